"""LoRA inside the streaming kernel: s (x A^T) B^T, added to the sums of x W^T while they are in registers.

x A^T needs all of K before any output, so it is computed beside the stream of weights, by warps that would be idle:
  * a *unit* is 16 ranks of one A, up to 16 rows of x and one slice of K; the spare warps of all CTAs share the units,
    leave float32 sums in global memory and count them;
  * when all are there, the spare warps of every CTA that owns outputs add the slices in order, for the adapters of
    those outputs only, multiply by s and keep x A^T in shared memory as BF16;
  * after the last quad the compute warps multiply it by their rows of B, which they fetched first of all.

So one exchange through the L2, a few microseconds, runs beside the weights. All CTAs wait for all units: they must be
resident together, which variants.py checks. The counters (`sync` words) are zero before and after every call. Additions
have a fixed order.
"""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .layout import COLS, EPILOGUE_FACTOR, ROWS
from .pick import pick
from .stream_plan import Plan

SUMMED = 3  # a named barrier of the spare warps; see stream_compute.py for the others
CHUNK = 32  # columns for which a lane loads 16 bytes of each row
BATCH = 8  # slices under way together when they are added


class LoraWarps:
    """The part of a CTA's program that belongs to LoRA. The CTA's class sets the attributes below before."""

    plan: Plan
    pdl: bool

    # ---- the spare warps -----------------------------------------------------------------------------------------

    def multiply_by_a(self):
        """One spare warp: its units of x A^T, then its part of the CTA's sums over the slices."""
        plan, c = self.plan, self.plan.config
        mine = p.sub(self.warp, c.warps + 1)
        is_first = p.eq(mine, 0)
        p.when(is_first, lambda: self.make_barriers([(self.h_full, 32 * plan.lora_warps)]))
        if self.pdl:
            p.grid_dependency_wait()
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
                    for j in (0, 2):
                        left = (low[n][j], high[n][j], low[n][j + 1], high[n][j + 1])
                        b = right[i][n]
                        acc[4 * i : 4 * i + 4] = p.mma_bf16(acc[4 * i : 4 * i + 4], left, b[j], b[j + 1])
            return acc

        acc = p.for_range(first, last, 1, [p.f32(0.0)] * (4 * group), half_quad)
        # a sum of 8 rows and 16 ranks is 512 bytes, a slice's sums lie together
        at = p.add(p.mul(part, plan.lora_slice), p.add(p.mul(sum_index, group * 512), p.mul(self.lane, 16)))
        to = mem.offset(self.partial, at)
        for i in range(group):
            mem.store_global_f32x4(to, acc[4 * i : 4 * i + 4], i * 512)
        mem.fence()
        p.warp_sync()
        p.when(self.is_lane_0, lambda: mem.count_up(self.sync))

    def add_slices(self, mine, is_first):
        """x A^T of the adapters whose outputs this CTA owns, from all slices to shared memory."""
        plan, threads = self.plan, 32 * self.plan.lora_warps
        asks = arith.andi(is_first, self.is_lane_0)  # one lane: many that ask would hold up those that count
        p.when(asks, lambda: mem.wait_for_count(self.sync, p.i32(plan.lora_units)))
        p.named_sync(SUMMED, threads)
        mem.fence()
        ends = [sum(plan.rank_tiles[: i + 1]) for i in range(len(plan.n))]
        values = [(p.i32(end - count), p.i32(end)) for end, count in zip(ends, plan.rank_tiles, strict=True)]
        (first, _), _ = pick(self.plan.tiles_of, self.first_tile, values)
        (_, end), _ = pick(self.plan.tiles_of, p.sub(p.add(self.first_tile, self.tile_count), 1), values)
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)

        def one(index, _):
            # index counts 16 ranks times 8 rows, as the slices do
            tile, rows = p.div(index, plan.m_tiles), p.rem(index, plan.m_tiles)
            scales, _ = pick(self.plan.rank_tiles, tile, list(zip(self.lora_scale, self.global_scale, strict=True)))
            scaling, global_scale = (mem.load_global_f32(scale) for scale in scales)
            # the sums that it joins are multiplied by EPILOGUE_FACTOR / global_scale in the end
            scale = arith.mulf(scaling, arith.mulf(global_scale, p.f32(1 / EPILOGUE_FACTOR)))
            source = mem.offset(self.partial, p.add(p.mul(index, 512), p.mul(self.lane, 16)))
            full = plan.lora_slices // BATCH * BATCH

            def add(acc, at, count):
                loaded = [mem.load_fresh_f32x4(at, n * plan.lora_slice) for n in range(count)]
                for values in loaded:
                    acc = [arith.addf(a, b) for a, b in zip(acc, values, strict=True)]
                return acc

            acc = p.for_range(
                0, full, BATCH, [p.f32(0.0)] * 4,
                lambda part, acc: add(acc, mem.offset(source, p.mul(part, plan.lora_slice)), BATCH),
            )  # fmt: skip
            acc = add(acc, mem.offset(source, p.i32(full * plan.lora_slice)), plan.lora_slices - full)
            # lane (g, t) holds ranks g (elements 0, 1) and g + 8 (2, 3) of rows 2 t (0, 2) and 2 t + 1 (1, 3)
            to = p.add(p.add(self.h_base, p.mul(tile, plan.h_tile)), p.mul(rows, 8 * ROWS * 2))
            to = p.add(to, p.add(p.mul(t, 2 * ROWS * 2), p.mul(g, 2)))
            for e in range(4):
                mem.store_shared_bf16(to, arith.mulf(acc[e], scale), (e % 2) * ROWS * 2 + (e // 2) * 16)
            return []

        start = p.add(p.mul(first, plan.m_tiles), mine)
        p.for_range(start, p.mul(end, plan.m_tiles), plan.lora_warps, [], one)
        mem.barrier_arrive(self.h_full)

        def leave():  # the last to have seen the count clears it
            before = mem.count_and_wrap(mem.offset(self.sync, p.i32(4)), p.i32(plan.clusters - 1))
            p.when(p.eq(before, plan.clusters - 1), lambda: mem.store_global_b32(self.sync, p.i32(0)))

        p.when(asks, leave)

    # ---- the compute warps ---------------------------------------------------------------------------------------

    def fetch_b(self, adds_lora):
        """Start the copy of B's rows for this warp's row tiles, if it is one of those of K's first part.

        Also notes, for each tile, where its adapter's part of x A^T begins and how many 16 ranks it has.
        """
        plan, c = self.plan, self.plan.config
        self.b_warp = p.add(self.b_base, p.mul(self.place_n, plan.b_warp))
        self.h_of, self.ranks_of = [], []
        first = [sum(plan.rank_tiles[:i]) for i in range(len(plan.n))]
        for r in range(c.tiles):
            values = [
                (self.b[i], p.i32(first[i]), p.i32(plan.rank_tiles[i]), p.i32(plan.n[i])) for i in range(len(plan.n))
            ]
            (b, h, count, n), local = pick(self.plan.tiles_of, p.add(self.first_tile, self.local_tiles[r]), values)
            count = p.select(arith.andi(adds_lora, self.valid[r]), count, 0)
            self.h_of.append(p.mul(h, plan.h_tile))
            self.ranks_of.append(count)
            # 16 rows of `count` x 32 bytes: each lane takes one row's half of every 32 bytes
            row, half = p.shr(self.lane, 1), p.and_(self.lane, 1)
            known = p.minimum(p.add(p.mul(local, ROWS), row), p.sub(n, 1))
            source = mem.offset(b, p.add(p.mul(p.mul(known, count), 32), p.mul(half, 16)))
            to = p.add(self.b_warp, p.add(p.mul(row, max(plan.ranks) * 2), p.mul(half, 16)))
            for j in range(max(plan.rank_tiles)):
                at = r * ROWS * max(plan.ranks) * 2 + j * 32
                p.when(p.lt(j, count), lambda at=at, j=j, to=to, s=source: mem.copy_async_16(to, s, at, j * 32))

    def add_lora(self, acc, adds_lora, g, t):
        """acc + (x A^T) B^T in the warps of K's first part; the others multiply by zeros."""
        plan, c = self.plan, self.plan.config
        p.when(adds_lora, lambda: mem.barrier_wait(self.h_full, p.i32(0)))
        acc = list(acc)
        stride = max(plan.ranks) * 2
        b_at = p.add(self.b_warp, p.add(p.mul(g, stride), p.mul(t, 8)))
        h_lane = p.add(self.h_base, p.add(p.mul(g, ROWS * 2), p.mul(t, 8)))
        for r in range(c.tiles):
            h_at = p.add(h_lane, self.h_of[r])
            for j in range(max(plan.rank_tiles)):
                here = p.lt(j, self.ranks_of[r])
                at = r * ROWS * stride + j * 32
                low, high = mem.load_shared_v2(b_at, at), mem.load_shared_v2(b_at, at + 8 * stride)
                a = [p.select(here, v, 0) for v in (low[0], high[0], low[1], high[1])]
                for i in range(plan.m_tiles):
                    # beyond the adapter's ranks lies another's x A^T or old bytes, which may be NaN
                    h = mem.load_shared_v2(h_at, j * plan.h_tile + i * 8 * ROWS * 2)
                    h = [p.select(here, v, 0) for v in h]
                    s = slice((r * plan.m_tiles + i) * 4, (r * plan.m_tiles + i) * 4 + 4)
                    acc[s] = p.mma_bf16(acc[s], a, *h)
        return acc
