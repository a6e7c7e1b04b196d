"""y = x W^T for few rows (M <= 64): packed NVFP4 weights streamed once past accumulators that stay in registers.

Letters: M rows of x, N outputs, K inputs; row tiles of 16 outputs, quads of 256 inputs (see layout.py).

Each cluster of CTAs owns an equal run of row tiles (the grid is one wave), and walks K once:
  * the CTAs of a cluster split K; in a CTA `warps_n` warps split the row tiles and `warps_k` the units of each quad; a
    warp holds the float32 sums of `tiles` row tiles x all M in registers until the end;
  * each lane streams its own codes and scales through its own part of a ring in shared memory (cp.async, `depth`
    quads), so weights need no barrier at all;
  * one more warp streams x through a ring that all warps of the CTA read, so x is read once per CTA;
  * at the end the sums meet in shared memory (the cluster's, when K is split over CTAs), are added in a fixed order,
    scaled, biased and stored; or, where the weights are gate and up, silu(gate) * up of both is (stream_outputs.py).

The order of additions for an output depends on K and the configuration, never on M, other rows, or timing; nothing is
added with atomics.
"""

import functools

import jax
import jax.numpy as jnp

from . import fragment_order, lane_level
from . import ptx as p
from . import ptx_memory as mem
from .counters import first_counters
from .float16_range import of_scaled
from .layout import COLS, EPILOGUE_FACTOR
from .operands import adapters
from .stream_compute import ComputeWarps
from .stream_plan import COUNTERS, FACTORS_AT, Plan, StreamConfig, make_plan
from .stream_slices import SliceWarps


class _Kernel(ComputeWarps, SliceWarps):
    """One CTA's program; what all its parts share is set in __init__, in the order in which the CTA computes it."""

    def __init__(self, plan: Plan, refs, has_bias: bool, wide_out: bool, scaled: bool = False):
        """`refs` are of operands, results, the sums of `lora_space` and shared memory, in the order of `build`."""
        self.plan, self.has_bias, self.wide_out, self.scaled = plan, has_bias, wide_out, scaled
        self.n_w = len(plan.n)
        c, left = plan.config, list(refs)

        def take(count: int) -> list:
            taken, left[:] = left[:count], left[count:]
            return [mem.global_address(ref) for ref in taken]

        def take_of_adapters() -> list:
            taken = iter(take(sum(rank > 0 for rank in plan.ranks)))
            return [next(taken) if rank else self.x for rank in plan.ranks]  # of rank 0: never used

        # in fragment order x comes twice where x A^T, made here, needs the plain one
        x = take(2 if c.wgmma and plan.computes_h else 1)
        self.x, self.x_plain = x[0], x[-1]
        self.data, self.global_scale = take(self.n_w), take(self.n_w)
        self.bias = take(self.n_w if has_bias else 0)
        if plan.given_h:
            (self.h,) = take(1)
        self.a = take_of_adapters() if plan.computes_h else []
        self.b = take_of_adapters()
        self.lora_scale = take_of_adapters() if plan.computes_h else []
        if plan.computes_h:
            (self.sync,) = take(1)
        self.outs = take(len(plan.outs)) * plan.joined  # one for each weight
        if plan.computes_h:
            (self.partial,) = take(1)
        base = mem.shared_address(*left)
        self.tid = p.sreg("tid.x")
        self.lane = p.and_(self.tid, 31)
        self.warp = p.uniform(p.shr(self.tid, 5))
        self.is_lane_0 = p.eq(self.lane, 0)
        self.locate()
        self.x_full, self.x_empty = base, p.add(base, 8 * c.x_depth)
        self.h_full, self.sums_full, self.rings_free = (p.add(base, 128 + 8 * n) for n in range(3))
        self.factor_base = p.add(base, FACTORS_AT)
        self.ring_base = p.add(base, plan.ring_at)
        self.totals_base = p.add(base, plan.totals_at)
        self.x_base = p.add(base, plan.x_at)
        self.b_base, self.h_base = p.add(base, plan.b_at), p.add(base, plan.h_at)
        self.sums_base = p.add(base, plan.sums_at)
        self.received_base = p.add(base, plan.received_at)
        self.first_quad = p.div(p.mul(self.rank, plan.quads), c.cluster)
        self.quads = p.sub(p.div(p.mul(p.add(self.rank, 1), plan.quads), c.cluster), self.first_quad)

    def locate(self, again: bool = False):
        """Which CTA this is, and which row tiles are its own."""
        plan, c = self.plan, self.plan.config
        self.cta = cta = p.sreg("ctaid.x", again)
        self.rank, self.cluster = p.rem(cta, c.together), p.div(cta, c.together)
        if c.shares:  # `side` of the two; each has all of K
            self.side, self.rank = self.rank, p.i32(0)
        # results' row tiles; with SwiGLU each is two of the weights'
        first = self.first_result(self.cluster)
        self.result_tiles = p.sub(self.first_result(p.add(self.cluster, 1)), first)
        self.first_tile, self.tile_count = p.mul(first, plan.joined), p.mul(self.result_tiles, plan.joined)
        if c.shares:
            self.share()

    def first_result(self, cluster):
        """The first of a cluster's results."""
        plan = self.plan
        full = p.minimum(cluster, plan.full_clusters)
        of_last = p.div(p.mul(p.sub(cluster, full), plan.last_results), plan.last_clusters)
        return p.add(p.mul(full, plan.full_results), of_last)

    def run(self):
        if self.plan.config.together > 1:
            self.make_cluster_barriers()
        is_compute = p.lt(self.warp, self.plan.config.warps)
        if self.plan.config.shares:
            p.if_else(is_compute, self.compute_and_add_up, self.serve_with_few_registers)
            return
        p.if_else(is_compute, self.compute, self.serve)
        p.warp_sync()
        self.add_up()

    # ---- the other warps -----------------------------------------------------------------------------------------

    def serve(self):
        is_loader = p.eq(self.warp, self.plan.config.warps)
        if self.plan.computes_h:
            p.if_else(is_loader, self.load_x, self.multiply_by_a)
        else:
            p.when(is_loader, self.load_x)
        if self.plan.config.together > 1:
            p.warp_sync()
            p.cluster_wait()

    def load_x(self):
        plan, c = self.plan, self.plan.config
        both = [(self.x_full, 1 if c.wgmma else 32), (self.x_empty, p.mul(self.working_warps(), c.warps_k))]
        barriers = [(p.add(first, 8 * i), count) for first, count in both for i in range(c.x_depth)]
        self.make_barriers(barriers + ([(self.h_full, 32)] if plan.given_h else []))
        scales = [mem.load_global_f32(scale) for scale in self.global_scale]  # at the end their latency would count
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
        if plan.given_h:
            p.when(p.eq(self.rank, 0), self.copy_h)
        mem.copy_wait_all()

        def keep_factors():
            factor = EPILOGUE_FACTOR * of_scaled(self.scaled)
            for i, scale in enumerate(scales):
                mem.store_shared_f32(self.factor_base, p.divide_without_call(p.f32(factor), scale), 4 * i)
            if c.cluster > 1:
                mem.barrier_arrive(self.sums_full)

        p.when(self.is_lane_0, keep_factors)


@functools.cache
def build(
    m: int,
    k: int,
    n: tuple[int, ...],
    config: StreamConfig,
    has_bias: bool = False,
    wide_out: bool = False,
    ranks: tuple[int, ...] = (),
    prepared: bool = False,
    swiglu: bool = False,
    gives_units: bool = False,
    scaled: bool = False,
    dtype: str = "bfloat16",
):
    """The kernel as a function of x [M, Q * 256] and, one for every weight, data, scale and, if `has_bias`, bias; with
    `ranks` then A [R, Q * 256], B [n_i, R] and scaling, of the weights of positive rank only, and
    `first_counters(COUNTERS)`. Returns the list of y_i [M, n_i]. x, A, B and y are of `dtype`, that of the weights.

    With wgmma x is first put in fragment order, by a small program of its own (fragment_order.py).

    If `prepared`, the caller has done what comes before: x is of `plan.x_shape`, in fragment order with wgmma, and in
    the place of A, B, scaling and counters are h = s x A^T scale / EPILOGUE_FACTOR of all weights [M, sum of ranks]
    (inputs_kernel.py) and B. Then no CTA waits for another one's part of x A^T, and they may be several waves.

    With `swiglu` the two weights, of equal N, are gate and up, and the one result is silu(y_0) * y_1, rounded once, in
    float16's range (float16_range.py) also if `wide_out`; with `gives_units` its columns are in unit order. `scaled`
    says that x is such a result.

    The global `scale` and LoRA's `scaling` are float32 [1], `bias` is float32 [n_i]; y_i is float32 if
    `wide_out`. Ranks are multiples of 16.
    """
    plan = make_plan(m, k, n, config, ranks, prepared, swiglu, gives_units)

    def nvfp4_decode_matmul(_, *refs):
        _Kernel(plan, refs, has_bias, wide_out, scaled).run()

    outs = [jax.ShapeDtypeStruct((m, n_i), jnp.float32 if wide_out else jnp.dtype(dtype)) for n_i in plan.outs]
    call = lane_level.kernel(
        nvfp4_decode_matmul,
        outs + lora_space(plan),
        dtype,
        grid=plan.clusters,
        warps=4 * plan.warpgroups,
        cluster=config.together,
        shared=plan.total,
    )

    def run(x, *rest):
        xs = (x,)
        expected = plan.x_shape if prepared else (m, plan.quads * COLS)
        if x.shape != expected:  # or the kernel would read what lies behind it
            raise ValueError(f"{'prepared ' * prepared}x must be {list(expected)}, got {list(x.shape)}")
        if config.wgmma and not prepared:
            ordered = fragment_order.in_fragment_order(x, plan.m_tiles * 8)
            xs = (ordered, x) if plan.ranks else (ordered,)
        return call(*xs, *rest)[: len(plan.outs)]

    return jax.jit(run)


def lora_space(plan: Plan) -> list[jax.ShapeDtypeStruct]:
    """The sums of the slices, which LoRA's warps leave for each other."""
    return [jax.ShapeDtypeStruct((plan.lora_slices * plan.lora_slice // 4,), jnp.float32)] if plan.computes_h else []


def lora_operands(loras, k: int, dtype: str = "bfloat16") -> list[jax.Array]:
    """What the kernel takes of (A [R, K], B [N, R], scaling) or None for each weight, with A padded to k columns."""
    if all(lora is None for lora in loras):
        return []
    all_a, all_b, scalings = adapters(loras, k, dtype)
    return [*all_a, *all_b, *scalings, jnp.asarray(first_counters(COUNTERS))]
