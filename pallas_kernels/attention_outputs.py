"""How the attention kernel ends (see attention_kernel.py): the warps' partial results become outputs, and outputs are
multiplied by LoRA's A of the projection behind it. In the block kernel all CTAs would have to wait for each other for
that product.
"""

import functools

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .attention_tiles import AttentionTiles
from .fragment_order import unit_place
from .hidden import add_products
from .layout import ROWS


class AttentionOutputs(AttentionTiles):
    """One warp's share of a CTA's outputs."""

    def leave(self, state):
        """This warp's partial result to the place of its ring."""
        plan, c = self.plan, self.plan.config
        for i in range(c.slots):
            row = p.add(self.g, 8 * i)
            at = p.add(self.ring, p.mul(row, plan.partial_stride))
            for block in range(plan.E // 16):
                first, second = (state[2 * c.slots + 4 * d + 2 * i :][:2] for d in (2 * block, 2 * block + 1))
                self.values.leave(at, self.t, block, first, second)
            total = p.over_quad(arith.addf, state[2 * i + 1])

            def write(row=row, i=i, total=total):
                at = p.add(self.ring, p.add(p.mul(row, 4), plan.rows * plan.partial_stride))
                mem.store_shared_f32(at, state[2 * i], 0)
                mem.store_shared_f32(at, total, 4 * plan.rows)

            p.when(p.eq(self.t, 0), write)

    def merge(self):
        """The CTA's warps' results become one, row by row. Alone, a CTA has the outputs with that; in a cluster each
        gets all CTAs' results of an equal share of the rows, and adds them up."""
        plan, c = self.plan, self.plan.config
        pairs, rows = plan.E // 2, c.units * plan.rows
        received = p.add(self.base, plan.received_at)

        def of_warps(row, pair):
            unit, of_unit = p.div(row, plan.rows), p.rem(row, plan.rows)
            warps = [p.add(unit, team * c.units) for team in range(plan.teams)]
            joined = _join([self.of_warp(p.add(self.base, p.mul(w, plan.ring_bytes)), of_unit, pair) for w in warps])
            if c.cluster == 1:
                self.store(row, row, pair, *joined[1:])
            else:
                owner, own = p.div(row, plan.owned_rows), p.rem(row, plan.owned_rows)
                place = p.add(p.mul(p.add(p.mul(self.rank, plan.owned_rows), own), pairs), pair)
                to = p.add(received, p.mul(place, 16))
                mem.send_f32x4(mem.map_rank(to, owner), joined, mem.map_rank(self.all_here, owner))

        self.each_pair(rows, of_warps)
        if c.cluster == 1:
            return
        mem.barrier_wait_for_cluster(self.all_here, p.i32(0))

        def of_ctas(own, pair):
            at, size = p.add(received, p.mul(p.add(p.mul(own, pairs), pair), 16)), 16 * plan.owned_rows * pairs
            joined = _join([mem.load_shared_f32x4(at, size * r) for r in range(c.cluster)])
            self.store(p.add(p.mul(self.rank, plan.owned_rows), own), own, pair, *joined[1:])

        self.each_pair(plan.owned_rows, of_ctas)

    def each_pair(self, rows: int, body):
        """body(row, pair of outputs) of rows that the warps take turns with."""

        def of_row(row, _):
            for first in range(0, self.plan.E // 2, 32):
                body(row, p.add(self.lane, first))
            return []

        p.for_range(self.warp, rows, self.plan.config.warps, [], of_row)

    def of_warp(self, place, row, pair):
        """A warp's partial result of a pair of outputs: maximum, sum of weights, weighted sums."""
        plan = self.plan
        head = p.add(place, p.add(p.mul(row, 4), plan.rows * plan.partial_stride))
        at = p.add(place, p.add(p.mul(row, plan.partial_stride), p.mul(pair, 8)))
        return [*(mem.load_shared_f32(head, 4 * plan.rows * i) for i in range(2)), *mem.load_shared_f32x2(at)]

    def store(self, row, own, pair, total, *sums):
        """A pair of outputs of a row, this CTA's own-th; zeros for a sample that has ended."""
        plan = self.plan
        head, sample = p.and_(row, 7), p.add(self.first_sample, p.shr(row, 3))

        def write():
            inverse = arith.divf(p.f32(1.0), arith.maximumf(total, p.f32(1e-30)))
            index = p.add(p.mul(sample, plan.H), p.add(p.mul(self.head, plan.Q), head))
            column = p.mul(pair, 2)
            place = unit_place(column) if plan.in_units else column
            at = mem.offset(mem.wide_offset(self.at["out"], index, plan.row_bytes), p.mul(place, 2))
            values = [arith.mulf(s, inverse) for s in sums]
            mem.store_global_halfx2(at, *values)
            if plan.ranks:
                mem.store_shared_halfx2(p.add(self.own_row(own), p.mul(column, 2)), *values)

        p.when(p.lt(head, plan.Q), write)

    # ---- x A^T ----------------------------------------------------------------------------------------------------

    def own_row(self, own):
        """Where the CTA's own-th row of outputs lies once more, for its warp's products with A."""
        return p.add(p.add(self.base, self.plan.outputs_at), p.mul(own, self.plan.row_bytes))

    def own_rows(self):
        """What this warp has merged: which of the CTA's rows, whether there is one, which of all, and its head."""
        plan = self.plan
        for n in range(0, plan.owned_rows, plan.config.warps):
            own = p.add(self.warp, n)
            row = p.add(p.mul(self.rank, plan.owned_rows), own)
            head = p.and_(row, 7)
            exists = arith.andi(p.lt(own, plan.owned_rows), p.lt(head, plan.Q))
            yield own, exists, row, p.add(p.mul(self.head, plan.Q), p.minimum(head, plan.Q - 1))

    def fetch_a(self):
        """Starts the copies of A's first ranks, of the columns of this warp's first head, to the last slot of its ring:
        as if they were keys of one more tile."""
        plan, rows = self.plan, self.of_a
        _, exists, _, head = next(self.own_rows())

        def copy():
            pieces = plan.row_bytes // 16
            piece, its_rank = p.rem(self.lane, pieces), p.div(self.lane, pieces)
            for i in range(0, plan.early_ranks, 32 // pieces):
                rank = p.add(its_rank, i)
                source = mem.wide_offset(self.at["a"], p.add(p.mul(rank, plan.H), head), plan.row_bytes)
                to = p.add(p.add(self.ring, plan.a_at), rows.place(rank, piece))
                mem.copy_async_16(to, mem.offset(source, p.mul(piece, 16)))

        p.when(exists, copy)

    def load_a(self, head, tile):
        """This lane's part of 16 ranks of a head's columns: of each chunk of 32 those of two rows."""
        plan = self.plan
        rank = p.add(p.mul(tile, ROWS), self.g)
        at = mem.wide_offset(self.at["a"], p.add(p.mul(rank, plan.H), head), plan.row_bytes)
        lane, below = mem.offset(at, p.mul(self.t, 16)), 8 * plan.H * plan.row_bytes
        return [[mem.load_global_v4(lane, 64 * chunk + row) for row in (0, below)] for chunk in range(plan.E // 32)]

    def multiply_by_a(self):
        """A part of x A^T for each row, over its head's columns: so additions have one order in all configurations. All
        eight columns of the product are the same row of x."""
        plan, rows, early = self.plan, self.of_a, self.plan.early_ranks // ROWS
        mem.copy_wait_all()
        p.warp_sync()
        for n, (own, exists, row, head) in enumerate(self.own_rows()):
            fetched = early if n * plan.config.warps % 8 == 0 else 0  # of the first row's head

            def products(own=own, row=row, head=head, fetched=fetched):
                at = p.add(self.own_row(own), p.mul(self.t, 16))
                x = [mem.load_shared_v4(at, 64 * chunk) for chunk in range(plan.E // 32)]
                chunks = rows.chunks(p.add(self.ring, plan.a_at), self.g, self.t)
                a = [
                    [[rows.load(chunk, ROWS * tile + below) for below in (0, 8)] for chunk in chunks]
                    for tile in range(fetched)
                ]
                for tile, product in enumerate(_products(a, x)):
                    self.leave_product(row, head, p.i32(tile), product)

                def one(tile, _):
                    self.leave_product(row, head, tile, *_products([self.load_a(head, tile)], x))
                    return []

                p.for_range(fetched, plan.ranks // ROWS, 1, [], one)

            p.when(exists, products)

    def leave_product(self, row, head, tile, product):
        """16 ranks of one row, as the block kernel reads them (hidden.py)."""
        plan = self.plan
        sample = p.add(self.first_sample, p.shr(row, 3))
        of_head = p.add(p.mul(head, plan.ranks // ROWS), tile)
        fragment = p.add(p.mul(of_head, plan.panels), p.shr(sample, 3))
        to = mem.offset(mem.wide_offset(self.at["hidden"], fragment, 512), p.mul(self.lane, 16))
        to = mem.offset(to, p.mul(p.and_(sample, 1), 4))

        def store():
            mem.store_global_f32(to, product[0])
            mem.store_global_f32(mem.offset(to, p.i32(8)), product[2])

        p.when(p.eq(self.t, p.shr(p.and_(sample, 7), 1)), store)


def _products(a, x):
    """x times tiles of A, [tile][chunk][rows], in two chains each: one would wait for itself."""
    sums = [[[p.f32(0.0)] * 4 for _ in range(2)] for _ in a]
    for chunk, columns in enumerate(x):
        for chains, tile in zip(sums, a, strict=True):
            chains[chunk % 2] = add_products(chains[chunk % 2], *tile[chunk], columns)
    return [p.total(chains) for chains in sums]


def _join(parts):
    """Partial results of a pair of outputs, each a maximum, a sum of weights and two weighted sums, added in order."""
    top = functools.reduce(arith.maximumf, [part[0] for part in parts])
    scales = [p.exp2(arith.subf(part[0], top)) for part in parts]
    return [top, *p.total([[arith.mulf(s, v) for v in part[1:]] for s, part in zip(scales, parts, strict=True)])]
