"""Wall time of a loop on a GPU, whose host may have other work."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

STEPS, ROUNDS = 40, 8
_LEAST = 0.75  # of the kernels' times, added up


def turn_us(loop: Callable[[int], Any]) -> float:
    """Microseconds of one of a loop's turns, see `slope_us`. `loop(turns)` is compiled already."""
    times: dict[int, list[float]] = {STEPS: [], 3 * STEPS: []}
    for _ in range(ROUNDS):
        for turns, seconds in times.items():
            began = time.perf_counter()
            jax.block_until_ready(loop(turns))
            seconds.append(time.perf_counter() - began)
    return slope_us(*times.values(), 2 * STEPS)


def slope_us(few: Sequence[float], many: Sequence[float], turns: int) -> float:
    """Microseconds a turn, from the seconds of calls of which the second kind has `turns` more: without what a call
    itself takes.

    The difference of the least times, since a busy host only ever adds to a time: one undisturbed call of each kind is
    enough, however many others were held up. A difference of medians, or a median of differences, is wrong once half of
    what it is taken of were, and too small where those are the shorter calls.
    """
    return (min(many) - min(few)) / turns * 1e6


def possible(us: float, kernels_us: float) -> float | None:
    """The wall time, or None where no call of one kind was undisturbed: it is far less than the loop's kernels take.
    Somewhat less it may be, since CUPTI times them in another run."""
    if us >= _LEAST * kernels_us:
        return us
    print(
        f"no wall time: {us:.1f} us is too little for kernels of {kernels_us:.1f}, the host is too busy to tell",
        file=sys.stderr,
        flush=True,
    )
    return None
