"""y = x W^T for few rows (M <= 64): packed NVFP4 weights streamed once past accumulators that stay in registers.

Letters: M rows of x, N outputs, K inputs; row tiles of 16 outputs, quads of 256 inputs (see layout.py).

Each cluster of CTAs owns an equal run of row tiles (the grid is one wave), and walks K once:
  * the CTAs of a cluster split K; in a CTA `warps_n` warps split the row tiles and `warps_k` the units of each quad; a
    warp holds the float32 sums of `tiles` row tiles x all M in registers until the end;
  * each lane streams its own codes and scales through its own part of a ring in shared memory (cp.async, `depth`
    quads), so weights need no barrier at all;
  * one more warp streams x through a ring that all warps of the CTA read, so x is read once per CTA;
  * at the end the sums meet in shared memory (the cluster's, when K is split over CTAs), are added in a fixed order,
    scaled, biased and stored.

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
from . import ptx_memory as mem
from .layout import COLS, EPILOGUE_FACTOR, ROWS
from .stream_compute import ComputeWarps
from .stream_plan import Plan, StreamConfig, make_plan

MAX_ROWS = 64


class _Kernel(ComputeWarps):
    """One CTA's program; what all its parts share is set in __init__, in the order in which the CTA computes it."""

    def __init__(self, plan: Plan, refs, has_bias: bool, pdl: bool, wide_out: bool):
        self.plan, self.has_bias, self.pdl, self.wide_out = plan, has_bias, pdl, wide_out
        self.n_w = n_w = len(plan.n)
        c = plan.config
        x_ref, *rest = refs
        self.x = mem.global_address(x_ref)
        self.data = [mem.global_address(r) for r in rest[:n_w]]
        self.factor = [mem.global_address(r) for r in rest[n_w : 2 * n_w]]
        self.bias = [mem.global_address(r) for r in rest[2 * n_w : 3 * n_w]] if has_bias else []
        self.outs = [mem.global_address(r) for r in rest[-1 - n_w : -1]]
        base = mem.shared_address(rest[-1])
        self.tid = p.sreg("tid.x")
        self.lane = p.and_(self.tid, 31)
        self.warp = p.uniform(p.shr(self.tid, 5))
        self.is_lane_0 = p.eq(self.lane, 0)
        cta = p.sreg("ctaid.x")
        self.rank, self.cluster = p.rem(cta, c.cluster), p.div(cta, c.cluster)
        self.x_full, self.x_empty = base, p.add(base, 8 * c.x_depth)
        self.ring_base = p.add(base, plan.ring_at)
        self.x_base = p.add(base, plan.x_at)
        self.first_quad = p.div(p.mul(self.rank, plan.quads), c.cluster)
        self.quads = p.sub(p.div(p.mul(p.add(self.rank, 1), plan.quads), c.cluster), self.first_quad)
        self.first_tile = p.div(p.mul(self.cluster, plan.all_tiles), plan.clusters)
        self.tile_count = p.sub(p.div(p.mul(p.add(self.cluster, 1), plan.all_tiles), plan.clusters), self.first_tile)

    def run(self):
        c = self.plan.config
        is_compute = p.lt(self.warp, c.warps)

        def init():
            for i in range(c.x_depth):
                mem.barrier_init(p.add(self.x_full, 8 * i), 1 if c.wgmma else 32)
                mem.barrier_init(p.add(self.x_empty, 8 * i), c.warps)
            mem.fence_barrier_init()

        p.when(p.eq(self.tid, 0), init)
        p.cta_sync()
        p.if_else(is_compute, self.compute, lambda: p.when(p.eq(self.warp, c.warps), self.load_x))
        if c.cluster > 1:
            p.warp_sync()
            p.cluster_sync()
        else:
            p.cta_sync()
        self.add_up()
        if c.cluster > 1:
            p.cluster_sync()  # nobody leaves while another CTA may still read its shared memory

    def pick(self, tile, values):
        """The weight that a row tile belongs to: its values, and the tile's index in it."""
        first, chosen, local = 0, list(values[0]), tile
        for i in range(1, self.n_w):
            first += self.plan.tiles_of[i - 1]
            earlier = p.lt(tile, first)
            chosen = [arith.select(earlier, a, b) for a, b in zip(chosen, values[i], strict=True)]
            local = p.select(earlier, local, p.sub(tile, first))
        return chosen, local

    # ---- the warp that loads x -----------------------------------------------------------------------------------

    def load_x(self):
        plan, c = self.plan, self.plan.config
        if self.pdl:
            p.grid_dependency_wait()
        row_bytes = plan.quads * COLS * 2
        piece = p.mul(self.lane, 16)
        src = mem.offset(self.x, p.add(p.mul(self.first_quad, COLS * 2), piece))
        dst = p.add(self.x_base, piece)

        def step(q, carry):
            slot, parity = carry
            mem.barrier_wait(p.add(self.x_empty, p.mul(slot, 8)), p.xor(parity, 1))
            full = p.add(self.x_full, p.mul(slot, 8))
            if c.wgmma:  # one copy by the copy engine, which is also what makes it visible to wgmma

                def load():
                    mem.barrier_expect(full, p.i32(plan.x_slot))
                    source = mem.wide_offset(self.x, p.add(self.first_quad, q), plan.x_slot)
                    mem.bulk_load(p.add(self.x_base, p.mul(slot, plan.x_slot)), source, p.i32(plan.x_slot), full)

                p.when(self.is_lane_0, load)
                p.warp_sync()
            else:
                src_q = mem.offset(src, p.mul(q, COLS * 2))
                dst_q = p.add(dst, p.mul(slot, plan.x_slot))
                for row in range(plan.m):
                    mem.copy_async_16(dst_q, src_q, row * plan.x_stride, row * row_bytes)
                mem.copy_arrive(full)
            after = self.next_slot(slot, c.x_depth)
            return [after, p.xor(parity, p.select(p.eq(after, 0), 1, 0))]

        p.for_range(0, self.quads, 1, [p.i32(0), p.i32(0)], step)
        mem.copy_wait_all()

    # ---- all warps -----------------------------------------------------------------------------------------------

    def add_up(self):
        """Add the slices' sums, K ascending, and store; in a cluster each CTA does an equal share of the outputs."""
        plan, c = self.plan, self.plan.config
        if self.pdl:
            p.grid_dependency_wait()
        pairs = p.mul(self.tile_count, plan.m * ROWS // 2)
        share = p.div(p.add(pairs, c.cluster - 1), c.cluster)
        end = p.minimum(p.mul(p.add(self.rank, 1), share), pairs)

        def one(index, _):
            per_row = p.mul(self.tile_count, ROWS // 2)
            m, rest = p.div(index, per_row), p.rem(index, per_row)
            tile, row = p.shr(rest, 3), p.mul(p.and_(rest, 7), 2)
            warp_n, r = p.div(tile, c.tiles), p.rem(tile, c.tiles)
            at = p.add(self.ring_base, p.add(p.mul(warp_n, plan.red_warp), p.mul(m, plan.red_stride)))
            at = p.add(at, p.mul(p.add(p.mul(r, ROWS), row), 4))
            loaded = []
            for rank in range(c.cluster):
                remote = mem.map_rank(at, p.i32(rank)) if c.cluster > 1 else at
                load = mem.load_cluster_f32x2 if c.cluster > 1 else mem.load_shared_f32x2
                loaded += [load(p.add(remote, k * c.warps_n * plan.red_warp)) for k in range(c.warps_k)]
            sums = loaded[0]
            for pair in loaded[1:]:
                sums = [arith.addf(a, b) for a, b in zip(sums, pair, strict=True)]
            self.store(p.add(self.first_tile, tile), m, row, sums)
            return []

        p.for_range(p.add(p.mul(self.rank, share), self.tid), end, c.warpgroups * 128, [], one)

    def store(self, tile, m, row, sums):
        bias = self.bias or self.outs
        values = [(self.factor[i], self.outs[i], bias[i], p.i32(self.plan.n[i])) for i in range(self.n_w)]
        (factor, out, bias, n), local = self.pick(tile, values)
        scale = mem.load_global_f32(factor)
        column = p.add(p.mul(local, ROWS), row)
        size = 4 if self.wide_out else 2

        def value(e):
            v = arith.mulf(sums[e], scale)
            if not self.has_bias:
                return v
            return arith.addf(v, mem.load_global_f32(mem.offset(bias, p.mul(p.add(column, e), 4))))

        def address(e):
            return mem.offset(out, p.mul(p.add(p.mul(m, n), p.add(column, e)), size))

        def both():
            (mem.store_global_f32x2 if self.wide_out else mem.store_global_bf16x2)(address(0), value(0), value(1))

        if all(n_i % ROWS == 0 for n_i in self.plan.n):
            both()
        elif all(n_i % 2 == 0 for n_i in self.plan.n):
            p.when(p.lt(column, n), both)
        else:  # a pair may straddle the end, or be misaligned
            store_one = mem.store_global_f32 if self.wide_out else mem.store_global_bf16
            for e in range(2):
                p.when(p.lt(p.add(column, e), n), lambda e=e: store_one(address(e), value(e)))


@functools.cache
def build(
    m: int,
    k: int,
    n: tuple[int, ...],
    config: StreamConfig,
    has_bias: bool = False,
    pdl: bool = False,
    wide_out: bool = False,
):
    """The kernel as a function (x [M, Q * 256] bf16, data..., factor..., [bias...]) -> list of y_i [M, n_i].

    With wgmma x is first put in fragment order, by a small program of its own that XLA may fuse into what made x.

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
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    if not config.wgmma:
        return jax.jit(call)
    return jax.jit(lambda x, *rest: call(fragment_order(x, plan.m_tiles * 8), *rest))


def fragment_order(x: jax.Array, rows: int) -> jax.Array:
    """x [M, Q * 256] -> [Q, rows * 256]: for each unit and step the 16 columns that the weight fragment multiplies.

    In a unit, step j's k index 2 t + c + 8 h (t = 0..3, c, h = 0..1) is column 16 t + 4 j + 2 h + c; each 8 rows x 8
    columns are 128 contiguous bytes, as wgmma reads them.
    """
    x = jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))).reshape(rows, -1, 4, 4, 4, 2, 2)  # rows Q unit t j h c
    x = x.transpose(1, 2, 4, 5, 0, 3, 6)  # Q unit j h rows t c
    return x.reshape(x.shape[0], rows * COLS)


def epilogue_factor(global_scale: jax.Array) -> jax.Array:
    """float32 [1]: what turns the kernel's raw sums into x W^T."""
    return (jnp.float32(EPILOGUE_FACTOR) / jnp.asarray(global_scale, jnp.float32)).reshape(1)
