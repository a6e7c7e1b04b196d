"""How the Triton kernel (triton_kernel.py) divides a product among programs.

By a rule, since the GPUs that it is for differ in their multiprocessors: what was fastest, or nearly, of the sizes
tried on an H200 (docs/log.md, The Triton kernel).
"""

import dataclasses

# Row tiles of 16 outputs that a program computes.
TILES = 4
# A program takes so many rows of x, or the next fewer; more rows are programs of their own.
BLOCKS_M = (8, 16, 32, 64)
# Warps that all programs have together for a multiprocessor, at most: K is split as long as there are fewer.
WARPS = 20
PARTS = (16, 8, 4, 2, 1)


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


def make_plan(m: int, tiles: int, quads: int, multiprocessors: int) -> TritonPlan:
    """For m rows, 1 or more, and a weight of so many row tiles and quads. All m up to the same `block_m` have the same
    plan, so a row's sums do not depend on how many stand beside it."""
    block_m = next((block for block in BLOCKS_M if m <= block), BLOCKS_M[-1])
    warps, stages = (4, 3) if block_m == BLOCKS_M[0] else (2, 2)  # one row tile a warp, or two
    programs = -(-tiles // TILES)
    fits = (s for s in PARTS if 2 * s <= quads and s * programs * warps <= WARPS * multiprocessors)
    return TritonPlan(TILES, warps, stages, next(fits, 1), block_m)
