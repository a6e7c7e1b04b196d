"""Row tiles that two CTAs of the streaming kernel (stream_kernel.py) share, each for half of K.

With wgmma four warps work together, so a CTA's row tiles come in fours, and where a multiprocessor has 17.9 of them
its schedulers would work as for 20. So CTAs come in pairs, and the last four warps of both have the same row tiles: the
first CTA's multiply the first half of K and send their sums, the second's the other half, and finish. While they do not
multiply they let x pass.
"""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .stream_plan import Plan

REGISTERS_COMPUTE, REGISTERS_SERVE = 88, 40  # of five groups of four warps and of one, which begin with 80


class SharedTiles:
    """The part of a CTA's program that is about them. The CTA's class sets the attributes before."""

    plan: Plan

    # ptxas lets products overlap only where a thread has registers for them: those of the warps that serve are given
    # to those that multiply, which then add up alone.

    def compute_and_add_up(self):
        if self.plan.gives_registers:
            p.set_registers(REGISTERS_COMPUTE, more=True)
        self.compute()
        before = dict(vars(self))
        self.locate(again=True)
        self.add_up()
        vars(self).update(before)  # the other branch's program comes next

    def serve_with_few_registers(self):
        if self.plan.gives_registers:
            p.set_registers(REGISTERS_SERVE, more=False)
        self.serve()
        p.warp_sync()
        p.cta_sync()  # where those that add up wait for the factors

    def share(self):
        """The pair's results, in the class's attributes, become this CTA's: its own, and of the second also the shared
        ones. Row tiles are those that the CTA has a part in."""
        plan, c = self.plan, self.plan.config
        shared = p.sub(self.result_tiles, 2 * plan.own_results)
        finished = p.mul(self.side, shared)
        self.result_tiles = p.add(finished, plan.own_results)
        self.received_tiles = p.mul(finished, plan.joined)
        self.tile_count = p.add(p.mul(shared, plan.joined), c.own_tiles)
        self.first_tile = p.add(self.first_tile, p.mul(self.side, c.own_tiles))

    def tile(self, local, first_tile=None):
        """Of all row tiles the CTA's `local`-th; `first_tile` is its first. Shared ones are behind both CTAs' own."""
        first = self.first_tile if first_tile is None else first_tile
        if not self.plan.config.shares:
            return p.add(first, local)
        own = self.plan.config.own_tiles
        past_neighbour = p.mul(p.sub(1, self.side), own)
        return p.add(p.add(first, local), p.select(p.lt(local, own), 0, past_neighbour))

    def turns(self, warp_n, works):
        """The first quad that a warp multiplies, and the end of those that it does: none unless it `works`."""
        plan = self.plan
        if not plan.config.shares:
            return p.i32(0), p.select(works, self.quads, 0)
        is_own, half = p.lt(warp_n, plan.config.own_tiles), plan.quads // 2
        first = p.select(is_own, 0, p.mul(self.side, half))
        end = p.select(self.finishes(warp_n), plan.quads, half)
        return p.select(works, first, 0), p.select(works, end, 0)

    def let_x_pass(self, first, end, x_state):
        """Quads of x that a warp does not multiply; `x_state` is their slot and its parity."""

        def step(_, carry):
            slot, parity = carry
            mem.barrier_wait(p.add(self.x_full, p.mul(slot, 8)), parity)
            p.when(self.is_lane_0, lambda: mem.barrier_arrive(p.add(self.x_empty, p.mul(slot, 8))))
            slot = self.next_slot(slot, self.plan.config.x_depth)
            return [slot, p.xor(parity, p.select(p.eq(slot, 0), 1, 0))]

        return p.for_range(first, end, 1, x_state, step)

    def finishes(self, warp_n):
        """Whether this CTA finishes what this warp multiplies."""
        return arith.ori(p.lt(warp_n, self.plan.config.own_tiles), p.eq(self.side, 1))

    def received_bytes(self):
        return p.mul(self.received_tiles, self.plan.m_tiles * 512)

    def with_neighbours(self, acc):
        """The warp's sums, in the second CTA with the first one's of the shared row tiles, which that sends."""
        plan, own, warp_n = self.plan, self.plan.config.own_tiles, p.opaque(self.place_n)
        p.cluster_wait()
        is_shared = arith.andi(p.lt(own - 1, warp_n), self.valid[0])
        is_second = p.eq(self.side, 1)
        at = p.add(p.add(self.received_base, p.mul(p.sub(warp_n, own), plan.m_tiles * 512)), p.mul(self.lane, 16))

        def send():
            barrier, there = mem.map_rank(self.sums_full, p.i32(1)), mem.map_rank(at, p.i32(1))
            for i in range(plan.m_tiles):
                mem.send_f32x4(p.add(there, 512 * i), acc[4 * i : 4 * i + 4], barrier)

        def both():
            mem.barrier_wait_for_cluster(self.sums_full, p.i32(0))
            received = [v for i in range(plan.m_tiles) for v in mem.load_shared_f32x4(at, 512 * i)]
            return [arith.addf(a, b) for a, b in zip(received, acc, strict=True)]

        p.when(arith.andi(is_shared, p.eq(self.side, 0)), send)
        return p.if_values(arith.andi(is_shared, is_second), both, acc)
