"""The x of the kernel that makes a matmul's inputs (inputs_kernel.py): given or RMSNorm's, chunk by chunk."""

import functools

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .inputs_plan import APART, CHUNK, CLUSTER, InputsPlan


class Sources:
    """The part of a CTA's program that makes x and multiplies it by A. The CTA's class sets the attributes before."""

    plan: InputsPlan
    eps: float

    # ---- x that is given ------------------------------------------------------------------------------------------

    def streamed(self):
        """This warp's run of K, some chunks at a time; its sums."""
        plan, column = self.plan, p.mul(self.t, 16)
        (source,) = self.source
        rows = [mem.offset(mem.wide_offset(source, row, 2 * plan.k), column) for row in self.known]

        def batch(start, acc):
            loaded = []
            for b in range(plan.batch):
                has = p.lt(p.add(start, b), self.end)
                chunk = p.minimum(p.add(start, b), p.sub(self.end, 1))
                at = p.mul(chunk, 2 * CHUNK)
                loaded.append((has, chunk, self.load_a(chunk), [pieces(mem.offset(row, at)) for row in rows]))
            for has, chunk, halves, xs in loaded:
                self.store_x(has, chunk, xs)
                acc = self.products(acc, halves, xs, has)
            return acc

        acc = p.for_range(self.begin, self.end, plan.batch, [p.f32(0.0)] * (4 * plan.fragments), batch)
        p.cluster_wait()  # the others' barriers are made
        return acc

    # ---- RMSNorm of the residual stream ---------------------------------------------------------------------------

    def normed(self):
        """The residual stream with what is added to it, its norm, and this warp's sums."""
        plan, run = self.plan, range(self.plan.run)
        residual, more, scale = self.source
        column = p.mul(self.t, 32)
        rows = [[mem.offset(mem.wide_offset(s, row, 4 * plan.k), column) for row in self.known]
                for s in (residual, more)]  # fmt: skip
        has = [p.lt(p.add(self.begin, b), self.end) for b in run]
        chunks = [p.minimum(p.add(self.begin, b), plan.chunks - 1) for b in run]
        squares = [p.f32(0.0)] * plan.eights
        for first in range(0, plan.run, plan.norm_batch):
            some = range(first, min(first + plan.norm_batch, plan.run))
            loaded = [[[_sixteen(row, p.mul(chunks[b], 4 * CHUNK)) for row in of] for of in rows] for b in some]
            if first == 0:
                p.cluster_wait()  # the others' barriers are made
            for b, (old, new) in zip(some, loaded, strict=True):
                for j in range(plan.eights):
                    squares[j] = self.join(b, j, has[b], chunks[b], old[j], new[j], squares[j])
        scales = [_sixteen(mem.offset(scale, column), p.mul(chunk, 4 * CHUNK)) for chunk in chunks]
        early = [self.load_a(chunks[b]) for b in range(plan.early)]
        inverse = self.inverse(squares)
        acc = [p.f32(0.0)] * (4 * plan.fragments)
        for b in run:
            halves = early[b] if b < plan.early else self.load_a(chunks[b])
            xs = []
            for j in range(plan.eights):
                flow = [v for part in range(4) for v in mem.load_shared_f32x4(self.own, self.flow_at(b, j, part))]
                x = [arith.mulf(arith.mulf(v, inverse[j]), weight) for v, weight in zip(flow, scales[b], strict=True)]
                xs.append([p.pack_half(*x[i : i + 2]) for i in range(0, 16, 2)])
            self.store_x(has[b], chunks[b], xs)
            acc = self.products(acc, halves, xs, has[b])
        return acc

    def flow_at(self, b: int, j: int, part: int) -> int:
        """Where four of a lane's numbers of a chunk and an eight of rows lie."""
        return ((b * self.plan.eights + j) * 4 + part) * 512

    def join(self, b: int, j: int, has, chunk, old, new, squares):
        """Adds to the residual stream, in a row's sixteen columns; keeps them, and adds their squares."""
        flow = [arith.addf(x, y) for x, y in zip(old, new, strict=True)]
        at = p.add(p.mul(chunk, 4 * CHUNK), p.mul(self.t, 32))
        to = mem.offset(mem.wide_offset(self.outs["residual"], self.known[j], 4 * self.plan.k), at)
        fours = [flow[i : i + 4] for i in (0, 4, 8, 12)]
        for part, four in enumerate(fours):
            mem.store_shared_f32x4(self.own, four, self.flow_at(b, j, part))

        def store():
            for four, byte in zip(fours, (0, 16, 128, 144), strict=True):
                mem.store_global_f32x4(to, four, byte)

        p.when(self.writes(has, j), store)
        here = functools.reduce(arith.addf, [arith.mulf(v, v) for v in flow])
        return arith.addf(squares, arith.select(has, here, p.f32(0.0)))

    def inverse(self, squares):
        """1 / sqrt(mean of the squares + eps) of this lane's rows."""
        plan = self.plan
        for j, here in enumerate(squares):
            total = p.over_lanes(arith.addf, here, (1, 2))
            to = p.add(self.base, p.mul(p.add(p.mul(self.warp, plan.rows), p.add(self.g, 8 * j)), 4))
            p.when(p.eq(self.t, 0), lambda to=to, total=total: mem.store_shared_f32(to, total, 0))
        p.cta_sync()

        def give():
            row, cta = p.rem(self.tid, plan.rows), p.div(self.tid, plan.rows)
            of_warp = p.add(self.base, p.mul(row, 4))
            total = functools.reduce(
                arith.addf, [mem.load_shared_f32(of_warp, warp * plan.rows * 4) for warp in range(plan.warps)]
            )
            to = p.add(p.mul(p.add(p.mul(self.rank, plan.rows), row), 4), plan.received_at)
            to, barrier = (mem.map_rank(at, cta) for at in (p.add(self.base, to), self.squares_here))
            mem.send_f32(to, total, barrier)

        p.when(p.lt(self.tid, plan.rows * CLUSTER), give)
        mem.barrier_wait_for_cluster(self.squares_here, p.i32(0))
        found = []
        for j in range(plan.eights):
            at = p.add(self.base, p.mul(p.add(self.g, 8 * j), 4))
            parts = [mem.load_shared_f32(at, plan.received_at + cta * plan.rows * 4) for cta in range(CLUSTER)]
            mean = arith.mulf(functools.reduce(arith.addf, parts), p.f32(1 / plan.k))
            found.append(p.rsqrt(arith.addf(mean, p.f32(self.eps))))
        return found

    # ---- x's way out --------------------------------------------------------------------------------------------

    def writes(self, has, j: int):
        """Whether this lane writes what it has of a chunk and the j-th eight of rows."""
        return arith.andi(arith.andi(has, self.first_group), p.lt(self.rows[j], self.plan.m))

    def store_x(self, has, chunk, xs):
        """A chunk of x, in the order that the matmul reads."""
        plan = self.plan
        if not plan.writes_x:
            return
        out = self.outs["x"]
        for j, words in enumerate(xs):
            if plan.ordered or plan.units:  # eights of a row, next to the other rows' or to the row's others
                row_bytes, strides = (16, plan.ordered * 16) if plan.ordered else (2 * plan.k, 16)
                first = p.add(p.mul(chunk, 8), p.add(p.mul(p.and_(self.t, 1), 4), p.and_(self.t, 2)))
                to = mem.wide_offset(mem.wide_offset(out, first, strides), self.known[j], row_bytes)
                fours = self.in_order(words)
            else:
                fours, strides = (words[:4], words[4:]), APART
                at = p.add(p.mul(chunk, 2 * CHUNK), p.mul(self.t, 16))
                to = mem.offset(mem.wide_offset(out, self.known[j], 2 * plan.k), at)

            def store(to=to, fours=fours, strides=strides):
                for i, four in enumerate(fours):
                    mem.store_global_v4(to, four, i * strides)

            p.when(self.writes(has, j), store)

    def in_order(self, words):
        """A lane's 16 bytes of two (step, half) of the chunk in fragment order (fragment_order.py), from the lane that
        has the other two of its four t. Lane t holds two t, t / 2 and 2 + t / 2, of half t % 2, all four steps' words;
        it gives away those of the steps that it does not store, and stores steps 0 and 1 if t < 2, else 2 and 3."""
        upper = p.eq(p.and_(self.t, 2), 2)
        mine, others = [], []
        for piece in (words[:4], words[4:]):
            mine.append([p.select(upper, piece[i + 2], piece[i]) for i in range(2)])
            others.append([p.shuffle_xor(p.select(upper, piece[i], piece[i + 2]), 2) for i in range(2)])
        out = []
        for i in range(2):
            pairs = zip((piece[i] for piece in mine), (piece[i] for piece in others), strict=True)
            out.append([p.select(upper, *pair) for a, b in pairs for pair in ((b, a), (a, b))])
        return out


def pieces(row, byte_offset: int = 0):
    """A lane's two pieces of 16 bytes."""
    return [word for i in range(2) for word in mem.load_global_v4(row, byte_offset + i * APART)]


def _sixteen(row, at):
    """Two pieces of eight float32 numbers."""
    here = mem.offset(row, at)
    return [v for byte in (0, 16, 128, 144) for v in mem.load_global_f32x4(here, byte)]
