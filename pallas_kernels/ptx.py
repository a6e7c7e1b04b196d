"""PTX instructions as Python functions over MLIR values, for lane-level Mosaic GPU kernels.

Addresses of shared memory are 32-bit integers, of global memory 64-bit. What moves data or orders it has side effects
(and keeps its place); pure arithmetic has none.
"""

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf


def i32_t() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def f32_t() -> ir.Type:
    return ir.F32Type.get()


def i32(value: int) -> ir.Value:
    return utils.c(value, i32_t())


def f32(value: float) -> ir.Value:
    return utils.c(value, f32_t())


def ptx(code: str, *args: ir.Value, results: Sequence[ir.Type] = (), effects: bool = False, convergent: bool = False):
    """One block of PTX; $0.. are the results, then the arguments. Returns a list of results."""
    out = utils.inline_ptx(
        code,
        *args,
        result_types=list(results) if results else None,
        has_side_effects=effects or not results,
        convergent=convergent,
    )
    if not results:
        return []
    return list(out) if isinstance(out, (tuple, list)) else [out]


def as_i32(value: ir.Value) -> ir.Value:
    return arith.index_cast(i32_t(), value) if isinstance(value.type, ir.IndexType) else value


def add(a, b):
    return arith.addi(_v(a), _v(b))


def sub(a, b):
    return arith.subi(_v(a), _v(b))


def mul(a, b):
    return arith.muli(_v(a), _v(b))


def and_(a, b):
    return arith.andi(_v(a), _v(b))


def xor(a, b):
    return arith.xori(_v(a), _v(b))


def shr(a, b):
    return arith.shrui(_v(a), _v(b))


def div(a, b):
    return arith.divui(_v(a), _v(b))


def rem(a, b):
    return arith.remui(_v(a), _v(b))


def lt(a, b):
    return arith.cmpi(arith.CmpIPredicate.ult, _v(a), _v(b))


def eq(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, _v(a), _v(b))


def select(cond, a, b):
    return arith.select(cond, _v(a), _v(b))


def minimum(a, b):
    return arith.minui(_v(a), _v(b))


def _v(x):
    return i32(x) if isinstance(x, int) else x


def sreg(name: str) -> ir.Value:
    return ptx(f"mov.u32 $0, %{name};", results=[i32_t()])[0]


def uniform(value: ir.Value) -> ir.Value:
    """Lane 0's value, so that the compiler knows that the warp agrees on it."""
    return ptx("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", value, results=[i32_t()], effects=True)[0]


def shared_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(i32_t(), utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def offset(base_64: ir.Value, offset_32: ir.Value) -> ir.Value:
    """base + offset in bytes; the offset is unsigned."""
    return arith.addi(base_64, arith.extui(ir.IntegerType.get_signless(64), offset_32))


def wide_offset(base_64: ir.Value, index_32: ir.Value, stride: int) -> ir.Value:
    """base + index * stride in bytes, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(base_64, arith.muli(arith.extui(i64, index_32), utils.c(stride, i64)))


def barrier_init(address: ir.Value, count: int):
    ptx("mbarrier.init.shared::cta.b64 [$0], $1;", address, i32(count))


def barrier_expect(address: ir.Value, n_bytes: ir.Value):
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", address, n_bytes)


def barrier_arrive(address: ir.Value):
    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", address)


def barrier_wait(address: ir.Value, parity: ir.Value):
    ptx(
        "{ .reg .pred done;\nagain_${:uid}:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@!done bra again_${:uid};\n}",
        address,
        parity,
        convergent=True,
    )


def fence_barrier_init():
    ptx("fence.mbarrier_init.release.cluster;", convergent=False)


def bulk_load(dst_shared, src_global, n_bytes, barrier):
    """Contiguous copy by the copy engine; 16-byte aligned and sized; completes on the barrier."""
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        dst_shared,
        src_global,
        n_bytes,
        barrier,
    )


def load_shared_v4(address, byte_offset: int):
    return ptx(
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];", address, results=[i32_t()] * 4, effects=True
    )


def load_shared_b32(address, byte_offset: int):
    return ptx(f"ld.shared.b32 $0, [$1+{byte_offset}];", address, results=[i32_t()], effects=True)[0]


def copy_async_16(dst_shared, src_global, dst_offset: int = 0, src_offset: int = 0):
    """This lane's 16 bytes, past L1."""
    ptx(f"cp.async.cg.shared.global.L2::128B [$0+{dst_offset}], [$1+{src_offset}], 16;", dst_shared, src_global)


def copy_async_4(dst_shared, src_global, dst_offset: int = 0, src_offset: int = 0):
    ptx(f"cp.async.ca.shared.global [$0+{dst_offset}], [$1+{src_offset}], 4;", dst_shared, src_global)


def copy_commit():
    ptx("cp.async.commit_group;")


def copy_wait(pending: int):
    """Until at most `pending` of this thread's groups are under way."""
    ptx(f"cp.async.wait_group {pending};")


def copy_wait_all():
    ptx("cp.async.wait_all;")


def copy_arrive(barrier):
    """This lane arrives on the barrier when its copies so far are complete."""
    ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", barrier)


def store_shared_f32(address, value, byte_offset: int):
    ptx(f"st.shared.f32 [$0+{byte_offset}], $1;", address, value)


def load_shared_f32x2(address):
    return ptx("ld.shared.v2.f32 {$0, $1}, [$2];", address, results=[f32_t()] * 2, effects=True)


def store_shared_f32x2(address, values):
    ptx("st.shared.v2.f32 [$0], {$1, $2};", address, *values)


def load_cluster_f32x2(address):
    return ptx("ld.shared::cluster.v2.f32 {$0, $1}, [$2];", address, results=[f32_t()] * 2, effects=True)


def load_global_f32(address):
    return ptx("ld.global.nc.f32 $0, [$1];", address, results=[f32_t()], effects=True)[0]


def load_global_b32(address, byte_offset: int):
    return ptx(f"ld.global.nc.b32 $0, [$1+{byte_offset}];", address, results=[i32_t()], effects=True)[0]


def load_global_v4(address, byte_offset: int):
    """16 bytes that are read once: not kept in L1."""
    return ptx(
        f"ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];",
        address,
        results=[i32_t()] * 4,
        effects=True,
    )


def store_global_v4(address, values, byte_offset: int):
    ptx(f"st.global.v4.b32 [$0+{byte_offset}], {{$1, $2, $3, $4}};", address, *values)


def store_global_f32(address, value):
    ptx("st.global.f32 [$0], $1;", address, value)


def store_global_f32x2(address, lo, hi):
    ptx("st.global.v2.f32 [$0], {$1, $2};", address, lo, hi)


def store_global_bf16(address, value):
    ptx("{ .reg .b16 h;\ncvt.rn.bf16.f32 h, $1;\nst.global.b16 [$0], h; }", address, value)


def store_global_bf16x2(address, lo, hi):
    ptx("{ .reg .b32 b;\ncvt.rn.bf16x2.f32 b, $2, $1;\nst.global.b32 [$0], b; }", address, lo, hi)


def map_rank(address, rank: ir.Value):
    """This CTA's shared address -> the same place in the cluster's CTA `rank`."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, rank, results=[i32_t()])[0]


def cta_sync():
    ptx("bar.sync 0;", convergent=True)


def named_sync(which: int, threads: int):
    """Barrier among some of the CTA's warps."""
    ptx(f"bar.sync {which}, {threads};", convergent=True)


def warp_sync():
    ptx("bar.warp.sync 0xffffffff;", convergent=True)


def cluster_sync():
    ptx("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;", convergent=True)


def grid_dependency_wait():
    ptx("griddepcontrol.wait;", convergent=True)


def grid_dependency_launch():
    ptx("griddepcontrol.launch_dependents;", convergent=True)


def mma_bf16(acc, a, b0, b1):
    """acc [4] += A (16 x 16, row) B (16 x 8, col), float32 accumulation."""
    return ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};",
        *a,
        b0,
        b1,
        *acc,
        results=[f32_t()] * 4,
        convergent=True,
    )


def proxy_fence():
    ptx("fence.proxy.async.shared::cta;")


def wgmma_fence():
    ptx("wgmma.fence.sync.aligned;", convergent=True)


def wgmma_commit():
    ptx("wgmma.commit_group.sync.aligned;", convergent=True)


def wgmma_wait(pending: int):
    ptx(f"wgmma.wait_group.sync.aligned {pending};", convergent=True)


def wgmma_bf16(acc, a, b_descriptor):
    """acc [N / 2] += A (64 x 16 over a warpgroup, registers) B (16 x N, shared memory), N = 8, 16, 32 or 64.

    Asynchronous: neither acc nor a may be read or written until wgmma_wait; the accumulators are tied in place.
    """
    count = len(acc)
    names = ", ".join(f"${i}" for i in range(count))
    a_names = ", ".join(f"${2 * count + i}" for i in range(4))
    code = (
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 {{{names}}}, {{{a_names}}}, "
        f"${2 * count + 4}, 1, 1, 1, 0;"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
    out = llvm.inline_asm(
        llvm.StructType.get_literal([f32_t()] * count),
        [*acc, *a, b_descriptor],
        code,
        ",".join(constraints),
        has_side_effects=True,
        convergent=True,
    )
    return [llvm.extractvalue(f32_t(), out, [i]) for i in range(count)]


def b_descriptor(address, k_stride: int, n_stride: int):
    """Descriptor of a K-major operand without swizzle: strides in bytes between 8 x 16-byte matrices along K and N."""
    i64 = ir.IntegerType.get_signless(64)
    low = arith.extui(i64, and_(shr(address, 4), 0x3FFF))
    return arith.ori(low, utils.c((k_stride >> 4) << 16 | (n_stride >> 4) << 32, i64))


def add_64(a, b: int):
    return arith.addi(a, utils.c(b, ir.IntegerType.get_signless(64)))


def for_range(lower, upper, step, carries, body):
    """scf.for over i32; body(i, carries) -> carries. Returns the final carries."""
    loop = scf.ForOp(_v(lower), _v(upper), _v(step), list(carries))
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(body(loop.induction_variable, list(loop.inner_iter_args)))
    return list(loop.results)


def when(cond, body):
    branch = scf.IfOp(cond)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.YieldOp([])


def if_else(cond, body, otherwise):
    branch = scf.IfOp(cond, has_else=True)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.YieldOp([])
    with ir.InsertionPoint(branch.else_block):
        otherwise()
        scf.YieldOp([])
