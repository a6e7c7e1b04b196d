"""How the Triton kernels (triton_kernel.py, triton_lora.py) divide products among programs.

By a rule, since the GPUs that it is for differ in their multiprocessors: what was fastest, or nearly, of the sizes
tried on an H200 (docs/log.md, The Triton kernels).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple


class _Program(NamedTuple):
    """Row tiles of 16 outputs, warps, stages and the most parts of K of the programs for some rows of x."""

    tiles: int
    warps: int
    stages: int
    parts: int


# By the rows of x that a program takes: the fewest that hold all; more are programs of their own. Four warps with eight
# row tiles take 7% less with 64 rows on an H200, but for sm_100 Triton then multiplies by other instructions, untried.
PROGRAMS = {8: _Program(4, 2, 3, 8), 16: _Program(4, 2, 2, 16), 32: _Program(4, 2, 2, 16), 64: _Program(4, 2, 2, 16)}
# Warps that all programs have together for a multiprocessor, at most: K is split as long as there are fewer.
WARPS = 20


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """Sizes of a program.

    Attributes:
      tiles: row tiles that it computes.
      warps: which have whole row tiles each.
      stages: quads of K that are under way in shared memory, at most.
      split: parts of K, each with programs of its own.
      block_m: rows of x that it takes.
    """

    tiles: int
    warps: int
    stages: int
    split: int
    block_m: int


def make_plan(m: int, tiles: Sequence[int], quads: int, multiprocessors: int) -> TritonPlan:
    """For m rows, 1 or more, and weights of so many row tiles each, and quads. All m up to the same `block_m` have the
    same plan, so a row's sums do not depend on how many stand beside it."""
    block_m = next((rows for rows in PROGRAMS if m <= rows), max(PROGRAMS))
    program = PROGRAMS[block_m]
    warps = program.warps * sum(blocks(tiles, program.tiles))
    fits = (s for s in (16, 8, 4, 2) if s <= program.parts and 2 * s <= quads and s * warps <= WARPS * multiprocessors)
    return TritonPlan(program.tiles, program.warps, program.stages, next(fits, 1), block_m)


def blocks(counts: Sequence[int], size: int) -> list[int]:
    """Programs for so many row tiles or ranks of each weight, of which one takes `size`."""
    return [-(-count // size) for count in counts]


def starts(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each weight's begin, of programs, outputs or ranks that stand one behind the other; and their sum."""
    return tuple(itertools.accumulate(counts, initial=0))
