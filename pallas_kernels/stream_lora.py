"""LoRA inside the streaming kernel: h B^T added to the sums of x W^T while they are in registers, h = s x A^T.

h comes from the kernel before this one, or is computed beside the stream of weights (stream_slices.py); either way it
lies in shared memory. After the last quad the compute warps multiply it by their rows of B, which they fetched first of
all, or, where there was no room, fetch then.
"""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .layout import ROWS
from .pick import of_tile
from .stream_plan import Plan


class LoraWarps:
    """The part of a CTA's program that belongs to LoRA. The CTA's class sets the attributes below before."""

    plan: Plan

    def own_adapters(self):
        """The first and the end of h's 16 ranks that belong to the adapters whose outputs this CTA owns."""
        plan = self.plan
        ends = [sum(plan.rank_tiles[: i + 1]) for i in range(len(plan.n))]
        values = [(p.i32(end - count), p.i32(end)) for end, count in zip(ends, plan.rank_tiles, strict=True)]
        (first, _), _ = of_tile(plan, self.first_tile, values)
        (_, end), _ = of_tile(plan, self.tile(p.sub(self.tile_count, 1)), values)
        return first, end

    # ---- the warp that loads x -----------------------------------------------------------------------------------

    def copy_h(self):
        """The own adapters' part of a given h to shared memory, behind all of x: so it has the time of the quads that
        wait in x's ring, as x itself has."""
        plan = self.plan
        first, end = self.own_adapters()
        pieces = plan.h_tile // 16

        def one(index, _):
            # 16 ranks of a row are two pieces of 16 bytes, one behind the other as the index counts them
            tile, rest = p.div(index, pieces), p.rem(index, pieces)
            row = p.minimum(p.shr(rest, 1), plan.m - 1)  # rows behind M repeat the last one, and are not stored
            source = mem.wide_offset(self.h, row, 2 * sum(plan.ranks))
            source = mem.offset(source, p.add(p.mul(tile, ROWS * 2), p.mul(p.and_(rest, 1), 16)))
            mem.copy_async_16(p.add(self.h_base, p.mul(index, 16)), source)
            return []

        p.for_range(p.add(p.mul(first, pieces), self.lane), p.mul(end, pieces), 32, [], one)
        mem.copy_arrive(self.h_full)

    # ---- the compute warps ---------------------------------------------------------------------------------------

    def adapter_of(self, r: int, first_tile, adds_lora):
        """Of this warp's row tile `r`, the CTA's first being `first_tile`: its adapter's B, where its part of x A^T
        begins, how many 16 ranks this warp adds, and N; and the tile's place in its weight."""
        plan = self.plan
        first = [sum(plan.rank_tiles[:i]) for i in range(len(plan.n))]
        values = [
            (self.b[i], p.i32(plan.h_tile * first[i]), p.i32(plan.rank_tiles[i]), p.i32(plan.n[i]))
            for i in range(len(plan.n))
        ]
        (b, h, count, n), local = of_tile(plan, self.tile(self.local_tiles[r], first_tile), values)
        return (b, h, p.select(arith.andi(adds_lora, self.valid[r]), count, 0), n), local

    def fetch_b(self, adds_lora, first_tile):
        """Start the copy of B's rows for this warp's row tiles, if it is one of those of K's first part."""
        plan, c = self.plan, self.plan.config
        b_warp = p.add(self.b_base, p.mul(self.place_n, plan.b_warp))
        row, half = self.row_and_half()
        for r in range(c.tiles):
            # 16 rows of `count` x 32 bytes: each lane takes one row's half of every 32 bytes
            source, count = self.row_of_b(r, first_tile, adds_lora, 16)
            to = p.add(b_warp, p.add(p.mul(row, max(plan.ranks) * 2), p.mul(half, 16)))
            for j in range(max(plan.rank_tiles)):
                at = r * ROWS * max(plan.ranks) * 2 + j * 32
                p.when(p.lt(j, count), lambda at=at, j=j, to=to, s=source: mem.copy_async_16(to, s, at, j * 32))

    def prefetch_b(self, adds_lora):
        """Has the L2 fetch what `fetch_b` will copy: each lane asks for half of a row, 16 ranks at a time."""
        _, half = self.row_and_half()
        for r in range(self.plan.config.tiles):
            source, count = self.row_of_b(r, self.first_tile, adds_lora, 32)
            for j in range(0, max(self.plan.rank_tiles), 2):
                p.when(p.lt(p.add(half, j), count), lambda j=j, s=source: mem.prefetch(s, j * 32))

    def row_and_half(self):
        """Which row of a tile's B a lane fetches, and which half of it."""
        return p.shr(self.lane, 1), p.and_(self.lane, 1)

    def row_of_b(self, r: int, first_tile, adds_lora, piece: int):
        """Where this lane's pieces, of so many bytes, begin in B of row tile `r`, and how many 16 ranks there are."""
        (b, _, count, n), local = self.adapter_of(r, first_tile, adds_lora)
        row, half = self.row_and_half()
        known = p.minimum(p.add(p.mul(local, ROWS), row), p.sub(n, 1))
        return mem.offset(b, p.add(p.mul(p.mul(known, count), 32), p.mul(half, piece))), count

    def add_lora(self, acc, adds_lora, g, t):
        """acc + (x A^T) B^T in the warps of K's first part; the others multiply by zeros."""
        plan, c = self.plan, self.plan.config
        p.when(adds_lora, lambda: mem.barrier_wait(self.h_full, p.i32(0)))
        acc = list(acc)
        stride = max(plan.ranks) * 2
        b_warp = p.add(self.b_base, p.mul(p.opaque(self.place_n), plan.b_warp))
        b_at = p.add(b_warp, p.add(p.mul(g, stride), p.mul(t, 8)))
        h_lane = p.add(self.h_base, p.add(p.mul(g, ROWS * 2), p.mul(t, 8)))
        # opaque: found again, where fetch_b's answers would keep registers through all of K
        first_tile = p.opaque(self.first_tile)
        for r in range(c.tiles):
            (_, h, count, _), _ = self.adapter_of(r, first_tile, adds_lora)
            h_at = p.add(h_lane, h)
            for j in range(max(plan.rank_tiles)):
                here = p.lt(j, count)
                at = r * ROWS * stride + j * 32
                low, high = mem.load_shared_v2(b_at, at), mem.load_shared_v2(b_at, at + 8 * stride)
                a = [p.select(here, v, 0) for v in (low[0], high[0], low[1], high[1])]
                for i in range(plan.m_tiles):
                    # beyond the adapter's ranks lies another's x A^T or old bytes, which may be NaN
                    h = mem.load_shared_v2(h_at, j * plan.h_tile + i * 8 * ROWS * 2)
                    h = [p.select(here, v, 0) for v in h]
                    s = slice((r * plan.m_tiles + i) * 4, (r * plan.m_tiles + i) * 4 + 4)
                    acc[s] = p.mma_half(acc[s], a, *h)
        return acc
