"""The compute warps of the streaming kernel (see stream_kernel.py): weights through a ring, codes to tensor cores."""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .fragments import decode_codes, decode_scales
from .layout import CODE_BYTES, QUAD_BYTES
from .pick import of_tile
from .stream_lora import LoraWarps
from .stream_outputs import FINISHED, OutputTiles
from .stream_shared import SharedTiles

PREPARED = 2  # a named barrier; see stream_outputs.py and stream_slices.py for others, 0 is the whole CTA's


class ComputeWarps(LoraWarps, OutputTiles, SharedTiles):
    """What one compute warp does. The CTA's class sets the plan and the addresses before."""

    @property
    def prepared_threads(self) -> int:
        """Of the compute warps, of that which loads x and of the first that multiplies by A."""
        return 32 * (self.plan.config.warps + 1 + self.plan.computes_h)

    def make_barriers(self, barriers):
        """(address, count) each. This warp does not wait for the compute warps, which first fetch weights: x, which
        it loads, would come later."""

        def make():
            for address, count in barriers:
                mem.barrier_init(address, count)
            mem.fence_barrier_init()

        p.when(self.is_lane_0, make)
        p.warp_sync()
        p.named_arrive(PREPARED, self.prepared_threads)

    def next_slot(self, slot, depth: int):
        slot = p.add(slot, 1)
        return p.select(p.eq(slot, depth), 0, slot)

    def working_warps(self):
        """Of the warps along row tiles those that this CTA has row tiles for, with wgmma whole groups of four."""
        warps = self.plan.warps_together
        tiles = warps * self.plan.config.tiles
        return p.mul(p.div(p.add(self.tile_count, tiles - 1), tiles), warps)

    def compute(self):
        plan, c = self.plan, self.plan.config
        warp_k, warp_n = p.div(self.warp, c.warps_n), p.rem(self.warp, c.warps_n)
        works = p.lt(warp_n, self.working_warps())
        first_turn, end = self.turns(warp_n, works)
        first_unit = p.mul(warp_k, plan.units_warp)
        used = plan.used_warps // c.warps_k
        self.is_used = p.lt(warp_n, used)  # the others read what their neighbour fetches, and keep nothing
        self.place_n = p.minimum(warp_n, used - 1)
        self.place = p.add(p.mul(warp_k, used), self.place_n)
        ring = p.add(self.ring_base, p.mul(self.place, c.depth * plan.slot))
        self.first_slot = mem.per_lane(p.add(ring, p.mul(self.lane, 16)), self.lane)
        self.read_once = mem.read_once()
        self.codes, self.scales, self.valid, self.local_tiles = [], [], [], []
        for r in range(c.tiles):
            local_tile = p.add(p.mul(warp_n, c.tiles), r)
            self.local_tiles.append(local_tile)
            self.valid.append(p.lt(local_tile, self.tile_count))
            (w,), at = of_tile(plan, self.tile(local_tile), [(d,) for d in self.data])
            source = mem.offset(mem.wide_offset(w, at, plan.quads * QUAD_BYTES), p.mul(self.first_quad, QUAD_BYTES))
            self.codes.append(mem.offset(source, p.add(p.mul(first_unit, 512), p.mul(self.lane, 16))))
            pair = p.mul(p.shr(first_unit, 1), 128)
            self.scales.append(mem.offset(source, p.add(p.add(pair, CODE_BYTES), p.mul(self.lane, 4))))
        # with one unit a warp, half of the warps use the upper half of their scale word
        self.scale_bytes = p.select(p.eq(p.and_(first_unit, 1), 1), 0x4342, 0x4140)
        adds_lora = arith.andi(p.eq(warp_k, 0), p.eq(self.rank, 0))
        if plan.ranks:
            adds_lora = arith.andi(adds_lora, self.finishes(warp_n) if c.shares else self.is_used)
            if c.late_b:
                self.prefetch_b(adds_lora)
            else:
                self.fetch_b(adds_lora, self.first_tile)
        for d in range(c.depth - 1):
            turn, slot = p.add(first_turn, d), p.add(self.first_slot, d * plan.slot)
            p.when(p.lt(turn, end), lambda turn=turn, slot=slot: self.fetch(turn, slot))
            mem.copy_commit()
        p.named_sync(PREPARED, self.prepared_threads)
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        if c.wgmma:
            x_lane = p.add(self.x_base, p.mul(first_unit, plan.m_tiles * 8 * 128))
        else:
            x_lane = p.add(p.add(self.x_base, p.mul(first_unit, 128)), p.add(p.mul(g, plan.x_stride), p.mul(t, 32)))

        def step(q, carry):
            slot, spare, x_slot, x_parity, *acc = carry
            mem.copy_wait(c.depth - 2)
            ahead = p.add(q, c.depth - 1)
            p.when(p.lt(ahead, end if c.shares else self.quads), lambda: self.fetch(ahead, spare))
            mem.copy_commit()
            mem.barrier_wait(p.add(self.x_full, p.mul(x_slot, 8)), x_parity)
            multiply = self.quad_wgmma if c.wgmma else self.quad
            acc = multiply(slot, p.add(x_lane, p.mul(x_slot, plan.x_slot)), acc)
            p.warp_sync()
            p.when(self.is_lane_0, lambda: mem.barrier_arrive(p.add(self.x_empty, p.mul(x_slot, 8))))
            x_slot = self.next_slot(x_slot, c.x_depth)
            x_parity = p.xor(x_parity, p.select(p.eq(x_slot, 0), 1, 0))
            is_last_slot = p.eq(slot, p.add(self.first_slot, (c.depth - 1) * plan.slot))
            after = p.select(is_last_slot, self.first_slot, p.add(slot, plan.slot))
            return [after, slot, x_slot, x_parity, *acc]

        state = [self.first_slot, p.add(self.first_slot, (c.depth - 1) * plan.slot), p.i32(0), p.i32(0)]
        acc = [p.f32(0.0)] * (plan.chains * plan.sums_warp)
        if c.wgmma and c.promote:
            self.totals = p.add(p.add(self.totals_base, p.mul(self.place, plan.totals_warp)), p.mul(self.lane, 16))
            self.set_totals(acc)

            def add_chain(first, state):
                after, acc = self.chain(first, state, step)
                self.set_totals(self.add_totals(acc))
                return after

            # A loop for each chain of additions: with a branch in one loop ptxas lets no two wgmma overlap.
            p.for_range(0, end, plan.promote_quads, state, add_chain)
        elif c.promote:

            def add_chain_to(first, carry):
                after, acc = self.chain(first, carry[: len(state)], step)
                return after + p.total([carry[len(state) :], acc])

            acc = p.for_range(0, end, plan.promote_quads, state + acc, add_chain_to)[len(state) :]
        else:
            if c.shares:
                state[2:] = self.let_x_pass(0, first_turn, state[2:])
            state = p.for_range(first_turn, end, 1, state + acc, step)
            x_state, acc = state[2:4], state[4:]
            acc = p.total([acc[n : n + plan.sums_warp] for n in range(0, len(acc), plan.sums_warp)])
            if c.shares:
                acc = self.with_neighbours(acc)
                self.let_x_pass(end, p.select(works, plan.quads, 0), x_state)
        if plan.ranks:
            if c.late_b:
                p.named_sync(FINISHED, c.warps * 32)  # every warp has read its last slot
                self.fetch_b(adds_lora, p.opaque(self.first_tile))
                mem.copy_wait_all()
                p.warp_sync()
            acc = self.add_lora(acc, adds_lora, g, t)
        if c.wgmma and c.promote:
            acc = self.add_totals(acc)
        self.finish_sums(warp_k, acc, g, t)

    def chain(self, first, state, step):
        """The quads of one chain of additions from `first` on: the state after them, and their sums."""
        # opaque: loops of one quad would be merged into one, with descriptors that are no longer uniform registers
        end = p.minimum(p.add(first, p.opaque(self.plan.promote_quads)), self.quads)
        zeros = [p.f32(0.0)] * self.plan.sums_warp
        after = p.for_range(first, end, 1, state + zeros, step)
        return after[: len(state)], after[len(state) :]

    # With wgmma the promoted sums lie in shared memory, each lane's own: the registers do not hold them twice.

    def set_totals(self, sums):
        def store():
            for i in range(0, len(sums), 4):
                mem.store_shared_f32x4(self.totals, sums[i : i + 4], i * 128)

        p.when(self.is_used, store)

    def add_totals(self, acc):
        out = []
        for i in range(0, len(acc), 4):
            total = mem.load_shared_f32x4(self.totals, i * 128)
            out += [arith.addf(a, b) for a, b in zip(total, acc[i : i + 4], strict=True)]
        return out

    def fetch(self, q, slot):
        """Start the copies of this lane's part of quad `q` into a slot of its ring, the address of the lane's codes."""
        plan, c = self.plan, self.plan.config
        at = p.mul(q, QUAD_BYTES)

        def tile(r):
            codes, scales = mem.offset(self.codes[r], at), mem.offset(self.scales[r], at)
            first = r * plan.tile_slot
            for u in range(plan.units_warp):
                mem.copy_async_16(slot, codes, first + u * 512, u * 512, self.read_once)
            for pair in range(-(-plan.units_warp // 2)):
                to = first + plan.units_warp * 512 + pair * 128
                mem.copy_async_4(self.scales_of(slot), scales, to, pair * 128, self.read_once)

        for r in range(c.tiles):
            p.when(self.valid[r], lambda r=r: tile(r))

    def scales_of(self, slot):
        """Where this lane's scales in a slot begin, less the bytes of all codes: it has 16 of these and 4 of scales."""
        return p.sub(slot, p.mul(self.lane, 12))

    def words_and_scales(self, u: int, slot):
        """The words of a unit's codes and its decoded scales, of each of this warp's row tiles."""
        plan, words, scales = self.plan, [], []
        for r in range(plan.config.tiles):
            words.append(mem.load_shared_v4(slot, r * plan.tile_slot + u * 512))
            at = r * plan.tile_slot + plan.units_warp * 512 + u // 2 * 128
            which = self.scale_bytes if plan.units_warp == 1 else p.i32(0x4342 if u % 2 else 0x4140)
            scales.append(decode_scales(mem.load_shared_b32(self.scales_of(slot), at), which))
        return words, scales

    def quad(self, slot, x_at, acc):
        """This warp's units of a quad for its row tiles: 4 m16n8k16 steps a unit, row tile and 8 rows of x, in the
        unit's chain."""
        plan, c = self.plan, self.plan.config
        acc = list(acc)
        for u in range(plan.units_warp):
            first = u % plan.chains * plan.sums_warp
            words, scales = self.words_and_scales(u, slot)
            for half in range(2):
                a = [[decode_codes(words[r][2 * half + j], scales[r]) for r in range(c.tiles)] for j in range(2)]
                for i in range(plan.m_tiles):
                    x = mem.load_shared_v4(x_at, u * 128 + 16 * half + i * 8 * plan.x_stride)
                    for j in range(2):
                        for r in range(c.tiles):
                            at = first + (r * plan.m_tiles + i) * 4
                            s = slice(at, at + 4)
                            acc[s] = p.mma_half(acc[s], a[j][r], x[2 * j], x[2 * j + 1])
        return acc

    def quad_wgmma(self, slot, x_at, acc):
        """The same with wgmma: one unit is decoded while the one before is multiplied."""
        plan, c = self.plan, self.plan.config
        acc, size = list(acc), plan.m_tiles * 4
        rows = plan.m_tiles * 8
        first = p.b_descriptor(x_at, k_stride=rows * 16, n_stride=128)
        for u in range(plan.units_warp):
            words, scales = self.words_and_scales(u, slot)
            for half in range(2):
                a = [
                    [decode_codes(words[r][2 * half + j], scales[r], in_place=True) for r in range(c.tiles)]
                    for j in range(2)
                ]
                p.wgmma_fence()
                for j in range(2):
                    b = p.add_64(first, (u * 4 + 2 * half + j) * rows * 2)
                    for r in range(c.tiles):
                        acc[r * size : (r + 1) * size] = p.wgmma_half(acc[r * size : (r + 1) * size], a[j][r], b)
                p.wgmma_commit()
                p.wgmma_wait(1)  # the codes before the last two steps may now be overwritten
        p.wgmma_wait(0)
        return acc
