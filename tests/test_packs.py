"""Packs of rows: every row once, in as few packs as hold them, and the same log-probabilities, gradients and update."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_adapter, tiny_model

from qerl_jax.models import packed_rows as packed_rows_module
from qerl_jax.models.attention import causal_attention, packed_attention
from qerl_jax.models.flash_attention import deterministic_jit
from qerl_jax.models.packed_rows import Frame, frames_of, in_a_row, moved, packed_rows, placed
from qerl_jax.models.packs import in_packs, packs_of
from qerl_jax.models.transformer import forward
from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.logprobs import completion_logps, longest_row, token_logps
from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.state import Batch, UpdateSettings, init_state
from qerl_jax.rl.update import score, update_step

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


def rows_of(batch):
    return batch.prompt, batch.prompt_lengths, batch.completion, batch.completion_lengths


def settings_of(size, level="none"):
    loss, correction = LossSpec("grpo", beta=0.05), SamplerCorrection(level, "truncate", 2.0)
    return UpdateSettings(4, 1.0, size, loss=loss, correction=correction)


IN_TWOS = settings_of(2, "sequence")  # of the tests below one program, as long as they train norms too
GIVEN = functools.partial(policy_loss, settings_of(1).loss)  # the same as a loss of one's own


@functools.partial(jax.jit, static_argnames=("settings", "loss_fn"))
def update(state, batch, settings, loss_fn=None):
    return update_step(state, MODEL, batch, optimizer=SGD, settings=settings, loss_fn=loss_fn)


@functools.partial(jax.jit, static_argnames="settings")
def update_in_one_pack(state, batch, settings):
    """Of rows that all stand in attention as wide as the widest may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_rows_module, "NARROWEST", P + C)
        assert settings.micro_batch_size == 12 and len(frames_of(12, 12 * (P + C), P + C)) == 1
        return update_step(state, MODEL, batch, optimizer=SGD, settings=settings)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(packed_rows_module, "NARROWEST", 16)


# ---- which rows go together ---------------------------------------------------------------------------------------


def test_frames_by_hand(monkeypatch):
    monkeypatch.undo()
    assert frames_of(64, 2 * 2112, 2112) == (
        Frame(58, 144), Frame(31, 272), Frame(16, 528), Frame(8, 1056), Frame(2, 2112), Frame(4, 2112)
    )  # fmt: skip
    assert frames_of(8, 2112, 2112)[-3:] == (Frame(4, 1056), Frame(1, 2112), Frame(2, 2112))
    assert frames_of(64, 64 * 96, 96) == (Frame(64, 96),)
    assert frames_of(4, 4 * 256, 256) == (Frame(4, 128), Frame(4, 256))


def test_packs_by_hand():
    """32 slots: the longest first, each into the first pack with room."""
    packs = packs_of(jnp.array([5, 16, 3, 12, 1, 9]), slots=32, frames=frames_of(6, 32, 16))
    assert packs.rows[:6].tolist() == [1, 2, 3, 4, 0, 5] and packs.first[:3].tolist() == [0, 4, 6]
    assert int(packs.number) == 2  # 16 + 12 + 3 + 1, 9 + 5


def cases():
    generator = np.random.default_rng(0)
    for name, lengths in LENGTHS.items():
        for size in (1, 3, 12):
            yield pytest.param(np.array(lengths) + 6, size, 64, id=f"{name} {size}")
    for i in range(12):
        B, longest = int(generator.integers(1, 40)), int(generator.choice([16, 40, 64, 300]))
        lengths = np.minimum(1 + generator.pareto(1, B) * longest / 16, longest).astype(int)
        yield pytest.param(lengths, int(generator.integers(1, B + 1)), longest, id=f"random {i}")


@pytest.mark.parametrize(("lengths", "size", "longest"), list(cases()))
def test_every_row_once_in_few_packs_that_frames_hold(lengths, size, longest):
    B = len(lengths)
    frames = frames_of(B, size * longest, longest)
    made = jax.jit(functools.partial(packs_of, slots=size * longest, frames=frames))
    packs = jax.tree.map(np.asarray, made(lengths))
    number = int(packs.number)
    together = [packs.rows[packs.first[i] : packs.first[i + 1]] for i in range(number)]
    assert sorted(np.concatenate(together).tolist()) == list(range(B)) and all(len(rows) for rows in together)
    assert (packs.rows[B:] == B).all() and len(packs.rows) - B == max(frame.rows for frame in frames)
    for rows in together:
        assert (np.diff(rows) > 0).all() and lengths[rows].sum() <= size * longest
        widest = lengths[rows].max()
        assert any(len(rows) <= frame.rows and widest <= frame.width for frame in frames)
    assert number <= -(-B // size)
    if lengths.max() * 16 < longest and size > 1:
        assert number < -(-B // size)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("size", [1, 3, 12])
def test_each_row_goes_with_its_own(name, size):
    lengths = jnp.array(LENGTHS[name])

    def body(carry, rows, places):
        seen, wrong, packs = carry
        own, of_two = rows
        live = places < 12
        wrong += jnp.sum(live & ((own != 100 + places) | (of_two[:, 1] != 3 * places)))
        wrong += jnp.sum(~live & (own != 111))  # copies of the last one
        return seen.at[places].add(1, mode="drop"), wrong, packs + 1

    none = jnp.zeros(12, jnp.int32), jnp.int32(0), jnp.int32(0)
    rows = 100 + jnp.arange(12), jnp.stack([jnp.zeros(12), 3 * jnp.arange(12)], 1)
    slots = size * 64
    run = functools.partial(in_packs, body, slots=slots, frames=frames_of(12, slots, 64))
    seen, wrong, packs = jax.jit(run)(none, rows, lengths)
    assert seen.tolist() == [1] * 12 and int(wrong) == 0 and packs <= -(-12 // size)


# ---- where tokens stand -------------------------------------------------------------------------------------------


def pack_of(lengths, slots, longest):
    return packed_rows(jnp.array(lengths, jnp.int32), slots, frames_of(len(lengths), slots, longest))


def test_a_pack_by_hand():
    pack = pack_of([3, 1, 2, 0], 8, 4)
    assert pack.row_L.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert pack.place_L.tolist() == [0, 1, 2, 0, 0, 1, 1, 1]  # the last token again
    assert pack.live_L.tolist() == [True] * 6 + [False] * 2 and pack.starts_N.tolist() == [0, 3, 4, 6]
    at = placed(pack, Frame(4, 4))
    assert at.slot_FW.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5], [5, 5, 5, 5]]
    assert at.real_FW.sum(1).tolist() == [3, 1, 2, 0]
    x = jnp.arange(8.0)
    assert at.take_out(x).tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5], [5, 5, 5, 5]]
    assert at.put_back(at.take_out(x)).tolist() == [0, 1, 2, 3, 4, 5, 5, 5]


def test_a_pack_of_as_many_rows_as_have_room_stands_as_its_frame():
    pack = pack_of([3, 4, 0, 0], 8, 4)
    assert pack.frames == (Frame(2, 4), Frame(4, 4)) and pack.frame == 0
    assert pack.row_L.tolist() == [0] * 4 + [1] * 4 and pack.place_L.tolist() == [0, 1, 2, 2, 0, 1, 2, 3]
    assert pack.live_L.tolist() == [True] * 3 + [False] + [True] * 4 and pack.starts_N[:2].tolist() == [0, 4]
    at, x = placed(pack, Frame(2, 4)), jnp.arange(8.0)
    assert (
        at.take_out(x).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and at.put_back(at.take_out(x)).tolist() == x.tolist()
    )


def test_no_parts_at_all_are_places_still():
    part, place, live, starts = in_a_row(jnp.zeros(3, jnp.int32), 4)
    assert part.tolist() == place.tolist() == [0] * 4 and not live.any() and starts.tolist() == [0] * 3


def test_the_gradient_of_what_is_moved_is_that_of_a_gather():
    x, to = jax.random.normal(jax.random.key(0), (6, 3)), jnp.array([[4, 0], [5, 5]])
    back = jnp.array([1, -1, -1, -1, 0, 2])  # of 5's two places the first
    weights = jnp.array([[1.0, 2.0], [3.0, 0.0]])[..., None]
    found = jax.grad(lambda x: jnp.sum(moved(x, to, back) * weights))(x)
    np.testing.assert_array_equal(found, jax.grad(lambda x: jnp.sum(x[to] * weights))(x))


# ---- what is computed ---------------------------------------------------------------------------------------------


def attended(lengths, slots, longest, dtype, seed=0):
    """Queries, keys, values and the result's gradient of a pack, and the pack."""
    keys = jax.random.split(jax.random.key(seed), 4)
    drawn = [jax.random.normal(k, (slots, heads, 16), dtype) for k, heads in zip(keys, (4, 2, 2, 4), strict=True)]
    return *drawn, pack_of(lengths, slots, longest)


def with_gradients(q, k, v, do, pack):
    o, back = jax.vjp(lambda q, k, v: packed_attention(q, k, v, pack), q, k, v)
    return o, *back(jnp.where(pack.live_L[:, None, None], do, 0))


PACKS = [[64], [64, 40], [64, 9, 20, 3], [30, 32, 1, 25], [20, 9, 3, 14, 30], [16, 2, 5, 1, 7], [3]]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_of_a_pack_attends_to_itself_alone(lengths, dtype):
    q, k, v, do, pack = attended(lengths + [0] * (8 - len(lengths)), 128, 64, dtype)
    found = [np.asarray(x, np.float32) for x in jax.jit(with_gradients)(q, k, v, do, pack)]
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for start, length in zip(pack.starts_N.tolist(), lengths, strict=False):
        at = slice(start, start + length)
        for ours, right in zip(found, alone(*(np.asarray(x)[at] for x in (q, k, v, do))), strict=True):
            np.testing.assert_allclose(ours[at], right, atol=tolerance)
    live_L = np.asarray(pack.live_L)
    assert live_L.sum() == sum(lengths)
    assert all(not gradient[~live_L].any() for gradient in found[1:])


def alone(*row):
    """Attention of one row by itself, and its gradients, in float32. Zeros behind it, which it does not see, let rows
    of all lengths share a program."""
    length = len(row[0])
    padded = [np.pad(x, ((0, 64 - length), (0, 0), (0, 0)))[None] for x in row]
    return [np.asarray(x[0], np.float32)[:length] for x in causal_with_gradients(*padded)]


@jax.jit
def causal_with_gradients(q, k, v, do):
    o, back = jax.vjp(lambda q, k, v: causal_attention(q, k, v, None), q, k, v)
    return o, *back(do)


def test_the_packs_use_every_frame():
    used = {int(pack_of(n + [0] * (8 - len(n)), 128, 64).frame) for n in PACKS}
    assert used == set(range(len(frames_of(8, 128, 64)))) and len(used) == 4


def test_a_choice_among_frames_keeps_no_room_for_all_of_them():
    q, k, v, _, pack = attended([16, 2, 5, 1, 7, 0, 0, 0], 128, 64, jnp.float32)
    assert len(pack.frames) > 1
    attention = functools.partial(packed_attention, pack=pack)
    kept = jax.eval_shape(lambda q, k, v: jax.vjp(attention, q, k, v)[1], q, k, v)
    floats = [leaf for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.float32]
    assert sum(math.prod(leaf.shape) for leaf in floats) <= q.size + k.size + v.size


@functools.partial(jax.jit, static_argnames="size")
def log_probabilities(adapter, rows, size=None):
    return completion_logps(MODEL, adapter, *rows, 0.7, size=size)


UNTIED = MODEL.replace(base=MODEL.base.replace(lm_head=MODEL.base.embed))
scored = jax.jit(score, static_argnames="settings")


def test_the_longest_row_is_rounded_up():
    assert longest_row(6, 58) == 64 and longest_row(7, 58) == 80


@pytest.mark.parametrize("size", [None, 7, 6])
def test_log_probabilities_are_those_of_each_row_alone(size):
    batch, adapter = batch_of(LENGTHS["a long tail"]), tiny_adapter(MODEL)
    found = log_probabilities(adapter, rows_of(batch), size)
    prompt, p, completion, c = map(np.asarray, rows_of(batch))
    rows = [np.concatenate([prompt[i, : p[i]], completion[i, : c[i]]]) for i in range(12)]
    padded = np.stack([np.pad(row, (0, P + C - len(row))) for row in rows])
    hidden = jax.jit(forward)(MODEL, adapter, padded)[0]
    flat = hidden[:, :-1].reshape(12 * 63, -1)
    of_all = jax.jit(token_logps, static_argnums=3)(MODEL, flat, padded[:, 1:].ravel(), 0.7)
    for ours, right in zip(map(np.asarray, found), map(np.asarray, of_all), strict=True):
        for i in range(12):
            np.testing.assert_allclose(ours[i, : c[i]], right.reshape(12, 63)[i, p[i] - 1 :][: c[i]], atol=2e-5)


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("empty", [[0], [5, 6, 9], [11], [0, 1, 10, 11]])
def test_completions_of_no_tokens_change_nothing_beside_them(empty, size):
    """As `until` of a request may leave them."""
    batch, adapter = batch_of(LENGTHS["a long tail"]), tiny_adapter(MODEL)
    lengths = np.asarray(batch.completion_lengths).copy()
    lengths[empty] = 0
    found = log_probabilities(adapter, rows_of(batch.replace(completion_lengths=jnp.asarray(lengths))), size)
    right = log_probabilities(adapter, rows_of(batch), size)
    for ours, full in zip(found, right, strict=True):
        np.testing.assert_allclose(ours, np.where(np.isin(np.arange(12), empty)[:, None], 0, full), atol=2e-5)


def test_a_row_of_nan_spoils_none_beside_it():
    batch, poison = batch_of(LENGTHS["a long tail"]), 7
    tokens = [jnp.where(x == poison, 8, x) for x in (batch.prompt, batch.completion)]
    clean = batch.replace(prompt=tokens[0], completion=tokens[1])
    model = UNTIED.replace(base=UNTIED.base.replace(embed=UNTIED.base.embed.at[poison].set(jnp.nan)))
    spoilt = clean.replace(completion=clean.completion.at[6, 3].set(poison))
    right, found = (np.asarray(scored(model, tiny_adapter(MODEL), b, settings=settings_of(2))) for b in (clean, spoilt))
    mask = np.arange(C) < np.asarray(batch.completion_lengths)[:, None]
    assert np.isnan(found[6][4:30]).all() and np.isfinite(right[mask]).all()
    others = np.arange(12) != 6
    np.testing.assert_array_equal(found[others][mask[others]], right[others][mask[others]])


LARGE_PACKS = [
    [2112, 2112], [2112, 600, 1, 1400], [1056, 900, 530, 1000, 700], [528] * 8, [300, 2, 77, 500, 128, 31],
    [272, 100, 90, 17, 200], [144] * 29, [9],
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("lengths", LARGE_PACKS, ids=lambda lengths: f"{len(lengths)} rows, {max(lengths)}")
def test_packs_by_cudnn_are_right_and_repeat_bit_for_bit(lengths, dtype, monkeypatch):
    monkeypatch.undo()
    slots, keys = 2 * 2112, jax.random.split(jax.random.key(0), 4)
    operands = [jax.random.normal(k, (slots, h, 128), dtype) for k, h in zip(keys, (28, 4, 4, 28), strict=True)]
    pack = pack_of(lengths + [0] * (64 - len(lengths)), slots, 2112)
    found = ordered(*operands, pack)
    expected = in_float32(*(x.astype(jnp.float32) for x in operands), pack)
    live_L11 = pack.live_L[:, None, None]
    for ours, right in zip(found, expected, strict=True):
        error, largest = (float(jnp.abs(jnp.where(live_L11, x, 0)).max()) for x in (ours - right, right))
        assert error <= 2 * float(jnp.finfo(dtype).eps) * largest and bool(jnp.isfinite(ours).all())
    for _ in range(5):
        for again, first in zip(ordered(*operands, pack), found, strict=True):
            np.testing.assert_array_equal(np.asarray(again), np.asarray(first))


ordered, in_float32 = deterministic_jit(with_gradients), jax.jit(with_gradients)


# ---- the same update ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENGTHS)
def test_an_update_in_packs_is_the_same_update(name):
    state, batch = init_state(tiny_adapter(MODEL, train_norms=True), SGD), batch_of(LENGTHS[name])
    whole, expected = update_in_one_pack(state, batch, settings_of(12, "sequence"))
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, whole.adapter, state.adapter))) > 1e-3
    for settings, loss_fn in ((settings_of(5, "sequence"), GIVEN), (IN_TWOS, None)):
        assert_close(update(state, batch, settings, loss_fn), (whole, expected))


@pytest.mark.parametrize(
    ("loss", "size", "bounded"),
    [(LossSpec("grpo", 0.05, 0.2, 0.28, "sequence", 3.0), 1, {"clip_ratio/low_mean", "clip_ratio/high_mean"}),
     (LossSpec("cispo", 0.0, 0.2, 2.0, "sequence"), 3, {"cispo_clip_ratio"}),
     (LossSpec("grpo", 0.05, 0.2, 0.28, "sequence", top_entropy_quantile=0.3), 2, {"clip_ratio/high_mean"}),
     (LossSpec("cispo", 0.05, 0.2, 2.0, top_entropy_quantile=0.3), 1, {"cispo_clip_ratio"})],
)  # fmt: skip
def test_ratios_of_rows_bounded_weights_and_high_entropy_are_the_same_in_packs(loss, size, bounded):
    """Off-policy, with rows beyond every bound, and with a correction per token."""
    state, batch = init_state(tiny_adapter(MODEL), SGD), batch_of(LENGTHS["a long tail"])
    batch = batch.replace(old_logps=batch.old_logps - jnp.tile(jnp.array([0.0, 1.5, 3.0]), 4)[:, None])
    settings = dataclasses.replace(settings_of(12, "token"), loss=loss)
    whole, expected = update_in_one_pack(state, batch, settings)
    assert all(0 < float(expected[name]) < 1 for name in bounded)
    assert float(optax.tree.norm(jax.tree.map(jnp.subtract, whole.adapter, state.adapter))) > 1e-3
    assert_close(update(state, batch, dataclasses.replace(settings, micro_batch_size=size)), (whole, expected))


def test_an_update_is_the_same_where_doubles_are_enabled():
    state, batch = init_state(tiny_adapter(MODEL, train_norms=True), SGD), batch_of(LENGTHS["a long tail"])
    expected = update(state, batch, IN_TWOS)
    with jax.enable_x64(True):
        found = update(state, batch, IN_TWOS, GIVEN)
        of_one_pass = jax.eval_shape(functools.partial(update, settings=IN_TWOS), state, batch)
    assert_close(found, expected)
    for new, _ in (found, of_one_pass):
        assert {leaf.dtype for leaf in jax.tree.leaves(new.adapter)} == {jnp.dtype(jnp.float32)}


def test_a_loss_of_ones_own_sees_the_rows_in_their_order():
    """One that weighs rows by their places, where packs reorder them."""

    def by_place(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sum(jnp.where(mask, logp, 0.0) * jnp.arange(12.0)[:, None]), {}

    state, batch = init_state(tiny_adapter(MODEL), SGD), batch_of(LENGTHS["a long tail"])
    new, _ = update(state, batch, settings_of(2), by_place)

    @jax.jit
    @jax.grad
    def gradient(adapter):
        logps = completion_logps(MODEL, adapter, *rows_of(batch), 1.0)[0]
        return by_place(logps, None, None, None, batch.mask)[0]

    expected = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, state.adapter, gradient(state.adapter))
    for a, b in zip(jax.tree.leaves(new.adapter), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
        assert np.abs(a).max() > 0.1


def test_scores_in_packs_are_the_same_scores():
    batch, adapter = batch_of(LENGTHS["a long tail"]), tiny_adapter(MODEL)
    behind = np.arange(C) >= np.asarray(batch.completion_lengths)[:, None]
    in_two, whole = (scored(UNTIED, adapter, batch, settings=settings_of(n)) for n in (2, 12))
    np.testing.assert_allclose(in_two, whole, atol=1e-5)
    assert not np.asarray(in_two)[behind].any() and np.asarray(in_two)[~behind].all()


def test_packs_under_vmap():
    """Of batches whose lengths, and so packs and frames, differ."""
    batches = [batch_of(LENGTHS[name]) for name in ("a long tail", "all full")]
    states = [init_state(tiny_adapter(MODEL, seed=seed, train_norms=True), SGD) for seed in range(2)]
    step = functools.partial(update_step, model=MODEL, optimizer=SGD, settings=IN_TWOS)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *zip(states, batches, strict=True))
    many, _ = jax.jit(jax.vmap(lambda pair: step(pair[0], batch=pair[1])))(stacked)
    for i, (state, batch) in enumerate(zip(states, batches, strict=True)):
        one, _ = update(state, batch, IN_TWOS)
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], many.adapter), one.adapter)
