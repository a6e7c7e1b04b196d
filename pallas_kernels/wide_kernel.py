"""y = x W^T and dx = dy W for many rows, from 17 on: packed NVFP4 weights decoded into the registers of wgmma.

Letters: M rows of x, R outputs and D inputs of the product (N and K forward, K and N for dx), see wide_plan.py.

A tile is 128 outputs x `m_tile` rows: out^T = W x^T, so that the weights are the operand that wgmma takes from
registers, and each of two warpgroups holds the float32 sums of 64 outputs. The last tile of rows multiplies only those
that there are, in 32s. A third warpgroup only loads: one warp x, by tensor copies into slots of 128 inputs, or 64
(shared by a cluster's CTAs where `share` says so), one warp blocks of packed weights (128 inputs). While the tensor
cores multiply 64 inputs, each warp decodes its weights for the next. Clusters take items in turn, one tile for each
CTA, rows fastest, until none is left; with `split` several compute each of the last items together and add their sums
in a fixed order (wide_split.py). So the order of additions for an output depends on D, the configuration and, where
that decides which items are the last, the number of tiles.

With `swiglu` a tile is 64 outputs of gate, of the first warpgroup, and the same 64 of up, of the second; chunk by chunk
their sums meet in shared memory, where outputs are always put in order for their way out. dx of what comes after, of
down, goes on through SwiGLU: on their way out its sums become the gradients of gate and up. These are loaded two
chunks ahead, from the L2, where they have been asked for piece by piece while the tile was multiplied.

LoRA: x A^T of all weights comes ready, or is made by CTAs that have no tile (wide_spare.py); wide_lora.py adds it. A
norm between two matmuls can be a part of both (wide_norm.py).

dx of several weights that read the same x is one product, of dy and weights one behind the other. Between two weights
the sums so far are multiplied by the next one's global scale over the last one's, as that is divided by in the end.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from . import ptx_tensor as pt
from .counters import first_counters
from .layout import QUAD_WORDS
from .pick import pick
from .wide_fragments import BLOCK_BYTES, SCALES_AT
from .wide_multiply import MultiplyWarps
from .wide_norm import NORM_WARPS, NormWarps, joined_outs
from .wide_plan import B_BOX, B_BOXES, CHUNK, PLAIN, STAGE, TILE, Handover, WideConfig, WidePlan, make_plan
from .wide_spare import SpareCtas, sums_shape
from .wide_spare_plan import WARPS
from .wide_split import SplitTiles

# Registers a thread: 2 x 128 x 232 + 128 x 40, which is what a CTA of 384 threads starts with, 168 each.
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40


class Unit(NamedTuple):
    """What a cluster computes at a time.

    Attributes:
      item: its number among all items.
      rows: of its tiles.
      parts, part: how many clusters split D of this item, and this one's place among them.
      first_block, end_block: this one's part of D.
    """

    item: ir.Value
    rows: int
    parts: int
    part: ir.Value
    first_block: ir.Value
    end_block: ir.Value


class _Kernel(MultiplyWarps, SplitTiles, SpareCtas, NormWarps):
    """One CTA's program; what all its parts share is set in __init__."""

    def __init__(self, ctx, plan: WidePlan, refs, has_bias: bool, wide_out: bool, eps: float):
        self.plan, self.has_bias, self.wide_out, self.eps = plan, has_bias, wide_out, eps
        c, given = plan.config, list(refs)

        def take(count):
            taken, given[:] = given[:count], given[count:]
            return taken

        def addresses(count):
            return list(map(mem.global_address, take(count)))

        present = [i for i, rank in enumerate(plan.ranks) if rank]
        x_refs, n_w = take(len(plan.segments)), len(plan.r)
        h_refs = take(1) if plan.given_h else []
        self.a = addresses(len(present)) if plan.makes_h else []
        b_refs = dict(zip(present, take(len(present)), strict=True))
        scalings = addresses(len(present)) if plan.makes_h else []
        data_refs = take(len(plan.inputs) or n_w)
        self.scales = addresses(len(data_refs))
        self.global_scale = self.scales[-n_w:]  # of what sums are divided by in the end
        self.bias = addresses(n_w) if has_bias else []
        if plan.handover.joins:
            self.residual, self.norm_scale = addresses(2)
        if plan.handover.normed:
            (self.squares,) = addresses(1)
        gate_up_refs = take(2) if plan.goes_through else []
        self.gate_up = list(map(mem.global_address, gate_up_refs))
        counters = addresses(1) if plan.counters else []
        self.outs = addresses(len(plan.outs))
        if plan.handover.joins:
            self.x_out, self.squares_out = addresses(2)
        if plan.split_items:
            (self.counters,), (self.sums,) = counters, addresses(1)
        if plan.makes_h:
            self.h_scales = [(self.global_scale[i], scaling) for i, scaling in zip(present, scalings, strict=True)]
            self.left, self.stored = (mem.offset(counters[0], p.i32(4 * (plan.counters - i))) for i in (2, 1))
            (self.h_sums,), h_refs = addresses(1), take(1)
            (self.h,), (self.x,) = map(mem.global_address, h_refs), map(mem.global_address, x_refs)
        (shared,) = given
        # by rows of a tile, of which each CTA of a cluster loads its part: x, and x A^T
        self.x_maps = {
            rows: [pt.tensor_map(ctx, ref, (rows // c.share, STAGE), 128) for ref in (*x_refs, *h_refs)]
            for rows in {run.rows for run in plan.runs}
        }
        self.gate_up_maps = [pt.tensor_map(ctx, ref, (CHUNK, STAGE), None) for ref in gate_up_refs]
        # codes and scales of a pair of units in the row tiles of a block that are one weight's
        boxes = [(plan.own_row_tiles, words) for words in (256, 32)]
        self.maps = [[pt.tensor_map(ctx, ref, box, None) for box in boxes] for ref in data_refs]
        b_maps = {i: pt.tensor_map(ctx, ref, (plan.own_outputs, 16), None) for i, ref in b_refs.items()}
        # B, and its first step of ranks among those of a tile; a weight without an adapter has none of another's
        firsts = (0,) * n_w if plan.own_ranks else plan.first_steps
        of_none = [b_maps[present[0]], p.i32(plan.lora_steps)] if b_maps else []
        self.b_maps = [[b_maps[i], p.i32(firsts[i])] if i in b_maps else of_none for i in range(n_w)]
        self.base = p.and_(p.add(mem.shared_address(shared), 1023), -1024)
        barriers = p.add(self.base, plan.barriers_at)
        self.x_full, self.x_empty = barriers, p.add(barriers, 8 * c.x_depth)
        self.w_full = p.add(barriers, 16 * c.x_depth)
        self.w_empty = p.add(self.w_full, 8 * c.w_depth)
        self.w_base = p.add(self.base, plan.w_at)
        self.inverse_ready = p.add(self.base, plan.inverse_at)
        self.tid = p.sreg("tid.x")
        self.lane = p.and_(self.tid, 31)
        self.warp = p.uniform(p.shr(self.tid, 5))
        self.is_lane_0 = p.eq(self.lane, 0)
        cta = p.sreg("ctaid.x")
        self.cluster, self.rank = p.div(cta, c.share), p.rem(cta, c.share)

    def run(self):
        c = self.plan.config
        in_cluster = c.share > 1

        def init():
            for i in range(c.x_depth):
                mem.barrier_init(p.add(self.x_full, 8 * i), 1)
                mem.barrier_init(p.add(self.x_empty, 8 * i), 8 * c.share)
            for i in range(c.w_depth):
                mem.barrier_init(p.add(self.w_full, 8 * i), 1)
                mem.barrier_init(p.add(self.w_empty, 8 * i), 8)
            if self.plan.handover.normed:
                mem.barrier_init(self.inverse_ready, NORM_WARPS)
            mem.fence_barrier_init()

        p.when(p.eq(self.tid, 0), init)
        (p.cluster_sync if in_cluster else p.cta_sync)()

        def load():
            pt.set_registers(LOAD_REGISTERS, up=False)
            p.when(p.eq(self.warp, 8), lambda: p.when(self.is_lane_0, self.load_x))
            p.when(p.eq(self.warp, 9), lambda: p.when(self.is_lane_0, self.load_weights))
            if self.plan.handover.normed:
                p.when(p.lt(9, self.warp), self.add_squares)
            p.warp_sync()

        def multiply():
            pt.set_registers(COMPUTE_REGISTERS, up=True)
            self.multiply()
            p.warp_sync()

        def tiles():
            p.if_else(p.lt(self.warp, 8), multiply, load)

        if self.plan.makes_h:
            p.if_else(p.lt(self.cluster, self.plan.clusters), tiles, self.make_h)
        else:
            tiles()
        if in_cluster:
            p.cluster_sync()  # nobody leaves while another CTA may still write to its shared memory

    def tile(self, unit):
        """This CTA's tile of outputs and first row in an item: groups of row tiles, then outputs, then rows fastest;
        behind them the outputs of the last rows, if these are fewer."""
        plan = self.plan
        if unit.rows < plan.config.m_tile:
            r_group, m_tile = p.sub(unit.item, plan.full_items), p.i32(plan.full_m_tiles)
        else:
            per_group = plan.m_group * plan.r_groups
            group, rest = p.div(unit.item, per_group), p.rem(unit.item, per_group)
            m_tile = p.add(p.mul(group, plan.m_group), p.rem(rest, plan.m_group))
            r_group = p.div(rest, plan.m_group)
        return p.add(p.mul(r_group, plan.config.share), self.rank), p.mul(m_tile, plan.config.m_tile)

    def each_unit(self, carries, body):
        """body(unit, carries) -> carries for every unit of this CTA: whole items, then a part of one of the last. Runs
        follow each other as if they were one: who had one unit less of the last has one of the next first."""
        plan, before = self.plan, 0
        for run in plan.runs:

            def one(index, carries, run=run):
                part = p.rem(index, run.parts)
                blocks = [p.div(p.mul(i, plan.blocks), run.parts) for i in (part, p.add(part, 1))]
                item = p.add(p.div(index, run.parts), run.first)
                return body(Unit(item, run.rows, run.parts, part, *blocks), carries)

            units = (run.end - run.first) * run.parts
            mine = p.rem(p.add(self.cluster, -before % plan.clusters), plan.clusters)
            carries = p.for_range(mine, units, plan.clusters, carries, one)
            before += units

    def segments(self, unit):
        """Of each weight one behind the other: its number, its first block, and those of the unit from one on to before
        another, of which a unit that is a part may have none."""
        found = []
        for i, (first, end) in enumerate(self.plan.segments):
            if len(self.plan.segments) == 1:
                begin, stop = unit.first_block, unit.end_block
            elif unit.parts == 1:
                begin, stop = p.i32(first), p.i32(end)
            else:
                begin, stop = p.maximum(unit.first_block, first), p.minimum(unit.end_block, end)
            found.append((i, first, begin, stop))
        return found

    def advance(self, slot, parity, depth: int):
        after = p.add(slot, 1)
        wraps = p.eq(after, depth)
        return [p.select(wraps, 0, after), p.xor(parity, p.select(wraps, 1, 0))]

    # ---- the warps that load -------------------------------------------------------------------------------------

    def load_x(self):
        plan, c = self.plan, self.plan.config
        mask = pt.multicast_mask(c.share) if c.share > 1 else None

        def one(unit, carry):
            r_tile, first_row = self.tile(unit)
            mine = p.mul(self.rank, unit.rows // c.share)
            mine_to, row = p.mul(mine, STAGE * 2), p.add(first_row, mine)
            maps = self.x_maps[unit.rows]
            x_maps, h_map = maps[: len(plan.segments)], maps[len(plan.segments) :]

            def load(source, column, carry, stages=1):
                slot, parity = carry
                full = p.add(self.x_full, p.mul(slot, 8))
                to = p.add(p.add(self.base, p.mul(slot, plan.x_slot)), mine_to)
                mem.barrier_wait(p.add(self.x_empty, p.mul(slot, 8)), p.xor(parity, 1))
                mem.barrier_expect(full, p.i32(unit.rows * stages * STAGE * 2))
                for i in range(stages):
                    at, its_column = p.add(to, i * plan.x_stage), p.add(column, i * STAGE)
                    pt.tensor_load(at, source, its_column, row, full, mask)
                return self.advance(slot, parity, c.x_depth)

            def load_h(carry):
                first = p.i32(0)
                if plan.own_ranks:
                    (first,), _ = pick(plan.tiles_of, r_tile, [[p.i32(16 * s)] for s in plan.first_steps])
                for slot in range(plan.lora_slots):
                    column = p.add(first, slot * STAGE)
                    if unit.parts > 1:  # zeros are behind the last rank
                        column = p.select(p.eq(unit.part, 0), column, 16 * plan.first_steps[-1])
                    carry = load(*h_map, column, carry)
                return carry

            if plan.given_h:
                carry = load_h(carry)
            for i, first, begin, end in self.segments(unit):

                def next_slot(at, carry, source=x_maps[i], first=first):
                    if plan.goes_through and unit.parts == 1:
                        self.ask_for_gate_and_up(at, unit.rows, r_tile, first_row)
                    column = p.mul(p.sub(at, first * plan.slots_of_block), plan.stages_of_slot * STAGE)
                    return load(source, column, carry, plan.stages_of_slot)

                slots = [p.mul(block, plan.slots_of_block) for block in (begin, end)]
                carry = p.for_range(*slots, 1, carry, next_slot)
            if plan.makes_h:
                p.when(p.eq(unit.part, 0), self.await_h)
                carry = load_h(carry)
                p.when(p.eq(unit.part, 0), self.leave_h)
            return carry

        self.each_unit([p.i32(0), p.i32(0)], one)

    def ask_for_gate_and_up(self, at, rows: int, r_tile, first_row):
        """A piece of what a tile's outputs need of gate and up, into the L2: one with each of the last slots of x, as
        all at once would hold up x."""
        pieces = rows // CHUNK * (TILE // STAGE)
        turn = p.sub(at, self.plan.blocks * self.plan.slots_of_block - 2 * pieces)
        of_gate = p.lt(turn, pieces)
        source = arith.select(of_gate, *self.gate_up_maps)
        piece = p.select(of_gate, turn, p.sub(turn, pieces))
        column = p.add(p.mul(r_tile, TILE), p.mul(p.rem(piece, TILE // STAGE), STAGE))
        row = p.add(first_row, p.mul(p.div(piece, TILE // STAGE), CHUNK))
        p.when(p.lt(turn, 2 * pieces), lambda: pt.tensor_prefetch(source, column, row))

    def load_weights(self):
        plan, c = self.plan, self.plan.config
        policy = mem.read_once() if plan.m_tiles == 1 else None  # each tile of rows reads all weights

        def one(unit, carry):
            r_tile, _ = self.tile(unit)
            row_tiles = plan.own_row_tiles

            def next_slot(slot, parity, size):
                full = p.add(self.w_full, p.mul(slot, 8))
                mem.barrier_wait(p.add(self.w_empty, p.mul(slot, 8)), p.xor(parity, 1))
                mem.barrier_expect(full, p.i32(size))
                return p.add(self.w_base, p.mul(slot, BLOCK_BYTES)), full

            def load_b(carry):
                of_weights, tile = self.b_maps, r_tile
                if not plan.joins_two:
                    chosen, tile = pick(plan.tiles_of, r_tile, self.b_maps)
                    of_weights = [chosen]
                for start in range(0, plan.lora_steps, B_BOXES):
                    steps = range(start, min(start + B_BOXES, plan.lora_steps))
                    to, full = next_slot(*carry, len(steps) * B_BOX)
                    for i, step in enumerate(steps):
                        for w, (b_map, first) in enumerate(of_weights):
                            at = p.add(to, i * B_BOX + w * plan.own_outputs * 32)
                            column = p.mul(p.sub(step, first), 16)  # zeros where these are another weight's ranks
                            pt.tensor_load(at, b_map, column, p.mul(tile, plan.own_outputs), full)
                    carry = self.advance(*carry, c.w_depth)
                return carry

            def block(i, carry, of_weights, tile, first):
                (slot, parity), i = carry, p.sub(i, first)
                to, full = next_slot(slot, parity, BLOCK_BYTES)
                rows, units = (i, tile) if plan.transposed else (tile, i)
                row, quad, pair = p.mul(rows, row_tiles), p.mul(p.shr(units, 1), QUAD_WORDS), p.and_(units, 1)
                for w, (codes, scales) in enumerate(of_weights):
                    at, scales_at = p.add(to, w * row_tiles * 1024), p.add(to, SCALES_AT + w * row_tiles * 128)
                    in_scales = p.add(quad, p.add(p.mul(pair, 32), 512))
                    pt.tensor_load(at, codes, p.add(quad, p.mul(pair, 256)), row, full, policy=policy)
                    pt.tensor_load(scales_at, scales, in_scales, row, full, policy=policy)
                return self.advance(slot, parity, c.w_depth)

            if plan.given_h:
                carry = load_b(carry)
            for i, first, begin, end in self.segments(unit):
                if plan.joins_two or plan.transposed:
                    of_weights, tile = self.maps if plan.joins_two else [self.maps[i]], r_tile
                else:
                    maps, tile = pick(plan.tiles_of, r_tile, self.maps)
                    of_weights = [maps]
                one_block = functools.partial(block, of_weights=of_weights, tile=tile, first=first)
                # opaque: LLVM unrolled a loop of ten blocks, for which 40 registers are too few
                carry = p.for_range(begin, p.opaque(end), 1, carry, one_block)
            return load_b(carry) if plan.makes_h else carry

        self.each_unit([p.i32(0), p.i32(0)], one)


def sums_size(plan: WidePlan) -> int:
    return plan.split_tiles * plan.parts * TILE * plan.config.m_tile


@functools.cache
def build(
    m: int,
    d: int,
    r: tuple[int, ...],
    config: WideConfig,
    transposed: bool = False,
    has_bias: bool = False,
    wide_out: bool = False,
    ranks: tuple[int, ...] = (),
    swiglu: bool = False,
    makes_h: bool = False,
    handover: Handover = PLAIN,
    eps: float = 0.0,
    dtype: str = "bfloat16",
    inputs: tuple[int, ...] = (),
    keeps: bool = False,
):
    """The kernel as a function (x [M, D], data [T, Q * 576] uint32..., scale..., [bias...]) -> list of [M, r_i],
    or with `swiglu`, of gate and up, of silu(gate) * up [M, r] alone, or if it `keeps` them of that, gate and up. Of dx
    with `swiglu` gate and up [M, r] of dtype are the last operands, and the results are their gradients.

    The global `scale` is float32 [1], `bias` float32 [r_i]; x and the results are of `dtype`, that of the weights, the
    results float32 if `wide_out`. With `ranks`, multiples of 16 and 0 where a weight has no LoRA, x is followed by
    s x A^T scale / EPILOGUE_FACTOR of all weights [M, sum of ranks] and by B [r_i, rank_i] of those that have one; or,
    if `makes_h`, by A [rank_i, D], B, and LoRA's scaling float32 [1], each of all that have one. With `inputs`, of dx,
    there is a dy [M, inputs_i] for each weight in the place of x.

    Where `handover` says that the result joins the residual stream, that, float32 [M, r], and the norm's scale float32
    [r] follow; the results are the residual stream, `wide_out`, and `wide_norm.joined_outs`. Where it says that x is of
    such a norm, with `eps`, the sums of its squares follow.
    """
    plan = make_plan(m, d, r, transposed, config, ranks, swiglu, makes_h, handover, inputs, keeps)
    outs = [jax.ShapeDtypeStruct((m, r_i), jnp.float32 if wide_out else jnp.dtype(dtype)) for r_i in plan.outs]
    if handover.joins:
        outs += joined_outs(plan, dtype)
    written = len(outs)
    if plan.split_items:
        outs.append(jax.ShapeDtypeStruct((sums_size(plan),), jnp.float32))
    if makes_h:
        outs.append(jax.ShapeDtypeStruct(sums_shape(plan), jnp.float32))
        outs.append(jax.ShapeDtypeStruct((m, sum(plan.ranks)), jnp.dtype(dtype)))

    def program(ctx, *refs):
        _Kernel(ctx, plan, refs, has_bias, wide_out, eps).run()

    k_n = f"{sum(plan.r)}x{plan.d}" if transposed else f"{plan.d}x{sum(plan.r)}"
    program.__name__ = f"nvfp4_wide_matmul_{'dx_' if transposed else ''}{k_n}"  # what a profile shows
    call = lane_level.kernel(
        program,
        outs,
        dtype,
        grid=plan.clusters + (plan.spare.ctas // config.share if makes_h else 0),
        warps=WARPS,
        cluster=config.share,
        shared=plan.total,
    )

    def product(*operands):
        sync = [jnp.asarray(first_counters(plan.counters))] if plan.counters else []
        return call(*operands, *sync)[:written]

    return jax.jit(product)
