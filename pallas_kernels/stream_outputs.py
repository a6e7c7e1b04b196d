"""The end of the streaming kernel (stream_kernel.py): warps' sums to the CTA that finishes them, added up and stored.

A product leaves 16 outputs of 8 rows: lane (g, t) has rows 2 t (elements 0, 2) and 2 t + 1 (1, 3) of outputs g (0, 1)
and g + 8 (2, 3). One or two such eights of rows, with SwiGLU gate's and up's, are a *unit*. The CTAs of a cluster
finish its units in turns; every warp sends its sums of each to the CTA whose turn it is, where a barrier counts their
bytes. So a CTA waits once, for what it adds up, reads no other's memory, and may leave while the others still work.
"""

from jaxlib.mlir.dialects import arith

from . import fragment_order
from . import ptx as p
from . import ptx_memory as mem
from .layout import ROWS
from .pick import of_tile
from .stream_plan import Plan
from .swiglu import gated

FINISHED = 1  # named barrier of the compute warps, see stream_compute.py


class OutputTiles:
    """The part of a CTA's program that finishes outputs. The CTA's class sets the attributes before."""

    plan: Plan
    wide_out: bool
    has_bias: bool
    pdl: bool

    def make_cluster_barriers(self):
        """All warps, first of all. They wait for the others' before they use them: `cluster_wait`."""
        plan, c = self.plan, self.plan.config

        def make():
            mem.barrier_init(self.sums_full, 2)  # this lane, for the bytes, and the warp that keeps the factors
            mem.barrier_expect(self.sums_full, p.mul(self.own_units(), plan.unit_sums))
            if not plan.sums_apart:
                mem.barrier_init(self.rings_free, c.cluster * c.warps)
            mem.fence_barrier_init()

        p.when(p.eq(self.tid, 32 * c.warps), make)
        p.warp_sync()
        p.cluster_arrive()

    def own_units(self):
        """How many this CTA finishes."""
        c = self.plan.config
        return p.div(p.sub(p.add(p.mul(self.result_tiles, self.plan.units_tile), c.cluster - 1), self.rank), c.cluster)

    # ---- compute warps

    def send_sums(self, warp_k, acc):
        """This warp's sums, of the warp_k-th part of the CTA's K, to where they are added up."""
        plan, c = self.plan, self.plan.config
        if c.cluster == 1:
            p.named_sync(FINISHED, c.warps * 32)  # they come in the place of the rings
        else:
            p.cluster_wait()
            if not plan.sums_apart:
                p.warp_sync()
                barrier = mem.map_rank(self.rings_free, self.lane)
                p.when(p.lt(self.lane, c.cluster), lambda: mem.barrier_arrive_in_cluster(barrier))
                mem.barrier_wait_for_cluster(self.rings_free, p.i32(0))
        part = p.add(p.mul(self.rank, c.warps_k), warp_k)

        def send(r):
            result, of_result = p.div(self.local_tiles[r], plan.joined), p.rem(self.local_tiles[r], plan.joined)
            in_unit = p.add(p.mul(of_result, plan.k_parts), part)
            for i in range(plan.m_tiles):
                unit, first = p.add(p.mul(result, plan.units_tile), i // plan.at_once), (r * plan.m_tiles + i) * 4
                place = p.add(in_unit, i % plan.at_once * plan.joined * plan.k_parts)
                self.send(unit, place, acc[first : first + 4])

        for r in range(c.tiles):
            p.when(self.valid[r], lambda r=r: send(r))

    def send(self, unit, place, sums):
        cluster = self.plan.config.cluster
        rank, at = p.rem(unit, cluster), self.sum_at(p.div(unit, cluster), place)
        if cluster == 1:
            mem.store_shared_f32x4(at, sums, 0)
        else:
            mem.send_f32x4(mem.map_rank(at, rank), sums, mem.map_rank(self.sums_full, rank))

    def sum_at(self, turn, place):
        """Where this lane's part of a sum lies in the CTA that finishes its unit, that CTA's `turn`-th. A unit's places
        are those of its eights of rows, in each those of gate and up, or of one tile, and in these K's parts."""
        return p.add(
            self.sums_base, p.add(p.mul(turn, self.plan.unit_sums), p.add(p.mul(place, 512), p.mul(self.lane, 16)))
        )

    # ---- all warps

    def add_up(self):
        """The sums of this CTA's units, K ascending, to outputs: a unit a warp."""
        plan, c = self.plan, self.plan.config
        if self.pdl:
            p.grid_dependency_wait()
        if c.cluster == 1:
            p.cta_sync()
        else:
            mem.barrier_wait_for_cluster(self.sums_full, p.i32(0))
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        is_odd = p.eq(p.and_(g, 1), 1)

        def one(turn, _):
            unit = p.add(p.mul(turn, c.cluster), self.rank)
            first = p.mul(p.div(unit, plan.units_tile), plan.joined)
            tiles = [p.add(self.first_tile, p.add(first, i)) for i in range(plan.joined)]
            eight, at = p.mul(p.rem(unit, plan.units_tile), plan.at_once), self.sum_at(turn, p.i32(0))
            places = range(0, plan.at_once * plan.joined * plan.k_parts, plan.k_parts)
            loaded = [[mem.load_shared_f32x4(at, 512 * (n + part)) for part in range(plan.k_parts)] for n in places]
            pairs = [in_pairs(p.total(parts)) for parts in loaded]
            for n in range(plan.at_once):
                m = p.add(p.mul(p.add(eight, n), 8), p.add(p.mul(t, 2), p.and_(g, 1)))
                self.store(tiles, m, g, pairs[n * plan.joined : (n + 1) * plan.joined])
            return []

        def in_pairs(acc):
            """Two neighbouring outputs, and those 8 behind them; lanes of even g have the even row of each."""
            pairs = []
            for even, odd in (acc[:2], acc[2:]):
                given = p.shuffle_xor(arith.select(is_odd, even, odd), 4)
                pairs.append([arith.select(is_odd, given, even), arith.select(is_odd, odd, given)])
            return pairs

        p.for_range(self.warp, self.own_units(), 4 * plan.warpgroups, [], one)

    def store(self, tiles, m, g, sums):
        """Row m of a row tile, or of gate's and up's, of lane (g, t); `sums` are the pairs of each."""
        plan, bias = self.plan, self.bias or self.outs
        values = [(p.i32(4 * i), self.outs[i], bias[i], p.i32(plan.n[i])) for i in range(self.n_w)]
        picked = [of_tile(plan, tile, values) for tile in tiles]
        (_, out, _, n), local = picked[0]
        scales = [mem.load_shared_f32(p.add(self.factor_base, factor), 0) for (factor, *_), _ in picked]
        of_pair = p.sub(g, p.and_(g, 1))
        columns = [p.add(p.mul(local, ROWS), p.add(of_pair, 8 * half)) for half in range(2)]
        exists = p.lt(m, plan.m)

        def value(half, e):
            ys = [arith.mulf(pairs[half][e], scale) for pairs, scale in zip(sums, scales, strict=True)]
            if self.has_bias:
                at = p.mul(p.add(columns[half], e), 4)
                biases = [mem.load_global_f32(mem.offset(bias, at)) for (_, _, bias, _), _ in picked]
                ys = [arith.addf(y, more) for y, more in zip(ys, biases, strict=True)]
            return gated(*ys) if plan.swiglu else ys[0]

        def address(place):
            return mem.offset(out, p.mul(p.add(p.mul(m, n), place), 4 if self.wide_out else 2))

        def store_fours():
            """A lane has four neighbours, so that a row's 16 go out together: of the first 8 or of those behind."""
            has_second = p.eq(p.and_(g, 2), 2)
            low, high = (p.pack_half(value(half, 0), value(half, 1)) for half in range(2))
            given = p.exchange(p.select(has_second, low, high), 8)
            pair = p.select(has_second, given, low), p.select(has_second, high, given)
            at = address(p.select(has_second, p.sub(columns[1], 2), columns[0]))
            p.when(exists, lambda: mem.store_global_v2(at, pair, 0))

        def store_pair(half):
            place = fragment_order.unit_place(columns[half]) if plan.gives_units else columns[half]
            store = mem.store_global_f32x2 if self.wide_out else mem.store_global_halfx2
            store(address(place), value(half, 0), value(half, 1))

        def store_one(half, e):
            store = mem.store_global_f32 if self.wide_out else mem.store_global_half
            store(address(p.add(columns[half], e)), value(half, e))

        if all(n_i % ROWS == 0 for n_i in plan.n) and not self.wide_out and not plan.gives_units:
            store_fours()
            return
        for half in range(2):
            if all(n_i % 2 == 0 for n_i in plan.n):
                p.when(arith.andi(exists, p.lt(columns[half], n)), lambda half=half: store_pair(half))
                continue
            for e in range(2):  # a pair may straddle the end, or be misaligned
                is_there = arith.andi(exists, p.lt(p.add(columns[half], e), n))
                p.when(is_there, lambda half=half, e=e: store_one(half, e))
