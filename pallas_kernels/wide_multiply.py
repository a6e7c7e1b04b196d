"""The multiplying warps of the wide kernel (see wide_kernel.py): decode, wgmma, and the sums' way out."""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from . import ptx_tensor as pt
from .layout import EPILOGUE_FACTOR
from .pick import pick
from .wide_fragments import BLOCK_BYTES, ForwardFragments, TransposedFragments
from .wide_plan import CHUNK, STAGES, SUM_STRIDE, TILE, WidePlan


class MultiplyWarps:
    """What one of the eight multiplying warps does. The CTA's class sets the attributes below before."""

    plan: WidePlan
    has_bias: bool
    wide_out: bool

    def multiply(self):
        plan, c = self.plan, self.plan.config
        warp = p.and_(self.warp, 3)
        group = p.shr(self.warp, 2)
        self.fragments = (TransposedFragments if plan.transposed else ForwardFragments)(self.lane, warp, group)

        def one(unit, carry):
            w, w_parity, x, x_parity = carry
            r_tile, first_row = self.tile(unit.item)
            needs = self.needs(r_tile, group)
            acc = [p.f32(0.0)] * (c.m_tile // 2)
            if plan.ranks:
                x, x_parity, *acc = self.add_lora(r_tile, group, x, x_parity, acc)
                if c.promote:
                    acc = self.finish(x, acc)
            state, start, end = [w, w_parity, x, x_parity, *acc], unit.first_block, unit.end_block
            if c.promote:
                # a loop for each chain: with a branch in one loop ptxas lets no two wgmma overlap
                state = p.for_range(
                    start, end, plan.promote_blocks, state, lambda first, state: self.chain(start, first, end, state)
                )
            else:
                state = self.blocks(start, end, state)
            w, w_parity, x, x_parity, *acc = state
            store = self.output(r_tile, group, *needs)
            if unit.parts > 1:
                self.add_up(unit, acc, warp, group, first_row, store)
            else:
                self.store_rows(acc, warp, group, first_row, store)
            return [w, w_parity, x, x_parity]

        if c.promote and not plan.totals_in_registers:
            self.totals = pt.own_memory(c.m_tile // 2)
        self.each_unit([p.i32(0)] * 4, one)

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
        state = p.for_range(first, end, 1, state, lambda i, state: self.block(p.eq(i, first), state))
        return [*state[:4], *self.finish(state[2], state[4:])]

    def finish(self, x, acc):
        """The sums when all is multiplied; `x` is the slot after the last."""
        acc = p.wgmma_finish(acc)
        self.release_x(self.before(x))
        return acc

    def block(self, is_first, carry):
        """One block of weights, four slots of x: decode for a slot while the slot before is multiplied."""
        w, w_parity, x, x_parity, *acc = carry
        block = p.add(self.w_base, p.mul(w, BLOCK_BYTES))
        mem.barrier_wait(p.add(self.w_full, p.mul(w, 8)), w_parity)
        for step in range(STAGES):
            operands = self.fragments.decode(self.fragments.load(block, step), step)
            if step == STAGES - 1:
                p.warp_sync()
                p.when(self.is_lane_0, lambda: mem.barrier_arrive(p.add(self.w_empty, p.mul(w, 8))))
            mem.barrier_wait(p.add(self.x_full, p.mul(x, 8)), x_parity)
            descriptor = pt.swizzled_descriptor(p.add(self.base, p.mul(x, self.plan.x_slot)))
            p.wgmma_fence()
            for k, a in enumerate(operands):
                acc = p.wgmma_bf16(acc, a, p.add_64(descriptor, 2 * k))
            p.wgmma_commit()
            p.wgmma_wait(1)  # the slot before is multiplied: it and its codes' registers are free
            if step == 0 and (self.plan.config.promote or not self.plan.ranks):  # what ended has released its last slot
                p.if_else(is_first, lambda: None, lambda x=x: self.release_x(self.before(x)))
            else:
                self.release_x(self.before(x))
            x, x_parity = self.advance(x, x_parity, self.plan.config.x_depth)
        return [*self.advance(w, w_parity, self.plan.config.w_depth), x, x_parity, *acc]

    def add_lora(self, r_tile, group, x, x_parity, acc):
        """acc + (x A^T) B^T, the first slots of an item; the last of them is under way when this returns."""
        plan = self.plan
        steps = plan.rank_steps
        values = [
            (self.b[i], p.i32(2 * plan.ranks[i]), p.i32(sum(steps[:i])), p.i32(steps[i]), p.i32(plan.r[i] - 1))
            for i in range(len(plan.r))
        ]
        (b, row_bytes, first, count, last_row), tile = pick(self.plan.tiles_of, r_tile, values)
        column = p.add(p.mul(tile, TILE), p.mul(group, 64))
        pair = p.mul(p.and_(self.lane, 3), 4)  # bytes
        rows = []
        for h in range(2):
            row = p.minimum(p.add(column, self.fragments.row(h)), last_row)
            rows.append(mem.offset(mem.long_offset(b, row, row_bytes), pair))

        def operand(step):
            """B's fragment of 16 ranks, as `fragments.decode` gives those of weights."""
            mine = p.sub(step, first)
            has = p.lt(mine, count)
            at = [mem.offset(row, p.mul(p.select(has, mine, 0), 32)) for row in rows]
            words = [mem.load_global_b32(row, byte) for byte in (0, 16) for row in at]
            return [p.select(has, word, 0) for word in words]

        for slot in range(plan.lora_slots):
            operands = [operand(p.i32(i)) for i in range(4 * slot, min(4 * slot + 4, sum(steps)))]
            mem.barrier_wait(p.add(self.x_full, p.mul(x, 8)), x_parity)
            descriptor = pt.swizzled_descriptor(p.add(self.base, p.mul(x, plan.x_slot)))
            p.wgmma_fence()
            for k, a in enumerate(operands):
                acc = p.wgmma_bf16(acc, a, p.add_64(descriptor, 2 * k))
            p.wgmma_commit()
            p.wgmma_wait(1)
            if slot:
                self.release_x(self.before(x))
            x, x_parity = self.advance(x, x_parity, plan.config.x_depth)
        return [x, x_parity, *acc]

    def before(self, slot):
        return p.select(p.eq(slot, 0), self.plan.config.x_depth - 1, p.sub(slot, 1))

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

    def needs(self, r_tile, group):
        """What outputs need besides sums, asked for before them, as it comes from far: a tile's scale and biases."""
        plan = self.plan
        values = list(zip(self.global_scale, self.bias or self.outs, map(p.i32, plan.r), strict=True))
        (global_scale, bias, r), tile = pick(plan.tiles_of, r_tile, values)
        bias = mem.offset(bias, p.mul(p.minimum(self.column(tile, group), p.sub(r, 4)), 4))
        return mem.load_global_f32(global_scale), mem.load_global_f32x4(bias, 0) if self.has_bias else []

    def column(self, tile, group):
        """The first of this lane's four outputs among those of its weight."""
        return p.add(p.add(p.mul(tile, TILE), p.mul(group, 64)), p.mul(p.and_(self.lane, 15), 4))

    def output(self, r_tile, group, global_scale, bias):
        """A function (row, sums) that scales, biases and stores this lane's four outputs of a row.

        A warp stores two rows at a time: lanes 0-15 the 64 outputs of one, lanes 16-31 of the next.
        """
        plan = self.plan
        values = list(zip(self.outs, map(p.i32, plan.r), strict=True))
        (out, r), tile = pick(plan.tiles_of, r_tile, values)
        column = self.column(tile, group)
        # `share` may make tiles past the last one, of no weight
        exists = arith.andi(p.lt(r_tile, sum(plan.tiles_of)), p.lt(column, r))
        factor = p.divide(p.f32(EPILOGUE_FACTOR), global_scale)
        size = 4 if self.wide_out else 2
        put = pt.store_global_f32x4 if self.wide_out else pt.store_global_bf16x4

        def store(row, sums):
            values = [arith.mulf(s, factor) for s in sums]
            if self.has_bias:
                values = [arith.addf(v, b) for v, b in zip(values, bias, strict=True)]
            place = mem.offset(mem.long_offset(out, row, p.mul(r, size)), p.mul(column, size))
            put(arith.andi(exists, p.lt(row, plan.m)), place, values)

        return store

    def store_rows(self, acc, warp, group, first_row, store):
        """Sums of this warpgroup's rows from `first_row` on to shared memory and from there to the result, a chunk of
        rows at a time. `store` is what `output` returns."""
        at = p.add(self.base, p.add(p.mul(group, CHUNK * SUM_STRIDE), self.plan.chunks_at))
        pair, end = p.shr(self.lane, 4), 2 * len(acc)
        for first in range(0, end, CHUNK):
            rows = min(CHUNK, end - first)
            first_mine = p.add(p.mul(warp, rows // 4), pair)
            mine = p.add(p.add(at, p.mul(first_mine, SUM_STRIDE)), p.mul(p.and_(self.lane, 15), 16))
            self.put_sums(acc, at, first, rows)
            self.group_sync(group)
            sums = [pt.load_shared_f32x4(p.add(mine, i * SUM_STRIDE)) for i in range(0, rows // 4, 2)]
            # opaque: LLVM would keep all rows' places in a tile in registers of their own
            row = p.opaque(p.add(p.add(first_row, first_mine), first))
            for i, values in enumerate(sums):
                store(p.add(row, 2 * i), values)
            self.group_sync(group)

    def group_sync(self, group):
        """Barrier of one warpgroup."""
        p.ptx("bar.sync $0, 128;", p.add(group, 1), convergent=True)
