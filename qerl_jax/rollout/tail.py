"""The last samples in fewer slots.

A step costs what its slots cost, whether their samples go on or have ended, and lengths of completions have long tails:
most steps of a rollout may be those of its last few samples. Where no more samples are at work than a smaller number of
slots holds, and none waits, their keys and values are copied into so many slots and decoding goes on there; the pool of
prompts stays as it is.

A sample's randomness is its own, so nothing is drawn again. On a CPU its tokens are the same in fewer slots, and so
are its log-probabilities: bit for bit in slots that are refilled (for sizes that `allocated_for` leaves as they are),
and up to rounding in a rollout, see `qerl_jax.rollout.programs`. On a GPU other numbers of rows have other kernels,
which round differently, and a token that was a close call may come out as another one. When samples move depends on
lengths and limits alone, so that a run that is continued does the same as before.

Dimension letters: S slots, fewer of them after each move.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import has_kernels
from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.rollout.batch import Rollout
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.queued import QueuedSlots
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import Slots

# Slot-steps that must be there to be saved. At 7B on an H200 (4.1 ms a step with 64 slots, 3.0 with 32, 2.1 with 8) a
# slot less saves some 32 us of each step: 8192 are 0.26 s. A move is a look at the host and a copy, some 10 ms by its
# parts, and a program's compilation, once for each size in a run, 20 s: within 80 rollouts they have come back.
WORTH = 8192


def default_tail_sizes() -> tuple[int, ...]:
    """Numbers of slots to go on in, by default: two for which the kernels are faster than for more rows, so at most two
    more programs are compiled; and none where there are no kernels."""
    return (32, 8) if has_kernels() else ()


def worthwhile(sizes: Sequence[int], slots: int, left: int) -> list[int]:
    """Those of the sizes that are worth a move from so many slots, if a sample may draw `left` more tokens: at most
    half of them, so that what is copied has room, see `plan_slots`."""
    return [size for size in sizes if 2 * size <= slots and (slots - size) * left >= WORTH]


def moved[T: (Slots, QueuedSlots)](slots: T, rows: np.ndarray, *shared: str) -> T:
    """The slots of these numbers alone, over the same prompts; the cache of the others is deleted.

    Args:
      slots: whose cache is the caller's own.
      rows: different numbers of slots.
      shared: fields that do not have a row for each slot, besides the cache.
    """
    kept: dict[str, Any] = {name: getattr(slots, name) for name in ("cache", *shared)}
    completion = []
    for layer in kept["cache"].completion:  # one by one, so that one layer at a time is there twice
        completion.append(_rows_of(layer, rows))
        for array in layer:
            array.delete()
    kept["cache"] = kept["cache"].replace(completion=tuple(completion))
    few: T = _rows_of(slots.replace(**dict.fromkeys(kept)), rows)
    return few.replace(**kept)


def decode_to_the_end(
    slots: Slots,
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    settings: SamplingSettings,
    limits_S: np.ndarray,
    group: int | None,
    sizes: Sequence[int],
) -> tuple[Rollout, int]:
    """`decode` until all samples have ended, the last of them in fewer slots.

    Args:
      slots: as they are `started`; donated.
      limits_S: their limits, on the host.
      group: as in `decode`.
      sizes: numbers of slots to go on in.

    Returns:
      The rollout, and the sum over its steps of the slots that they were made with.
    """
    left_behind: list[tuple[Rollout, np.ndarray]] = []  # what was moved on, and from which rows
    live_S, drawn, slot_steps = np.ones(len(limits_S), bool), 1, 0
    while live_S.any():
        found = worthwhile(sizes, len(limits_S), int(limits_S[live_S].max()) - drawn)
        fit = [size for size in found if size >= live_S.sum()]
        if fit:
            rows = np.argsort(~live_S, kind="stable")[: min(fit)]
            left_behind.append((slots.out, rows))
            slots, limits_S, live_S, group = moved(slots, rows), limits_S[rows], live_S[rows], None
            continue
        slots = programs().finished(
            slots, model, adapter, norms, settings.max_completion_length, max(found, default=0), settings, group=group
        )
        live_S, lengths_S = jax.device_get((slots.live_S, slots.out.lengths))
        before, drawn = drawn, int(lengths_S.max())
        slot_steps += (drawn - before) * len(lengths_S)
    out = slots.out
    for whole, rows in reversed(left_behind):
        out = _with_rows(whole, out, rows)
    return out, slot_steps


@jax.jit
def _rows_of(tree: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda array: array[rows], tree)


@functools.partial(jax.jit, donate_argnums=0)
def _with_rows(whole: Any, part: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda array, new: array.at[rows].set(new), whole, part)
