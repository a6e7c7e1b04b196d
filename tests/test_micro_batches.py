"""Micro-batches by length: every row once, never wider than asked for, never more of them, and the same update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_adapter, tiny_model

from qerl_jax.rl import widths
from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.micro_batches import in_micro_batches, in_stretch, sizes_of, stretches
from qerl_jax.rl.update import Batch, UpdateSettings, init_state, score, update_step
from qerl_jax.rl.widths import widths_of

MODEL = tiny_model()
P, C = 6, 58
SGD = optax.sgd(0.1)
LENGTHS = {
    "a long tail": [3, 5, 58, 4, 9, 2, 30, 1, 12, 7, 6, 20],
    "all full": [58] * 12,
    "all short": [2] * 12,
    "one at each limit": [10, 26, 58, 11, 27, 57, 9, 25, 58, 1, 42, 12],
}


def batch_of(lengths):
    """Rows of 2 to 6 prompt tokens; rewards and old log-probabilities of their own."""
    B, keys = len(lengths), iter(jax.random.split(jax.random.key(0), 9))
    completion_lengths = jnp.array(lengths, jnp.int32)
    mask = jnp.arange(C) < completion_lengths[:, None]
    tokens = jax.random.randint(next(keys), (B, P + C), 0, MODEL.config.vocab_size)
    logps = -4 + 0.1 * jax.random.normal(next(keys), (3, B, C))
    return Batch(
        prompt=tokens[:, :P],
        prompt_lengths=2 + jnp.arange(B) % 5,
        completion=jnp.where(mask, tokens[:, P:], 0),
        completion_lengths=completion_lengths,
        mask=mask.at[1].set(False),
        rewards=jax.random.uniform(next(keys), (B,)),
        sampled_logps=logps[0],
        rollout_step=jnp.int32(7),
        old_logps=logps[1],
        ref_logps=logps[2],
    )


def settings_of(size, buckets, level="none"):
    loss, correction = LossSpec("grpo", beta=0.05), SamplerCorrection(level, "truncate", 2.0)
    return UpdateSettings(4, 1.0, size, loss=loss, correction=correction, length_buckets=buckets)


@functools.partial(jax.jit, static_argnames=("settings", "loss_fn"))
def update(state, batch, settings, loss_fn=None):
    return update_step(state, MODEL, batch, optimizer=SGD, settings=settings, loss_fn=loss_fn)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(widths, "NARROWEST", 16)


def test_widths(monkeypatch):
    assert widths_of(2112, 4) == (2112, 1056, 528, 272) and widths_of(2112, 1) == (2112,)
    monkeypatch.undo()
    assert widths_of(2112, 9) == (2112, 1056, 528, 272, 144) and widths_of(88, 4) == (88,)
    assert widths_of(256, 4) == (256, 128) and widths_of(224, 4) == (224,)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("size", [1, 3, 12])
@pytest.mark.parametrize("buckets", [1, 4])
def test_every_row_once_and_never_more_micro_batches_or_tokens_than_with_one_width(name, size, buckets):
    lengths, T = jnp.array(LENGTHS[name]), 64
    B = len(lengths)

    def body(carry, rows, places, width):
        seen, runs, tokens, too_long, wrong = carry
        live = places < B
        seen = seen.at[places].add(1, mode="drop")
        wrong += jnp.sum(rows != 100 + jnp.minimum(places, B - 1))
        too_long += jnp.sum(live & (lengths[jnp.minimum(places, B - 1)] > width))
        return seen, runs + 1, tokens + width * places.shape[0], too_long, wrong

    none = jnp.zeros(B, jnp.int32), *(jnp.int32(0) for _ in range(4))
    run = functools.partial(in_micro_batches, body, size=size, longest=T, buckets=buckets)
    seen, runs, tokens, too_long, wrong = jax.jit(run)(none, 100 + jnp.arange(B), lengths)
    assert seen.tolist() == [1] * B and (int(too_long), int(wrong)) == (0, 0)
    assert runs <= B // size and tokens <= B * T
    if name == "all short" and buckets == 4:
        assert tokens <= 0.5 * B * T


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("size", [1, 3, 12])
@pytest.mark.parametrize("buckets", [1, 3, 4])
def test_a_loop_on_the_host_makes_the_same_micro_batches(name, size, buckets):
    lengths, cut = np.array(LENGTHS[name]), {"size": size, "longest": 64, "buckets": buckets}

    def body(carry, rows, places, width):  # the number and the width of each row's micro-batch
        return carry[0].at[places].set(jnp.array([carry[1], width]), mode="drop"), carry[1] + 1

    none, sizes = (jnp.full((12, 2), -1), jnp.int32(0)), sizes_of(12, **cut)
    traced, count = jax.jit(lambda none, lengths: in_micro_batches(body, none, lengths, lengths, **cut))(none, lengths)
    carry = none
    for width, places, first, number in stretches(lengths, **cut):
        assert places.dtype == np.int32 and len(places) == 12 + sizes[width] and number > 0
        carry = in_stretch(body, carry, jnp.asarray(lengths), places, first, number, width=width)
    assert int(carry[1]) == int(count)
    np.testing.assert_array_equal(carry[0], traced)


def test_micro_batches_by_hand():
    """Widths 64, 32 and 16 have 1, 2 and 4 rows; a row as long as a width still goes with it."""
    lengths = jnp.array([16, 5, 33, 16, 32, 17, 64, 1])

    def body(carry, rows, places, width):
        return carry[0].at[places].set(width, mode="drop"), carry[1] + 1

    none = jnp.zeros(8, jnp.int32), jnp.int32(0)
    widths, runs = in_micro_batches(body, none, lengths, lengths, size=1, longest=64, buckets=4)
    assert widths.tolist() == [16, 16, 64, 16, 32, 32, 64, 16] and int(runs) == 4


@functools.partial(jax.jit, static_argnames="width")
def log_probabilities(adapter, rows, width=None):
    return completion_logps(MODEL, adapter, *rows, 0.7, width=width)


@pytest.mark.parametrize("width", [16, 40, P + C])
def test_log_probabilities_do_not_depend_on_the_width(width):
    batch, adapter = batch_of([min(n, 10) for n in LENGTHS["a long tail"]]), tiny_adapter(MODEL)
    rows = batch.prompt, batch.prompt_lengths, batch.completion, batch.completion_lengths
    mask = np.arange(C) < np.asarray(batch.completion_lengths)[:, None]
    narrow, whole = log_probabilities(adapter, rows, width), log_probabilities(adapter, rows)
    for made, true in zip(narrow, whole, strict=True):
        assert made.shape == true.shape == (12, C)
        np.testing.assert_allclose(np.asarray(made)[mask], np.asarray(true)[mask], atol=1e-5)


@pytest.mark.parametrize("name", LENGTHS)
def test_an_update_by_length_is_the_same_update(name):
    state, batch = init_state(tiny_adapter(MODEL, train_norms=True), SGD), batch_of(LENGTHS[name])
    whole, expected = update(state, batch, settings_of(12, 1, "sequence"))
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, whole.adapter, state.adapter))) > 1e-3
    given = functools.partial(policy_loss, settings_of(1, 1).loss)
    for size, buckets, loss_fn in ((1, 3, None), (2, 2, given)):
        new, metrics = update(state, batch, settings_of(size, buckets, "sequence"), loss_fn)
        for a, b in zip(jax.tree.leaves((new, metrics)), jax.tree.leaves((whole, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "buckets", "bounded"),
    [(LossSpec("grpo", 0.05, 0.2, 0.28, "sequence", 3.0), 2, {"clip_ratio/low_mean", "clip_ratio/high_mean"}),
     (LossSpec("dapo", 0.05, 0.2, 0.28, "sequence"), 1, {"clip_ratio/low_mean", "clip_ratio/high_mean"}),
     (LossSpec("cispo", 0.0, 0.2, 2.0, "sequence"), 1, {"cispo_clip_ratio"})],
)  # fmt: skip
def test_ratios_of_rows_and_bounded_weights_are_the_same_in_micro_batches(loss, buckets, bounded):
    """Off-policy, with rows beyond every bound, and with a correction per token."""
    state, batch = init_state(tiny_adapter(MODEL), SGD), batch_of(LENGTHS["a long tail"])
    batch = batch.replace(old_logps=batch.old_logps - jnp.tile(jnp.array([0.0, 1.5, 3.0]), 4)[:, None])
    settings = dataclasses.replace(settings_of(12, 1, "token"), loss=loss)
    whole, expected = update(state, batch, settings)
    assert all(0 < float(expected[name]) < 1 for name in bounded)
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, whole.adapter, state.adapter))) > 1e-3
    cut = dataclasses.replace(settings, micro_batch_size=3, length_buckets=buckets)
    for a, b in zip(jax.tree.leaves(update(state, batch, cut)), jax.tree.leaves((whole, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("buckets", [1, 3])
def test_an_update_is_the_same_where_doubles_are_enabled(buckets):
    state, batch = init_state(tiny_adapter(MODEL), SGD), batch_of(LENGTHS["a long tail"])
    settings = settings_of(4, buckets)
    given = functools.partial(policy_loss, settings.loss)
    expected = update(state, batch, settings)
    with jax.enable_x64(True):
        found = [update(state, batch, settings, loss_fn) for loss_fn in (None, given)]
    for new, metrics in found:
        assert {leaf.dtype for leaf in jax.tree.leaves(new.adapter)} == {jnp.dtype(jnp.float32)}
        for a, b in zip(jax.tree.leaves((new, metrics)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [4, 12])
def test_a_loss_of_ones_own_sees_the_rows_in_their_order(size):
    """One that weighs rows by their places, where lengths reorder them."""

    def by_place(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sum(jnp.where(mask, logp, 0.0) * jnp.arange(12.0)[:, None]), {}

    state, batch = init_state(tiny_adapter(MODEL), SGD), batch_of(LENGTHS["a long tail"])
    whole, _ = update(state, batch, settings_of(12, 1), by_place)
    new, _ = update(state, batch, settings_of(size, 3), by_place)
    for a, b in zip(jax.tree.leaves(new.adapter), jax.tree.leaves(whole.adapter), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert float(jnp.abs(a).max()) > 0.1


def test_scores_by_length_are_the_same_scores():
    batch, adapter = batch_of(LENGTHS["a long tail"]), tiny_adapter(MODEL)
    mask = np.arange(C) < np.asarray(batch.completion_lengths)[:, None]
    by_length, whole = (jax.jit(score, static_argnums=3)(MODEL, adapter, batch, settings_of(2, n)) for n in (3, 1))
    for a, b in zip(by_length, whole, strict=True):
        np.testing.assert_allclose(np.asarray(a)[mask], np.asarray(b)[mask], atol=1e-5)


def test_by_length_under_vmap():
    batch = batch_of(LENGTHS["a long tail"])
    states = [init_state(tiny_adapter(MODEL, seed=seed), SGD) for seed in range(2)]
    step = functools.partial(update_step, model=MODEL, optimizer=SGD, settings=settings_of(4, 2))
    many, _ = jax.jit(jax.vmap(lambda state: step(state, batch=batch)))(jax.tree.map(lambda *x: jnp.stack(x), *states))
    for seed, state in enumerate(states):
        one, _ = update(state, batch, settings_of(4, 2))
        for a, b in zip(jax.tree.leaves(many.adapter), jax.tree.leaves(one.adapter), strict=True):
            np.testing.assert_allclose(a[seed], b, rtol=1e-4, atol=1e-6)
