"""y = x W^T for few rows (M <= 64): packed NVFP4 weights, mma.sync fragments, x resident in shared memory.

Letters: M rows of x, N outputs, K inputs; T row tiles of 16 outputs, U units of 64 inputs (see layout.py).

Work is cut so that no byte of W is read twice and x is read once per CTA:
  * a cluster of CTAs splits K; each CTA keeps its K slice of x in shared memory for its whole life;
  * the clusters take groups of `warps_n * tiles` row tiles in turn (persistent grid);
  * in a CTA, `warps_k` warps split the K slice again, `warps_n` warps split the group's rows;
  * each warp streams its own (row tiles x K slice) through its own ring of slots, filled by the copy engine: lane 0
    refills a slot as soon as the warp has used it, so there is no loading warp and no CTA-wide wait;
  * at the end of a group the warps leave float32 sums in shared memory and go on; four epilogue warps add them in a
    fixed order and store. With a cluster, they keep their CTA's sums until the end, when the cluster adds them up.

The order of additions for an output depends on K and the configuration, never on M, other rows, or timing; nothing is
added with atomics.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from . import ptx as p
from .decode_plan import EPILOGUE_WARPS, DecodeConfig, Plan, make_plan
from .fragments import decode_codes, decode_scales
from .layout import COLS, EPILOGUE_FACTOR, ROWS, UNIT_BYTES


class _Kernel:
    """One CTA's program. Values that all parts share are set in __init__, in the order in which the CTA computes them."""

    def __init__(self, plan: Plan, refs, has_bias: bool, pdl: bool, wide_out: bool):
        self.plan, self.has_bias, self.pdl, self.wide_out = plan, has_bias, pdl, wide_out
        self.n_w = n_w = len(plan.n)
        c = plan.config
        x_ref, *rest = refs
        self.x = p.global_address(x_ref)
        self.data = [p.global_address(r) for r in rest[:n_w]]
        self.factor = [p.global_address(r) for r in rest[n_w : 2 * n_w]]
        self.bias = [p.global_address(r) for r in rest[2 * n_w : 3 * n_w]] if has_bias else []
        self.outs = [p.global_address(r) for r in rest[-1 - n_w : -1]]
        base = p.shared_address(rest[-1])
        self.tid = p.sreg("tid.x")
        self.lane = p.and_(self.tid, 31)
        self.warp = p.uniform(p.shr(self.tid, 5))
        self.is_lane_0 = p.eq(self.lane, 0)
        cta = p.sreg("ctaid.x")
        self.rank, self.cluster = p.rem(cta, c.cluster), p.div(cta, c.cluster)
        self.rings = base
        self.x_bar = p.add(base, c.warps * c.depth * 8)
        self.full = p.add(self.x_bar, 8)
        self.empty = p.add(self.x_bar, 24)
        self.ring_base = p.add(base, plan.ring_at)
        self.x_base = p.add(base, plan.x_at)
        self.red_base = p.add(base, plan.red_at)
        self.part_base = p.add(base, plan.part_at)
        self.cta_u0 = p.mul(self.rank, plan.units_cta)
        self.cta_units = p.minimum(p.sub(plan.units, self.cta_u0), plan.units_cta)
        self.groups_here = p.div(p.add(p.sub(plan.groups, self.cluster), plan.clusters - 1), plan.clusters)

    def run(self):
        c = self.plan.config
        compute = p.lt(self.warp, c.warps)

        def init():
            for d in range(c.depth):
                p.when(compute, lambda d=d: p.barrier_init(p.add(self.rings, p.add(p.mul(self.warp, c.depth * 8), 8 * d)), 1))

            def shared():
                p.barrier_init(self.x_bar, 1)
                for b in range(2):
                    p.barrier_init(p.add(self.full, 8 * b), c.warps)
                    p.barrier_init(p.add(self.empty, 8 * b), EPILOGUE_WARPS)

            p.when(p.eq(self.warp, c.warps), shared)
            p.fence_barrier_init()

        p.when(self.is_lane_0, init)
        p.cta_sync()
        p.if_else(compute, self.compute, self.epilogue)
        if c.cluster > 1:
            p.warp_sync()
            p.cluster_sync()
            self.add_cluster()
            p.cluster_sync()  # nobody leaves while another CTA may still read its shared memory

    def pick(self, group, values):
        """The weight that a row group belongs to: its values, and the group's index in it."""
        first, chosen, local = 0, list(values[0]), group
        for i in range(1, self.n_w):
            first += self.plan.groups_of[i - 1]
            earlier = p.lt(group, first)
            chosen = [arith.select(earlier, a, b) for a, b in zip(chosen, values[i], strict=True)]
            local = p.select(earlier, local, p.sub(group, first))
        return chosen, local

    # ---- compute warps -------------------------------------------------------------------------------------------

    def compute(self):
        plan, c = self.plan, self.plan.config
        self.bars = p.add(self.rings, p.mul(self.warp, c.depth * 8))
        self.ring = p.add(self.ring_base, p.mul(self.warp, c.depth * plan.slot))
        self.warp_k, self.warp_n = p.div(self.warp, c.warps_n), p.rem(self.warp, c.warps_n)
        self.warp_u0 = p.minimum(p.mul(self.warp_k, plan.units_warp), self.cta_units)
        self.warp_units = p.minimum(p.sub(self.cta_units, self.warp_u0), plan.units_warp)
        for d in range(c.depth):
            it, part = divmod(d, plan.slots_per_group)
            p.when(
                arith.andi(self.is_lane_0, p.lt(it, self.groups_here)),
                lambda it=it, part=part, d=d: self.fetch(p.add(self.cluster, it * plan.clusters), part, p.i32(d)),
            )
        if self.pdl:
            p.grid_dependency_launch()
            p.grid_dependency_wait()
        p.when(p.eq(self.warp, 0), self.load_x)
        p.barrier_wait(self.x_bar, p.i32(0))
        g, t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        x_lane = p.add(self.x_base, p.add(p.mul(g, plan.x_stride), p.mul(t, 32)))
        self.x_warp = p.add(x_lane, p.mul(self.warp_u0, COLS * 2))
        self.sum_lane = p.add(
            p.add(self.red_base, p.mul(self.warp, plan.red_warp)), p.add(p.mul(t, 2 * plan.red_stride), p.mul(g, 4))
        )
        p.for_range(0, self.groups_here, 1, [p.i32(0), p.i32(0)], self.compute_group)

    def units_of(self, part: int):
        """Units in a slot: a constant where every warp has the same."""
        plan = self.plan
        size = min(plan.slot_units, plan.units_warp - part * plan.slot_units)
        if not plan.ragged:
            return p.i32(size)
        start = p.minimum(self.warp_units, part * plan.slot_units)
        return p.minimum(p.sub(self.warp_units, start), size)

    def fetch(self, group, part: int, slot):
        """Lane 0: start the copies of part `part` of this warp's share of a row group into a slot."""
        plan, c = self.plan, self.plan.config
        row_tile = plan.units * UNIT_BYTES
        (w,), local = self.pick(group, [(d,) for d in self.data])
        n_bytes = p.mul(self.units_of(part), UNIT_BYTES)
        bar = p.add(self.bars, p.mul(slot, 8))
        dst = p.add(self.ring, p.mul(slot, plan.slot))
        p.barrier_expect(bar, p.mul(n_bytes, c.tiles))
        tile = p.mul(p.add(p.mul(local, c.warps_n), self.warp_n), c.tiles)
        unit = p.add(p.add(self.cta_u0, self.warp_u0), part * plan.slot_units)
        src = p.offset(p.wide_offset(w, tile, row_tile), p.mul(unit, UNIT_BYTES))

        def copies():
            for r in range(c.tiles):
                at = p.add(dst, r * plan.slot_units * UNIT_BYTES)
                p.bulk_load(at, p.wide_offset(src, p.i32(r), row_tile), n_bytes, bar)

        if plan.ragged:
            p.when(p.lt(0, n_bytes), copies)
        else:
            copies()

    def load_x(self):
        plan = self.plan
        row_bytes = p.mul(self.cta_units, COLS * 2)
        p.when(self.is_lane_0, lambda: p.barrier_expect(self.x_bar, p.mul(row_bytes, plan.m_tiles * 8)))
        p.warp_sync()
        for first in range(0, plan.m_tiles * 8, 32):
            row = p.add(self.lane, first)
            # rows past M repeat the last one; their sums are never stored
            src = p.wide_offset(self.x, p.minimum(row, plan.m - 1), plan.units * COLS * 2)
            src = p.offset(src, p.mul(self.cta_u0, COLS * 2))
            dst = p.add(self.x_base, p.mul(row, plan.x_stride))
            p.when(
                p.lt(row, plan.m_tiles * 8), lambda s=src, d=dst: p.bulk_load(d, s, row_bytes, self.x_bar)
            )

    def compute_group(self, it, carries):
        plan, c = self.plan, self.plan.config
        slot, parity = carries
        group = p.add(self.cluster, p.mul(it, plan.clusters))
        acc = [p.f32(0.0)] * (c.tiles * plan.m_tiles * 4)
        for part in range(plan.slots_per_group):
            p.barrier_wait(p.add(self.bars, p.mul(slot, 8)), parity)
            acc = self.compute_slot(slot, part, acc)
            p.warp_sync()
            ahead, next_part = divmod(part + c.depth, plan.slots_per_group)
            p.when(
                arith.andi(self.is_lane_0, p.lt(p.add(it, ahead), self.groups_here)),
                lambda ahead=ahead, next_part=next_part, slot=slot: self.fetch(
                    p.add(group, ahead * plan.clusters), next_part, slot
                ),
            )
            slot = p.add(slot, 1)
            wrap = p.eq(slot, c.depth)
            slot, parity = p.select(wrap, 0, slot), p.select(wrap, arith.xori(parity, p.i32(1)), parity)
        which = p.and_(it, 1)
        # passes at once for the first use of each buffer: the phase before the first counts as complete
        p.barrier_wait(p.add(self.empty, p.mul(which, 8)), p.and_(p.add(p.shr(it, 1), 1), 1))
        mine = p.add(self.sum_lane, p.mul(which, plan.red_buffer))
        for r in range(c.tiles):
            for i in range(plan.m_tiles):
                for e in range(4):
                    where = (8 * i + e % 2) * plan.red_stride + (r * ROWS + 8 * (e // 2)) * 4
                    p.store_shared_f32(mine, acc[(r * plan.m_tiles + i) * 4 + e], where)
        p.warp_sync()
        p.when(self.is_lane_0, lambda: p.barrier_arrive(p.add(self.full, p.mul(which, 8))))
        return [slot, parity]

    def compute_slot(self, slot, part: int, acc):
        plan = self.plan
        here = p.add(self.ring, p.mul(slot, plan.slot))
        code_at = p.add(here, p.mul(self.lane, 16))
        scale_at = p.add(p.add(here, p.mul(self.lane, 2)), 512)
        x_at = p.add(self.x_warp, part * plan.slot_units * COLS * 2)
        size = min(plan.slot_units, plan.units_warp - part * plan.slot_units)
        if not plan.ragged and size <= 8:
            for u in range(size):
                acc = self.unit(code_at, scale_at, x_at, u, acc)
            return acc
        step = 1 if plan.ragged else max(s for s in range(1, 5) if size % s == 0)

        def units(u, carry):
            code_at, scale_at, x_at, *acc = carry
            for s in range(step):
                acc = self.unit(code_at, scale_at, x_at, s, acc)
            moved = step * UNIT_BYTES
            return [p.add(code_at, moved), p.add(scale_at, moved), p.add(x_at, step * COLS * 2), *acc]

        return p.for_range(0, self.units_of(part), step, [code_at, scale_at, x_at, *acc], units)[3:]

    def unit(self, code_at, scale_at, x_at, u: int, acc):
        """One unit of 64 columns for each of this warp's row tiles: 4 m16n8k16 steps a row tile and 8 rows of x."""
        plan, c = self.plan, self.plan.config
        acc = list(acc)
        words, scales = [], []
        for r in range(c.tiles):
            at = (r * plan.slot_units + u) * UNIT_BYTES
            words.append(p.load_shared_v4(code_at, at))
            scales.append(decode_scales(p.load_shared_u16(scale_at, at)))
        for half in range(2):
            xs = [
                p.load_shared_v4(x_at, u * COLS * 2 + 16 * half + i * 8 * plan.x_stride) for i in range(plan.m_tiles)
            ]
            for j in range(2):
                for r in range(c.tiles):
                    a = decode_codes(words[r][2 * half + j], *scales[r])
                    for i in range(plan.m_tiles):
                        s = slice((r * plan.m_tiles + i) * 4, (r * plan.m_tiles + i) * 4 + 4)
                        acc[s] = p.mma_bf16(acc[s], a, xs[i][2 * j], xs[i][2 * j + 1])
        return acc

    # ---- epilogue warps ------------------------------------------------------------------------------------------

    def epilogue(self):
        if self.pdl:
            p.grid_dependency_wait()
        p.for_range(0, self.groups_here, 1, [], self.epilogue_group)

    def epilogue_group(self, it, _):
        plan, c = self.plan, self.plan.config
        group = p.add(self.cluster, p.mul(it, plan.clusters))
        which = p.and_(it, 1)
        local_tid = p.sub(self.tid, 32 * c.warps)
        threads = 32 * EPILOGUE_WARPS
        target = self.output_of(group) if c.cluster == 1 else None
        p.barrier_wait(p.add(self.full, p.mul(which, 8)), p.and_(p.shr(it, 1), 1))
        buffer = p.add(self.red_base, p.mul(which, plan.red_buffer))
        for first in range(0, plan.pairs, threads):
            pair = p.add(local_tid, first)

            def one(pair=pair):
                m, row = p.div(pair, plan.rows // 2), p.mul(p.rem(pair, plan.rows // 2), 2)
                per_warp = ROWS * c.tiles
                at = p.add(buffer, p.add(p.mul(m, plan.red_stride), p.mul(p.rem(row, per_warp), 4)))
                at = p.add(at, p.mul(p.div(row, per_warp), plan.red_warp))
                loaded = [p.load_shared_f32x2(p.add(at, wk * c.warps_n * plan.red_warp)) for wk in range(c.warps_k)]
                sums = _add_all(loaded)
                if c.cluster == 1:
                    self.store(target, m, row, sums)
                else:
                    p.store_shared_f32x2(p.add(self.part_base, p.mul(p.add(p.mul(it, plan.pairs), pair), 8)), sums)

            if first + threads > plan.pairs:
                p.when(p.lt(pair, plan.pairs), one)
            else:
                one()
        p.warp_sync()
        p.when(self.is_lane_0, lambda: p.barrier_arrive(p.add(self.empty, p.mul(which, 8))))
        return []

    def add_cluster(self):
        """All threads: add the CTAs' sums of this cluster's groups, each rank an equal share, ranks in order."""
        plan, c = self.plan, self.plan.config
        share = p.div(p.add(p.mul(self.groups_here, plan.pairs), c.cluster - 1), c.cluster)
        end = p.minimum(p.mul(p.add(self.rank, 1), share), p.mul(self.groups_here, plan.pairs))

        def one(index, _):
            at = p.add(self.part_base, p.mul(index, 8))
            loaded = [p.load_cluster_f32x2(p.map_rank(at, p.i32(r))) for r in range(c.cluster)]
            it, pair = p.div(index, plan.pairs), p.rem(index, plan.pairs)
            group = p.add(self.cluster, p.mul(it, plan.clusters))
            m, row = p.div(pair, plan.rows // 2), p.mul(p.rem(pair, plan.rows // 2), 2)
            self.store(self.output_of(group), m, row, _add_all(loaded))
            return []

        p.for_range(p.add(p.mul(self.rank, share), self.tid), end, c.threads, [], one)

    def output_of(self, group):
        """What storing a group's outputs needs: scale, output, bias, N, first output's index."""
        bias = self.bias or self.outs
        values = [(self.factor[i], self.outs[i], bias[i], p.i32(self.plan.n[i])) for i in range(self.n_w)]
        (factor, out, bias, n), local = self.pick(group, values)
        return p.load_global_f32(factor), out, bias, n, p.mul(local, self.plan.rows)

    def store(self, target, m, row, sums):
        scale, out, bias, n, first = target
        column = p.add(first, row)
        size = 4 if self.wide_out else 2
        at = p.offset(out, p.mul(p.add(p.mul(m, n), column), size))

        def value(e):
            v = arith.mulf(sums[e], scale)
            if not self.has_bias:
                return v
            return arith.addf(v, p.load_global_f32(p.offset(bias, p.mul(p.add(column, e), 4))))

        def both():
            (p.store_global_f32x2 if self.wide_out else p.store_global_bf16x2)(at, value(0), value(1))

        if all(n_i % ROWS == 0 for n_i in self.plan.n):
            both()
        elif all(n_i % 2 == 0 for n_i in self.plan.n):
            p.when(p.lt(column, n), both)
        else:  # pairs may straddle the end, or be misaligned: one at a time
            for e in range(2):
                at = p.offset(out, p.mul(p.add(p.mul(m, n), p.add(column, e)), size))
                store_one = p.store_global_f32 if self.wide_out else p.store_global_bf16
                p.when(p.lt(p.add(column, e), n), lambda at=at, e=e, store_one=store_one: store_one(at, value(e)))


def _add_all(pairs):
    total = pairs[0]
    for pair in pairs[1:]:
        total = [arith.addf(a, b) for a, b in zip(total, pair, strict=True)]
    return total


@functools.lru_cache(maxsize=None)
def build(
    m: int,
    k: int,
    n: tuple[int, ...],
    config: DecodeConfig,
    has_bias: bool = False,
    pdl: bool = False,
    wide_out: bool = False,
):
    """The kernel as a function (x [M, U * 64] bf16, data..., factor..., [bias...]) -> list of y_i [M, n_i].

    `factor` is float32 [1], 128 / global_scale; `bias` is float32 [n_i]; y_i is bfloat16, or float32 if `wide_out`.
    """
    plan = make_plan(m, k, n, config)
    count = 1 + (3 if has_bias else 2) * len(n) + len(n) + 1

    def nvfp4_decode_matmul(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * count)
        def body(ctx, *refs):
            _Kernel(plan, refs, has_bias, pdl, wide_out).run()

        body(*refs)
        if pdl:
            plgpu.griddepcontrol_wait()  # tells the launcher that the kernel takes part; the body has waited already

    call = plgpu.kernel(
        nvfp4_decode_matmul,
        out_type=[jax.ShapeDtypeStruct((m, n_i), jnp.float32 if wide_out else jnp.bfloat16) for n_i in n],
        scratch_types=[plgpu.SMEM((plan.total,), jnp.int8)],
        grid=(plan.clusters,),
        grid_names=("clusters",),
        cluster=(config.cluster,),
        cluster_names=("rank",),
        num_threads=config.threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    return jax.jit(call)


def epilogue_factor(global_scale: jax.Array) -> jax.Array:
    """float32 [1]: what turns the kernel's raw sums into x W^T."""
    return (jnp.float32(EPILOGUE_FACTOR) / jnp.asarray(global_scale, jnp.float32)).reshape(1)
