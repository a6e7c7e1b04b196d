"""The service warps of the block kernel (block_kernel.py): x to shared memory, RMSNorm's divisors, LoRA's x A^T.

LoRA's first product of a part needs all of K before any output: the CTAs share its *units* of 16 ranks and a part of K.
All service warps of a CTA work on its unit, so that they have all of its A before x is there: beside the stream of
weights a load takes 2 us. They leave float32 sums in global memory, and every CTA adds those of the adapters whose
outputs it owns, in order, and rounds x A^T to 16 bits. Of the first part who made x may have left them already.
"""

import functools

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .block_plan import BATCH, PANEL, PIECE, PIECES, SERVICE_WARPS, BlockPlan
from .float16_range import out_of_range
from .hidden import add_products
from .layout import COLS, ROWS
from .pick import pick

SERVED, PREPARED = 2, 3  # named barriers


class ServiceWarps:
    """The part of a CTA's program that belongs to the service warps. The CTA's class sets the attributes before."""

    plan: BlockPlan
    eps: float

    # ---- the CTA's barriers: made by thread 0 and seen by way of the cluster's own, or alone by the service warps

    def make_barriers(self):
        plan, threads = self.plan, self.plan.service_threads
        mem.barrier_init(self.x_full, 1 if plan.cluster > 1 else threads)
        mem.barrier_init(self.h_full, threads)
        if plan.panels > 1:
            mem.barrier_init(self.sums_full, plan.cluster * plan.warps)
        mem.fence_barrier_init()

    def make_cluster_barriers(self):
        """All warps, first of all."""
        p.when(p.eq(self.tid, 0), self.make_barriers)
        p.warp_sync()
        p.cluster_arrive()

    def barriers_served(self, asks):
        """The service warps, first of all."""
        if self.plan.cluster > 1:
            p.cluster_wait()
        else:
            p.when(asks, self.make_barriers)
            self.served()
            p.when(self.is_first, lambda: p.named_arrive(PREPARED, 32 * (self.plan.warps + 1)))

    def barriers_seen(self):
        """The compute warps, before they wait at one."""
        if self.plan.cluster > 1:
            p.cluster_wait()
        else:
            p.named_sync(PREPARED, 32 * (self.plan.warps + 1))

    # ---- the parts

    def served(self):
        p.named_sync(SERVED, self.plan.service_threads)

    def serve(self):
        plan = self.plan
        self.mine = p.sub(self.warp, plan.warps)
        self.place = p.sub(self.tid, 32 * plan.warps)
        self.is_first = p.eq(self.mine, 0)
        asks = arith.andi(self.is_first, self.is_lane_0)  # one lane: many would hold up those that count
        self.barriers_served(asks)
        for i, part in enumerate(plan.parts):
            has_lora, makes = any(part.ranks), part.lora_units > 0
            early, seen = self.first_of_a(i) if makes and i else [], []
            if i:
                seen.append(self.await_inputs(asks, i))
            self.load_x(i)
            if makes:
                early = early or self.first_of_a(i)
                self.await_x(i)
                self.multiply_by_a(i, early)
            if part.normed:
                self.invert(i)
            if makes:
                units, all_ctas = p.i32(part.lora_units), p.i32(plan.ctas)
                seen.append(self.wait_for(asks, self.counter(plan.multiplied(i)), units, all_ctas))
            if has_lora:
                self.add_hidden(i)
            mem.barrier_arrive(self.h_full)
            for counter, waiting in seen:
                p.when(asks, lambda counter=counter, waiting=waiting: self.leave(counter, waiting))

    def await_inputs(self, asks, i: int):
        """Until what this CTA reads in part i is stored, and no CTA whose x it copies reads the x before any more."""
        plan, part, share, all_ctas = self.plan, self.plan.parts[i], self.shares[i], p.i32(self.plan.ctas)
        if part.slices == 1:
            return self.wait_for(asks, self.counter(plan.arrived(i - 1)), all_ctas, all_ctas)
        of_slice = part.groups * part.cuts
        without = plan.ctas - part.slices * of_slice  # a share, which read the last slice
        readers = p.select(p.eq(share.slice, part.slices - 1), of_slice + without, of_slice)
        tiles = p.mul(functools.reduce(p.add, share.quads_of), COLS // ROWS * plan.panels)
        return self.wait_for(asks, self.counter(plan.stored(i), share.slice), p.add(tiles, readers), readers)

    def wait_for(self, asks, counter, count, waiting):
        """All service warps, for a counter that so many CTAs wait for; returns it and their number, to leave it."""
        p.when(asks, lambda: mem.wait_for_at_least(counter, count))
        self.served()
        return counter, waiting

    def await_x(self, i: int):
        """Any warp, for this CTA's columns of x."""
        mem.barrier_wait(self.x_full, p.i32(i % 2))

    def load_x(self, i: int):
        """This CTA's columns of x. In a cluster whose CTAs have the same, each copies a part of them to all."""
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        sharers = plan.cluster // part.cuts
        size = p.mul(share.quads, COLS * 2 // sharers)
        begin = p.mul(self.rank, size) if sharers > 1 else p.i32(0)
        source = mem.offset(self.x_of[i], p.add(p.mul(share.first_quad, COLS * 2), begin))
        to = p.add(self.x_base, begin)

        def copy(piece, _):
            at = p.mul(piece, 16)
            for row in range(plan.m):
                mem.copy_async_16(p.add(to, at), mem.offset(source, at), row * plan.x_stride(part), row * part.k * 2)
            return []

        def copy_rows():
            row = p.mul(self.lane, plan.x_stride(part)), p.mul(self.lane, part.k * 2)
            mem.fence_async()
            p.when(self.is_lane_0, lambda: mem.barrier_expect(self.x_full, p.mul(size, sharers * plan.m)))
            p.warp_sync()
            copied = p.add(to, row[0]), mem.offset(source, row[1]), size, self.x_full
            if sharers == 1:
                p.when(p.lt(self.lane, plan.m), lambda: mem.bulk_load(*copied))
            else:
                p.when(p.lt(self.lane, plan.m), lambda: mem.bulk_load_to_all(*copied, sharers))

        if plan.cluster == 1:
            p.for_range(self.place, p.div(size, 16), plan.service_threads, [], copy)
            mem.copy_arrive(self.x_full)
        else:
            p.when(self.is_first, copy_rows)

    def squares_at(self, i: int):
        """Where the squares of this CTA's panel lie that part i leaves."""
        return mem.offset(self.flows[i].squares, p.mul(self.panel, self.plan.hidden // ROWS * PANEL * 4))

    def invert(self, i: int):
        """1 / sqrt(mean of the squares + eps) of each row of this CTA's panel, from the squares of all row tiles in a
        fixed order."""
        plan, tiles = self.plan, self.plan.hidden // ROWS
        squares = self.squares_at(i - 1)
        half, first = p.and_(self.place, 1), p.shr(self.place, 1)
        lanes = plan.service_threads // 2
        loaded = []
        for start in range(0, tiles, lanes):
            tile = p.add(first, start)
            known = p.minimum(tile, tiles - 1)
            at = mem.offset(squares, p.add(p.mul(known, PANEL * 4), p.mul(half, 16)))
            values = mem.load_fresh_f32x4(at, 0)
            loaded.append([arith.select(p.lt(tile, tiles), v, p.f32(0.0)) for v in values])
        sums = loaded[0]
        for values in loaded[1:]:
            sums = [arith.addf(a, b) for a, b in zip(sums, values, strict=True)]
        sums = [p.over_lanes(arith.addf, v, (2, 4, 8, 16)) for v in sums]
        to = p.add(self.squares_base, p.add(p.mul(self.mine, PANEL * 4), p.mul(half, 16)))
        p.when(p.lt(self.lane, 2), lambda: mem.store_shared_f32x4(to, sums, 0))
        self.served()

        def row():
            at = p.mul(self.place, 4)
            total = mem.load_shared_f32(p.add(self.squares_base, at), 0)
            for warp in range(1, SERVICE_WARPS):
                total = arith.addf(total, mem.load_shared_f32(p.add(self.squares_base, at), warp * PANEL * 4))
            mean = arith.addf(p.divide(total, p.f32(float(plan.hidden))), p.f32(self.eps))
            mem.store_shared_f32(p.add(self.inverse_base, at), *out_of_range([p.rsqrt(mean)]), 0)

        p.when(p.lt(self.place, PANEL), row)
        self.served()

    def multiply_by_a(self, i: int, early):
        """This CTA's units: x A^T of 16 ranks over a part of its columns. `early` is what `first_of_a` gave."""
        start, end, step = self.units(i)
        p.when(p.lt(start, end), lambda: self.unit(i, start, early))

        def next_unit(index, _):
            pieces = self.pieces_of_a(i, index)
            self.served()
            self.unit(i, index, pieces)
            return []

        p.for_range(p.add(start, step), end, step, [], next_unit)
        if self.has_several_units(i):  # one fence for all of them
            made = p.div(p.add(p.sub(end, start), step - 1), step)
            is_one = arith.andi(arith.andi(self.is_first, self.is_lane_0), p.lt(start, end))
            p.when(is_one, lambda: self.tell(self.counter(self.plan.multiplied(i)), made))

    def has_several_units(self, i: int) -> bool:
        """Any CTA of part i."""
        part = self.plan.parts[i]
        return sum(part.rank_tiles) * part.lora_chunks > part.groups

    def unit(self, i: int, index, pieces):
        """One of them, of whose A the first pieces are there, by all service warps; the first one adds up what the
        others leave where x A^T will be."""
        plan, part = self.plan, self.plan.parts[i]
        x = [p.add(self.x_base, p.add(p.mul(row, plan.x_stride(part)), p.mul(self.t, 16))) for row in self.rows_in_x]
        _, first, last = self.rows_of_a(i, index)

        def product(acc, words, piece):
            made = []
            for panel, row in enumerate(x):
                right = mem.load_shared_v4(p.add(row, p.mul(piece, PIECE * 2)), 0)
                made += add_products(acc[4 * panel : 4 * panel + 4], words[:4], words[4:], right)
            return made

        acc = [p.f32(0.0)] * (4 * plan.panels)
        for start in range(0, part.most_pieces, PIECES):
            for n, words in enumerate(self.pieces_of_a(i, index, start) if start else pieces, start):
                piece = p.add(first, n)
                acc = p.if_values(p.lt(piece, last), lambda w=words, n=piece, acc=acc: product(acc, w, n), acc)
        left = p.add(self.h_base, p.mul(self.lane, 16))
        own = p.add(left, p.mul(p.sub(self.mine, 1), 512))
        for panel in range(plan.panels):
            mine = acc[4 * panel : 4 * panel + 4]
            if panel:
                self.served()
            p.when(p.lt(0, self.mine), lambda mine=mine: mem.store_shared_f32x4(own, mine, 0))
            self.served()
            p.when(self.is_first, lambda mine=mine, panel=panel: self.store_product(i, index, panel, mine, left))

        p.warp_sync()
        if not self.has_several_units(i):
            is_one = arith.andi(self.is_first, self.is_lane_0)
            p.when(is_one, lambda: self.tell(self.counter(plan.multiplied(i))))

    def store_product(self, i: int, index, panel: int, own, left):
        """The sum of what all service warps have of a unit, K ascending."""
        part, share = self.plan.parts[i], self.shares[i]
        others = [mem.load_shared_f32x4(left, 512 * n) for n in range(SERVICE_WARPS - 1)]
        tile, chunk = p.div(index, part.lora_chunks), p.rem(index, part.lora_chunks)
        cut = p.add(p.mul(share.slice, part.cuts), self.panel)
        where = p.add(p.mul(p.add(p.mul(cut, part.lora_chunks), chunk), sum(part.rank_tiles)), tile)
        to = mem.wide_offset(self.hidden_of[i], where, 512 * self.plan.panels)
        mem.store_global_f32x4(mem.offset(to, p.mul(self.lane, 16)), p.total([own, *others]), 512 * panel)

    def first_of_a(self, i: int):
        """`pieces_of_a` of this CTA's first unit. What there are no registers for the L2 fetches meanwhile."""
        part = self.plan.parts[i]
        start, end, step = self.units(i)
        pieces = self.pieces_of_a(i, start)

        def rest(index, skipped: int):
            here, count = self.lane_of_a(i, index)
            for n in range(skipped, part.most_pieces):
                p.when(p.lt(n, count), lambda n=n: [mem.prefetch(here, at) for at in self.rows_of_piece(i, n)])
            return []

        if part.most_pieces > PIECES:
            rest(start, PIECES)
        if self.has_several_units(i):
            p.for_range(p.add(start, step), end, step, [], lambda index, _: rest(index, 0))
        return pieces

    def pieces_of_a(self, i: int, index, start: int = 0):
        """What this warp multiplies by in a unit, if there is one: of each piece a lane's words of rows g and g + 8.
        From piece `start` on, PIECES at most."""
        part = self.plan.parts[i]
        here, count = self.lane_of_a(i, index)

        def load(n):
            low, high = (mem.load_global_v4(here, at) for at in self.rows_of_piece(i, n))
            return [*low, *high]

        zeros = [p.i32(0)] * 8
        end = min(start + PIECES, part.most_pieces)
        return [p.if_values(p.lt(n, count), lambda n=n: load(n), zeros) for n in range(start, end)]

    def lane_of_a(self, i: int, index):
        """Where this lane's words of a unit's first piece begin, and how many pieces there are, none behind the last
        unit."""
        part = self.plan.parts[i]
        a, first, last = self.rows_of_a(i, index)
        last = p.select(p.lt(index, self.units(i)[1]), last, first)
        here = mem.offset(mem.wide_offset(a, self.g, part.k * 2), p.add(p.mul(first, PIECE * 2), p.mul(self.t, 16)))
        return here, p.sub(last, first)

    def rows_of_piece(self, i: int, n: int):
        """Where rows g and g + 8 of the n-th piece lie behind the first."""
        return [n * PIECE * 2 + row * self.plan.parts[i].k * 2 for row in (0, 8)]

    def units(self, i: int):
        """First, end and step of this CTA's units of part i, of those of its slice of K."""
        part, share = self.plan.parts[i], self.shares[i]
        end = p.select(p.lt(0, share.items), sum(part.rank_tiles) * part.lora_chunks, 0)
        return share.group, end, part.groups

    def rows_of_a(self, i: int, index):
        """Where this CTA's columns of a unit's first row of A begin, and this warp's first and last piece in them."""
        part, share = self.plan.parts[i], self.shares[i]
        tile, chunk = p.div(index, part.lora_chunks), p.rem(index, part.lora_chunks)
        (a,), local = pick(part.rank_tiles, tile, [(w.data if w.a is None else w.a,) for w in self.weights[i]])
        a = mem.offset(mem.wide_offset(a, p.mul(local, ROWS), part.k * 2), p.mul(share.first_quad, COLS * 2))
        of_warp = p.add(p.mul(chunk, SERVICE_WARPS), self.mine)
        pieces, shares = p.mul(share.quads, COLS // PIECE), part.lora_chunks * SERVICE_WARPS
        first, last = (p.div(p.mul(n, pieces), shares) for n in (of_warp, p.add(of_warp, 1)))
        return a, first, last

    def add_hidden(self, i: int):
        """x A^T of the adapters whose outputs this CTA owns, from all parts of K to shared memory, in 16 bits."""
        part, share = self.plan.parts[i], self.shares[i]
        stride = sum(part.rank_tiles) * 512 * self.plan.panels
        first_tile, first_rank_tile = 0, 0
        for tiles, rank_tiles in zip(part.tiles_of, part.rank_tiles, strict=True):
            last = p.add(share.first, share.entries)
            owns = p.lt(0, share.entries)
            if not part.paired:
                owns = arith.andi(owns, p.lt(share.first, first_tile + tiles))
                owns = arith.andi(owns, p.lt(first_tile, last))

            def add(first=2 * first_rank_tile, count=2 * rank_tiles):
                start = p.and_(p.sub(p.add(self.mine, 4 * (first + 1)), first), SERVICE_WARPS - 1)
                together = part.together(count // 2, part.half_parts)

                def halves(n, _):
                    self.add_halves(i, [p.add(n, first + SERVICE_WARPS * more) for more in range(together)], stride)
                    return []

                p.for_range(start, count, SERVICE_WARPS * together, [], halves)

            if rank_tiles:
                p.when(owns, add)
            first_tile, first_rank_tile = first_tile + tiles, first_rank_tile + rank_tiles

    def add_halves(self, i: int, halves, stride: int):
        """Adds the parts of K of halves of fragments' lanes, by the halves' numbers. The lower half of the warp adds
        the first half of the parts, the upper half the others: so all of them are under way together."""
        part, upper = self.plan.parts[i], p.shr(self.lane, 4)
        half = part.half_parts
        places = [self.half_of_fragment(which) for which in halves]
        sources = [self.products_at(i, tile, lane) for tile, lane in places]
        of_half = [mem.offset(source, p.mul(upper, half * stride)) for source in sources]

        def load(which: int, n: int):
            if half + n < part.lora_parts:
                return mem.load_fresh_f32x4(of_half[which], n * stride)
            values = mem.load_fresh_f32x4(sources[which], n * stride)  # the upper half has one part less
            return [arith.select(p.eq(upper, 0), v, p.f32(0.0)) for v in values]

        sums = [[p.f32(0.0)] * 4 for _ in halves]
        for start in range(0, half, BATCH):
            parts = range(start, min(start + BATCH, half))
            loaded = [[load(which, n) for n in parts] for which in range(len(halves))]
            sums = [p.total([acc, *products]) for acc, products in zip(sums, loaded, strict=True)]
        for place, acc in zip(places, sums, strict=True):
            self.store_half(part, *place, [p.over_lanes(arith.addf, v, (16,)) for v in acc])

    def half_of_fragment(self, which):
        """The 16 ranks that a half belongs to, and which lane's numbers of them this lane adds."""
        return p.shr(which, 1), p.add(p.mul(p.and_(which, 1), 16), p.and_(self.lane, 15))

    def products_at(self, i: int, tile, lane):
        """Where a lane's products of the first part of K lie."""
        fragment = p.add(p.mul(tile, self.plan.panels), self.panel)
        return mem.offset(mem.wide_offset(self.hidden_of[i], fragment, 512), p.mul(lane, 16))

    def store_half(self, part, tile, lane, sums):
        if part.normed:
            sums = self.times_inverse(sums)
        # lane (g, t) holds ranks g (elements 0, 1) and g + 8 (2, 3) of rows 2 t (0, 2) and 2 t + 1 (1, 3)
        at = p.add(p.mul(self.t, 64), p.mul(p.shr(lane, 2), 2))
        to = p.add(p.add(self.h_base, p.mul(tile, PANEL * ROWS * 2)), at)
        for e in range(4):
            mem.store_shared_half(to, sums[e], (e % 2) * ROWS * 2 + (e // 2) * 16)
