"""How CTAs of the wide kernel that have no tile cut x A^T (wide_spare.py)."""

import dataclasses

WARPS = 12  # of a CTA
UNIT_TILES = 6  # sixteens of ranks that a warp computes, at most
UNIT_EIGHTS = 4  # eights of rows
STEP = 32  # columns that it multiplies at a time: 16 bytes of each of four lanes
FRAGMENT = 16 * 8 * 4  # bytes of the sums of 16 ranks x 8 rows, as m16n8k16 leaves them


@dataclasses.dataclass(frozen=True)
class SparePlan:
    """Sizes, in fragments of 16 ranks x 8 rows unless named otherwise.

    Attributes:
      m: rows of x, all of its tiles', so that a row's sums do not depend on M where the number of tiles does not.
      d: columns of x.
      tiles: sixteens of ranks, of all adapters.
      ctas: that share D.
      shared: bytes of shared memory that each has.
    """

    m: int
    d: int
    tiles: int
    ctas: int
    shared: int

    @property
    def row_groups(self) -> int:
        return -(-self.m // (8 * UNIT_EIGHTS))

    @property
    def unit_tiles(self) -> int:
        """As few as leave no warp more than one unit; more than UNIT_TILES where there are none so few."""
        return next(n for n in range(1, self.tiles + 1) if n == self.tiles or self._units(n) <= WARPS)

    def _units(self, unit_tiles: int) -> int:
        return -(-self.tiles // unit_tiles) * self.row_groups

    @property
    def parts(self) -> int:
        """Warps that share a unit, each some steps of its CTA's part of D."""
        return WARPS // self._units(self.unit_tiles)

    @property
    def eights(self) -> int:
        return self.row_groups * UNIT_EIGHTS

    @property
    def fragments(self) -> int:
        return -(-self.tiles // self.unit_tiles) * self.unit_tiles * self.eights

    @property
    def rows(self) -> int:
        """Of x, and behind them of A, in shared memory."""
        return 8 * self.eights + 16 * self.tiles

    @property
    def copied(self) -> float:
        """Bytes of x and A that each CTA copies."""
        return 2 * self.rows * self.d / self.ctas

    @property
    def stage(self) -> int:
        """Steps that shared memory holds, or fewer, if a CTA has no more."""
        held = self.shared // (self.rows * 2 * STEP)
        return min(held - 1 + held % 2, -(-self.d // STEP // self.ctas))

    @property
    def stride(self) -> int:
        """Bytes from row to row, an odd number of steps: so eight lanes' pieces of two rows fall in different banks."""
        return (self.stage | 1) * 2 * STEP


def check_spare(plan: SparePlan, ranks: tuple[int, ...]):
    """Raises ValueError naming the constraint when the CTAs cannot make x A^T."""
    if plan.ctas < 1:
        raise ValueError("no CTA is without a tile, which could make x A^T")
    if plan.d % STEP:
        raise ValueError(f"x A^T in the wide kernel takes K in multiples of {STEP}, got {plan.d}")
    held = plan.stage >= 1 and plan.parts * plan.fragments * FRAGMENT <= plan.shared
    if plan.unit_tiles > UNIT_TILES or plan.parts < 1 or not held:
        raise ValueError(f"x A^T of M = {plan.m} and ranks {ranks} is too much for the wide kernel's spare CTAs")
