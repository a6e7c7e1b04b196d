"""The end of each of the block kernel's parts (block_kernel.py): sums of tiles to outputs, by the compute warps.

A tile's outputs of a panel are held as a product leaves them: lane (g, t) has rows 2 t (elements 0, 2) and 2 t + 1 (1,
3) of outputs g (0, 1) and g + 8 (2, 3). A CTA finishes those of one panel.
"""

import types
from typing import Any, NamedTuple

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .block_lora import LoraWarps
from .block_plan import PANEL, BlockPlan, Part
from .float16_range import into_range, of_scaled
from .layout import COLS, EPILOGUE_FACTOR, ROWS
from .pick import pick
from .swiglu import gated

FINISHED = 1  # named barrier of the compute warps; 0 is the whole CTA's


class OutputWeight(NamedTuple):
    """What outputs need of their weight: its scale, bias, B and LoRA's scaling (or anything where it has none); where
    they are stored; place of its x A^T, number of its 16 ranks, whether it is biased, and number of its outputs."""

    scale: Any
    bias: Any
    b: Any
    lora_scale: Any
    out: Any
    h: Any
    rank_tiles: Any
    is_biased: Any
    n: Any


class OutputTiles(LoraWarps):
    """The part of a CTA's program that finishes tiles. The CTA's class sets the attributes before."""

    plan: BlockPlan

    def entry_of(self, i: int, n):
        """The n-th of the CTA's entries that it finishes: all, or, with slices, those that its turn is for."""
        slices = self.plan.parts[i].slices
        return n if slices == 1 else p.add(p.mul(n, slices), self.shares[i].slice)

    def finished_by(self, i: int):
        """How many entries this CTA finishes."""
        part, share = self.plan.parts[i], self.shares[i]
        return p.div(p.sub(p.add(share.entries, part.slices - 1), share.slice), part.slices)

    def each(self, count, most: int, body):
        """body(n, which of this warp's it is) for n < count, warp after warp."""
        for turn, first in enumerate(range(0, most, self.plan.warps)):
            n = p.add(self.warp, first)
            p.when(p.lt(n, count), lambda n=n, turn=turn: body(n, turn))

    def place_of(self, i: int, n):
        """Of the n-th entry that this CTA finishes among all CTAs' entries, or, where there is none, of any."""
        return p.minimum(p.add(self.shares[i].first, self.entry_of(i, n)), self.plan.parts[i].entries - 1)

    def finish(self, i: int, early):
        """Tiles' sums to outputs, and a word to the CTAs that read them when this one's are stored. `early` are the
        `needs_of` this warp's first entry."""
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        following = range(plan.warps, part.most_finished, plan.warps)
        needs = [early, *(self.needs_of(i, p.add(self.warp, first)) for first in following)]
        late = self.late_b(i, self.warp)
        if plan.panels > 1:
            mem.barrier_wait_for_cluster(self.sums_full, p.i32(i % 2))
        else:
            p.named_sync(FINISHED, 32 * plan.warps)
        if part.slices > 1:
            self.each(share.tiles, part.most_tiles, lambda tile, _: self.leave_slice(i, tile))
            self.await_slices(i)
        mem.barrier_wait(self.h_full, p.i32(i % 2))

        def entry(n, turn):
            weights, flow = needs[turn]
            for weight, words in zip(weights, self.late_b(i, n) if turn else late, strict=False):
                weight.b += words
            self.entry(i, self.entry_of(i, n), weights, flow)

        self.each(self.finished_by(i), part.most_finished, entry)
        if i + 1 < len(plan.parts):
            p.named_sync(FINISHED, 32 * plan.warps)
            if plan.parts[i + 1].slices > 1:
                p.when(p.eq(self.warp, 0), lambda: self.say_what_slices_are_stored(i))
            else:
                p.when(p.eq(self.tid, 0), lambda: self.tell(self.counter(plan.arrived(i))))

    def say_what_slices_are_stored(self, i: int):
        """To those who read a slice of the next part's K that has some of this CTA's outputs, and those who read the
        same as it: its tiles, and itself."""
        plan, share, reads = self.plan, self.shares[i], self.shares[i + 1].slice
        following = plan.parts[i + 1]
        end = p.add(share.first, share.entries)

        def of_slice(n, _):
            starts, ends = (
                p.mul(p.div(p.mul(at, following.quads), following.slices), COLS // ROWS) for at in (n, p.add(n, 1))
            )
            first = p.maximum(share.first, starts)
            stored = p.sub(p.maximum(p.minimum(end, ends), first), first)
            number = p.add(stored, p.select(p.eq(n, reads), 1, 0))
            p.when(p.lt(0, number), lambda: self.tell(self.counter(plan.stored(i + 1), n), number))
            return []

        p.for_range(self.lane, following.slices, 32, [], of_slice)

    def sum_at(self, cut, tile, warp):
        """Where a warp's sum of a tile lies in the CTA that finishes it; `cut` says which CTA of the pair the warp is
        in."""
        n = p.add(p.mul(cut, self.plan.sums), p.add(tile, warp))
        return p.add(self.sums_base, p.add(p.mul(n, 512), p.mul(self.lane, 16)))

    def leave_sums(self, tile, acc):
        """A tile's sums of this warp, of chains that the panels take turns in, to the CTA that finishes a panel."""
        panels, chains = self.plan.panels, [acc[n : n + 4] for n in range(0, len(acc), 4)]
        sums = [p.total(chains[panel::panels]) for panel in range(panels)]
        at, own = self.sum_at(self.panel, tile, self.warp), sums[0]
        if panels > 1:
            is_first = p.eq(self.panel, 0)
            own = [arith.select(is_first, a, b) for a, b in zip(*sums, strict=True)]
            others = [arith.select(is_first, b, a) for a, b in zip(*sums, strict=True)]
            mem.store_cluster_f32x4(mem.map_rank(at, p.xor(self.rank, 1)), others)
        mem.store_shared_f32x4(at, own, 0)

    def say_that_sums_are_left(self):
        """To each CTA of the pair."""
        p.warp_sync()

        full, is_one = self.sums_full, p.lt(self.lane, self.plan.cluster)
        p.when(is_one, lambda: mem.barrier_arrive_in_cluster(mem.map_rank(full, self.lane)))

    def tile_sum(self, i: int, tile):
        """A tile's sum over the quads of this CTA, or of the pair: what its warps left, one warp after the other."""
        plan, share, found = self.plan, self.shares[i], []
        for cut, quads in enumerate(share.quads_of):
            # lane w asks whether warp w of that CTA has items of the tile
            begin, end = self.run_of(p.mul(share.tiles, quads), self.lane)
            start = p.mul(tile, quads)
            begin, end = p.maximum(begin, start), p.minimum(end, p.add(start, quads))
            holders = p.ballot(p.lt(begin, end))
            first = p.lowest_bit(holders)
            holders, at = p.shr(holders, first), self.sum_at(p.i32(cut), tile, first)
            for n in range(plan.most_holders(plan.parts[i])):
                values, holds = mem.load_shared_f32x4(at, 512 * n), p.eq(p.and_(p.shr(holders, n), 1), 1)
                found.append([arith.select(holds, v, p.f32(0.0)) for v in values])
        return p.total(found)

    def slice_at(self, i: int, slice_, tile):
        """Where the sums of a slice's tile of this CTA's panel lie."""
        part = self.plan.parts[i]
        panel = p.add(p.mul(slice_, self.plan.panels), self.panel)
        at = p.add(p.mul(panel, part.entries), p.add(self.shares[i].first, tile))
        return mem.offset(mem.wide_offset(self.outs[f"sums{i}"], at, 512), p.mul(self.lane, 16))

    def leave_slice(self, i: int, tile):
        mem.store_global_f32x4(self.slice_at(i, self.shares[i].slice, tile), self.tile_sum(i, tile), 0)

    def await_slices(self, i: int):
        """Until all slices' sums of what this CTA finishes are there."""
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        which = p.add(p.mul(share.group, plan.panels), self.panel)
        counter = self.counter(plan.summed(i), which)
        # one lane, of the warp that finishes no tile if any does not
        is_last = arith.andi(p.eq(self.warp, plan.warps - 1), self.is_lane_0)
        asks = arith.andi(is_last, p.lt(0, share.items))
        p.named_sync(FINISHED, 32 * plan.warps)

        def wait():
            self.tell(counter)
            mem.wait_for_at_least(counter, p.i32(part.slices))

        p.when(asks, wait)
        p.named_sync(FINISHED, 32 * plan.warps)
        p.when(asks, lambda: self.leave(counter, p.i32(part.slices)))

    def all_slices(self, i: int, tile):
        """A tile's sum over the slices of K."""
        part, at = self.plan.parts[i], self.slice_at(i, p.i32(0), tile)
        size = self.plan.panels * part.entries * 512
        return p.total([mem.load_fresh_f32x4(at, n * size) for n in range(part.slices)])

    def needs_of(self, i: int, n):
        """What the n-th entry that this CTA finishes needs besides sums: of each of its weights, and in the residual
        stream. Where it has none, that of any."""
        at, flow = self.place_of(i, n), None
        if self.plan.parts[i].joins:
            flow = types.SimpleNamespace(**self.flow_at(i, at))
        return [self.loaded(i, n, weight, tile) for weight, tile in self.weights_at(i, at)], flow

    def weights_at(self, i: int, at):
        """The weights that have outputs of tile (or pair of tiles) `at`, and the tile in each."""
        part = self.plan.parts[i]
        weights = [self.output_weight(i, w) for w in range(len(self.weights[i]))]
        if part.paired:
            return [(weight, at) for weight in weights]
        values, tile = pick(part.tiles_of, at, weights)
        return [(OutputWeight(*values), tile)]

    def output_weight(self, i: int, w: int):
        part, weight = self.plan.parts[i], self.weights[i][w]
        out = self.outs.get(f"y{w}" if i + 1 == len(self.plan.parts) and not part.joins else f"x{i + 1}", weight.scale)
        optional = [weight.scale if v is None else v for v in (weight.bias, weight.b, weight.lora_scale)]
        numbers = sum(part.rank_tiles[:w]) * PANEL * ROWS * 2, part.rank_tiles[w], int(part.biased[w]), part.n[w]
        return OutputWeight(weight.scale, *optional, out, *map(p.i32, numbers))

    def loaded(self, i: int, n, weight: OutputWeight, tile):
        part, row = self.plan.parts[i], p.add(p.mul(tile, ROWS), self.g)
        found = types.SimpleNamespace(tile=tile, out=weight.out, n=weight.n, rank_tiles=weight.rank_tiles)
        found.h = p.add(self.h_base, weight.h)
        found.scale, found.bias = mem.load_global_f32(weight.scale), None
        if any(part.biased):
            has = p.eq(weight.is_biased, 1)
            low, high = (
                mem.load_global_f32(mem.offset(weight.bias, p.select(has, p.mul(p.add(row, below), 4), 0)))
                for below in (0, 8)
            )
            found.bias = [arith.select(has, v, p.f32(0.0)) for v in (low, low, high, high)]
        if any(part.ranks):
            found.scaling, found.b = mem.load_global_f32(weight.lora_scale), self.held_b(i, n, weight, tile)
        return found

    def flow_at(self, i: int, tile):
        """Of this lane's elements of a tile: the residual stream and the next norm's scale."""
        flow, scale = self.flows[i], None
        old = [mem.load_fresh_f32(mem.offset(flow.before, at)) for at in self.places(tile)]
        if flow.norm is not None:
            first = p.mul(p.add(p.mul(tile, ROWS), self.g), 4)
            scale = [mem.load_global_f32(mem.offset(flow.norm, p.add(first, 32 * n))) for n in range(2)]
        return {"old": old, "scale": scale}

    def places(self, tile):
        """Where this lane's elements of a tile lie in the residual stream."""
        last = p.opaque(self.plan.m - 1)  # or ptxas spills where it knows that only lanes with t = 0 have rows
        rows = [p.minimum(self.row(e), last) for e in range(4)]
        columns = [p.add(p.mul(tile, ROWS), p.add(self.g, 8 * (e // 2))) for e in range(4)]
        pairs = zip(rows, columns, strict=True)
        return [p.mul(p.add(p.mul(row, self.plan.hidden), column), 4) for row, column in pairs]

    def entry(self, i: int, entry, weights, flow):
        part, share = self.plan.parts[i], self.shares[i]
        if part.paired:
            tiles = entry, p.add(entry, share.entries)
            gate, up = (self.output(part, w, self.tile_sum(i, tile)) for w, tile in zip(weights, tiles, strict=True))
            joined = [gated(*pair) for pair in zip(gate, up, strict=True)]
            self.store_rows(weights[0].out, weights[0].n, weights[0].tile, joined)
            return
        sums = self.tile_sum(i, entry) if part.slices == 1 else self.all_slices(i, entry)
        (weight,) = weights
        y = self.output(part, weight, sums)
        if part.joins:
            self.join(i, weight.tile, flow, y)
        else:
            self.store_rows(weight.out, weight.n, weight.tile, y)

    def output(self, part: Part, weight, sums):
        """A weight's outputs of a tile: scaled, with LoRA and bias."""
        taken_back = of_scaled(part.scaled)
        factor = p.divide(p.f32(EPILOGUE_FACTOR * taken_back), weight.scale)
        y = [arith.mulf(v, factor) for v in sums]
        if part.normed:
            y = self.times_inverse(y)
        if any(part.ranks):
            lora, h = [p.f32(0.0)] * 4, p.add(weight.h, p.add(p.mul(self.g, ROWS * 2), p.mul(self.t, 8)))
            for j, b in enumerate(weight.b):
                here = mem.load_shared_v2(h, j * PANEL * ROWS * 2)
                # beyond the adapter's ranks lies another's x A^T or old bytes, which may be NaN
                here = [p.select(p.lt(j, weight.rank_tiles), v, 0) for v in here]
                lora = p.mma_half(lora, b, *here)
            scaling = weight.scaling if taken_back == 1 else arith.mulf(weight.scaling, p.f32(taken_back))
            y = [arith.addf(v, arith.mulf(scaling, more)) for v, more in zip(y, lora, strict=True)]
        return y if weight.bias is None else [arith.addf(v, b) for v, b in zip(y, weight.bias, strict=True)]

    def times_inverse(self, values):
        """Values of rows 2 t and 2 t + 1 over the rows' root mean squares."""
        inverse = mem.load_shared_f32x2(p.add(self.inverse_base, p.mul(self.t, 8)))
        return [arith.mulf(v, inverse[e % 2]) for e, v in enumerate(values)]

    def row(self, e: int):
        """Of an element."""
        return p.add(p.mul(self.panel, PANEL), p.add(p.mul(self.t, 2), e % 2))

    def each_element(self, tile, body):
        """body(e, row, column) of this lane's elements of a tile, whose row exists."""
        for e in range(4):
            row = self.row(e)
            column = p.add(p.mul(tile, ROWS), p.add(self.g, 8 * (e // 2)))
            if self.plan.m % PANEL == 0:
                body(e, row, column)
            else:  # opaque: as in `places`
                p.when(p.lt(row, p.opaque(self.plan.m)), lambda e=e, row=row, column=column: body(e, row, column))

    def store_rows(self, out, n, tile, values):
        def store(e, row, column):
            mem.store_global_half(mem.offset(out, p.mul(p.add(p.mul(row, n), column), 2)), values[e])

        self.each_element(tile, store)

    def join(self, i: int, tile, here, values):
        """The residual stream with a tile's outputs, and what the next part and its norm read."""
        flow = self.flows[i]
        new = [arith.addf(a, b) for a, b in zip(here.old, values, strict=True)]
        # opaque: found again, where those of what was loaded would keep registers through all products
        at = self.places(p.opaque(tile))
        self.each_element(tile, lambda e, *_: mem.store_global_f32(mem.offset(flow.after, at[e]), new[e]))
        if flow.norm is None:
            return
        normed = into_range([arith.mulf(v, here.scale[e // 2]) for e, v in enumerate(new)])
        self.store_rows(flow.normed, self.plan.hidden, tile, normed)
        squares = [arith.mulf(v, v) for v in new]
        pair = [p.over_lanes(arith.addf, arith.addf(squares[row], squares[row + 2]), (4, 8, 16)) for row in range(2)]
        to = mem.offset(self.squares_at(i), p.add(p.mul(tile, PANEL * 4), p.mul(self.t, 8)))
        p.when(p.eq(self.g, 0), lambda: mem.store_global_f32x2(to, *pair))
