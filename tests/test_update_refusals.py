"""What an update refuses of its settings and of a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_step import MODEL, SGD, UPDATE, assert_trees_close, batch_of, state_of

from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.update import update_step


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_generations": 0},
        {"temperature": 0.0},
        {"micro_batch_size": 0},
        {"old_logprobs": "reference"},
    ],
)
def test_an_update_that_does_not_exist(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; allowed: "):
        dataclasses.replace(UPDATE, **wrong)


def test_a_correction_of_what_the_ratio_holds_already_is_refused():
    with pytest.raises(ValueError, match=r"correction.level is 'token'; allowed with old_logprobs 'sampler': 'none'"):
        dataclasses.replace(UPDATE, old_logprobs="sampler", correction=SamplerCorrection("token"))


@pytest.mark.parametrize(
    "name",
    [
        "rewards",
        "sampled_logps",
        "old_logps",
        "ref_logps",
        "mask",
        "advantages",
        "prompt_lengths",
        "completion_lengths",
    ],
)
def test_parts_of_a_batch_that_are_not_of_its_rows_are_named(name):
    batch = batch_of()
    part = (
        batch.rewards if name == "advantages" else batch.mask if getattr(batch, name) is None else getattr(batch, name)
    )
    wrong = batch.replace(**{name: jnp.ones_like(part)[:1]})
    with pytest.raises(ValueError, match=rf"the batch's {name} have the shape \(1,.*\); expected \(12,"):
        update_step(state_of(), MODEL, wrong, optimizer=SGD, settings=UPDATE)


def test_advantages_of_another_shape_are_refused_and_numpys_taken():
    state, batch = state_of(), batch_of()
    step = functools.partial(update_step, state, MODEL, batch, optimizer=SGD, settings=UPDATE)
    for wrong in (lambda rewards: rewards.T, lambda rewards: rewards.mean(1)):
        with pytest.raises(ValueError, match=r"advantage_fn gave the shape .*; expected \(3, 4\)"):
            step(advantage_fn=wrong)
    with pytest.raises(ValueError, match="advantage_fn gave a dict; expected an array"):
        step(advantage_fn=lambda rewards: {})
    ones, _ = step(advantage_fn=lambda rewards: np.ones(rewards.shape))
    assert_trees_close(ones, step(advantage_fn=jnp.ones_like)[0], rtol=0, atol=0)


def test_a_batch_that_is_no_whole_groups_is_named():
    with pytest.raises(ValueError, match="num_generations 5"):
        settings = dataclasses.replace(UPDATE, num_generations=5)
        update_step(state_of(), MODEL, batch_of(), optimizer=SGD, settings=settings)
    nothing = jax.tree.map(lambda rows: rows[:0] if rows.ndim else rows, batch_of())
    with pytest.raises(
        ValueError, match="a batch has 0 completions; allowed: a multiple of num_generations 4, and not 0"
    ):
        update_step(state_of(), MODEL, nothing, optimizer=SGD, settings=UPDATE)
