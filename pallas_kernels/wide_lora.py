"""LoRA in the wide kernel: the multiplying warps add h B^T to the sums of x W^T, h = s x A^T of all weights.

h lies side by side [M, sum of ranks] in 16 bits. It goes through the ring of x, and is multiplied by fragments of B,
or by zeros where ranks are another weight's: every CTA multiplies all ranks, since CTAs that share slots may have
different weights. Of CTAs that split D only the first adds LoRA; the others load zeros, from behind the last rank.

Of dx = dy W the same is added with s dy B in the place of h, and A^T in the place of B (wide.py).

Where h is given, it comes before x, and B's fragments from global memory. Where spare CTAs make it (wide_spare.py), it
comes behind x, which is the time they have; each warp has its rows of B in shared memory then, fetched first of all.
"""

from . import ptx as p
from . import ptx_memory as mem
from . import ptx_tensor as pt
from .wide_plan import WidePlan


class LoraWarps:
    """What one of the eight multiplying warps does for LoRA. The CTA's class sets the attributes before."""

    plan: WidePlan

    def own_adapter(self, r_tile, group):
        """Of this warpgroup's weight: B, bytes of its rows, its first sixteen ranks among all, their number, its last
        row; and the first of the warpgroup's outputs."""
        plan, steps = self.plan, self.plan.rank_steps
        values = [
            (self.b[i], p.i32(2 * plan.ranks[i]), p.i32(sum(steps[:i])), p.i32(steps[i]), p.i32(plan.r[i] - 1))
            for i in range(len(plan.r))
        ]
        return self.of_group(r_tile, group, values)

    def fetch_b(self, r_tile, group):
        """Start the copy of this warp's 16 rows of B; each lane takes one row's half of every 32 bytes."""
        (b, row_bytes, _, count, last_row), column = self.own_adapter(r_tile, group)
        local, half = p.add(p.mul(p.and_(self.warp, 3), 16), p.shr(self.lane, 1)), p.mul(p.and_(self.lane, 1), 16)
        source = mem.offset(mem.long_offset(b, p.minimum(p.add(column, local), last_row), row_bytes), half)
        to = p.add(p.mul(p.add(p.mul(group, 64), local), self.plan.b_stride), half)
        to = p.add(p.add(self.base, self.plan.b_at), to)
        for step in range(max(self.plan.rank_steps)):
            p.when(p.lt(step, count), lambda step=step: mem.copy_async_16(to, source, 32 * step, 32 * step))

    def add_lora(self, r_tile, group, x, x_parity, acc):
        """acc + (x A^T) B^T, from the slots of x that come next; the last of them is under way when this returns."""
        plan = self.plan
        (b, row_bytes, first, count, last_row), column = self.own_adapter(r_tile, group)
        pair = p.mul(p.and_(self.lane, 3), 4)  # bytes
        rows = [self.fragments.row(h) for h in range(2)]
        if plan.makes_h:
            mem.copy_wait_all()
            p.warp_sync()
            local = [p.mul(p.add(p.mul(group, 64), row), plan.b_stride) for row in rows]
            places = [p.add(p.add(p.add(self.base, plan.b_at), row), pair) for row in local]
        else:
            known = [p.minimum(p.add(column, row), last_row) for row in rows]
            places = [mem.offset(mem.long_offset(b, row, row_bytes), pair) for row in known]

        def operand(step):
            """B's fragment of 16 ranks, as `fragments.decode` gives those of weights."""
            mine = p.sub(step, first)
            has = p.lt(mine, count)
            at = p.mul(p.select(has, mine, 0), 32)
            if plan.makes_h:
                words = [mem.load_shared_b32(p.add(place, at), byte) for byte in (0, 16) for place in places]
            else:
                words = [mem.load_global_b32(mem.offset(place, at), byte) for byte in (0, 16) for place in places]
            return [p.select(has, word, 0) for word in words]

        for slot in range(plan.lora_slots):
            operands = [operand(p.i32(i)) for i in range(4 * slot, min(4 * slot + 4, sum(plan.rank_steps)))]
            mem.barrier_wait(p.add(self.x_full, p.mul(x, 8)), x_parity)
            descriptor = pt.swizzled_descriptor(p.add(self.base, p.mul(x, plan.x_slot)))
            p.wgmma_fence()
            for k, a in enumerate(operands):
                acc = p.wgmma_half(acc, a, p.add_64(descriptor, 2 * k))
            p.wgmma_commit()
            p.wgmma_wait(1)
            if slot:
                self.release_x(self.before(x))
            x, x_parity = self.advance(x, x_parity, plan.config.x_depth)
        return [x, x_parity, *acc]
