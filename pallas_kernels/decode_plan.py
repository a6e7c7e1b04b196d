"""How the decode kernel cuts a shape: the configuration, and the shared memory that it needs."""

import dataclasses

from .layout import COLS, ROWS, UNIT_BYTES

SMEM_LIMIT = 226 * 1024  # of 227 KiB: Mosaic keeps a little for itself
MULTIPROCESSORS = 132
EPILOGUE_WARPS = 4


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """One cut of a shape.

    Attributes:
      cluster: CTAs that share K (a cluster; its sums meet once, at the end).
      warps_n, warps_k: compute warps along a group's rows and along K.
      tiles: row tiles of 16 that a warp does at once, so that x fragments are read once for them.
      slot_units: units of 64 columns in a slot of a warp's ring (0: all of its K slice).
      depth: slots in the ring.
    """

    cluster: int = 1
    warps_n: int = 1
    warps_k: int = 16
    tiles: int = 1
    slot_units: int = 0
    depth: int = 3

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        return 32 * (self.warps + EPILOGUE_WARPS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and shared-memory places of one kernel, in bytes unless named otherwise."""

    m: int
    m_tiles: int
    n: tuple[int, ...]
    groups_of: tuple[int, ...]
    units: int
    units_cta: int
    units_warp: int
    slot_units: int
    config: DecodeConfig

    @property
    def groups(self) -> int:
        return sum(self.groups_of)

    @property
    def clusters(self) -> int:
        return min(MULTIPROCESSORS // self.config.cluster, self.groups)

    @property
    def ragged(self) -> bool:
        """Whether some warp has fewer units than the others."""
        return bool(self.units % self.config.cluster or self.units_cta % self.config.warps_k)

    @property
    def slots_per_group(self) -> int:
        return -(-self.units_warp // self.slot_units)

    @property
    def rows(self) -> int:
        return ROWS * self.config.tiles * self.config.warps_n

    @property
    def pairs(self) -> int:
        """Pairs of neighbouring outputs in a row group, for all rows of x."""
        return self.m * self.rows // 2

    @property
    def x_stride(self) -> int:
        return self.units_cta * COLS * 2 + 16  # 16 more: then 8 rows x 4 pieces of 16 bytes fall in different banks

    @property
    def slot(self) -> int:
        return self.config.tiles * self.slot_units * UNIT_BYTES

    @property
    def red_stride(self) -> int:
        return (self.config.tiles * ROWS + 4) * 4  # between rows m of a warp's sums; 4 more against bank conflicts

    @property
    def red_warp(self) -> int:
        return self.m_tiles * 8 * self.red_stride

    @property
    def red_buffer(self) -> int:
        return self.config.warps * self.red_warp

    @property
    def barriers(self) -> int:
        return self.config.warps * self.config.depth + 5  # rings, x, two full and two empty sum buffers

    @property
    def ring_at(self) -> int:
        return -(-self.barriers * 8 // 128) * 128

    @property
    def x_at(self) -> int:
        return self.ring_at + self.config.warps * self.config.depth * self.slot

    @property
    def red_at(self) -> int:
        return self.x_at + self.m_tiles * 8 * self.x_stride

    @property
    def part_at(self) -> int:
        return self.red_at + 2 * self.red_buffer

    @property
    def total(self) -> int:
        part = 0
        if self.config.cluster > 1:
            part = -(-self.groups // self.clusters) * self.pairs * 8
        return self.part_at + part


def make_plan(m: int, k: int, n: tuple[int, ...], config: DecodeConfig) -> Plan:
    """Raises ValueError naming the constraint when the configuration does not take the shape."""
    units = -(-k // COLS)
    units_cta = -(-units // config.cluster)
    units_warp = -(-units_cta // config.warps_k)
    if units - (config.cluster - 1) * units_cta <= 0:
        raise ValueError(f"K = {k} is {units} units of 64, too few for a cluster of {config.cluster}")
    rows = ROWS * config.tiles * config.warps_n
    for n_i in n:
        if -(-n_i // ROWS) * ROWS % rows:
            raise ValueError(f"N = {n_i} must fill row tiles of {rows}")
    if config.warps % 4:
        raise ValueError(f"warps_n * warps_k must be a multiple of 4, got {config.warps}")
    if not 1 <= m <= 64:
        raise ValueError(f"M must be in 1..64, got {m}")
    m_tiles = next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    slot_units = min(config.slot_units or units_warp, units_warp)
    groups_of = tuple(-(-n_i // rows) for n_i in n)
    plan = Plan(m, m_tiles, tuple(n), groups_of, units, units_cta, units_warp, slot_units, config)
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"{config} needs {plan.total} bytes of shared memory at M = {m}, K = {k}; limit {SMEM_LIMIT}")
    return plan
