"""The compute warps of the block kernel (block_kernel.py): items of all parts through a ring, codes to tensor cores."""

import functools
import itertools

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .block_outputs import OutputTiles
from .fragments import decode_codes, decode_scales
from .layout import CODE_BYTES, COLS, QUAD_BYTES
from .pick import pick

UNITS = 4  # of an item
CHAINS = 4  # of additions, of all panels together: a product waits for the one before it in its chain


class ComputeWarps(OutputTiles):
    """What one compute warp does. The CTA's class sets the plan and the addresses before."""

    def compute(self):
        plan = self.plan
        self.table = p.add(self.table_base, p.mul(self.warp, 8 * plan.items_warp))
        ring = p.add(self.ring_base, p.mul(self.warp, plan.depth * QUAD_BYTES))
        self.first_slot = mem.per_lane(p.add(ring, p.mul(self.lane, 16)), self.lane)
        self.read_once = mem.read_once()
        first_parts = plan.parts_at_first  # the others' addresses have time
        early = self.fill_table(p.i32(0), range(first_parts))
        p.warp_sync()
        for d in range(plan.depth - 1):
            p.when(p.lt(d, early), lambda d=d: self.fetch(p.i32(d), p.add(self.first_slot, d * QUAD_BYTES)))
            mem.copy_commit()
        runs = [self.run_of(share.items, self.warp) for share in self.shares]
        self.all_items = functools.reduce(p.add, [p.sub(end, begin) for begin, end in runs])
        self.barriers_seen()
        item, slots = p.i32(0), (self.first_slot, p.add(self.first_slot, (plan.depth - 1) * QUAD_BYTES))
        for i in range(len(plan.parts)):
            needs = self.needs_of(i, self.warp)  # under way while x is
            item, slots = self.multiply(i, item, slots)
            self.finish(i, needs)
            if i == 0:
                self.fill_table(early, range(first_parts, len(plan.parts)))
                p.warp_sync()

    def fill_table(self, filled, parts: range):
        """Addresses of this warp's items of some parts, behind `filled`; returns how many there are then."""
        for i in parts:
            part, share, weights = self.plan.parts[i], self.shares[i], self.weights[i]
            begin, end = self.run_of(share.items, self.warp)

            def one(index, _, part=part, share=share, weights=weights, begin=begin, filled=filled):
                item = p.add(begin, index)
                tile, quad = p.div(item, share.quads), p.add(share.first_quad, p.rem(item, share.quads))
                data = [(weight.data,) for weight in weights]
                if part.paired:
                    is_gate = p.lt(tile, share.entries)
                    at = p.add(share.first, p.select(is_gate, tile, p.sub(tile, share.entries)))
                    source = arith.select(is_gate, weights[0].data, weights[1].data)
                else:
                    (source,), at = pick(part.tiles_of, p.add(share.first, tile), data)
                source = mem.wide_offset(source, p.add(p.mul(at, part.quads), quad), QUAD_BYTES)
                mem.store_shared_address(p.add(self.table, p.mul(p.add(filled, index), 8)), source)
                return []

            p.for_range(self.lane, p.sub(end, begin), 32, [], one)
            filled = p.add(filled, p.sub(end, begin))
        return filled

    def fetch(self, item, slot):
        """Start the copies of this lane's part of an item into a slot of its ring, the address of the lane's codes."""
        source = mem.load_shared_address(p.add(self.table, p.mul(item, 8)))
        codes, scales = mem.offset(source, p.mul(self.lane, 16)), mem.offset(source, p.mul(self.lane, 4))
        for unit in range(UNITS):
            mem.copy_async_16(slot, codes, unit * 512, unit * 512, self.read_once)
        for pair in range(2):
            at = CODE_BYTES + pair * 128
            mem.copy_async_4(self.scales_of(slot), scales, at, at, self.read_once)

    def scales_of(self, slot):
        """Where this lane's scales in a slot begin, less CODE_BYTES: it has 16 bytes of codes and 4 of scales."""
        return p.sub(slot, p.mul(self.lane, 12))

    def multiply(self, i: int, first_item, first_slots):
        """This warp's items of part i; leaves their sums where tiles are finished. Returns the next item and its slots.

        Of the first item what registers hold is decoded before x is there. An item's `slots` are its own and that of
        the item before it, which is filled again.
        """
        plan, part, share = self.plan, self.plan.parts[i], self.shares[i]
        begin, end = self.run_of(share.items, self.warp)
        last_item = p.add(first_item, p.sub(end, begin))
        x = [p.add(self.x_base, p.add(p.mul(row, plan.x_stride(part)), p.mul(self.t, 32))) for row in self.rows_in_x]

        def await_item(item, spare):
            mem.copy_wait(plan.depth - 2)
            ahead = p.add(item, plan.depth - 1)
            p.when(p.lt(ahead, self.all_items), lambda: self.fetch(ahead, spare))
            mem.copy_commit()

        def add_item(item, fragments, carry):
            slot, _, quad, tile, *acc = carry
            at = p.mul(quad, COLS * 2)
            acc = self.quad(fragments, [p.add(row, at) for row in x], acc)
            is_end = p.eq(p.add(quad, 1), share.quads)
            is_last = p.eq(p.add(item, 1), last_item)

            def leave():
                self.leave_sums(tile, acc)
                return [p.opaque_zero() for _ in acc]

            acc = p.if_values(arith.ori(is_end, is_last), leave, acc)
            is_last_slot = p.eq(slot, p.add(self.first_slot, (plan.depth - 1) * QUAD_BYTES))
            after = p.select(is_last_slot, self.first_slot, p.add(slot, QUAD_BYTES))
            return [after, slot, p.select(is_end, 0, p.add(quad, 1)), p.select(is_end, p.add(tile, 1), tile), *acc]

        def decode_early():
            await_item(first_item, first_slots[1])
            made = self.fragments(first_slots[0], range(plan.early_units), in_place=True)
            return list(itertools.chain.from_iterable(made))

        def add_first():
            words = iter(decoded)
            made = zip(*[words] * 4, strict=True)
            rest = self.fragments(first_slots[0], range(plan.early_units, UNITS))
            return add_item(first_item, itertools.chain(made, rest), carry)

        def step(item, carry):
            await_item(item, carry[1])
            return add_item(item, self.fragments(carry[0], range(UNITS)), carry)

        has_items, next_item = p.lt(first_item, last_item), first_item
        if plan.early_units:
            decoded = p.if_values(has_items, decode_early, [p.i32(0)] * (16 * plan.early_units))
        self.await_x(i)
        self.prefetch_late_b(i)
        carry = [*first_slots, p.rem(begin, share.quads), p.div(begin, share.quads), *[p.f32(0.0)] * (4 * CHAINS)]
        if plan.early_units:
            carry, next_item = p.if_values(has_items, add_first, carry), p.add(first_item, 1)
        slot, spare, *_ = p.for_range(next_item, last_item, 1, carry, step)
        if plan.panels > 1:
            self.say_that_sums_are_left()
        return last_item, (slot, spare)

    def fragments(self, slot, units: range, in_place: bool = False):
        """The left operands of the m16n8k16 steps of an item's units, four registers each, one after the other."""
        for u in units:
            words = mem.load_shared_v4(slot, u * 512)
            if u % 2 == 0:
                scale_word = mem.load_shared_b32(self.scales_of(slot), CODE_BYTES + u // 2 * 128)
            scales = decode_scales(scale_word, p.i32(0x4342 if u % 2 else 0x4140))
            for word in words:
                yield decode_codes(word, scales, in_place)

    def quad(self, fragments, rows, acc):
        """acc + one item: 16 m16n8k16 steps for each panel, whose units take turns in its chains. `rows` are where this
        lane's rows of x begin."""
        chains = [acc[n : n + 4] for n in range(0, len(acc), 4)]
        for u in range(UNITS):
            for half in range(2):
                xs = [mem.load_shared_v4(row, u * 128 + 16 * half) for row in rows]
                for j in range(2):
                    left = next(fragments)
                    for panel, x in enumerate(xs):
                        n = (u * len(rows) + panel) % CHAINS
                        chains[n] = p.mma_half(chains[n], left, x[2 * j], x[2 * j + 1])
        return list(itertools.chain.from_iterable(chains))
