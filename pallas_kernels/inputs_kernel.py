"""What a matmul reads, made by one launch for up to 256 rows: x, and s x A^T of all its adapters in 16 bits.

Letters: M rows, K inputs, R ranks of all adapters together; fragments of 16 ranks x 8 rows, as m16n8k16 leaves them.

x is given, or it is RMSNorm of the residual stream, to which another matmul's result is added here.
By XLA each of these is a launch or two, s x A^T two or three (a product, the sum over its slices of K, the rounding),
where adapters share x one more that puts their A one below the other, and the order of x that wgmma reads
(fragment_order.py) another. The work is small; what takes time is latency, so that all of the GPU should ask at once.

A cluster of 8 CTAs has a *tile*: 8 to 32 rows, and up to 96 ranks. Its warps cut K into runs of chunks of 64 columns.
Lane (g, t) has two *pieces* of row g of each eight of rows: columns 8 t and 32 + 8 t, and the seven behind. That is
how m16n8k16 takes them if A comes in the same order of columns. What CTAs have for each other they send into each
other's shared memory, where barriers count it. Sums are added in a fixed order: those of a CTA's warps first, then
those of the cluster's CTAs. A row's x and s x A^T depend on K and the ranks' order alone.
"""

import functools

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from . import fragment_order, lane_level
from . import ptx as p
from . import ptx_memory as mem
from .hidden import add_products, store_hidden
from .inputs_plan import CHUNK, CLUSTER, FRAGMENT, GIVEN, NORMED, InputsPlan, make_inputs_plan
from .inputs_sources import Sources, pieces
from .layout import COLS, EPILOGUE_FACTOR, ROWS
from .pick import pick

SOURCES = {GIVEN: 1, NORMED: 3}  # arrays of which x is made


class _Kernel(Sources):
    """One CTA's program. The operands: what x is made of, A, the global scale and LoRA's scaling of each adapter; the
    results that `inputs_outs` names."""

    def __init__(self, plan: InputsPlan, eps: float, refs, shared):
        self.plan, self.eps, count = plan, eps, len(plan.ranks)
        given = [mem.global_address(ref) for ref in refs]

        def take(number):
            taken, given[:] = given[:number], given[number:]
            return taken

        self.source = take(SOURCES[plan.source])
        self.a, self.scale, self.scaling = take(count), take(count), take(count)
        self.outs = dict(zip(inputs_outs(plan), given, strict=True))
        self.base = mem.shared_address(shared)
        self.tid, cta = p.sreg("tid.x"), p.sreg("ctaid.x")
        self.lane, self.warp = p.and_(self.tid, 31), p.uniform(p.shr(self.tid, 5))
        self.g, self.t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        self.rank, cluster = p.rem(cta, CLUSTER), p.div(cta, CLUSTER)
        group = p.div(cluster, plan.row_tiles)
        self.squares_here = p.add(self.base, plan.barriers_at)
        self.sums_here = p.add(self.squares_here, 8)
        self.first_row = p.mul(p.rem(cluster, plan.row_tiles), plan.rows)
        self.first_tile = p.mul(group, plan.tiles)
        self.first_group = p.eq(group, 0)  # which writes x
        self.rows = [p.add(p.add(self.first_row, 8 * j), self.g) for j in range(plan.eights)]
        self.known = [p.minimum(row, plan.m - 1) for row in self.rows]  # rows behind M repeat the last one
        place = p.add(p.mul(self.rank, plan.warps), self.warp)
        self.begin, self.end = (p.div(p.mul(i, plan.chunks), plan.runs) for i in (place, p.add(place, 1)))
        self.own = p.add(p.add(self.base, p.add(p.mul(self.warp, plan.own), plan.own_at)), p.mul(self.lane, 16))
        self.a_rows = [mem.offset(self.a_row(n), p.mul(self.t, 16)) for n in range(plan.tiles)]

    def run(self):
        p.when(p.eq(self.tid, 0), self.make_barriers)
        p.warp_sync()
        p.cluster_arrive()
        acc = self.normed() if self.plan.source == NORMED else self.streamed()
        if self.plan.ranks:
            self.finish(acc)

    def make_barriers(self):
        plan = self.plan
        of_fragments = p.mul(self.fragments_here(), CLUSTER * FRAGMENT)
        for barrier, size in ((self.squares_here, p.i32(CLUSTER * plan.rows * 4)), (self.sums_here, of_fragments)):
            mem.barrier_init(barrier, 1)
            mem.barrier_expect(barrier, size)
        mem.fence_barrier_init()

    # ---- A ----------------------------------------------------------------------------------------------------------

    def a_row(self, n: int):
        """Row g of the tile's n-th sixteen ranks; behind the last sixteen it repeats."""
        tiles_of = self.plan.tiles_of
        tile = p.minimum(p.add(self.first_tile, n), sum(tiles_of) - 1)
        (a,), local = pick(tiles_of, tile, [(a,) for a in self.a])
        return mem.wide_offset(a, p.add(p.mul(local, ROWS), self.g), 2 * self.plan.k)

    def load_a(self, chunk):
        """A's columns of a chunk, rows g and g + 8 of each sixteen. They are on their way until something is done with
        them, and so nothing is before `products`."""
        at = p.mul(chunk, 2 * CHUNK)
        return [[pieces(mem.offset(row, at), h * 16 * self.plan.k) for h in range(2)] for row in self.a_rows]

    def products(self, acc, halves, xs, has):
        """acc + A x^T of a chunk's columns, four m16n8k16 a fragment; acc where the run has no such chunk."""
        acc, xs = list(acc), [[p.select(has, word, 0) for word in x] for x in xs]
        for n, (low, high) in enumerate(halves):
            for j, x in enumerate(xs):
                f = slice(4 * (n * len(xs) + j), 4 * (n * len(xs) + j) + 4)
                acc[f] = add_products(acc[f], low, high, x)
        return acc

    # ---- s x A^T --------------------------------------------------------------------------------------------------

    def finish(self, acc):
        """The warps' sums added up, scaled and stored; each CTA of the cluster does this for some fragments."""
        plan = self.plan
        for f in range(plan.fragments):
            mem.store_shared_f32x4(self.own, acc[4 * f : 4 * f + 4], f * FRAGMENT)
        p.cta_sync()
        of_lane = p.add(self.base, p.mul(self.lane, 16))

        def give(f):
            at = p.add(of_lane, p.mul(f, FRAGMENT))
            parts = [mem.load_shared_f32x4(at, plan.own_at + warp * plan.own) for warp in range(plan.warps)]
            slot, cta = p.add(p.mul(self.rank, plan.slots), p.div(f, CLUSTER)), p.rem(f, CLUSTER)
            to = p.add(of_lane, p.add(p.mul(slot, FRAGMENT), plan.sums_at))
            mem.send_f32x4(mem.map_rank(to, cta), p.total(parts), mem.map_rank(self.sums_here, cta))

        p.for_range(self.warp, plan.fragments, plan.warps, [], lambda f, _: give(f) or [])
        mem.barrier_wait_for_cluster(self.sums_here, p.i32(0))

        def take(slot):
            at = p.add(of_lane, p.mul(slot, FRAGMENT))
            strides = range(0, CLUSTER * plan.slots * FRAGMENT, plan.slots * FRAGMENT)
            self.store(self.fragment(slot), p.total([mem.load_shared_f32x4(at, plan.sums_at + s) for s in strides]))

        p.for_range(self.warp, self.fragments_here(), plan.warps, [], lambda slot, _: take(slot) or [])

    def fragments_here(self):
        """How many this CTA finishes."""
        return p.div(p.sub(self.plan.fragments + CLUSTER - 1, self.rank), CLUSTER)

    def fragment(self, slot):
        return p.add(p.mul(slot, CLUSTER), self.rank)

    def store(self, f, sums):
        """A fragment of s x A^T."""
        plan = self.plan
        tile, j = p.add(self.first_tile, p.div(f, plan.eights)), p.rem(f, plan.eights)
        known = p.minimum(tile, sum(plan.tiles_of) - 1)
        (scale, scaling), _ = pick(plan.tiles_of, known, list(zip(self.scale, self.scaling, strict=True)))
        factor = arith.mulf(mem.load_global_f32(scale), mem.load_global_f32(scaling))
        factor = arith.mulf(factor, p.f32(1 / EPILOGUE_FACTOR))
        first_row = p.add(self.first_row, p.mul(j, 8))
        values = [arith.mulf(v, factor) for v in sums]
        store_hidden(self.outs["h"], plan.m, sum(plan.ranks), self.lane, tile, first_row, values)


def inputs_outs(plan: InputsPlan, dtype: str = "bfloat16") -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: the `residual` stream [M, K], `x` [M, K], as it is or in unit order, or in fragment
    order, and `h`, which is s x A^T scale / EPILOGUE_FACTOR of all adapters [M, R]."""
    outs = {}
    if plan.source == NORMED:
        outs["residual"] = jax.ShapeDtypeStruct((plan.m, plan.k), jnp.float32)
    if plan.writes_x:
        shape = (plan.k // COLS, plan.ordered * COLS) if plan.ordered else (plan.m, plan.k)
        outs["x"] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if plan.ranks:
        outs["h"] = jax.ShapeDtypeStruct((plan.m, sum(plan.ranks)), jnp.dtype(dtype))
    return outs


@functools.cache
def build(
    m: int,
    k: int,
    ranks: tuple[int, ...],
    source: str,
    ordered: int = 0,
    eps: float = 0.0,
    units: bool = False,
    dtype: str = "bfloat16",
):
    """The kernel as a function (what x is made of, A [R_i, K]..., global scale float32 [1]..., LoRA's scaling float32
    [1]...) -> `inputs_outs` arrays by name; A, x and h are of `dtype`.

    x is made of itself, [M, K]; of the residual stream float32 [M, K], what is added to it, alike, and the
    norm's scale float32 [K]. Raises ValueError naming the constraint when the kernel does not take the shape.
    """
    plan = make_inputs_plan(m, k, ranks, source, ordered, units)
    outs = inputs_outs(plan, dtype)

    def matmul_inputs(_, *refs):
        *refs, shared = refs
        _Kernel(plan, eps, refs, shared).run()

    call = lane_level.kernel(
        matmul_inputs,
        list(outs.values()),
        dtype,
        grid=plan.row_tiles * plan.groups,
        warps=plan.warps,
        cluster=CLUSTER,
        shared=plan.total,
    )
    return jax.jit(lambda *operands: dict(zip(outs, call(*operands), strict=True)))


def reference(plan: InputsPlan, eps: float, *operands: jax.Array, dtype: str = "bfloat16") -> dict[str, jax.Array]:
    """The same in plain JAX."""
    count, ranks = SOURCES[plan.source], len(plan.ranks)
    parts, rest = operands[:count], operands[count:]
    a, scales, scalings = (rest[i * ranks : (i + 1) * ranks] for i in range(3))
    outs, x = {}, parts[0]
    if plan.source == NORMED:
        outs["residual"] = flow = parts[0] + parts[1]
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(flow), -1, keepdims=True) + eps)
        x = (flow * inverse * parts[2]).astype(dtype)
    if plan.writes_x:
        ordered = fragment_order.in_unit_order(x) if plan.units else x
        outs["x"] = fragment_order.reference(x, plan.ordered) if plan.ordered else ordered
    if plan.ranks:
        h = jnp.dot(x, jnp.concatenate(a).T, preferred_element_type=jnp.float32)
        factors = [
            jnp.broadcast_to(s * t / EPILOGUE_FACTOR, rank)
            for s, t, rank in zip(scales, scalings, plan.ranks, strict=True)
        ]
        outs["h"] = (h * jnp.concatenate(factors)).astype(dtype)
    return outs
