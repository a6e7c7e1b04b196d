"""Ratios of an update: exactly 1 at the first one after a rollout, bit by bit, and clipped at the second, which is
refused where nobody recorded what they are of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny_step import MODEL, SAMPLING, SETTINGS, SGD, UPDATE, assert_trees_close, batch_of, state_of

from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.update import update_step

# Bounds that nothing passes unclipped; the same program for both tests.
TIGHT = LossSpec(epsilon=1e-6, epsilon_high=1e-6)
TIGHT_IN_THREE = dataclasses.replace(UPDATE, micro_batch_size=4, loss=TIGHT)


@functools.partial(jax.jit, static_argnames=("settings", "loss_fn"))
def update(state, batch, settings, loss_fn=None):
    return update_step(state, MODEL, batch, optimizer=SGD, settings=settings, loss_fn=loss_fn)


def test_first_update_has_ratio_exactly_one_under_top_p():
    """top_p 0.8, sigma 0, float32: the ratio is exactly 1 and nothing is clipped, though sampling was truncated."""
    settings = dataclasses.replace(SETTINGS, sampling=dataclasses.replace(SAMPLING, top_p=0.8))
    state = state_of()

    def spy(logp, old_logp, ref_logp, advantages, mask):
        loss, metrics = policy_loss(TIGHT, logp, old_logp, ref_logp, advantages, mask)
        ratio = jnp.where(mask, jnp.exp(logp - old_logp), 1)
        return loss, metrics | {"low": ratio.min(), "high": ratio.max()}

    whole = dataclasses.replace(UPDATE, loss=TIGHT)
    for several, of_size, loss_fn in ((False, whole, spy), (True, TIGHT_IN_THREE, spy), (True, TIGHT_IN_THREE, None)):
        batch = batch_of(settings, state, several)
        _, seen = update(state, batch, of_size, loss_fn)
        assert loss_fn is None or float(seen["low"]) == float(seen["high"]) == 1.0
        assert float(seen["clip_ratio/region_mean"]) == 0.0
        assert float(seen["sampling/sampling_logp_difference/max"]) < 1e-4


def test_second_update_uses_the_old_policy_and_clips():
    state = state_of()
    batch = batch_of(state=state, several=True)
    once, first = update(state, batch, TIGHT_IN_THREE)
    _, second = update(once, batch, TIGHT_IN_THREE)
    assert float(first["clip_ratio/region_mean"]) == 0.0 < float(second["clip_ratio/region_mean"])


def test_a_second_update_whose_old_policy_nobody_recorded_is_refused():
    state = state_of()
    batch = batch_of(state=state)
    once, first = update(state, batch, TIGHT_IN_THREE)
    twice, second = update(once, batch, TIGHT_IN_THREE)
    assert int(first["nonfinite"]) == 0 and int(second["nonfinite"]) == 1
    assert np.isnan(second["loss"]) and np.isnan(second["sampling/sampling_logp_difference/mean"])
    assert_trees_close(twice, once, rtol=0, atol=0)


def test_a_loss_without_the_old_policy_takes_later_updates_by_the_sampler():
    def reinforce(logp, old_logp, ref_logp, advantages, mask):
        return -jnp.sum(jnp.where(mask, logp * advantages, 0)), {}

    state = state_of()
    batch, later = batch_of(state=state), state.replace(step=jnp.int32(3))
    right, _ = update(state, batch, UPDATE, reinforce)
    for old_logprobs, size, refused in (("learner", 12, 1), ("learner", 4, 1), ("sampler", 12, 0)):
        settings = dataclasses.replace(UPDATE, old_logprobs=old_logprobs, micro_batch_size=size)
        first, _ = update(state, batch, settings, reinforce)
        assert_trees_close(first.adapter, right.adapter, rtol=1e-4, atol=1e-5)  # another program
        new, metrics = update(later, batch, settings, reinforce)
        assert int(metrics["nonfinite"]) == refused
        assert_trees_close(new.adapter, (state if refused else first).adapter, rtol=0, atol=0)
