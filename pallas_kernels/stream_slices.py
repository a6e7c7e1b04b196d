"""x A^T inside the streaming kernel, for callers that do not bring it (see stream_lora.py).

It needs all of K before any output, so it is computed beside the stream of weights, by warps that would be idle:
  * a *unit* is 16 ranks of one A, up to 16 rows of x and one slice of K; the spare warps of all CTAs share the units,
    leave float32 sums in global memory and count them;
  * when all are there, the spare warps of every CTA that owns outputs add the slices in order, for the adapters of
    those outputs only, multiply by s and keep x A^T in shared memory in 16 bits.

So one exchange through the L2, a few microseconds, runs beside the weights. All CTAs wait for all units: they must be
resident together, which variants.py checks. The counters (`sync` words) are zero before and after every call. Additions
have a fixed order.
"""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .hidden import add_products
from .layout import COLS, EPILOGUE_FACTOR, ROWS
from .pick import pick
from .stream_lora import LoraWarps

SUMMED = 3  # a named barrier of the spare warps; see stream_compute.py for the others
CHUNK = 32  # columns for which a lane loads 16 bytes of each row


class SliceWarps(LoraWarps):
    """The spare warps where A is an operand. The CTA's class sets the addresses before."""

    def multiply_by_a(self):
        """One spare warp: its units of x A^T, then its part of the CTA's sums over the slices."""
        plan, c = self.plan, self.plan.config
        mine = p.sub(self.warp, c.warps + 1)
        is_first = p.eq(mine, 0)
        p.when(is_first, lambda: self.make_barriers([(self.h_full, 32 * plan.lora_warps)]))
        ctas = plan.clusters * c.cluster

        def unit(index, _):
            self.unit(p.div(index, plan.lora_slices), p.rem(index, plan.lora_slices))
            return []

        first = p.add(p.mul(mine, ctas), self.cta)
        p.for_range(first, plan.lora_units, ctas * plan.lora_warps, [], unit)
        p.when(p.eq(self.rank, 0), lambda: self.add_slices(mine, is_first))

    def unit(self, sum_index, part):
        plan = self.plan
        groups, group = plan.m_tiles // plan.lora_group, plan.lora_group
        tile, m_group = p.div(sum_index, groups), p.rem(sum_index, groups)
        (a,), local = pick(self.plan.rank_tiles, tile, [(a,) for a in self.a])
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        row_bytes = plan.quads * COLS * 2
        a = mem.wide_offset(a, p.add(p.mul(local, ROWS), g), row_bytes)
        rows = [p.minimum(p.add(p.mul(m_group, group * 8), p.add(g, 8 * i)), plan.m - 1) for i in range(group)]
        piece = p.mul(t, 16)
        a = mem.offset(a, piece)
        x = [mem.offset(mem.wide_offset(self.x_plain, row, row_bytes), piece) for row in rows]
        halves = 2 * plan.quads
        first = p.div(p.mul(part, halves), plan.lora_slices)
        last = p.div(p.mul(p.add(part, 1), halves), plan.lora_slices)

        def half_quad(index, acc):
            acc, at = list(acc), p.mul(index, COLS)
            here_a, here_x = mem.offset(a, at), [mem.offset(row, at) for row in x]
            chunks = range(COLS // 2 // CHUNK)
            low = [mem.load_global_v4(here_a, n * 64) for n in chunks]
            high = [mem.load_global_v4(here_a, n * 64 + 8 * row_bytes) for n in chunks]
            right = [[mem.load_global_v4(row, n * 64) for n in chunks] for row in here_x]
            for n in chunks:
                for i in range(group):
                    acc[4 * i : 4 * i + 4] = add_products(acc[4 * i : 4 * i + 4], low[n], high[n], right[i][n])
            return acc

        acc = p.for_range(first, last, 1, [p.f32(0.0)] * (4 * group), half_quad)
        # a sum of 8 rows and 16 ranks is 512 bytes, a slice's sums lie together
        at = p.add(p.mul(part, plan.lora_slice), p.add(p.mul(sum_index, group * 512), p.mul(self.lane, 16)))
        to = mem.offset(self.partial, at)
        for i in range(group):
            mem.store_global_f32x4(to, acc[4 * i : 4 * i + 4], i * 512)
        p.warp_sync()

        def count():
            mem.fence()
            mem.count(self.sync)

        p.when(self.is_lane_0, count)

    def add_slices(self, mine, is_first):
        """x A^T of the adapters whose outputs this CTA owns, from all slices to shared memory."""
        plan, threads, at_once = self.plan, 32 * self.plan.lora_warps, self.plan.summed_at_once
        asks = arith.andi(is_first, self.is_lane_0)  # one lane: many that ask would hold up those that count
        p.when(asks, lambda: mem.await_count(self.sync, p.i32(plan.lora_units)))
        p.named_sync(SUMMED, threads)
        first, end = self.own_adapters()
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)

        def one(index, _):
            # index counts 16 ranks times 8 rows, as the slices do
            tile, rows = p.div(index, plan.m_tiles), p.rem(index, plan.m_tiles)
            scales, _ = pick(self.plan.rank_tiles, tile, list(zip(self.lora_scale, self.global_scale, strict=True)))
            scaling, global_scale = (mem.load_global_f32(scale) for scale in scales)
            # the sums that it joins are multiplied by EPILOGUE_FACTOR / global_scale in the end
            scale = arith.mulf(scaling, arith.mulf(global_scale, p.f32(1 / EPILOGUE_FACTOR)))
            source = mem.offset(self.partial, p.add(p.mul(index, 512), p.mul(self.lane, 16)))
            full = plan.lora_slices // at_once * at_once

            def add(acc, at, count):
                loaded = [mem.load_fresh_f32x4(at, n * plan.lora_slice) for n in range(count)]
                for values in loaded:
                    acc = [arith.addf(a, b) for a, b in zip(acc, values, strict=True)]
                return acc

            acc = p.for_range(
                0, full, at_once, [p.f32(0.0)] * 4,
                lambda part, acc: add(acc, mem.offset(source, p.mul(part, plan.lora_slice)), at_once),
            )  # fmt: skip
            acc = add(acc, mem.offset(source, p.i32(full * plan.lora_slice)), plan.lora_slices - full)
            # lane (g, t) holds ranks g (elements 0, 1) and g + 8 (2, 3) of rows 2 t (0, 2) and 2 t + 1 (1, 3)
            to = p.add(p.add(self.h_base, p.mul(tile, plan.h_tile)), p.mul(rows, 8 * ROWS * 2))
            to = p.add(to, p.add(p.mul(t, 2 * ROWS * 2), p.mul(g, 2)))
            for e in range(4):
                mem.store_shared_half(to, arith.mulf(acc[e], scale), (e % 2) * ROWS * 2 + (e // 2) * 16)
            return []

        start = p.add(p.mul(first, plan.m_tiles), mine)
        p.for_range(start, p.mul(end, plan.m_tiles), plan.lora_warps, [], one)
        mem.barrier_arrive(self.h_full)

        def leave():  # the last to have seen the count clears it
            before = mem.count_and_wrap(mem.offset(self.sync, p.i32(4)), p.i32(plan.clusters - 1))
            p.when(p.eq(before, plan.clusters - 1), lambda: mem.store_global_b32(self.sync, p.i32(0)))

        p.when(asks, leave)
