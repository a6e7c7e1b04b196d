"""Which groups of a rollout are trained on, and which prompts it uses up."""

import numpy as np
import pytest

from qerl_jax.rl.experience import choose_groups


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
