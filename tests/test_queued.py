"""Slots that take samples from a queue by themselves: which sample is in which slot at which step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from qerl_jax.models.params import norms_of
from qerl_jax.rollout import SamplingSettings
from qerl_jax.rollout import programs as compiled
from qerl_jax.rollout.prepared import made, prepared
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.queued import Queue, empty_slots, freed

KEY = jax.random.key(3)
SETTINGS = SamplingSettings(6, (), 0)
MODEL, _ = prepared(tiny_model(), None, made(tiny_model(), None))
NORMS = norms_of(MODEL, None)
LIMITS = [2, 1, 3, 1, 1, 2]
# Of samples 0 to 5 with these limits in three slots: two that end in one step are replaced in the slots' order.
SCHEDULE = [[0, 1, 2], [0, 3, 2], [4, 5, 2], [-1, 5, -1]]


def slots(used=3):
    """Three slots over a pool with two prompts."""
    new = empty_slots(MODEL, SETTINGS, KEY, rows=2, max_prompt_length=4, slots=3, used=used)
    tokens = np.array([[20, 21, 0, 0], [22, 23, 24, 25]], np.int32)
    return programs().admit(new, MODEL, None, NORMS, tokens, np.array([2, 4], np.int32), np.arange(2))


def decoded(slots, first=0, count=6, max_steps=8, stop_at=3):
    """Decodes with the queue of the samples from `first` on, of which entries behind `count` mean nothing."""
    numbers = np.arange(first, first + 6, dtype=np.int32)
    limits = np.array((LIMITS[first:] + [1] * 6)[:6], np.int32)
    queue = Queue(numbers, numbers % 2, numbers // 2, numbers % 3, limits, jnp.int32(count))
    slots, log, steps, taken = programs().decode_queue(
        slots, queue, KEY, MODEL, None, NORMS, max_steps, stop_at, SETTINGS, log_steps=8
    )
    return slots, jax.tree.map(lambda part: np.asarray(part)[: int(steps)], log), int(taken)


def test_samples_that_end_together_are_replaced_in_the_order_of_slots():
    _, log, taken = decoded(slots())
    assert log.samples_TS.tolist() == SCHEDULE and taken == 6


@pytest.mark.parametrize(("stop_at", "steps"), [(1, 3), (2, 3), (3, 4)])
def test_the_loop_ends_when_the_queue_is_empty_and_so_many_slots_are_free(stop_at, steps):
    """In the third step the queue's last samples start, and two slots' samples end."""
    _, log, taken = decoded(slots(), stop_at=stop_at)
    assert (len(log.samples_TS), taken) == (steps, 6)


def test_a_chunk_goes_on_where_the_one_before_ended():
    whole = decoded(slots())[1]
    half, first, taken = decoded(slots(), max_steps=2)
    assert taken == 4
    _, second, taken = decoded(half, first=4, count=2)
    assert taken == 2
    both = jax.tree.map(lambda *parts: np.concatenate(parts), first, second)
    assert both.samples_TS.tolist() == SCHEDULE
    for part, expected in zip(jax.tree.leaves(both), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(part[both.samples_TS >= 0], expected[both.samples_TS >= 0])


def test_entries_behind_the_queues_end_are_not_taken():
    _, log, taken = decoded(slots(), count=2)
    assert log.samples_TS.tolist() == [[0, 1, -1], [0, -1, -1]] and taken == 2


def test_a_slot_that_is_not_in_use_takes_nothing():
    _, log, taken = decoded(slots(used=2), stop_at=2)
    assert log.samples_TS.tolist() == [[0, 1, -2], [0, 2, -2], [3, 2, -2], [4, 2, -2], [5, -1, -2], [5, -1, -2]]
    assert taken == 6


def test_a_slot_that_is_freed_takes_the_next_sample():
    half, log, _ = decoded(slots(), count=3, max_steps=1)
    assert log.samples_TS.tolist() == [[0, 1, 2]]  # of which 1 ended
    _, log, _ = decoded(freed(half, jnp.array([False, False, True])), first=3, count=2)
    assert log.samples_TS.tolist() == [[0, 3, 4]]


def test_what_comes_out_of_a_program_is_of_the_type_that_went_in():
    """Else the next call compiles the program again."""
    before = [jax.typeof(leaf) for leaf in jax.tree.leaves(slots())]
    assert [jax.typeof(leaf) for leaf in jax.tree.leaves(decoded(slots())[0])] == before
    new = empty_slots(MODEL, SETTINGS, KEY, rows=2, max_prompt_length=4, slots=3, used=3)
    assert [jax.typeof(leaf) for leaf in jax.tree.leaves(new)] == before


def test_the_kinds_of_a_graph_are_those_that_xla_knows():
    """It takes the same options for a program of any device, and refuses a kind that it does not know."""
    assert jax.jit(jnp.negative, compiler_options=compiled._LOOP_IN_GRAPH)(1.0) == -1
    assert "WHILE" in compiled._LOOP_IN_GRAPH["xla_gpu_enable_command_buffer"].split(",")


@pytest.mark.gpu
def test_a_loop_in_a_graph_changes_no_bit(monkeypatch):
    """XLA runs a program kernel by kernel first, then records its graph, then changes addresses in it."""
    inside = [decoded(slots())[1] for _ in range(4)]
    monkeypatch.setattr(compiled, "_LOOP_IN_GRAPH", {})
    outside = compiled.programs.__wrapped__()
    monkeypatch.setitem(globals(), "programs", lambda: outside)
    expected = decoded(slots())[1]
    for log in inside:
        for part, other in zip(jax.tree.leaves(log), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize(
    "stable, chosen, warned", [([True, True], 0, 0), ([False, True], 1, 0), ([False, False], 0, 1)]
)
def test_products_are_left_to_what_keeps_their_rows(monkeypatch, caplog, stable, chosen, warned):
    monkeypatch.setattr(compiled, "_keeps_rows", lambda options: stable[compiled._ROW_STABLE.index(options)])
    assert compiled._compiler_options.__wrapped__() is compiled._ROW_STABLE[chosen]
    assert caplog.text.count("may differ in their last bits") == warned


def test_what_is_chosen_here_keeps_rows():
    assert compiled._keeps_rows(compiled._compiler_options())
