"""The end of the streaming kernel (stream_kernel.py): warps' sums added up, scaled and stored.

A CTA that has all of K adds up what its own warps leave, in the place of their rings, a pair of neighbouring outputs a
lane. In a cluster, whose CTAs have parts of K, they finish *fragments* in turns: 16 outputs of 8 rows as a product
leaves them, lane (g, t) with rows 2 t (elements 0, 2) and 2 t + 1 (1, 3) of outputs g (0, 1) and g + 8 (2, 3). Every
warp sends its sums of each to the CTA whose turn it is, where a barrier counts their bytes. So a CTA waits once, for
what it adds up, reads no other's memory, and may leave while the others still work.
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

    def finish_sums(self, warp_k, acc, g, t):
        """Compute warps: this warp's sums, of the warp_k-th part of the CTA's K, to where they are added up."""
        if self.plan.config.cluster > 1:
            self.send_sums(warp_k, acc)
        else:
            self.leave_sums(acc, g, t)

    def add_up(self):
        """All warps: sums, K ascending, to outputs."""
        if self.plan.config.cluster > 1:
            self.add_what_is_sent()
        else:
            self.add_what_is_left()

    # ---- a CTA alone

    def leave_sums(self, acc, g, t):
        """Over the rings: only after every warp of the CTA has read its last slot."""
        plan, c = self.plan, self.plan.config
        p.named_sync(FINISHED, c.warps * 32)
        mine = p.add(
            p.add(self.sums_base, p.mul(self.place, plan.red_warp)), p.add(p.mul(t, 2 * plan.red_stride), p.mul(g, 4))
        )

        def store():
            for r in range(c.tiles):
                for i in range(plan.m_tiles):
                    for e in range(4):
                        where = (8 * i + e % 2) * plan.red_stride + (r * ROWS + 8 * (e // 2)) * 4
                        mem.store_shared_f32(mine, acc[(r * plan.m_tiles + i) * 4 + e], where)

        p.when(self.is_used, store)

    def add_what_is_left(self):
        """A lane has two neighbouring outputs of a row."""
        plan, c = self.plan, self.plan.config
        p.cta_sync()
        part = plan.used_warps // c.warps_k * plan.red_warp

        def one(index, _):
            per_row = p.mul(self.result_tiles, ROWS // 2)
            m, rest = p.div(index, per_row), p.rem(index, per_row)
            first, row = p.mul(p.shr(rest, 3), plan.joined), p.mul(p.and_(rest, 7), 2)
            tiles = [p.add(first, i) for i in range(plan.joined)]
            loaded = [load(tile, m, row) for tile in tiles]
            self.store([self.tile(tile) for tile in tiles], m, row, list(map(p.total, loaded)))
            return []

        def load(tile, m, row):
            warp_n, r = p.div(tile, c.tiles), p.rem(tile, c.tiles)
            at = p.add(self.sums_base, p.add(p.mul(warp_n, plan.red_warp), p.mul(m, plan.red_stride)))
            at = p.add(at, p.mul(p.add(p.mul(r, ROWS), row), 4))
            return [mem.load_shared_f32x2(p.add(at, k * part)) for k in range(c.warps_k)]

        pairs = p.mul(self.result_tiles, plan.m * ROWS // 2)
        p.for_range(self.tid, pairs, plan.adding_threads, [], one)

    # ---- the CTAs of a cluster

    def make_cluster_barriers(self):
        """All warps, first of all. They wait for the others' before they use them: `cluster_wait`."""
        plan, c = self.plan, self.plan.config

        def make():
            # this lane, for the bytes, and, where all sums are sent, the warp that keeps the factors
            mem.barrier_init(self.sums_full, 1 if c.shares else 2)
            sent = self.received_bytes() if c.shares else p.mul(self.own_fragments(), plan.fragment_sums)
            mem.barrier_expect(self.sums_full, sent)
            if c.cluster > 1 and not plan.sums_apart:
                mem.barrier_init(self.rings_free, c.cluster * c.warps)
            mem.fence_barrier_init()

        p.when(p.eq(self.tid, 32 * c.warps), make)
        p.warp_sync()
        p.cluster_arrive()

    def own_fragments(self):
        """How many this CTA finishes."""
        fragments, cluster = p.mul(self.result_tiles, self.plan.m_tiles), self.plan.config.cluster
        return p.div(p.sub(p.add(fragments, cluster - 1), self.rank), cluster)

    def send_sums(self, warp_k, acc):
        plan, c = self.plan, self.plan.config
        p.cluster_wait()
        if not plan.sums_apart:
            p.warp_sync()
            free = self.rings_free
            is_one = p.lt(self.lane, c.cluster)
            p.when(is_one, lambda: mem.barrier_arrive_in_cluster(mem.map_rank(free, self.lane)))
            mem.barrier_wait_for_cluster(self.rings_free, p.i32(0))
        part = p.add(p.mul(self.rank, c.warps_k), warp_k)

        def send(r):
            result, of_result = p.div(self.local_tiles[r], plan.joined), p.rem(self.local_tiles[r], plan.joined)
            place = p.add(p.mul(of_result, plan.k_parts), part)
            for i in range(plan.m_tiles):
                fragment, first = p.add(p.mul(result, plan.m_tiles), i), (r * plan.m_tiles + i) * 4
                rank, at = p.rem(fragment, c.cluster), self.sum_at(p.div(fragment, c.cluster), place)
                sums, barrier = acc[first : first + 4], mem.map_rank(self.sums_full, rank)
                mem.send_f32x4(mem.map_rank(at, rank), sums, barrier)

        for r in range(c.tiles):
            p.when(self.valid[r], lambda r=r: send(r))

    def sum_at(self, turn, place):
        """Where this lane's part of a sum lies in the CTA that finishes its fragment, that CTA's `turn`-th. Places are
        K's parts, with SwiGLU gate's and then up's."""
        at = p.add(p.mul(turn, self.plan.fragment_sums), p.add(p.mul(place, 512), p.mul(self.lane, 16)))
        return p.add(self.sums_base, at)

    def add_what_is_sent(self):
        """A warp has a fragment; lanes of even g its even rows, those of odd g the others."""
        plan, c = self.plan, self.plan.config
        mem.barrier_wait_for_cluster(self.sums_full, p.i32(0))
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        odd = p.and_(g, 1)
        is_odd = p.eq(odd, 1)

        def one(turn, _):
            fragment = p.add(p.mul(turn, c.cluster), self.rank)
            first = p.add(self.first_tile, p.mul(p.div(fragment, plan.m_tiles), plan.joined))
            m = p.add(p.mul(p.rem(fragment, plan.m_tiles), 8), p.add(p.mul(t, 2), odd))
            totals = [total(turn, i) for i in range(plan.joined)]

            def store():
                for half in range(2):
                    row = p.add(p.sub(g, odd), 8 * half)
                    self.store([p.add(first, i) for i in range(plan.joined)], m, row, [pair[half] for pair in totals])

            p.when(p.lt(m, plan.m), store)
            return []

        def total(turn, i):
            """Of outputs g and its neighbour, and of those 8 behind them."""
            at = self.sum_at(turn, p.i32(i * plan.k_parts))
            acc = p.total([mem.load_shared_f32x4(at, 512 * part) for part in range(plan.k_parts)])
            pairs = []
            for even, other in (acc[:2], acc[2:]):
                given = p.shuffle_xor(arith.select(is_odd, even, other), 4)
                pairs.append([arith.select(is_odd, given, even), arith.select(is_odd, other, given)])
            return pairs

        p.for_range(self.warp, self.own_fragments(), 4 * plan.warpgroups, [], one)

    # ---- both

    def store(self, tiles, m, row, sums):
        """Two neighbouring outputs of a row tile, or of gate's and up's, from the sums of each."""
        bias = self.bias or self.outs
        values = [(p.i32(4 * i), self.outs[i], bias[i], p.i32(self.plan.n[i])) for i in range(self.n_w)]
        picked = [of_tile(self.plan, tile, values) for tile in tiles]
        (_, out, _, n), local = picked[0]
        scales = [mem.load_shared_f32(p.add(self.factor_base, factor), 0) for (factor, *_), _ in picked]
        column = p.add(p.mul(local, ROWS), row)
        size = 4 if self.wide_out else 2

        def value(e):
            ys = [arith.mulf(pair[e], scale) for pair, scale in zip(sums, scales, strict=True)]
            if self.has_bias:
                at = p.mul(p.add(column, e), 4)
                biases = [mem.load_global_f32(mem.offset(bias, at)) for (_, _, bias, _), _ in picked]
                ys = [arith.addf(y, more) for y, more in zip(ys, biases, strict=True)]
            return gated(*ys) if self.plan.swiglu else ys[0]

        place = fragment_order.unit_place(column) if self.plan.gives_units else column

        def address(e):
            return mem.offset(out, p.mul(p.add(p.mul(m, n), p.add(place, e)), size))

        def both():
            (mem.store_global_f32x2 if self.wide_out else mem.store_global_halfx2)(address(0), value(0), value(1))

        if all(n_i % ROWS == 0 for n_i in self.plan.n):
            both()
        elif all(n_i % 2 == 0 for n_i in self.plan.n):
            p.when(p.lt(column, n), both)
        else:  # a pair may straddle the end, or be misaligned
            store_one = mem.store_global_f32 if self.wide_out else mem.store_global_half
            for e in range(2):
                p.when(p.lt(p.add(column, e), n), lambda e=e: store_one(address(e), value(e)))
