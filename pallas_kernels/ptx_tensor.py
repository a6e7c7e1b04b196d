"""PTX for the wide kernel: tensor copies that may go to several CTAs, swizzled operands of wgmma, register budgets."""

from jax.experimental.mosaic.gpu import launch_context, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .ptx import and_, f32_t, half, i32, i32_t, ptx, shr

# What a 128-byte swizzle's descriptor holds beside the address: 1024 bytes between groups of 8 rows, layout type 1.
_SWIZZLED_128 = 1 << 16 | (1024 >> 4) << 32 | 1 << 62


def tensor_map(ctx: launch_context.LaunchContext, ref: ir.Value, box: tuple[int, int], swizzle: int | None) -> ir.Value:
    """Address (64 bit) of the tensor map for boxes of a matrix that is an argument of the kernel."""
    descriptor = ctx._get_tma_desc(ref, (), None, box, swizzle, None)
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), descriptor)


def tensor_load(dst_shared, descriptor, column, row, barrier, mask: ir.Value | None = None, policy=None):
    """A box at (row, column), zeros outside the matrix; with `mask` (16 bit) to the same place in several CTAs. For
    `policy` see `ptx_memory.read_once`."""
    where = "[$0], [$1, {$2, $3}], [$4]"
    code = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    args = [dst_shared, descriptor, column, row, barrier]
    for value, modifier in ((mask, ".multicast::cluster"), (policy, ".L2::cache_hint")):
        if value is not None:
            code, where = code + modifier, f"{where}, ${len(args)}"
            args.append(value)
    ptx(f"{code} {where};", *args)


def tensor_prefetch(descriptor, column, row):
    """Ask for a box at (row, column) into the L2."""
    ptx("cp.async.bulk.prefetch.tensor.2d.L2.global [$0, {$1, $2}];", descriptor, column, row)


def multicast_mask(count: int) -> ir.Value:
    """A cluster's first `count` CTAs."""
    return utils.c((1 << count) - 1, ir.IntegerType.get_signless(16))


def remote_arrive(barrier, rank):
    """Arrive on the barrier at the same place in the cluster's CTA `rank`: that this CTA has read, nothing more, so
    without a release to the cluster, for which the compiler would put a memory fence into the main loop."""
    ptx(
        "{ .reg .b32 remote;\nmapa.shared::cluster.u32 remote, $0, $1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}",
        barrier,
        rank,
    )


def swizzled_descriptor(address) -> ir.Value:
    """wgmma's operand of rows of 128 bytes in shared memory, swizzled by 128 bytes, K along the row."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.ori(arith.extui(i64, and_(shr(address, 4), 0x3FFF)), utils.c(_SWIZZLED_128, i64))


def transpose_8x8(value) -> ir.Value:
    """A warp's 8 x 8 matrix of 16-bit elements (lane 4 g + t: row g, columns 2 t, 2 t + 1), transposed."""
    return ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", value, results=[i32_t()], effects=True, convergent=True
    )[0]


def set_registers(count: int, up: bool):
    ptx(f"setmaxnreg.{'inc' if up else 'dec'}.sync.aligned.u32 {count};", convergent=True)


def own_memory(words: int) -> ir.Value:
    """Address of memory of each lane's own, the kernel's wherever it is asked for."""
    block = ir.InsertionPoint.current.block
    while block.owner.name != "gpu.launch":
        block = block.owner.operation.block
    with ir.InsertionPoint.at_block_begin(block):
        own = llvm.alloca(ir.Type.parse("!llvm.ptr"), i32(words), f32_t(), alignment=16)
    i64 = ir.IntegerType.get_signless(64)
    return ptx("cvta.to.local.u64 $0, $1;", llvm.ptrtoint(i64, own), results=[i64])[0]


def load_own_f32x4(address, word: int) -> list[ir.Value]:
    code = f"ld.local.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * word}];"
    return ptx(code, address, results=[f32_t()] * 4, effects=True)


def store_own_f32x4(address, values, word: int):
    ptx(f"st.local.v4.f32 [$0 + {4 * word}], {{$1, $2, $3, $4}};", address, *values)


def store_global_f32_if(condition, address, value):
    _if(condition, "st.global.f32 [$1], $2;", address, value)


def store_global_f32x4_if(condition, address, values):
    _if(condition, "st.global.v4.f32 [$1], {$2, $3, $4, $5};", address, *values)


def store_global_halfx2_if(condition, address, values):
    code = f".reg .b32 a;\ncvt.rn.{half()}x2.f32 a, $3, $2;\n"
    _if(condition, "st.global.b32 [$1], a;", address, *values, before=code)


def store_global_halfx4_if(condition, address, values):
    code = f".reg .b32 a, b;\ncvt.rn.{half()}x2.f32 a, $3, $2;\ncvt.rn.{half()}x2.f32 b, $5, $4;\n"
    _if(condition, "st.global.v2.b32 [$1], {a, b};", address, *values, before=code)


def _if(condition, code: str, *args, before: str = ""):
    """One predicated instruction, without a branch."""
    flag = arith.extui(i32_t(), condition)
    ptx(f"{{ .reg .pred p;\n{before}setp.ne.b32 p, $0, 0;\n@p {code}\n}}", flag, *args)
