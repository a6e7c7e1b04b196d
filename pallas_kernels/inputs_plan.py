"""How the kernel that makes a matmul's inputs cuts its work (inputs_kernel.py)."""

import dataclasses

from .layout import COLS, ROWS
from .stream_plan import SMEM_LIMIT

GIVEN, NORMED = "given", "normed"  # what x is
CLUSTER = 8
CHUNK = 64  # columns: for each of four lanes two pieces of 16 bytes of a row, the second half a chunk behind the first
APART = 64  # bytes from the first to the second
TILE_RANKS = 6  # sixteens of ranks in a tile, at most
MAX_ROWS = 256  # beyond, a wave does not hold the tiles, and launches matter less
# Most rows, and for so many the eights of rows in a tile. An H200 holds 15 clusters of 8 CTAs at once: of the cuts that
# make no more, with up to 96 ranks, the fastest.
EIGHTS = {False: ((64, 1), (128, 2), (MAX_ROWS, 4)), True: ((64, 1), (128, 2), (MAX_ROWS, 3))}
LOADS = 24  # of 16 bytes a lane, that a warp has under way together
FRAGMENT = 16 * 8 * 4


@dataclasses.dataclass(frozen=True)
class InputsPlan:
    """Sizes of one kernel.

    Attributes:
      m, k: of x.
      ranks: the adapters', multiples of 16; empty where the matmul has none.
      source: what x is.
      ordered: rows of x in fragment order (fragment_order.py), or 0 for x as it is.
      units: whether x is written in unit order.
    """

    m: int
    k: int
    ranks: tuple[int, ...]
    source: str
    ordered: int = 0
    units: bool = False

    @property
    def long(self) -> bool:
        """Whether there is much to make: what goes into down."""
        return self.k >= 8192 and self.source != NORMED

    @property
    def eights(self) -> int:
        """Eights of rows in a tile."""
        return next(eights for most, eights in EIGHTS[self.long] if self.m <= most)

    @property
    def warps(self) -> int:
        """Of a CTA. A norm's have one chunk each, where there can be so many: a second one's A would be asked for when
        the norm is known, and waits for the memory then."""
        if self.source != NORMED:
            return 16 if self.long else 8
        return min(16, max(8, 4 * -(-self.chunks // (4 * CLUSTER))))

    @property
    def runs(self) -> int:
        """That cut K."""
        return CLUSTER * self.warps

    @property
    def writes_x(self) -> bool:
        return self.source != GIVEN or self.ordered > 0 or self.units

    @property
    def tiles_of(self) -> tuple[int, ...]:
        """Sixteens of ranks of each adapter."""
        return tuple(rank // ROWS for rank in self.ranks)

    @property
    def groups(self) -> int:
        """Clusters that share rows of x, each for some of the ranks."""
        return max(1, -(-sum(self.tiles_of) // TILE_RANKS))

    @property
    def tiles(self) -> int:
        """Sixteens of ranks in a tile."""
        return -(-sum(self.tiles_of) // self.groups)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 8 * self.eights

    @property
    def row_tiles(self) -> int:
        return -(-self.m // self.rows)

    @property
    def fragments(self) -> int:
        return self.tiles * self.eights

    @property
    def slots(self) -> int:
        """Fragments that one CTA of a cluster finishes, at most."""
        return -(-self.fragments // CLUSTER)

    @property
    def chunks(self) -> int:
        return self.k // CHUNK

    @property
    def run(self) -> int:
        """Chunks of the longest run."""
        return -(-self.chunks // self.runs)

    @property
    def batch(self) -> int:
        """Chunks of a given x whose loads are under way together."""
        return min(self.run, max(1, LOADS // (2 * (2 * self.tiles + self.eights))))

    @property
    def norm_batch(self) -> int:
        """Chunks of the residual stream whose loads are under way together: two times 64 bytes a lane and row."""
        return max(1, LOADS // (8 * self.eights))

    @property
    def early(self) -> int:
        """Chunks of A that are under way before the norm is known."""
        return min(self.run, LOADS // (4 * self.tiles)) if self.tiles else self.run

    @property
    def received_at(self) -> int:
        """Where sums of squares lie that the cluster's CTAs gave, behind those of this CTA's warps."""
        return self.warps * self.rows * 4

    @property
    def own_at(self) -> int:
        """Where a warp's own numbers lie: its part of the residual stream, later its sums."""
        return self.received_at + CLUSTER * self.rows * 4

    @property
    def own(self) -> int:
        flow = self.run * self.eights * 2048 if self.source == NORMED else 0
        return max(flow, self.fragments * FRAGMENT)

    @property
    def sums_at(self) -> int:
        """Where the sums of fragments lie that the cluster's CTAs gave."""
        return self.own_at + self.warps * self.own

    @property
    def barriers_at(self) -> int:
        """Two barriers, that sums of squares and that sums of fragments have arrived."""
        return self.sums_at + CLUSTER * self.slots * FRAGMENT

    @property
    def total(self) -> int:
        return self.barriers_at + 16


def make_inputs_plan(
    m: int, k: int, ranks: tuple[int, ...], source: str, ordered: int = 0, units: bool = False
) -> InputsPlan:
    """Raises ValueError naming the constraint when the kernel does not take the shape."""
    plan = InputsPlan(m, k, ranks, source, ordered, units)
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"M must be in 1..{MAX_ROWS}, got {m}")
    if k % CHUNK:
        raise ValueError(f"K must be a multiple of {CHUNK}, got {k}")
    if ordered and (k % COLS or ordered < m or ordered % 8):
        raise ValueError(f"fragment order takes K in multiples of {COLS} and rows in multiples of 8, got {plan}")
    if ordered and units:
        raise ValueError("x is written in one order, fragment or unit")
    if any(rank % ROWS or not rank for rank in ranks):
        raise ValueError(f"ranks must be multiples of {ROWS}, and not 0, got {ranks}")
    if not ranks and not plan.writes_x:
        raise ValueError("nothing to do: x is given and there are no adapters")
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"{plan} needs {plan.total} bytes of shared memory; limit {SMEM_LIMIT}")
    return plan
