"""The multiplying warps of the wide kernel (see wide_kernel.py): decode, wgmma, and the sums' way out."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from . import ptx_tensor as pt
from .float16_range import of_scaled
from .layout import EPILOGUE_FACTOR
from .pick import pick
from .swiglu import gated, gated_back
from .wide_fragments import BLOCK, BLOCK_BYTES, ForwardFragments, TransposedFragments, UnitFragments
from .wide_lora import LoraWarps
from .wide_plan import CHUNK, STAGE, SUM_STRIDE, TILE, WidePlan

BOTH = 3  # the named barrier of both warpgroups; each has one of its own
FETCHED = 2 * CHUNK  # rows whose `WayOut.fetch` is asked for before they are stored


class WayOut(NamedTuple):
    """What becomes of this lane's four outputs of a row.

    Attributes:
      fetch: of a row what `store` needs, asked for early, as it comes from far.
      store: of a row, that, and its sums of each weight: scales, biases and stores them, if the row is one.
    """

    fetch: Callable
    store: Callable


class MultiplyWarps(LoraWarps):
    """What one of the eight multiplying warps does. The CTA's class sets the attributes below before."""

    plan: WidePlan
    has_bias: bool
    wide_out: bool

    def multiply(self):
        plan, c = self.plan, self.plan.config
        warp = p.and_(self.warp, 3)
        group = p.shr(self.warp, 2)
        fragments = (
            UnitFragments if plan.handover.units else TransposedFragments if plan.transposed else ForwardFragments
        )
        self.fragments = fragments(self.lane, warp, group)

        def one(unit, carry):
            r_tile, first_row = self.tile(unit)
            state = [*carry, *[p.f32(0.0)] * (unit.rows // 2)]
            if plan.given_h:
                state = self.add_lora(group, state)
                if not plan.one_chain:
                    state = self.finished(state)
            # not before LoRA: with these in registers too, ptxas lets no two wgmma overlap in some configurations
            needs = self.needs(r_tile, group)
            for i, _, begin, end in self.segments(unit):
                if i:
                    state = [*state[:4], *self.of_scale(i, p.lt(begin, end), state[4:])]
                state = self.segment(unit, begin, end, state)
            if plan.makes_h:
                state = self.finished(self.add_lora(group, state))
            carry, acc = state[:4], state[4:]
            way_out = self.output(r_tile, group, needs)
            if plan.handover.normed:
                self.await_inverse()
            if unit.parts > 1:
                self.add_up(unit, acc, group, first_row, way_out)
            else:
                self.store_rows(acc, group, first_row, way_out)
            return carry

        if c.promote and not plan.totals_in_registers:
            self.totals = pt.own_memory(c.m_tile // 2)
        self.each_unit([p.i32(0)] * 4, one)

    def segment(self, unit, begin, end, state):
        """A weight's blocks of the unit, whose products are added to the sums in `state`."""
        plan = self.plan
        if plan.config.promote:
            # a loop for each chain: with a branch in one loop ptxas lets no two wgmma overlap
            chain = functools.partial(self.chain, unit.first_block, end=end)
            return p.for_range(begin, end, plan.promote_blocks, state, lambda first, state: chain(first, state=state))
        if unit.parts == 1 or len(plan.segments) == 1:
            return self.blocks(begin, end, state)
        return p.if_values(p.lt(begin, end), lambda: self.blocks(begin, end, state), state)

    def of_scale(self, i: int, follow, sums):
        """Sums up to weight i, in units of the one before, in those of this one, if blocks of it `follow`: they are
        divided by the last one's global scale in the end."""
        ratio = p.divide_without_call(*(mem.load_global_f32(self.scales[at]) for at in (i, i - 1)))
        sums = [arith.mulf(s, ratio) for s in sums]
        if not self.plan.config.promote or self.plan.totals_in_registers:
            return sums
        p.when(follow, lambda: self.set_totals(sums))  # a chain of its own begins
        return [arith.select(follow, p.f32(0.0), s) for s in sums]

    def chain(self, start, first, end, state):
        """One chain of additions, of the blocks from `first` on; its sums are added to the totals of those before."""
        # opaque: LLVM would merge loops of one block
        chain_end = p.minimum(p.add(first, p.opaque(self.plan.promote_blocks)), end)
        if self.plan.totals_in_registers:
            totals, zeros = state[4:], [p.f32(0.0)] * len(state[4:])
            state = self.blocks(first, chain_end, [*state[:4], *zeros])
            return state[:4] + [arith.addf(total, s) for total, s in zip(totals, state[4:], strict=True)]
        state = self.blocks(first, chain_end, state)
        sums = self.add_totals(p.lt(start, first), state[4:])
        is_last = p.eq(chain_end, end)
        p.if_else(is_last, lambda: None, lambda: self.set_totals(sums))
        return state[:4] + [arith.select(is_last, s, p.f32(0.0)) for s in sums]

    def add_totals(self, exist, acc):
        """acc and, where they exist, the totals in memory."""

        def add():
            totals = [total for i in range(0, len(acc), 4) for total in pt.load_own_f32x4(self.totals, i)]
            return [arith.addf(total, s) for total, s in zip(totals, acc, strict=True)]

        return p.if_values(exist, add, acc)

    def set_totals(self, sums):
        for i in range(0, len(sums), 4):
            pt.store_own_f32x4(self.totals, sums[i : i + 4], i)

    def blocks(self, first, end, state):
        """Blocks first .. end - 1, whose products are added to the sums in `state`. When it returns they are done."""
        return self.finished(p.for_range(first, end, 1, state, lambda i, state: self.block(p.eq(i, first), state)))

    def finished(self, state):
        """The state when all is multiplied."""
        acc = p.wgmma_finish(state[4:])
        self.release_x(self.before(state[2]))
        return [*state[:4], *acc]

    def block(self, is_first, carry):
        """One block of weights: decode for a stage of x while the stage before is multiplied."""
        plan = self.plan
        w, w_parity, x, x_parity, *acc = carry
        block = p.add(self.w_base, p.mul(w, BLOCK_BYTES))
        mem.barrier_wait(p.add(self.w_full, p.mul(w, 8)), w_parity)
        ahead = None
        for slot in range(plan.slots_of_block):
            for stage in range(plan.stages_of_slot):
                step = slot * plan.stages_of_slot + stage
                operands = self.fragments.decode(ahead or self.fragments.load(block, step), step)
                # the next step's words before these products, behind which they would be waited for; dx gains nothing
                has_next = step + 1 < BLOCK // STAGE and not plan.transposed
                ahead = self.fragments.load(block, step + 1) if has_next else None
                if stage == 0:
                    mem.barrier_wait(p.add(self.x_full, p.mul(x, 8)), x_parity)
                    descriptor = pt.swizzled_descriptor(p.add(self.base, p.mul(x, plan.x_slot)))
                p.wgmma_fence()
                for k, a in enumerate(operands):  # a descriptor counts 16 bytes
                    acc = p.wgmma_half(acc, a, p.add_64(descriptor, stage * plan.x_stage // 16 + 2 * k))
                p.wgmma_commit()
                if step == BLOCK // STAGE - 1:
                    self.release_w(w)
                p.wgmma_wait(1)  # the stage before is multiplied: it and its codes' registers are free
                if stage == 0:
                    self.release_before(x, is_first if slot == 0 else None)
            x, x_parity = self.advance(x, x_parity, plan.config.x_depth)
        return [*self.advance(w, w_parity, plan.config.w_depth), x, x_parity, *acc]

    def release_before(self, slot, is_first=None):
        """The slot before, but that of a chain's first block where the chain in front has released it."""
        if is_first is None or (self.plan.one_chain and self.plan.given_h):
            self.release_x(self.before(slot))
        else:
            p.if_else(is_first, lambda: None, lambda: self.release_x(self.before(slot)))

    def before(self, slot):
        return p.select(p.eq(slot, 0), self.plan.config.x_depth - 1, p.sub(slot, 1))

    def release_w(self, slot):
        """Tell the loader that this warp has what it needs of a slot of weights: behind a wgmma that takes it. The
        arrival waits for no load that is still under way, and while wgmmas read x, loads have taken longer than the
        slot's next copy took."""
        p.warp_sync()
        p.when(self.is_lane_0, lambda: mem.barrier_arrive(p.add(self.w_empty, p.mul(slot, 8))))

    def release_x(self, slot):
        """Tell every CTA that loads into this one's slot that it may be overwritten."""
        share = self.plan.config.share
        barrier = p.add(self.x_empty, p.mul(slot, 8))
        p.warp_sync()
        if share == 1:
            p.when(self.is_lane_0, lambda: mem.barrier_arrive(barrier))
        else:
            p.when(p.lt(self.lane, share), lambda: pt.remote_arrive(barrier, self.lane))

    # ---- the sums' way out ---------------------------------------------------------------------------------------

    def put_sums(self, acc, at, first: int, rows: int):
        """Rows first .. first + rows - 1 of this warpgroup's sums to shared memory, [row][64 outputs] float32."""
        t = p.and_(self.lane, 3)
        for h in range(2):
            to = p.add(at, p.add(p.mul(t, 2 * SUM_STRIDE), p.mul(self.fragments.row(h), 4)))
            for i in range(first // 8, (first + rows) // 8):
                for e in range(2):
                    mem.store_shared_f32(to, acc[4 * i + 2 * h + e], (8 * i + e - first) * SUM_STRIDE)

    def of_group(self, r_tile, group, values):
        """Of each weight's `values` those of this warpgroup's, and the first of its outputs among that weight's."""
        plan = self.plan
        if plan.joins_two:
            is_gate = p.eq(group, 0)
            chosen = [arith.select(is_gate, gate, up) for gate, up in zip(*values, strict=True)]
            return chosen, p.mul(r_tile, plan.own_outputs)
        chosen, tile = pick(plan.tiles_of, r_tile, values)
        return chosen, p.add(p.mul(tile, TILE), p.mul(group, 64))

    def needs(self, r_tile, group):
        """What outputs need besides sums, asked for before them, as it comes from far: the global scale and this lane's
        biases of the warpgroup's weight; with `swiglu` gate's and up's. Where the result joins the residual stream the
        norm's scales follow."""
        plan = self.plan
        values = list(zip(self.global_scale, self.bias or self.outs * len(plan.r), map(p.i32, plan.r), strict=False))
        here, first = self.of_group(r_tile, group, values)
        column = self.column(first)
        found = []
        for global_scale, bias, r in values if plan.joins_two else [here]:
            bias = mem.offset(bias, p.mul(p.minimum(column, p.sub(r, 4)), 4))
            found.append((mem.load_global_f32(global_scale), mem.load_global_f32x4(bias, 0) if self.has_bias else []))
        return found, self.norm_scale_of(column) if plan.handover.joins else []

    def column(self, first):
        """The first of this lane's four outputs, of 64 from `first` on."""
        return p.add(first, p.mul(p.and_(self.lane, 15), 4))

    def output(self, r_tile, group, needs) -> WayOut:
        """The way out of this lane's four outputs of each row."""
        plan = self.plan
        needs, norm_scale = needs
        values = list(zip(self.outs, map(p.i32, plan.r), strict=False))
        if plan.joins_two:
            values = values[:1] * 2
        (out, r), first = self.of_group(r_tile, group, values)
        column = self.column(first)
        # `share` may make tiles past the last one, of no weight
        exists = arith.andi(p.lt(r_tile, sum(plan.tiles_of)), p.lt(column, r))
        factor = EPILOGUE_FACTOR * of_scaled(plan.handover.scaled)
        factors = [p.divide_without_call(p.f32(factor), global_scale) for global_scale, _ in needs]
        size = 4 if self.wide_out else 2
        put = pt.store_global_f32x4_if if self.wide_out else pt.store_global_halfx4_if

        def fetch(row):
            return self.residual_of(row, column) if plan.handover.joins else self.gate_and_up_of(row, column)

        def put_besides(known, row, pairs):
            """Of gate and up: two numbers for each output."""
            for out, values in zip(self.outs[-2:], zip(*pairs, strict=True), strict=True):
                put(known, self.place_in(out, row, column, size), list(values))

        def store(row, fetched, *sums):
            outputs = []
            for of_weight, factor, (_, bias) in zip(sums, factors, needs, strict=True):
                values = [arith.mulf(s, factor) for s in of_weight]
                values = self.divided(row, values) if plan.handover.normed else values
                outputs.append([arith.addf(v, b) for v, b in zip(values, bias, strict=True)] if bias else values)
            values = [gated(*pair) for pair in zip(*outputs, strict=True)] if plan.joins_two else outputs[0]
            known = arith.andi(exists, p.lt(row, plan.m))
            if plan.keeps:
                put_besides(known, row, zip(*outputs, strict=True))
            if plan.goes_through:
                gate_up = [[v for word in words for v in p.unpack_half(word)] for words in fetched]
                put_besides(known, row, [gated_back(*of_one) for of_one in zip(values, *gate_up, strict=True)])
            elif plan.handover.joins:
                self.join(known, row, column, values, fetched, norm_scale)
            elif plan.handover.gives_units:
                self.put_half(known, out, row, column, values)
            else:
                put(known, mem.offset(mem.long_offset(out, row, p.mul(r, size)), p.mul(column, size)), values)

        return WayOut(fetch, store)

    def gate_and_up_of(self, row, column):
        """Four columns of either, two words; rows and columns behind the last ones repeat them."""
        row, column = p.minimum(row, self.plan.m - 1), p.minimum(column, self.plan.r[0] - 4)
        return [mem.load_global_v2(self.place_in(array, row, column, 2), 0) for array in self.gate_up]

    def fetch_rows(self, first_row, count: int, way_out: WayOut) -> list:
        """What `store_rows` needs of `count` rows from `first_row` on, if it needs any, but of FETCHED at most."""
        if not self.plan.fetches:
            return []
        mine = p.add(first_row, p.shr(p.and_(self.tid, 127), 4))
        return [way_out.fetch(p.add(mine, i)) for i in range(0, min(FETCHED, count), 8)]

    def store_rows(self, acc, group, first_row, way_out: WayOut, fetched=()):
        """Sums of this warpgroup's rows from `first_row` on to shared memory and from there to the result, a chunk of
        rows at a time. `fetched` is what `fetch_rows` gave of them, if it was called before.

        Sixteen lanes store the 64 outputs of a row. A warpgroup stores its own, or of gate and up both all rows'.
        """
        plan, end = self.plan, 2 * len(acc)
        chunks = p.add(self.base, plan.chunks_at)
        threads, sync = (256, self.both_sync) if plan.joins_two else (128, lambda: self.group_sync(group))
        first_mine = p.shr(p.and_(p.opaque(self.tid), threads - 1), 4)  # opaque: not in registers before
        of_lane = p.add(p.mul(first_mine, SUM_STRIDE), p.mul(p.and_(self.lane, 15), 16))
        of_group = p.mul(group, CHUNK * SUM_STRIDE)
        mine = (0, CHUNK * SUM_STRIDE) if plan.joins_two else (of_group,)
        mine = [p.add(p.add(chunks, of_lane), at) for at in mine]
        fetched = list(fetched or self.fetch_rows(first_row, end, way_out))
        for first in range(0, end, CHUNK):
            rows, step = min(CHUNK, end - first), threads // 16
            self.put_sums(acc, p.add(chunks, of_group), first, rows)
            behind = first + FETCHED
            fetched += self.fetch_rows(p.add(first_row, behind), min(CHUNK, end - behind), way_out)
            sync()
            at_once = [[mem.load_shared_f32x4(at, i * SUM_STRIDE) for at in mine] for i in range(0, rows, step)]
            # opaque: LLVM would keep all rows' places in a tile in registers of their own
            row = p.opaque(p.add(p.add(first_row, first_mine), first))
            for i, sums in enumerate(at_once):
                here = p.add(row, i * step)
                if rows % step:  # eight rows, for sixteen
                    here = p.select(p.lt(p.add(first_mine, i * step), rows), here, plan.m)
                way_out.store(here, fetched[first // 8 + i] if fetched else [], *sums)
            sync()

    def group_sync(self, group):
        """Barrier of one warpgroup."""
        p.named_sync(p.add(group, 1), 128)

    def both_sync(self):
        """Barrier of both."""
        p.named_sync(BOTH, 256)
