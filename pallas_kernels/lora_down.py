"""LoRA's first product for many rows: s x A^T of all adapters of a call, in bfloat16, as one launch.

Letters: M rows, K inputs, R ranks of all adapters together; fragments of 16 ranks x 8 rows, as m16n8k16 leaves them.

By XLA it is two or three launches (a product, the sum over its slices of K, the rounding) and, where several adapters
share x, one more that puts their A one below the other. The product itself is small; what takes time is latency, so
that all of the GPU should ask for A at once. A cluster of 8 CTAs computes a *tile*, 16 or 32 rows of x and up to 96
ranks: its 64 warps cut K into runs of 32 columns and multiply fragments that they load from global memory, 16 bytes a
lane, whose order of columns is the same for A and x. Sums meet in shared memory, those of a CTA's warps first, then
those of the cluster's CTAs, each in a fixed order: an output depends on K and the ranks' order alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from .layout import EPILOGUE_FACTOR, ROWS
from .pick import pick
from .stream_plan import SMEM_LIMIT

CLUSTER, WARPS = 8, 8
CHUNK = 32  # columns of a fragment: 16 bytes of a row for each of four lanes
TILE_RANKS = 6  # sixteens of ranks in a tile, at most
LOADS = 28  # of 16 bytes a lane, that are under way together
FRAGMENT = 16 * 8 * 4
MAX_ROWS = 256  # beyond, tiles are more than one wave, and the product is no longer small


@dataclasses.dataclass(frozen=True)
class DownPlan:
    """Sizes of one kernel; `ranks` are the adapters', multiples of 16."""

    m: int
    k: int
    ranks: tuple[int, ...]

    @property
    def tiles_of(self) -> tuple[int, ...]:
        """Sixteens of ranks of each adapter."""
        return tuple(rank // ROWS for rank in self.ranks)

    @property
    def groups(self) -> int:
        return -(-sum(self.tiles_of) // TILE_RANKS)

    @property
    def tiles(self) -> int:
        """Sixteens of ranks in a tile."""
        return -(-sum(self.tiles_of) // self.groups)

    @property
    def eights(self) -> int:
        """Eights of rows in a tile."""
        return 2 if self.m <= 128 else 4

    @property
    def row_tiles(self) -> int:
        return -(-self.m // (8 * self.eights))

    @property
    def fragments(self) -> int:
        return self.tiles * self.eights

    @property
    def chunks(self) -> int:
        return self.k // CHUNK

    @property
    def batch(self) -> int:
        """Chunks whose loads are under way together."""
        return max(1, LOADS // (2 * self.tiles + self.eights))

    @property
    def sums_at(self) -> int:
        """Where the CTA's sums are in shared memory, behind those of its warps."""
        return WARPS * self.fragments * FRAGMENT

    @property
    def total(self) -> int:
        return self.sums_at + self.fragments * FRAGMENT


def takes(m: int, k: int) -> bool:
    """Whether the kernel is for so many rows and inputs."""
    return 1 <= m <= MAX_ROWS and k % CHUNK == 0


def make_down_plan(m: int, k: int, ranks: tuple[int, ...]) -> DownPlan:
    """Raises ValueError naming the constraint when the kernel does not take the shape."""
    plan = DownPlan(m, k, ranks)
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"M must be in 1..{MAX_ROWS}, got {m}")
    if k % CHUNK:
        raise ValueError(f"K must be a multiple of {CHUNK}, got {k}")
    if not ranks or any(rank % ROWS or not rank for rank in ranks):
        raise ValueError(f"ranks must be multiples of {ROWS}, and one at least, got {ranks}")
    assert plan.total <= SMEM_LIMIT, plan
    return plan


class _Kernel:
    """One CTA's program. The operands: x, then A, the global scale and LoRA's scaling of each adapter, and s x A^T."""

    def __init__(self, plan: DownPlan, refs, shared):
        self.plan, count = plan, len(plan.ranks)
        addresses = [mem.global_address(ref) for ref in refs]
        self.x, *addresses, self.out = addresses
        self.a, self.scale, self.scaling = (addresses[i * count : (i + 1) * count] for i in range(3))
        self.base = mem.shared_address(shared)
        tid, cta = p.sreg("tid.x"), p.sreg("ctaid.x")
        self.lane, self.warp = p.and_(tid, 31), p.uniform(p.shr(tid, 5))
        self.g, self.t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        self.rank, cluster = p.rem(cta, CLUSTER), p.div(cta, CLUSTER)
        self.first_row = p.mul(p.rem(cluster, plan.row_tiles), 8 * plan.eights)
        self.first_tile = p.mul(p.div(cluster, plan.row_tiles), plan.tiles)

    def run(self):
        self.multiply()
        p.cta_sync()
        self.add_warps()
        p.cluster_sync()
        self.add_ctas()
        p.cluster_sync()  # nobody leaves while another CTA may still read its sums

    def multiply(self):
        """This warp's run of K; leaves its sums in shared memory."""
        plan = self.plan
        place = p.add(p.mul(self.rank, WARPS), self.warp)
        begin, end = (p.div(p.mul(i, plan.chunks), CLUSTER * WARPS) for i in (place, p.add(place, 1)))
        column = p.mul(self.t, 16)
        a_rows = [mem.offset(self.a_row(n), column) for n in range(plan.tiles)]
        rows = [p.add(p.add(self.first_row, 8 * j), self.g) for j in range(plan.eights)]
        known = [p.minimum(row, plan.m - 1) for row in rows]  # rows behind M repeat the last one
        x_rows = [mem.offset(mem.wide_offset(self.x, row, 2 * plan.k), column) for row in known]

        def batch(start, acc):
            loaded = []
            for b in range(plan.batch):
                chunk = p.add(start, b)
                at = p.mul(p.minimum(chunk, p.sub(end, 1)), 2 * CHUNK)
                has = p.lt(chunk, end)
                halves = [
                    [mem.load_global_v4(mem.offset(row, at), h * 16 * plan.k) for h in range(2)] for row in a_rows
                ]
                halves = [[[p.select(has, word, 0) for word in half] for half in pair] for pair in halves]
                loaded.append((halves, [mem.load_global_v4(mem.offset(row, at), 0) for row in x_rows]))
            for halves, xs in loaded:
                acc = self.products(acc, halves, xs)
            return acc

        acc = p.for_range(begin, end, plan.batch, [p.f32(0.0)] * (4 * plan.fragments), batch)
        to = p.add(p.add(self.base, p.mul(self.warp, plan.fragments * FRAGMENT)), p.mul(self.lane, 16))
        for f in range(plan.fragments):
            mem.store_shared_f32x4(to, acc[4 * f : 4 * f + 4], f * FRAGMENT)

    def a_row(self, n: int):
        """Row g of the tile's n-th sixteen ranks; behind the last sixteen it repeats."""
        tiles_of = self.plan.tiles_of
        tile = p.minimum(p.add(self.first_tile, n), sum(tiles_of) - 1)
        (a,), local = pick(tiles_of, tile, [(a,) for a in self.a])
        return mem.wide_offset(a, p.add(p.mul(local, ROWS), self.g), 2 * self.plan.k)

    def products(self, acc, halves, xs):
        """acc + A x^T of 32 columns: two m16n8k16 a fragment."""
        acc = list(acc)
        for n, (low, high) in enumerate(halves):
            for j, x in enumerate(xs):
                f = slice(4 * (n * len(xs) + j), 4 * (n * len(xs) + j) + 4)
                for i in (0, 2):
                    acc[f] = p.mma_bf16(acc[f], (low[i], high[i], low[i + 1], high[i + 1]), x[i], x[i + 1])
        return acc

    def each_fragment(self, first, step: int, body):
        """body(f) for the fragments first, first + step, .. of a warp."""
        p.for_range(first, self.plan.fragments, step, [], lambda f, _: body(f) or [])

    def add_warps(self):
        """The sums of the CTA's warps."""
        plan = self.plan

        def one(f):
            at = p.add(p.add(self.base, p.mul(f, FRAGMENT)), p.mul(self.lane, 16))
            parts = [mem.load_shared_f32x4(at, warp * plan.fragments * FRAGMENT) for warp in range(WARPS)]
            mem.store_shared_f32x4(at, _total(parts), plan.sums_at)

        self.each_fragment(self.warp, WARPS, one)

    def add_ctas(self):
        """The sums of the cluster's CTAs, of which each takes some fragments, scaled and stored."""
        plan = self.plan

        def one(f):
            at = p.add(p.add(self.base, p.mul(f, FRAGMENT)), p.mul(self.lane, 16))
            parts = [
                mem.load_cluster_f32x4(p.add(mem.map_rank(at, p.i32(cta)), plan.sums_at)) for cta in range(CLUSTER)
            ]
            tile, j = p.add(self.first_tile, p.div(f, plan.eights)), p.rem(f, plan.eights)
            known = p.minimum(tile, sum(plan.tiles_of) - 1)
            (scale, scaling), _ = pick(plan.tiles_of, known, list(zip(self.scale, self.scaling, strict=True)))
            factor = arith.mulf(mem.load_global_f32(scale), mem.load_global_f32(scaling))
            factor = arith.mulf(factor, p.f32(1 / EPILOGUE_FACTOR))
            values = [arith.mulf(v, factor) for v in _total(parts)]
            first = p.add(p.add(self.first_row, p.mul(j, 8)), p.mul(self.t, 2))
            column = p.add(p.mul(tile, ROWS), self.g)
            for e in range(4):
                row, rank = p.add(first, e % 2), p.add(column, 8 * (e // 2))
                to = mem.offset(self.out, p.mul(p.add(p.mul(row, sum(plan.ranks)), rank), 2))
                exists = arith.andi(p.lt(row, plan.m), p.lt(tile, sum(plan.tiles_of)))
                p.when(exists, lambda to=to, e=e: mem.store_global_bf16(to, values[e]))

        self.each_fragment(p.add(self.rank, p.mul(self.warp, CLUSTER)), CLUSTER * WARPS, one)


def _total(parts):
    """Sums of the parts' elements, in their order."""
    return functools.reduce(lambda a, b: [arith.addf(x, y) for x, y in zip(a, b, strict=True)], parts)


@functools.cache
def build(m: int, k: int, ranks: tuple[int, ...]):
    """The kernel as a function (x bf16 [M, K], A bf16 [R_i, K]..., global scale float32 [1]..., LoRA's scaling float32
    [1]...) -> s x A^T scale / EPILOGUE_FACTOR of all adapters, bfloat16 [M, sum of ranks].

    Raises ValueError naming the constraint when the kernel does not take the shape.
    """
    plan = make_down_plan(m, k, ranks)

    def lora_down(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def body(ctx, *refs):
            *refs, shared = refs
            _Kernel(plan, refs, shared).run()

        body(*refs)

    return jax.jit(plgpu.kernel(
        lora_down,
        out_type=jax.ShapeDtypeStruct((m, sum(ranks)), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((plan.total,), jnp.int8)],
        grid=(plan.row_tiles * plan.groups,),
        grid_names=("tiles",),
        cluster=(CLUSTER,),
        cluster_names=("rank",),
        num_threads=WARPS // 4,
        thread_name="warpgroup",
        compiler_params=lane_level.PARAMS,
    ))  # fmt: skip
