"""An update's two halves, which a run compiles as two programs, beside the whole; and the memory that they take."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tiny_step import MODEL, SGD, UPDATE, assert_trees_close, batch_of, state_of

from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.plan import _made_by
from qerl_jax.rl.update import apply_gradients, gather_gradients, update_step

PLAIN = LossSpec("dapo", beta=0.1)


@pytest.mark.parametrize(
    ("loss", "loss_fn"),
    [(PLAIN, None), (PLAIN, functools.partial(policy_loss, PLAIN)),
     (dataclasses.replace(PLAIN, top_entropy_quantile=0.3), None)],
)  # fmt: skip
def test_the_halves_are_the_whole(loss, loss_fn):
    """At a later step than the rollout's, in packs, with all that a batch may have."""
    settings = dataclasses.replace(UPDATE, micro_batch_size=5, loss=loss)
    state = state_of().replace(step=jnp.int32(2))
    batch = batch_of(state=state, several=True)
    batch = batch.replace(ref_logps=batch.old_logps - 0.1, mask=batch.mask.at[3].set(False))
    options = {"settings": settings, "loss_fn": loss_fn}
    gathered = jax.jit(functools.partial(gather_gradients, **options))(state, MODEL, batch)
    new, metrics = jax.jit(functools.partial(apply_gradients, optimizer=SGD, **options))(state, batch, gathered)
    whole = jax.jit(functools.partial(update_step, optimizer=SGD, **options))(state, MODEL, batch)
    assert_trees_close((new, metrics), whole, rtol=1e-5, atol=1e-6)
    assert int(new.step) == 3 and float(metrics["grad_norm"]) > 1e-3
    expected = jax.tree.map(lambda before, grad: before - 0.1 * grad, state.adapter, gathered.grads)
    assert_trees_close(new.adapter, expected, rtol=1e-5, atol=1e-6)


def test_what_is_finite_is_found_once_for_all_arrays():
    """XLA for a CPU makes small things again wherever they are used, so a program of n arrays had n^2 instructions."""
    state, batch = state_of(), batch_of()
    gathered = jax.eval_shape(functools.partial(gather_gradients, settings=UPDATE), state, MODEL, batch)
    program = jax.jit(functools.partial(apply_gradients, optimizer=SGD, settings=UPDATE))
    text = program.lower(state, batch, gathered).compile().as_text()
    arguments = [line.count(": ") for line in re.findall(r"^%fused\S* \((.*)\) ->", text, re.MULTILINE)]
    arrays = len(jax.tree.leaves(state.adapter))
    assert arguments and sum(count >= arrays for count in arguments) <= 2


@pytest.mark.parametrize(("of_first", "of_second", "expected"), [
    ((700, 50), (10, 90, 80), 750),  # the network's temporaries, and gradients
    ((5, 50), (10, 90, 80), 70),  # gradients, and what the optimizer makes that is no next state
])  # fmt: skip
def test_the_memory_of_an_update_is_the_most_of_its_halves(of_first, of_second, expected):
    names = "temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"

    def program(sizes):
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**dict(zip(names, sizes, strict=False))))

    assert _made_by(program(of_first), program(of_second)) == expected
    assert _made_by(program(of_first), SimpleNamespace(memory_analysis=lambda: None)) is None
