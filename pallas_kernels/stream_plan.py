"""How the streaming kernel cuts a shape: the configuration, and the shared memory that it needs."""

import dataclasses

from .layout import COLS, ROWS, UNIT_BYTES

SMEM_LIMIT = 226 * 1024  # of 227 KiB: Mosaic keeps a little for itself
# Clusters that are resident at once, by cluster size: 132 multiprocessors lie in groups of 16 or 18.
RESIDENT = {1: 132, 2: 66, 4: 32, 8: 16}


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """One cut of a shape.

    Attributes:
      cluster: CTAs that split K and add their sums at the end.
      warps_n, warps_k: compute warps along the CTA's row tiles and along its K slice.
      tiles: row tiles of 16 outputs that a warp holds, so that x fragments are read once for them.
      slot_units: units of 64 columns in a slot of the rings.
      depth: slots in the rings.
    """

    cluster: int = 1
    warps_n: int = 9
    warps_k: int = 2
    tiles: int = 2
    slot_units: int = 2
    depth: int = 3

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
    units: int
    config: StreamConfig

    @property
    def all_tiles(self) -> int:
        return sum(self.tiles_of)

    @property
    def clusters(self) -> int:
        return min(RESIDENT[self.config.cluster], self.all_tiles)

    @property
    def slices(self) -> int:
        return self.config.cluster * self.config.warps_k

    @property
    def ragged(self) -> bool:
        return bool(self.units % (self.slices * self.config.slot_units))

    @property
    def tile_slots(self) -> int:
        return self.config.warps_n * self.config.tiles

    @property
    def slot(self) -> int:
        return self.config.tiles * self.config.slot_units * UNIT_BYTES

    @property
    def x_stride(self) -> int:
        return self.config.slot_units * COLS * 2 + 16  # 16 more: then 8 rows x 4 pieces fall in different banks

    @property
    def x_slot(self) -> int:
        return self.m_tiles * 8 * self.x_stride

    @property
    def barriers(self) -> int:
        return (self.config.warps + 2 * self.config.warps_k) * self.config.depth

    @property
    def ring_at(self) -> int:
        return -(-self.barriers * 8 // 128) * 128

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
        rings = self.x_at + self.config.warps_k * self.config.depth * self.x_slot
        return max(rings, self.ring_at + self.config.warps * self.red_warp)


def make_plan(m: int, k: int, n: tuple[int, ...], config: StreamConfig) -> Plan:
    """Raises ValueError naming the constraint when the configuration does not take the shape."""
    units = -(-k // COLS)
    if not 1 <= m <= 64:
        raise ValueError(f"M must be in 1..64, got {m}")
    m_tiles = next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    tiles_of = tuple(-(-n_i // ROWS) for n_i in n)
    plan = Plan(m, m_tiles, tuple(n), tiles_of, units, config)
    if plan.slices > units:
        raise ValueError(f"K = {k} is {units} units of 64, too few for {plan.slices} slices")
    if -(-plan.all_tiles // plan.clusters) > plan.tile_slots:
        raise ValueError(
            f"N = {n} is {plan.all_tiles} row tiles; {plan.clusters} clusters of {plan.tile_slots} tiles do not hold it"
        )
    if config.warpgroups * 128 > 1024:
        raise ValueError(f"{config} has more than 1024 threads")
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"{config} needs {plan.total} bytes of shared memory at M = {m}, K = {k}; limit {SMEM_LIMIT}")
    return plan
