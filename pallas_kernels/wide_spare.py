"""x A^T inside the wide kernel, by CTAs that have no tile: where one wave of tiles leaves multiprocessors idle.

It needs all of K before any output, so it is made beside the product, and the product adds it last (wide_lora.py).
Letters: M rows, K inputs; fragments of 16 ranks x 8 rows, as m16n8k16 leaves them.
  * The spare CTAs share K. Each copies its columns of x and A to shared memory, as many as it holds at a time, all of
    them under way together; its warps multiply units of up to 96 ranks and 32 rows. It leaves its sums in global
    memory, where they stay in the L2.
  * When all have, each adds up some fragments of all CTAs, scales them, and stores h = s x A^T scale / EPILOGUE_FACTOR
    in 16 bits; when all have done that, the CTAs whose tiles need it load it as they load x.

  sums    float32 [spare CTAs][fragments][32 lanes][4]
  sync    two counters: of spare CTAs that have left sums and then have seen that all have; of those that have stored h,
          and then of CTAs that have read it. They go back to zero by themselves.

Additions have a fixed order, which depends on K, the number of row tiles, the ranks and the number of spare CTAs. All
CTAs are resident, which make_plan and variants.py see to.
"""

import functools

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .fragment_order import from_unit_place
from .hidden import add_products, store_hidden
from .layout import EPILOGUE_FACTOR
from .pick import pick
from .wide_plan import WidePlan
from .wide_spare_plan import FRAGMENT, STEP, UNIT_EIGHTS, WARPS

STEP_BYTES = 2 * STEP
AT_ONCE = 24  # CTAs whose sums are under way together


def sums_shape(plan: WidePlan) -> tuple[int]:
    """Of the spare CTAs' sums, float32."""
    return (plan.spare.ctas * plan.spare.fragments * FRAGMENT // 4,)


class SpareCtas:
    """The program of a CTA without a tile, and how others take what it has made. The CTA's class sets the attributes
    before: of each adapter A, global scale and LoRA's scaling among them."""

    plan: WidePlan

    def make_h(self):
        plan, spare = self.plan, self.plan.spare
        place = p.sub(p.sreg("ctaid.x"), plan.ctas)
        scales = [[mem.load_global_f32(scale) for scale in pair] for pair in self.h_scales]  # they come from far
        self.of_lane = p.add(self.base, p.mul(self.lane, 16))
        steps = plan.d // STEP
        begin, end = (p.div(p.mul(i, steps), spare.ctas) for i in (place, p.add(place, 1)))
        units = spare.fragments // (spare.unit_tiles * UNIT_EIGHTS)
        unit, part = p.rem(self.warp, units), p.div(self.warp, units)

        def stage(first, acc):
            count = p.minimum(p.sub(end, first), spare.stage)
            self.fetch(first, count)
            mem.copy_wait_all()
            p.cta_sync()
            acc = self.products(unit, part, count, acc)
            p.cta_sync()
            return acc

        acc = [p.f32(0.0)] * (4 * spare.unit_tiles * UNIT_EIGHTS)
        acc = p.for_range(begin, end, spare.stage, acc, stage)
        p.when(p.lt(part, spare.parts), lambda: self.leave_products(unit, part, acc))
        p.cta_sync()
        p.for_range(self.warp, spare.fragments, WARPS, [], lambda f, _: self.leave_sums_of(place, f) or [])
        p.cta_sync()

        def meet():
            mem.fence()
            mem.count(self.left)
            mem.wait_for_at_least(self.left, p.i32(spare.ctas))

        is_first = p.eq(self.tid, 0)
        p.when(is_first, meet)
        p.cta_sync()
        first = p.add(p.mul(place, WARPS), self.warp)
        p.for_range(first, spare.fragments, spare.ctas * WARPS, [], lambda f, _: self.finish_h(f, scales) or [])
        mem.fence_async()
        p.cta_sync()

        def tell():
            mem.fence()
            mem.count(self.stored)
            mem.count_and_wrap(self.left, p.i32(2 * spare.ctas - 1))

        p.when(is_first, tell)

    def await_h(self):
        """One thread of a CTA that needs it, before it loads h."""
        mem.wait_for_at_least(self.stored, p.i32(self.plan.spare.ctas))
        mem.fence_async()

    def leave_h(self):
        """The same thread afterwards."""
        mem.count_and_wrap(self.stored, p.i32(self.plan.spare.ctas + self.plan.readers - 1))

    # ---- parts ---------------------------------------------------------------------------------------------------

    def fetch(self, first, count):
        """Start the copy of some steps' columns, of rows of x and behind them of A; each warp copies whole rows."""
        plan, spare = self.plan, self.plan.spare
        column, pieces = p.mul(first, STEP_BYTES), p.mul(count, STEP_BYTES // 16)

        def copy(row, source):
            here = mem.offset(source, p.add(column, p.mul(self.lane, 16)))
            at = p.add(self.of_lane, p.mul(row, spare.stride))
            for piece in range(0, spare.stage * STEP_BYTES // 16, 32):
                known = p.lt(p.add(self.lane, piece), pieces)
                p.when(known, functools.partial(mem.copy_async_16, at, here, 16 * piece, 16 * piece))
            return []

        def of_a(row, _):
            (a,), local = pick(self.adapters_ranks(), row, [(a,) for a in self.a])
            copy_row = copy_ordered if plan.handover.units else copy
            return copy_row(p.add(row, 8 * spare.eights), mem.wide_offset(a, local, 2 * plan.d))

        def copy_ordered(row, source):
            """Two columns a lane, to where x in unit order has them."""
            at = p.add(self.base, p.add(p.mul(row, spare.stride), p.mul(self.lane, 4)))
            for place in range(0, spare.stage * STEP, 64):
                place_here = p.add(p.add(p.mul(first, STEP), place), p.mul(self.lane, 2))
                here = mem.offset(source, p.mul(from_unit_place(place_here), 2))
                known = p.lt(p.add(p.mul(self.lane, 2), place), p.mul(count, STEP))
                p.when(known, functools.partial(mem.copy_async_4, at, here, 2 * place))
            return []

        p.for_range(self.warp, sum(plan.ranks), WARPS, [], of_a)
        p.for_range(self.warp, plan.m, WARPS, [], lambda row, _: copy(row, mem.wide_offset(self.x, row, 2 * plan.d)))

    def adapters_ranks(self) -> list[int]:
        """Of each adapter."""
        return [rank for rank in self.plan.ranks if rank]

    def products(self, unit, part, count, acc):
        """acc + A x^T of a unit, over each `parts`-th of the columns in shared memory."""
        spare = self.plan.spare
        first_tile, first_eight = self.first_of(unit)
        g, piece = p.shr(self.lane, 2), p.mul(p.and_(self.lane, 3), 16)

        def place(row):
            return p.add(p.add(self.base, p.mul(p.add(row, g), spare.stride)), piece)

        x_at = place(p.mul(first_eight, 8))  # rows behind M are old bytes, whose products are stored nowhere
        tiles = [p.minimum(p.add(first_tile, n), spare.tiles - 1) for n in range(spare.unit_tiles)]
        a_at = [place(p.add(p.mul(tile, 16), 8 * spare.eights)) for tile in tiles]

        def step(index, acc):
            acc, at = list(acc), p.mul(index, STEP_BYTES)
            xs = [mem.load_shared_v4(p.add(x_at, at), 8 * j * spare.stride) for j in range(UNIT_EIGHTS)]
            for n, row in enumerate(a_at):
                low, high = (mem.load_shared_v4(p.add(row, at), 8 * h * spare.stride) for h in range(2))
                for j, x in enumerate(xs):
                    f = slice(4 * (n * UNIT_EIGHTS + j), 4 * (n * UNIT_EIGHTS + j) + 4)
                    acc[f] = add_products(acc[f], low, high, x)
            return acc

        return p.for_range(part, p.select(p.lt(part, spare.parts), count, 0), spare.parts, acc, step)

    def first_of(self, unit):
        """A unit's first sixteen ranks and first eight rows."""
        spare = self.plan.spare
        first_tile = p.mul(p.div(unit, spare.row_groups), spare.unit_tiles)
        return first_tile, p.mul(p.rem(unit, spare.row_groups), UNIT_EIGHTS)

    def leave_products(self, unit, part, acc):
        """A unit's sums to shared memory."""
        spare = self.plan.spare
        first_tile, first_eight = self.first_of(unit)
        first = p.add(p.add(p.mul(part, spare.fragments), p.mul(first_tile, spare.eights)), first_eight)
        to = p.add(self.of_lane, p.mul(first, FRAGMENT))
        for n in range(spare.unit_tiles):
            for j in range(UNIT_EIGHTS):
                sums = acc[4 * (n * UNIT_EIGHTS + j) :][:4]
                mem.store_shared_f32x4(to, sums, (n * spare.eights + j) * FRAGMENT)

    def leave_sums_of(self, place, f):
        """This CTA's sums of a fragment to global memory."""
        spare = self.plan.spare
        at = p.add(self.of_lane, p.mul(f, FRAGMENT))
        parts = [mem.load_shared_f32x4(at, part * spare.fragments * FRAGMENT) for part in range(spare.parts)]
        mem.store_global_f32x4(
            mem.offset(self.place_of(f), p.mul(place, spare.fragments * FRAGMENT)), p.total(parts), 0
        )

    def place_of(self, f):
        """Where this lane's sums of a fragment lie, of the first CTA."""
        return mem.offset(self.h_sums, p.add(p.mul(f, FRAGMENT), p.mul(self.lane, 16)))

    def finish_h(self, f, scales):
        """A fragment of h, from the sums of all CTAs."""
        plan, spare = self.plan, self.plan.spare
        of_cta, full = spare.fragments * FRAGMENT, spare.ctas // AT_ONCE * AT_ONCE

        def add(first, acc, count):
            at = mem.offset(self.place_of(f), p.mul(first, of_cta))
            return p.total([acc, *(mem.load_fresh_f32x4(at, i * of_cta) for i in range(count))])

        # opaque: LLVM would unroll the loop, and ask for all at once
        sums = p.for_range(0, p.opaque(full), AT_ONCE, [p.f32(0.0)] * 4, lambda first, acc: add(first, acc, AT_ONCE))
        sums = add(p.i32(full), sums, spare.ctas - full)
        tile, eight = p.div(f, spare.eights), p.rem(f, spare.eights)
        (scale, scaling), _ = pick(self.adapters_ranks(), p.mul(tile, 16), scales)
        factor = arith.mulf(arith.mulf(scale, scaling), p.f32(1 / EPILOGUE_FACTOR))
        values = [arith.mulf(v, factor) for v in sums]
        store_hidden(self.h, plan.m, sum(plan.ranks), self.lane, tile, p.mul(eight, 8), values)
