"""The last samples in fewer slots: the same samples, fewer slot-steps, and only where it is worth it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, tiny_adapter, tiny_model

from qerl_jax.rollout import Engine, Prompts, Request, SamplingSettings, tail
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.queued import empty_slots
from qerl_jax.rollout.tail import moved, worthwhile

pytestmark = pytest.mark.usefixtures("compiled_for_users")

MODEL = tiny_model()
ADAPTER = tiny_adapter(MODEL)
P, C, N, G = 6, 24, 6, 4
SETTINGS = SamplingSettings(C, (3, 4), 0, temperature=1.3)
ENDLESS = SamplingSettings(C, (), 0)
NUCLEUS = dataclasses.replace(SETTINGS, top_p=0.8, top_k=20)
KEY = jax.random.key(7)
# Most tokens of each prompt's completions: those that go on for long stand between others.
LIMITS = [2, C, 5, 1, 9, 9]
WORTH = tail.WORTH


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Worth a move where a single token may follow."""
    monkeypatch.setattr(tail, "WORTH", 1)


def engine(sizes, settings=SETTINGS, slots=None):
    """An engine whose last samples go on in so many slots."""
    return Engine(MODEL, settings, max_prompt_length=P, max_slots=slots, tail_sizes=sizes)


def prompts():
    tokens = np.random.default_rng(0).integers(13, CONFIG.vocab_size, (N, P)).astype(np.int32)
    return Prompts(jnp.asarray(tokens), jnp.array([1, 6, 4, 2, 5, 3], jnp.int32), jnp.arange(40, 40 + N))


@functools.cache
def rolled_out(sizes, settings=SETTINGS):
    one = engine(sizes, settings)
    return one.rollout(ADAPTER, prompts(), KEY, G, limits=LIMITS), one.statistics


def slot_steps(lengths, sizes):
    """What the steps of a rollout with these lengths cost: the first token is no step, and after each the samples that
    go on move into the least slots that hold them, if these are at most half as many."""
    total, slots = 0, len(lengths)
    for step in range(1, max(lengths)):
        live = sum(length > step for length in lengths)
        slots = min([slots] + [size for size in sizes if live <= size <= slots / 2])
        total += slots
    return total


@pytest.mark.parametrize(("sizes", "settings"), [((12, 4), SETTINGS), ((4, 8), SETTINGS), ((12, 4), NUCLEUS)])
def test_a_rollout_is_the_same_when_its_last_samples_go_on_in_fewer_slots(sizes, settings):
    (whole, before), (out, after) = rolled_out((), settings), rolled_out(sizes, settings)
    for name in ("tokens", "lengths", "terminated"):
        np.testing.assert_array_equal(getattr(out, name), getattr(whole, name))
    np.testing.assert_allclose(out.logps, whole.logps, atol=1e-5)
    assert (out.truncated_logps is None) == (settings is SETTINGS)
    if out.truncated_logps is not None:
        np.testing.assert_allclose(out.truncated_logps, whole.truncated_logps, atol=1e-5)
    lengths = np.asarray(out.lengths).tolist()
    assert max(lengths) == C and bool(jnp.any(out.terminated)) and not bool(jnp.all(out.terminated))
    assert before.slot_steps == slot_steps(lengths, ()) == N * G * before.steps
    assert after.slot_steps == slot_steps(lengths, sizes) < 0.7 * before.slot_steps
    for name in ("steps", "drawn", "tokens", "samples"):
        assert getattr(after, name) == getattr(before, name)


@functools.cache
def requests():
    batch = prompts()
    return [
        Request(row[:length].tolist(), G, 40 + i, limit)
        for i, (row, length, limit) in enumerate(zip(np.asarray(batch.tokens), batch.lengths, LIMITS, strict=True))
    ]


def completed(one, **options):
    """{(request, sample): everything of it} of those that have ended."""
    return {
        (done.request, done.sample): (
            done.ids,
            done.logps.tolist(),
            None if done.truncated_logps is None else done.truncated_logps.tolist(),
            done.finish_reason,
        )
        for done in one.generate(ADAPTER, requests(), KEY, **options)
        if done.finish_reason is not None
    }


@pytest.mark.parametrize("settings", [SETTINGS, NUCLEUS])
def test_slots_that_are_filled_again_become_fewer_without_a_bit_changed(settings):
    wide, narrow = engine((), settings, 16), engine((8, 4), settings, 16)
    expected = completed(wide)
    assert completed(narrow) == expected and {reason for *_, reason in expected.values()} == {"eos", "length"}
    before, after = wide.statistics, narrow.statistics
    assert (after.steps, after.drawn, after.samples) == (before.steps, before.drawn, N * G)
    assert before.slot_steps == 16 * before.steps and after.slot_steps < 0.8 * before.slot_steps


def test_what_until_ends_makes_slots_fewer_too():
    """A look after every third step; some samples are over with 4 tokens, some with 12, others with their limits."""

    def until(ids):
        end = 4 if sum(ids[:2]) % 3 else 12
        return end if len(ids) >= end else None

    wide, narrow = engine((), SETTINGS, 16), engine((8, 4), SETTINGS, 16)
    expected = completed(wide, until=until, every=3)
    assert completed(narrow, until=until, every=3) == expected
    assert {reason for *_, reason in expected.values()} == {"stop", "length", "eos"}
    assert narrow.statistics.slot_steps < 0.8 * wide.statistics.slot_steps


def test_slots_become_fewer_when_no_sample_waits():
    """Three long ones in sixteen slots, and more short ones than fit beside them at once: after six steps."""
    one = engine((8, 4), ENDLESS, 16)
    waiting = [Request([20, 21], 1, i, limit) for i, limit in enumerate([10, 10, 20] + [3] * 21)]
    assert len(list(one.generate(ADAPTER, waiting, KEY))) == len(waiting)
    assert (one.statistics.steps, one.statistics.slot_steps) == (20, 16 * 6 + 4 * 14)


def test_what_a_move_is_worth(monkeypatch):
    monkeypatch.setattr(tail, "WORTH", WORTH)
    sizes = (32, 8)
    assert worthwhile(sizes, 64, 256) == [32, 8]  # 32 x 256 and 56 x 256 slot-steps; at least 8192
    assert worthwhile(sizes, 64, 255) == [8]
    assert worthwhile(sizes, 256, 37) == [32, 8] and worthwhile(sizes, 256, 33) == []
    assert worthwhile(sizes, 63, 10**6) == [8] and worthwhile(sizes, 15, 10**6) == []  # at most half
    assert worthwhile(sizes, 16, 1024) == [8] and worthwhile(sizes, 16, 1023) == []


def test_nothing_moves_and_nothing_is_compiled_where_it_is_not_worth_it(monkeypatch):
    rolled_out(()), completed(engine((), SETTINGS, 16))
    before = programs().finished._cache_size(), programs().decode_queue._cache_size()
    monkeypatch.setattr(tail, "WORTH", WORTH)
    whole, queued = engine((8, 4)), engine((8, 4), SETTINGS, 16)
    whole.rollout(ADAPTER, prompts(), KEY, G, limits=LIMITS)
    completed(queued)
    assert (programs().finished._cache_size(), programs().decode_queue._cache_size()) == before
    assert whole.statistics.slot_steps == N * G * whole.statistics.steps
    assert queued.statistics.slot_steps == 16 * queued.statistics.steps


def test_by_default_nothing_moves_without_kernels(monkeypatch):
    assert Engine(MODEL, SETTINGS, max_prompt_length=P).tail_sizes == ()
    monkeypatch.setattr(tail, "has_kernels", lambda: True)
    assert Engine(MODEL, SETTINGS, max_prompt_length=P).tail_sizes == (32, 8)


def test_a_move_takes_rows_of_slots_leaves_prompts_and_frees_the_rest():
    slots = empty_slots(MODEL, SETTINGS, KEY, rows=2, max_prompt_length=P, slots=8, used=8)
    numbers = jnp.arange(8, dtype=jnp.int32)
    cache = jax.tree.map(lambda array: array + numbers[:, None, None, None], slots.cache.completion)
    slots = slots.replace(cache=slots.cache.replace(completion=cache), limits_S=numbers)
    few = moved(slots, np.array([6, 1]), "prompt_hidden_RD")
    assert few.limits_S.tolist() == [6, 1] and len(few.keys_S) == 2
    for array in jax.tree.leaves(few.cache.completion):
        assert array[:, 0, 0, 0].tolist() == [6, 1]
    assert all(array.is_deleted() for array in jax.tree.leaves(cache))
    kept, before = (
        jax.tree.leaves((of.cache.prompt, of.cache.prompt_lengths_R, of.prompt_hidden_RD)) for of in (few, slots)
    )
    assert all(a is b for a, b in zip(kept, before, strict=True))


@pytest.mark.parametrize("slots", [None, 16])
def test_no_cache_is_left_behind(slots):
    before = {id(array) for array in jax.live_arrays()}
    engine((8,), slots=slots).rollout(ADAPTER, prompts(), KEY, G, limits=LIMITS)
    assert not [array.shape for array in jax.live_arrays() if id(array) not in before and array.ndim > 2]
