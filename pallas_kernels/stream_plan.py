"""How the streaming kernel cuts a shape: the configuration, and the shared memory that it needs."""

import dataclasses

from .layout import COLS, QUAD_BYTES, ROWS

SMEM_LIMIT = 226 * 1024  # of 227 KiB: Mosaic keeps a little for itself
# Clusters that an H200 holds at once (cudaOccupancyMaxActiveClusters; its multiprocessors lie in groups of unequal
# size). One cluster more is a second wave: 32 clusters of 4 took twice as long as 30.
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15}


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """One cut of a shape.

    Attributes:
      cluster: CTAs that split K (whole quads) and add their sums at the end.
      warps_n, warps_k: compute warps along the CTA's row tiles, and along the units of a quad (1, 2 or 4).
      tiles: row tiles of 16 outputs that a warp holds, so that x fragments are read once for them.
      depth: quads in a warp's ring of weights.
      x_depth: quads in the CTA's ring of x.
      wgmma: multiply with wgmma (the faster tensor-core path, for M from 32 on) instead of mma.sync. Then four
        neighbouring warps act as one, and x comes reordered (see `fragment_order` in stream_kernel.py).
      waves: CTAs one after the other on a multiprocessor, where one wave's sums do not fit in the registers.
      promote: without wgmma, add each quad's sums to the total outside the tensor core, whose additions truncate.
    """

    cluster: int = 1
    warps_n: int = 9
    warps_k: int = 2
    tiles: int = 2
    depth: int = 3
    x_depth: int = 3
    wgmma: bool = False
    waves: int = 1
    promote: bool = False

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def warpgroups(self) -> int:
        return -(-(self.warps + 1) // 4)  # one more warp loads x


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and shared-memory places of one kernel, in bytes unless named otherwise."""

    m: int
    m_tiles: int
    n: tuple[int, ...]
    tiles_of: tuple[int, ...]
    quads: int
    config: StreamConfig

    @property
    def all_tiles(self) -> int:
        return sum(self.tiles_of)

    @property
    def clusters(self) -> int:
        return min(RESIDENT[self.config.cluster] * self.config.waves, self.all_tiles)

    @property
    def units_warp(self) -> int:
        return 4 // self.config.warps_k

    @property
    def tile_slot(self) -> int:
        """One row tile's part of a slot: this warp's units of codes, then scale words of whole pairs of units."""
        return self.units_warp * 512 + -(-self.units_warp // 2) * 128

    @property
    def slot(self) -> int:
        return self.config.tiles * self.tile_slot

    @property
    def x_stride(self) -> int:
        return COLS * 2 + 16  # 16 more: then 8 rows x 4 pieces of 16 bytes fall in different banks

    @property
    def x_slot(self) -> int:
        return self.m_tiles * 8 * (COLS * 2 if self.config.wgmma else self.x_stride)

    @property
    def ring_at(self) -> int:
        return 128  # after 2 x x_depth barriers

    @property
    def x_at(self) -> int:
        return self.ring_at + self.config.warps * self.config.depth * self.slot

    @property
    def red_stride(self) -> int:
        return (self.config.tiles * ROWS + 4) * 4  # between rows m of a warp's sums; 4 more against bank conflicts

    @property
    def red_warp(self) -> int:
        return self.m_tiles * 8 * self.red_stride

    @property
    def total(self) -> int:
        rings = self.x_at + self.config.x_depth * self.x_slot
        return max(rings, self.ring_at + self.config.warps * self.red_warp)

    @property
    def bytes_ahead(self) -> int:
        """Weight bytes that one CTA has under way."""
        return self.config.warps_n * self.config.tiles * (self.config.depth - 1) * QUAD_BYTES


def make_plan(m: int, k: int, n: tuple[int, ...], config: StreamConfig) -> Plan:
    """Raises ValueError naming the constraint when the configuration does not take the shape."""
    quads = -(-k // COLS)
    if not 1 <= m <= 64:
        raise ValueError(f"M must be in 1..64, got {m}")
    if config.warps_k not in (1, 2, 4):
        raise ValueError(f"warps_k must be 1, 2 or 4, got {config.warps_k}")
    if not (config.depth >= 2 and 2 <= config.x_depth <= 8):
        raise ValueError(f"depth must be at least 2 and x_depth 2..8, got {config.depth}, {config.x_depth}")
    if config.wgmma and config.promote:
        raise ValueError("promote needs mma.sync: with wgmma the sums would not fit twice in the registers")
    if config.wgmma and config.warps_n % 4:
        raise ValueError(f"with wgmma warps_n must be a multiple of 4, got {config.warps_n}")
    m_tiles = next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    tiles_of = tuple(-(-n_i // ROWS) for n_i in n)
    plan = Plan(m, m_tiles, tuple(n), tiles_of, quads, config)
    if config.cluster > quads:
        raise ValueError(f"K = {k} is {quads} quads of 256, too few for a cluster of {config.cluster}")
    slots = config.warps_n * config.tiles
    if -(-plan.all_tiles // plan.clusters) > slots:
        raise ValueError(f"N = {n} is {plan.all_tiles} row tiles; {plan.clusters} clusters of {slots} do not hold them")
    if config.warpgroups * 128 > 1024:
        raise ValueError(f"{config} has more than 1024 threads")
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"{config} needs {plan.total} bytes of shared memory at M = {m}, K = {k}; limit {SMEM_LIMIT}")
    return plan
