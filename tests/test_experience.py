"""Which groups of a rollout are trained on, which prompts it uses up, and what is logged of its completions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.experience import choose_groups
from qerl_jax.rl.step import reward_metrics
from qerl_jax.rollout import Rollout


@pytest.mark.parametrize(
    ("informative", "count", "chosen", "used"),
    [
        ([1, 1, 1], 3, [0, 1, 2], 3),
        ([0, 1, 0, 1, 1, 1], 3, [1, 3, 4], 5),  # one sampled beyond the last one chosen
        ([1, 1, 1, 0, 0, 0], 3, [0, 1, 2], 3),
        ([0, 0, 0, 0, 1, 1], 2, [4, 5], 6),
        ([0, 1, 0, 0, 1, 0], 3, [0, 1, 4], 6),  # filled up with the first of the others, in data order
        ([1, 0, 0, 1, 0, 0], 4, [0, 1, 2, 3], 6),
        ([0, 0, 0, 0], 2, [0, 1], 4),
        ([0], 1, [0], 1),
    ],
)
def test_the_first_informative_groups_are_chosen_and_others_fill_up(informative, count, chosen, used):
    found, prompts = choose_groups(np.array(informative, bool), count)
    assert found.tolist() == chosen and prompts == used


def test_where_all_completions_ended_none_is_clipped():
    """Exactly: compiled, 1 - their mean is below 0 for most numbers of them."""
    clipped = jax.jit(lambda *of: reward_metrics(*of)["completions/clipped_ratio"])
    for count in range(2, 40, 2):
        lengths, logps = jnp.ones(count, jnp.int32), jnp.zeros((count, 1))
        done = Rollout(jnp.zeros((count, 1), jnp.int32), lengths, jnp.ones(count, bool), logps, None)
        assert clipped(jnp.zeros((count // 2, 2)), done) == 0
