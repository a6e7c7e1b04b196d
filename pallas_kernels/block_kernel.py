"""What one decode step computes between two attentions, for few rows (M <= 8), as one kernel.

Letters: M rows, D hidden size, K inputs and N outputs of a weight; row tiles of 16 outputs, quads of 256 inputs (see
layout.py), items of one tile and one quad.

The output projection, the residual stream, RMSNorm, gate, up and SwiGLU, down, and the next layer's RMSNorm and q, k, v
are *parts* that follow each other in one grid of CTAs, one a multiprocessor. Every CTA waits for all others between two
parts. Weights do not depend on what the others compute: while a CTA waits, its warps go on fetching their items of the
next parts, as far as their rings reach, so the memory does not rest.

  * Items: a part's row tiles are shared by groups of CTAs (with `slices`, also its K), and a CTA's items, tile after
    tile, by its compute warps in equal runs. A table in shared memory holds the addresses of a warp's items of all
    parts; it streams them through its ring with cp.async, each lane its own bytes, and needs no barrier for them.
  * Sums: a warp leaves the sum of its run's part of a tile in shared memory; in the end one warp adds a tile's sums, K
    ascending, and finishes it: scales, LoRA, bias, then SwiGLU or the residual stream. Sums over slices of K go
    through the L2, and the CTAs of a group finish the tiles between them.
  * x: the service warps copy it to shared memory, and compute LoRA's first product (see block_service.py).
  * RMSNorm: who writes the residual stream also writes its product with the norm's scale in bfloat16, and its tile's
    squares; the division by the root of their mean happens to the next part's sums.

The order of additions depends on the shape and the plan, never on M, other rows, or timing.
"""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .block_plan import MAX_ROWS, BlockPlan, Part
from .block_service import ServiceWarps
from .fragments import decode_codes, decode_scales
from .layout import CODE_BYTES, COLS, EPILOGUE_FACTOR, QUAD_BYTES, ROWS

FINISHED = 1  # named barrier of the compute warps; 0 is the whole CTA's
LOG2_E = 1.4426950408889634


class Weight(NamedTuple):
    """A weight's operands: data uint32 [N/16, K/256, 576] (layout.py), global scale float32 [1], bias float32 [N], and
    LoRA's A [R, K] and B [N, R] in bfloat16 and scaling float32 [1]; None where it has none."""

    data: Any
    scale: Any
    bias: Any = None
    a: Any = None
    b: Any = None
    lora_scale: Any = None


class Operands(NamedTuple):
    """x bfloat16 [M, K], the residual stream float32 [M, D], the weights of each part, the norm scale float32 [D] after
    each part that joins the residual stream and is not the last, and the counters."""

    x: Any
    residual: Any
    weights: tuple[tuple[Weight, ...], ...]
    norms: tuple[Any, ...]
    sync: Any


@dataclasses.dataclass(frozen=True)
class Share:
    """What a CTA does of a part: its group, its slice, entries and quads from the first on, items."""

    group: Any
    slice: Any
    first: Any
    entries: Any
    first_quad: Any
    quads: Any
    tiles: Any
    items: Any


class _Kernel(ServiceWarps):
    """One CTA's program."""

    def __init__(self, plan: BlockPlan, eps: float, operands: Operands, outs: dict[str, Any], shared):
        self.plan, self.eps = plan, eps

        def addresses(tree):
            return jax.tree.map(mem.global_address, tree)

        operands, self.outs = Operands(*map(addresses, operands)), addresses(outs)
        self.weights, self.sync = operands.weights, operands.sync
        base = mem.shared_address(shared)
        self.tid = p.sreg("tid.x")
        self.lane, self.warp = p.and_(self.tid, 31), p.uniform(p.shr(self.tid, 5))
        self.is_lane_0 = p.eq(self.lane, 0)
        self.g, self.t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        self.cta = p.sreg("ctaid.x")
        self.x_full, self.h_full = base, p.add(base, 8)
        self.inverse_base, self.squares_base = p.add(base, 64), p.add(base, 128)
        self.table_base, self.sums_base = p.add(base, plan.table_at), p.add(base, plan.sums_at)
        self.h_base, self.x_base = p.add(base, plan.h_at), p.add(base, plan.x_at)
        self.ring_base = p.add(base, plan.ring_at)
        self.row_in_x = p.minimum(self.g, plan.m - 1)
        self.shares = [self.share(part) for part in plan.parts]
        # what a part reads, and the residual stream, its norm's scale and where its squares lie
        self.x_of, self.flows, residual, norms = [operands.x], [], operands.residual, list(operands.norms)
        for i, part in enumerate(plan.parts):
            flow = types.SimpleNamespace(before=residual, after=None, norm=None, normed=None, squares=None)
            if part.joins:
                flow.after = residual = self.outs[f"residual{i}"]
                if i + 1 < len(plan.parts):
                    flow.norm, flow.normed = norms.pop(0), self.outs[f"x{i + 1}"]
                    flow.squares = self.outs[f"squares{i}"]
            self.flows.append(flow)
            self.x_of.append(self.outs.get(f"x{i + 1}"))

    def share(self, part: Part) -> Share:
        group, in_slice = p.rem(self.cta, part.groups), p.div(self.cta, part.groups)
        has, in_slice = p.lt(in_slice, part.slices), p.minimum(in_slice, part.slices - 1)

        def run(index, of, total):
            first = p.div(p.mul(index, total), of)
            return first, p.sub(p.div(p.mul(p.add(index, 1), total), of), first)

        first, entries = run(group, part.groups, part.entries)
        first_quad, quads = run(in_slice, part.slices, part.quads)
        entries = p.select(has, entries, 0)  # the CTAs beyond groups x slices have none
        tiles = p.mul(entries, 2) if part.paired else entries
        return Share(group, in_slice, first, entries, first_quad, quads, tiles, p.mul(tiles, quads))

    def run(self):
        p.if_else(p.lt(self.warp, self.plan.warps), self.compute, self.serve)

    # ---- places --------------------------------------------------------------------------------------------------

    def counter(self, word: int):
        return mem.offset(self.sync, p.i32(4 * word))

    def leave(self, counter, waiting: int):
        """Says that one of `waiting` has seen the counter; the last of them clears it for the next call."""
        before = mem.count_and_wrap(mem.offset(counter, p.i32(4)), p.i32(waiting - 1))
        p.when(p.eq(before, waiting - 1), lambda: mem.store_global_b32(counter, p.i32(0)))

    def pick(self, sizes, index, values):
        """Of which size's range an index is: its values, and the index in it."""
        first, chosen, local = 0, list(values[0]), index
        for size, here in zip(sizes, values[1:], strict=False):
            first += size
            earlier = p.lt(index, first)
            chosen = [arith.select(earlier, a, b) for a, b in zip(chosen, here, strict=True)]
            local = p.select(earlier, local, p.sub(index, first))
        return chosen, local

    def run_of(self, share: Share, warp):
        """First item of a warp's run, and the first after it."""
        return tuple(p.div(p.mul(share.items, w), self.plan.warps) for w in (warp, p.add(warp, 1)))

    # ---- the compute warps: weights ------------------------------------------------------------------------------

    def compute(self):
        plan = self.plan
        self.table = p.add(self.table_base, p.mul(self.warp, 8 * plan.items_warp))
        ring = p.add(self.ring_base, p.mul(self.warp, plan.depth * QUAD_BYTES))
        self.code_lane, self.scale_lane = p.add(ring, p.mul(self.lane, 16)), p.add(ring, p.mul(self.lane, 4))
        self.sums_warp = p.add(self.sums_base, p.mul(self.warp, plan.runs * 512))
        first_parts = plan.parts_at_first  # the others' addresses have time
        early = self.fill_table(p.i32(0), range(first_parts))
        p.warp_sync()
        for d in range(plan.depth - 1):
            p.when(p.lt(d, early), lambda d=d: self.fetch(p.i32(d), p.i32(d)))
            mem.copy_commit()
        runs = [self.run_of(share, self.warp) for share in self.shares]
        self.all_items = functools.reduce(p.add, [p.sub(end, begin) for begin, end in runs])
        self.prepared(waits=True)
        item, slot = p.i32(0), p.i32(0)
        for i in range(len(plan.parts)):
            needs = self.early_needs(i)  # under way while x is
            item, slot = self.multiply(i, item, slot)
            self.finish(i, needs)
            if i == 0:
                self.fill_table(early, range(first_parts, len(plan.parts)))
                p.warp_sync()

    def fill_table(self, filled, parts: range):
        """Addresses of this warp's items of some parts, behind `filled`; returns how many there are then."""
        for i in parts:
            part, share, weights = self.plan.parts[i], self.shares[i], self.weights[i]
            begin, end = self.run_of(share, self.warp)

            def one(index, _, part=part, share=share, weights=weights, begin=begin, filled=filled):
                item = p.add(begin, index)
                tile, quad = p.div(item, share.quads), p.add(share.first_quad, p.rem(item, share.quads))
                data = [(weight.data,) for weight in weights]
                if part.paired:
                    is_gate = p.lt(tile, share.entries)
                    at = p.add(share.first, p.select(is_gate, tile, p.sub(tile, share.entries)))
                    source = arith.select(is_gate, weights[0].data, weights[1].data)
                else:
                    (source,), at = self.pick(part.tiles_of, p.add(share.first, tile), data)
                source = mem.wide_offset(source, p.add(p.mul(at, part.quads), quad), QUAD_BYTES)
                mem.store_shared_address(p.add(self.table, p.mul(p.add(filled, index), 8)), source)
                return []

            p.for_range(self.lane, p.sub(end, begin), 32, [], one)
            filled = p.add(filled, p.sub(end, begin))
        return filled

    def fetch(self, item, slot):
        """Start the copies of this lane's part of an item into a slot of its ring."""
        source = mem.load_shared_address(p.add(self.table, p.mul(item, 8)))
        to = p.mul(slot, QUAD_BYTES)
        to_codes, to_scales = p.add(self.code_lane, to), p.add(self.scale_lane, to)
        codes, scales = mem.offset(source, p.mul(self.lane, 16)), mem.offset(source, p.mul(self.lane, 4))
        for unit in range(4):
            mem.copy_async_16(to_codes, codes, unit * 512, unit * 512)
        for pair in range(2):
            at = CODE_BYTES + pair * 128
            mem.copy_async_4(to_scales, scales, at, at)

    def multiply(self, i: int, first_item, first_slot):
        """This warp's items of part i; leaves their sums in shared memory. Returns the next item and slot."""
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        begin, end = self.run_of(share, self.warp)
        last_item = p.add(first_item, p.sub(end, begin))
        x_row = p.add(self.x_base, p.add(p.mul(self.row_in_x, plan.x_stride(part)), p.mul(self.t, 32)))
        mem.barrier_wait(self.x_full, p.i32(i % 2))

        def step(item, carry):
            slot, quad, run, *acc = carry
            mem.copy_wait(plan.depth - 2)
            ahead = p.add(item, plan.depth - 1)
            spare = p.select(p.eq(slot, 0), plan.depth - 1, p.sub(slot, 1))
            p.when(p.lt(ahead, self.all_items), lambda: self.fetch(ahead, spare))
            mem.copy_commit()
            acc = self.quad(p.mul(slot, QUAD_BYTES), p.add(x_row, p.mul(quad, COLS * 2)), acc)
            is_end = p.eq(p.add(quad, 1), share.quads)
            is_last = p.eq(p.add(item, 1), last_item)
            to = p.add(p.add(self.sums_warp, p.mul(run, 512)), p.mul(self.lane, 16))
            p.when(arith.ori(is_end, is_last), lambda: mem.store_shared_f32x4(to, acc, 0))
            acc = [arith.select(is_end, p.f32(0.0), v) for v in acc]
            slot = p.select(p.eq(slot, plan.depth - 1), 0, p.add(slot, 1))
            return [slot, p.select(is_end, 0, p.add(quad, 1)), p.select(is_end, p.add(run, 1), run), *acc]

        start = [first_slot, p.rem(begin, share.quads), p.i32(0), *[p.f32(0.0)] * 4]
        slot, *_ = p.for_range(first_item, last_item, 1, start, step)
        return last_item, slot

    def quad(self, slot, x_at, total):
        """total + one item: 16 m16n8k16 steps, those of a unit in a chain of their own."""
        sums = []
        for u in range(4):
            words = mem.load_shared_v4(p.add(self.code_lane, slot), u * 512)
            if u % 2 == 0:
                scale_word = mem.load_shared_b32(p.add(self.scale_lane, slot), CODE_BYTES + u // 2 * 128)
            scales = decode_scales(scale_word, p.i32(0x4342 if u % 2 else 0x4140))
            acc = [p.f32(0.0)] * 4
            for half in range(2):
                x = mem.load_shared_v4(x_at, u * 128 + 16 * half)
                for j in range(2):
                    codes = decode_codes(words[2 * half + j], *scales)
                    acc = p.mma_bf16(acc, codes, x[2 * j], x[2 * j + 1])
            sums.append(acc)
        return [
            arith.addf(old, arith.addf(arith.addf(a, b), arith.addf(c, d)))
            for old, a, b, c, d in zip(total, *sums, strict=True)
        ]

    # ---- the compute warps: outputs ------------------------------------------------------------------------------

    def place(self, i: int, n):
        """The n-th of the CTA's entries that it finishes: all, or, with slices, those that its turn is for."""
        slices = self.plan.parts[i].slices
        return n if slices == 1 else p.add(p.mul(n, slices), self.shares[i].slice)

    def early_needs(self, i: int):
        """`needs` of this warp's first entry, or, where it has none, of any."""
        part, share = self.plan.parts[i], self.shares[i]
        return self.needs(i, p.minimum(p.add(share.first, self.place(i, self.warp)), part.entries - 1))

    def finish(self, i: int, early):
        """Tiles' sums to outputs, and a word to all CTAs when this one's are stored. `early` is `early_needs`."""
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        count = p.div(p.sub(p.add(share.entries, part.slices - 1), share.slice), part.slices)
        p.named_sync(FINISHED, 32 * plan.warps)
        if part.slices > 1:
            self.each(share.tiles, part.most_tiles, lambda tile, _: self.leave_slice(i, tile))
            self.await_slices(i)
        mem.barrier_wait(self.h_full, p.i32(i % 2))

        def one(n, first):
            entry = self.place(i, n)
            self.entry(i, entry, early if first else self.needs(i, p.add(share.first, entry)))

        self.each(count, -(-part.most_entries // part.slices), one)
        if i + 1 < len(plan.parts):
            p.named_sync(FINISHED, 32 * plan.warps)

            def arrive():
                mem.fence()
                mem.count(self.counter(plan.arrived(i)))

            p.when(p.eq(self.tid, 0), arrive)

    def each(self, count, most: int, body):
        """body(n, whether it is this warp's first) for n < count, warp after warp."""
        for first in range(0, most, self.plan.warps):
            n = p.add(self.warp, first)
            p.when(p.lt(n, count), lambda n=n, first=first: body(n, first == 0))

    def tile_sum(self, i: int, tile):
        """A tile's sum over this CTA's quads: lane (g, t) holds rows 2 t (elements 0, 2) and 2 t + 1 (1, 3) of outputs
        g (0, 1) and g + 8 (2, 3)."""
        plan, share = self.plan, self.shares[i]

        def warp_of(item):
            return p.div(p.sub(p.mul(p.add(item, 1), plan.warps), 1), share.items)

        first = p.mul(tile, share.quads)
        last = p.sub(p.add(first, share.quads), 1)

        def add(warp, acc):
            begin, end = self.run_of(share, warp)
            run = p.sub(tile, p.div(begin, share.quads))
            at = p.add(p.mul(p.add(p.mul(warp, plan.runs), run), 512), p.mul(self.lane, 16))
            here = mem.load_shared_f32x4(p.add(self.sums_base, at), 0)
            has = p.lt(begin, end)
            return [arith.addf(a, arith.select(has, v, p.f32(0.0))) for a, v in zip(acc, here, strict=True)]

        return p.for_range(warp_of(first), p.add(warp_of(last), 1), 1, [p.f32(0.0)] * 4, add)

    def leave_slice(self, i: int, tile):
        part, share = self.plan.parts[i], self.shares[i]
        at = p.add(p.mul(share.slice, part.entries), p.add(share.first, tile))
        to = mem.offset(mem.wide_offset(self.outs[f"sums{i}"], at, 512), p.mul(self.lane, 16))
        mem.store_global_f32x4(to, self.tile_sum(i, tile), 0)

    def await_slices(self, i: int):
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        p.named_sync(FINISHED, 32 * plan.warps)

        def wait():
            counter = mem.offset(self.counter(plan.summed(i, 0)), p.mul(share.group, 8))
            mem.fence()
            mem.count(counter)
            mem.await_count(counter, p.i32(part.slices))
            self.leave(counter, part.slices)

        p.when(arith.andi(p.eq(self.tid, 0), p.lt(0, share.items)), wait)
        p.named_sync(FINISHED, 32 * plan.warps)

    def all_slices(self, i: int, tile):
        """A tile's sum over the slices of K."""
        part = self.plan.parts[i]
        at = mem.wide_offset(self.outs[f"sums{i}"], p.add(self.shares[i].first, tile), 512)
        at = mem.offset(at, p.mul(self.lane, 16))
        parts = [mem.load_fresh_f32x4(at, n * part.entries * 512) for n in range(part.slices)]
        return functools.reduce(lambda a, b: [arith.addf(x, y) for x, y in zip(a, b, strict=True)], parts)

    def needs(self, i: int, at):
        """What the outputs of tile (or pair of tiles) `at` need besides sums: of each of its weights, and in the
        residual stream."""
        part, weights = self.plan.parts[i], self.weights[i]
        if part.paired:
            chosen = [(self.values(i, w), at) for w in range(2)]
        else:
            chosen = [self.pick(part.tiles_of, at, [self.values(i, w) for w in range(len(weights))])]
        flow = None
        if part.joins:
            flow = types.SimpleNamespace(**self.flow_at(i, at))
        return [self.loaded(part, values, tile) for values, tile in chosen], flow

    def values(self, i: int, w: int):
        """A weight's scale, bias, B, LoRA's scaling (or anything where it has none), place of its x A^T, and number of
        its 16 ranks; its outputs and their number."""
        part, weight = self.plan.parts[i], self.weights[i][w]
        out = self.outs.get(f"y{w}" if i + 1 == len(self.plan.parts) and not part.joins else f"x{i + 1}", weight.scale)
        optional = [weight.scale if v is None else v for v in (weight.bias, weight.b, weight.lora_scale)]
        numbers = sum(part.rank_tiles[:w]) * MAX_ROWS * ROWS * 2, part.rank_tiles[w], int(part.biased[w]), part.n[w]
        return [weight.scale, *optional, out, *map(p.i32, numbers)]

    def loaded(self, part: Part, values, tile):
        scale, bias, b, scaling, out, h, rank_tiles, is_biased, n = values
        row = p.add(p.mul(tile, ROWS), self.g)
        found = types.SimpleNamespace(tile=tile, out=out, n=n, h=p.add(self.h_base, h), rank_tiles=rank_tiles)
        found.scale, found.bias, found.b = mem.load_global_f32(scale), None, []
        if any(part.biased):
            at = p.select(p.eq(is_biased, 1), p.mul(row, 4), 0)
            low, high = mem.load_global_f32(mem.offset(bias, at)), None
            high = mem.load_global_f32(mem.offset(bias, p.select(p.eq(is_biased, 1), p.mul(p.add(row, 8), 4), 0)))
            has = p.eq(is_biased, 1)
            found.bias = [arith.select(has, v, p.f32(0.0)) for v in (low, low, high, high)]
        if any(part.ranks):
            found.scaling = mem.load_global_f32(scaling)
            stride = p.mul(rank_tiles, 32)
            low = mem.offset(b, p.add(p.mul(row, stride), p.mul(self.t, 8)))
            high = mem.offset(low, p.mul(stride, 8))
            zeros = [p.i32(0)] * 4
            for j in range(max(part.rank_tiles)):

                def load(j=j):
                    a, c = mem.load_global_v2(low, j * 32), mem.load_global_v2(high, j * 32)
                    return [a[0], c[0], a[1], c[1]]

                found.b.append(p.if_values(p.lt(j, rank_tiles), load, zeros))
        return found

    def flow_at(self, i: int, tile):
        """Of this lane's elements of a tile: the residual stream, its places, the next norm's scale."""
        flow, D = self.flows[i], self.plan.hidden
        rows = [p.minimum(p.add(p.mul(self.t, 2), e % 2), self.plan.m - 1) for e in range(4)]
        columns = [p.add(p.mul(tile, ROWS), p.add(self.g, 8 * (e // 2))) for e in range(4)]
        at = [p.mul(p.add(p.mul(row, D), column), 4) for row, column in zip(rows, columns, strict=True)]
        old, scale = [mem.load_fresh_f32(mem.offset(flow.before, a)) for a in at], None
        if flow.norm is not None:
            scale = [mem.load_global_f32(mem.offset(flow.norm, p.mul(columns[e], 4))) for e in (0, 2)]
        return {"at": at, "old": old, "scale": scale}

    def entry(self, i: int, entry, needs):
        part, share, (weights, flow) = self.plan.parts[i], self.shares[i], needs
        if part.paired:
            tiles = entry, p.add(entry, share.entries)
            gate, up = (self.output(part, w, self.tile_sum(i, tile)) for w, tile in zip(weights, tiles, strict=True))
            swish = [
                arith.mulf(p.divide(v, arith.addf(p.f32(1.0), p.exp2(arith.mulf(v, p.f32(-LOG2_E))))), u)
                for v, u in zip(gate, up, strict=True)
            ]
            self.store_rows(weights[0].out, weights[0].n, weights[0].tile, swish)
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
        factor = p.divide(p.f32(EPILOGUE_FACTOR), weight.scale)
        y = [arith.mulf(v, factor) for v in sums]
        if part.normed:
            y = self.times_inverse(y)
        if any(part.ranks):
            lora, h = [p.f32(0.0)] * 4, p.add(weight.h, p.add(p.mul(self.g, ROWS * 2), p.mul(self.t, 8)))
            for j, b in enumerate(weight.b):
                here = mem.load_shared_v2(h, j * MAX_ROWS * ROWS * 2)
                # beyond the adapter's ranks lies another's x A^T or old bytes, which may be NaN
                here = [p.select(p.lt(j, weight.rank_tiles), v, 0) for v in here]
                lora = p.mma_bf16(lora, b, *here)
            y = [arith.addf(v, arith.mulf(weight.scaling, more)) for v, more in zip(y, lora, strict=True)]
        return y if weight.bias is None else [arith.addf(v, b) for v, b in zip(y, weight.bias, strict=True)]

    def times_inverse(self, values):
        """Values of rows 2 t and 2 t + 1 over the rows' root mean squares."""
        inverse = mem.load_shared_f32x2(p.add(self.inverse_base, p.mul(self.t, 8)))
        return [arith.mulf(v, inverse[e % 2]) for e, v in enumerate(values)]

    def each_element(self, tile, body):
        """body(e, row, column) of this lane's elements of a tile, whose row exists."""
        for e in range(4):
            row = p.add(p.mul(self.t, 2), e % 2)
            column = p.add(p.mul(tile, ROWS), p.add(self.g, 8 * (e // 2)))
            if self.plan.m == MAX_ROWS:
                body(e, row, column)
            else:
                p.when(p.lt(row, self.plan.m), lambda e=e, row=row, column=column: body(e, row, column))

    def store_rows(self, out, n, tile, values):
        def store(e, row, column):
            mem.store_global_bf16(mem.offset(out, p.mul(p.add(p.mul(row, n), column), 2)), values[e])

        self.each_element(tile, store)

    def join(self, i: int, tile, here, values):
        """The residual stream with a tile's outputs, and what the next part and its norm read."""
        flow = self.flows[i]
        new = [arith.addf(a, b) for a, b in zip(here.old, values, strict=True)]
        self.each_element(tile, lambda e, *_: mem.store_global_f32(mem.offset(flow.after, here.at[e]), new[e]))
        if flow.norm is None:
            return
        normed = [arith.mulf(v, here.scale[e // 2]) for e, v in enumerate(new)]
        self.store_rows(flow.normed, self.plan.hidden, tile, normed)
        squares = [arith.mulf(v, v) for v in new]
        pair = [p.over_lanes(arith.addf, arith.addf(squares[row], squares[row + 2]), (4, 8, 16)) for row in range(2)]
        to = mem.offset(flow.squares, p.add(p.mul(tile, MAX_ROWS * 4), p.mul(self.t, 8)))
        p.when(p.eq(self.g, 0), lambda: mem.store_global_f32x2(to, *pair))


def block_outs(plan: BlockPlan) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: `residual` after each part that joins it, the last part's `y` of each weight, and what
    CTAs leave for each other."""

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    outs, last = {}, len(plan.parts) - 1
    for i, part in enumerate(plan.parts):
        if part.joins:
            outs[f"residual{i}"] = f32(plan.m, plan.hidden)
        if part.joins and i < last:
            outs[f"x{i + 1}"] = bf16(plan.m, plan.hidden)
            outs[f"squares{i}"] = f32(plan.hidden // ROWS, MAX_ROWS)
        if part.paired:
            outs[f"x{i + 1}"] = bf16(plan.m, part.n[0])
        if not part.joins and not part.paired:
            outs |= {f"y{w}": bf16(plan.m, n) for w, n in enumerate(part.n)}
        if part.slices > 1:
            outs[f"sums{i}"] = f32(part.slices * part.entries * 128)
        if any(part.ranks):
            outs[f"hidden{i}"] = f32(part.lora_units * 128)
    return outs


def counters(plan: BlockPlan) -> np.ndarray:
    """Their first state, zeros. The last word is no counter: with it XLA keeps the array as a constant, where zeros
    would be written anew by a kernel before each call."""
    words = np.zeros(plan.sync_words + 1, np.uint32)
    words[-1] = 1
    return words


@functools.cache
def build(plan: BlockPlan, eps: float):
    """The kernel as a function of Operands (without `sync`) that returns `block_outs` arrays."""
    outs = block_outs(plan)
    names = list(outs)

    def run(operands: Operands):
        leaves, tree = jax.tree.flatten(operands)

        def nvfp4_block(*refs):
            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
            def body(ctx, *refs):
                *refs, shared = refs
                given = jax.tree.unflatten(tree, refs[: len(leaves)])
                made = dict(zip(names, refs[len(leaves) :], strict=True))
                _Kernel(plan, eps, given, made, shared).run()

            body(*refs)

        call = plgpu.kernel(
            nvfp4_block,
            out_type=[outs[name] for name in names],
            scratch_types=[plgpu.SMEM((plan.total,), jnp.int8)],
            grid=(plan.ctas,),
            grid_names=("ctas",),
            num_threads=plan.threads // 128,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )
        return dict(zip(names, call(*leaves), strict=True))

    return jax.jit(run)
