"""How the streaming kernel cuts a shape: the configuration, and the shared memory that it needs."""

import dataclasses
import functools

from .layout import COLS, QUAD_BYTES, ROWS, UNIT

SMEM_LIMIT = 226 * 1024  # of 227 KiB: Mosaic keeps a little for itself
# Clusters that an H200 holds at once (cudaOccupancyMaxActiveClusters; its multiprocessors lie in groups of unequal
# size). One cluster more is a second wave: 32 clusters of 4 took twice as long as 30.
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15}
STREAM_ROWS = 64  # at most, of x
FACTORS_AT = 160  # behind 2 x x_depth barriers, those of LoRA and of the end: 128 / each global scale
SHARING = 4  # warps of each of two CTAs that share row tiles
COUNTERS = 63  # two are in use, see stream_slices.py


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """One cut of a shape.

    Attributes:
      cluster: CTAs that split K (whole quads) and add their sums at the end.
      warps_n, warps_k: compute warps along the CTA's row tiles, and along the units of a quad (1, 2 or 4).
      tiles: row tiles of 16 outputs that a warp holds, so that x fragments are read once for them.
      depth: quads in a warp's ring of weights.
      x_depth: quads in the CTA's ring of x.
      wgmma: multiply with wgmma (the faster tensor-core path, for M from 17 on) instead of mma.sync. Then four
        neighbouring warps act as one, and x comes reordered (see fragment_order.py).
      waves: CTAs one after the other on a multiprocessor, where one wave's sums do not fit in the registers. The first
        are full; the last has what is left, and warps that have nothing to do.
      promote: steps of a sum on the tensor core, whose additions truncate, before it is added to a total outside: in
        registers, with wgmma in shared memory. 0: never; with mma.sync a warp's units of a quad, if they are several,
        then take turns in two sums.
      late_b: B of LoRA, for which there is no room beside the rings, comes in their place when all of K is multiplied;
        the L2 fetches it before.
      shares: CTAs come in pairs, whose last four warps have the same row tiles, each CTA's half of K of them.
    """

    cluster: int = 1
    warps_n: int = 9
    warps_k: int = 2
    tiles: int = 2
    depth: int = 3
    x_depth: int = 3
    wgmma: bool = False
    waves: int = 1
    promote: int = 32
    late_b: bool = False
    shares: bool = False

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def together(self) -> int:
        """CTAs of a cluster as they are launched."""
        return 2 if self.shares else self.cluster

    @property
    def own_tiles(self) -> int:
        """Row tiles of a CTA that it does not share: all that its warps have places for, but the last four's."""
        return (self.warps_n - SHARING * self.shares) * self.tiles

    @property
    def places(self) -> int:
        """Row tiles for which a cluster's, or a pair's, warps have places."""
        return 2 * self.own_tiles + SHARING if self.shares else self.own_tiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and shared-memory places of one kernel, in bytes unless named otherwise."""

    m: int
    m_tiles: int
    n: tuple[int, ...]
    tiles_of: tuple[int, ...]
    quads: int
    config: StreamConfig
    ranks: tuple[int, ...] = ()  # of each weight's LoRA, 0 for none; empty when no weight has one
    prepared: bool = False  # whether x comes as the kernel reads it, and x A^T with it
    swiglu: bool = False  # whether the two weights are gate and up, and silu(gate) * up is what it writes
    gives_units: bool = False  # whether it writes that in unit order (fragment_order.py)

    @property
    def outs(self) -> tuple[int, ...]:
        """Columns of the arrays that it writes."""
        return self.n[:1] if self.swiglu else self.n

    @property
    def joined(self) -> int:
        """Row tiles that make one of the results' and so lie in one cluster, side by side: a gate's and its up's."""
        return 2 if self.swiglu else 1

    @property
    def given_h(self) -> bool:
        """Whether x A^T is an operand."""
        return self.prepared and bool(self.ranks)

    @property
    def computes_h(self) -> bool:
        """Whether A is an operand."""
        return bool(self.ranks) and not self.prepared

    @property
    def warpgroups(self) -> int:
        warps = self.config.warps + 1 + self.computes_h  # one more loads x, at least one more multiplies by A
        return -(-warps // 4)

    @property
    def lora_warps(self) -> int:
        return 4 * self.warpgroups - self.config.warps - 1

    @property
    def rank_tiles(self) -> tuple[int, ...]:
        return tuple(r // ROWS for r in self.ranks)

    @property
    def lora_group(self) -> int:
        """Eights of rows of x that one unit of x A^T takes."""
        return min(2, self.m_tiles)

    @property
    def lora_sums(self) -> int:
        """Sums over K: one for each 16 ranks and each group of rows."""
        return sum(self.rank_tiles) * self.m_tiles // self.lora_group

    @property
    def summed_at_once(self) -> int:
        """Slices of x A^T that are under way together when a warp adds them; each takes four registers, of which a
        thread has 96 with five warpgroups and 64 with eight."""
        return 16 if self.warpgroups <= 5 else 8

    @functools.cached_property
    def lora_slices(self) -> int:
        """Parts of K whose products with A are added afterwards: what makes both together shortest, by an estimate.

        A warp's 128 columns take about 1 us (a trip to the memory while weights stream), slices that it asks for
        together a quarter: they are in the L2.
        """
        halves = 2 * self.quads
        warps = self.clusters * self.config.cluster * self.lora_warps
        sums = -(-max(self.rank_tiles) * self.m_tiles // self.lora_warps)  # that a warp adds up for one adapter

        def us(slices):
            added = sums * -(-slices // self.summed_at_once)
            return -(-halves // slices) * -(-self.lora_sums * slices // warps) + 0.25 * added

        return min(range(1, halves + 1), key=us)

    @property
    def lora_units(self) -> int:
        return self.lora_sums * self.lora_slices

    @property
    def lora_slice(self) -> int:
        """Bytes of one slice's sums."""
        return sum(self.rank_tiles) * self.m_tiles * 512

    @property
    def all_tiles(self) -> int:
        return sum(self.tiles_of)

    @property
    def clusters(self) -> int:
        return min(RESIDENT[self.config.together] * self.config.waves, self.results)

    @property
    def results(self) -> int:
        """Row tiles of the results."""
        return self.all_tiles // self.joined

    @property
    def full_clusters(self) -> int:
        """The first ones, which have `full_results` each: those of all waves but the last, if it is left any."""
        before = RESIDENT[self.config.together] * (self.config.waves - 1)
        behind, rest = self.clusters - before, self.results - before * self.full_results
        return before if 0 < behind <= rest <= behind * self.full_results else 0

    @property
    def full_results(self) -> int:
        """That a cluster's warps have places for."""
        return self.config.places // self.joined

    @property
    def last_clusters(self) -> int:
        """The others, which share `last_results`."""
        return self.clusters - self.full_clusters

    @property
    def last_results(self) -> int:
        return self.results - self.full_clusters * self.full_results

    @property
    def last_tiles(self) -> int:
        """Row tiles of the one of them that has most."""
        return -(-self.last_results // self.last_clusters) * self.joined

    @property
    def working_tiles(self) -> int:
        """Row tiles that the working warps of a multiprocessor hold in all waves together, where it has most; shared
        ones count half."""
        if self.config.shares:
            return self.config.places // 2
        waves, together = self.config.waves, self.warps_together * self.config.tiles
        full_waves = waves - 1 if self.full_clusters else 0
        last = -(-self.last_tiles // together) * together
        return full_waves * self.full_results * self.joined + (waves - full_waves) * last

    @property
    def warps_together(self) -> int:
        """That work if one of them does."""
        return 4 if self.config.wgmma else 1

    @property
    def most_tiles(self) -> int:
        """Row tiles of the cluster that has most."""
        return self.full_results * self.joined if self.full_clusters else self.last_tiles

    @property
    def used_warps(self) -> int:
        """Compute warps that own row tiles in some CTA; with wgmma the others only fill up a group of four."""
        return min(self.config.warps_n, -(-self.most_tiles // self.config.tiles)) * self.config.warps_k

    @property
    def units_warp(self) -> int:
        return 4 // self.config.warps_k

    @property
    def sums_warp(self) -> int:
        """Of a warp, that a lane holds."""
        return 4 * self.config.tiles * self.m_tiles

    @property
    def chains(self) -> int:
        """In how many parts a lane holds them."""
        return 1 if self.config.promote or self.config.wgmma else min(2, self.units_warp)

    @property
    def promote_quads(self) -> int:
        """Quads between promotions."""
        return max(1, self.config.promote // (4 * self.units_warp))

    @property
    def tile_slot(self) -> int:
        """One row tile's part of a slot: this warp's units of codes, then scale words of whole pairs of units."""
        return self.units_warp * 512 + -(-self.units_warp // 2) * 128

    @property
    def slot(self) -> int:
        return self.config.tiles * self.tile_slot

    @property
    def x_shape(self) -> tuple[int, int]:
        """Of x as the kernel reads it: in fragment order with wgmma."""
        return (self.quads, self.m_tiles * 8 * COLS) if self.config.wgmma else (self.m, self.quads * COLS)

    @property
    def x_stride(self) -> int:
        return COLS * 2 + 16  # 16 more: then 8 rows x 4 pieces of 16 bytes fall in different banks

    @property
    def x_slot(self) -> int:
        return self.m_tiles * 8 * (COLS * 2 if self.config.wgmma else self.x_stride)

    @property
    def ring_at(self) -> int:
        return -(-(FACTORS_AT + 4 * len(self.n)) // 128) * 128

    @property
    def totals_at(self) -> int:
        return self.ring_at + self.used_warps * self.config.depth * self.slot

    @property
    def totals_warp(self) -> int:
        """A warp's promoted sums with wgmma, 16 bytes a lane for each four of them."""
        return self.config.tiles * self.m_tiles * 512 if self.config.wgmma and self.config.promote else 0

    @property
    def x_at(self) -> int:
        return self.totals_at + self.used_warps * self.totals_warp

    @property
    def b_warp(self) -> int:
        """A warp's rows of the LoRA's B."""
        return self.config.tiles * ROWS * max(self.ranks, default=0) * 2

    @property
    def b_size(self) -> int:
        return self.used_warps // self.config.warps_k * self.b_warp

    @property
    def x_end(self) -> int:
        return self.x_at + self.config.x_depth * self.x_slot

    @property
    def b_at(self) -> int:
        return self.ring_at if self.config.late_b else self.x_end

    @property
    def h_at(self) -> int:
        return self.x_end if self.config.late_b else self.b_at + self.b_size

    @property
    def h_tile(self) -> int:
        """x A^T in 16 bits, 16 ranks of it."""
        return self.m_tiles * 8 * ROWS * 2

    @property
    def end(self) -> int:
        """Of all that is there while weights stream: a warp reads, and drops, as many ranks of every adapter as the
        widest has."""
        return self.h_at + (sum(self.rank_tiles) + max(self.rank_tiles, default=0)) * self.h_tile

    @property
    def k_parts(self) -> int:
        """Sums that are added up for an output."""
        return self.config.cluster * self.config.warps_k

    @property
    def red_stride(self) -> int:
        return (self.config.tiles * ROWS + 4) * 4  # between rows m of a warp's sums; 4 more against bank conflicts

    @property
    def red_warp(self) -> int:
        return self.m_tiles * 8 * self.red_stride

    @property
    def fragment_sums(self) -> int:
        """Bytes of the sums of 16 outputs and 8 rows that a cluster's CTA adds up."""
        return self.joined * self.k_parts * 512

    @property
    def sums(self) -> int:
        """Bytes of all the sums that a CTA adds up."""
        if self.config.cluster == 1:
            return self.used_warps * self.red_warp
        fragments = self.most_tiles // self.joined * self.m_tiles
        return -(-fragments // self.config.cluster) * self.fragment_sums

    @property
    def sums_apart(self) -> bool:
        """Whether they have room of their own, so that a cluster's CTA may send them while another one still
        multiplies."""
        return self.config.cluster > 1 and self.end + self.sums <= SMEM_LIMIT

    @property
    def sums_at(self) -> int:
        return self.end if self.sums_apart else self.ring_at

    @property
    def total(self) -> int:
        return max(self.received_at + self.received, self.sums_at + self.sums)

    @property
    def own_results(self) -> int:
        """Of a CTA that shares others with its neighbour."""
        return self.config.own_tiles // self.joined

    @property
    def gives_registers(self) -> bool:
        """Whether warps that load leave registers to those that multiply, which have few (stream_shared.py)."""
        return self.config.shares and self.warpgroups == 6

    @property
    def adding_threads(self) -> int:
        """That add up a CTA's sums."""
        return 32 * self.config.warps if self.config.shares else 128 * self.warpgroups

    @property
    def received_at(self) -> int:
        """The neighbour's sums of shared row tiles that this CTA finishes."""
        return self.end

    @property
    def received(self) -> int:
        return SHARING * self.m_tiles * 512 if self.config.shares else 0

    @property
    def bytes_ahead(self) -> int:
        """Weight bytes that one CTA has under way."""
        return self.config.warps_n * self.config.tiles * (self.config.depth - 1) * QUAD_BYTES


def make_plan(
    m: int,
    k: int,
    n: tuple[int, ...],
    config: StreamConfig,
    ranks: tuple[int, ...] = (),
    prepared: bool = False,
    swiglu: bool = False,
    gives_units: bool = False,
) -> Plan:
    """Raises ValueError naming the constraint when the configuration does not take the shape."""
    quads = -(-k // COLS)
    if not 1 <= m <= STREAM_ROWS:
        raise ValueError(f"M must be in 1..{STREAM_ROWS}, got {m}")
    if config.warps_k not in (1, 2, 4):
        raise ValueError(f"warps_k must be 1, 2 or 4, got {config.warps_k}")
    if not (config.depth >= 2 and 2 <= config.x_depth <= 8):
        raise ValueError(f"depth must be at least 2 and x_depth 2..8, got {config.depth}, {config.x_depth}")
    if config.wgmma and config.warps_n % 4:
        raise ValueError(f"with wgmma warps_n must be a multiple of 4, got {config.warps_n}")
    m_tiles = next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    tiles_of = tuple(-(-n_i // ROWS) for n_i in n)
    if not any(ranks):
        ranks = ()
    if (ranks and len(ranks) != len(n)) or any(r % ROWS for r in ranks):
        raise ValueError(f"ranks must be one for each weight and multiples of {ROWS}, got {ranks}")
    if swiglu and (len(n) != 2 or n[0] != n[1]):
        raise ValueError(f"swiglu joins two weights of equal N, got N = {n}")
    if gives_units and (not swiglu or n[0] % UNIT):
        raise ValueError(f"only swiglu's result goes out in unit order, N in multiples of {UNIT}; got N = {n}")
    plan = Plan(m, m_tiles, tuple(n), tiles_of, quads, config, tuple(ranks), prepared, swiglu, gives_units)
    if config.cluster > quads:
        raise ValueError(f"K = {k} is {quads} quads of 256, too few for a cluster of {config.cluster}")
    slots = config.places
    if plan.most_tiles > slots:
        tiles = f"{plan.all_tiles} row tiles" + ", two by two" * swiglu
        raise ValueError(f"N = {n} is {tiles}; {plan.clusters} clusters of {slots} do not hold them")
    if config.shares:
        others = config.cluster, config.warps_k, config.tiles, config.waves, config.promote
        if not config.wgmma or others != (1, 1, 1, 1, 0) or plan.computes_h or config.warps_n <= SHARING:
            needs = "wgmma alone, one to a warp, in one wave, without chains, and with x A^T given"
            raise ValueError(f"row tiles are shared with {needs}: {config}")
        if quads < 2:
            raise ValueError(f"K = {k} is one quad of 256, which no two CTAs share: {config}")
        if plan.results // plan.clusters < 2 * plan.own_results:
            raise ValueError(f"N = {n} leaves warps that share none without a row tile of their own: {config}")
    if config.late_b and plan.b_size > plan.totals_at - plan.ring_at:
        raise ValueError(f"B of {plan.b_size} bytes does not fit in rings of {plan.totals_at - plan.ring_at}: {config}")
    if plan.warpgroups * 128 > 1024:
        raise ValueError(f"{config} has more than 1024 threads")
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"{config} needs {plan.total} bytes of shared memory at M = {m}, K = {k}; limit {SMEM_LIMIT}")
    return plan
