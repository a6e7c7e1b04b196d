"""PTX instructions as Python functions over MLIR values, for lane-level Mosaic GPU kernels.

What orders something has side effects and keeps its place; pure arithmetic has none. Memory is in ptx_memory.py.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

# The 16-bit numbers that kernels multiply, and what PTX calls them.
HALVES = {"bfloat16": "bf16", "float16": "f16"}
_HALF = contextvars.ContextVar("half", default="bfloat16")


@contextlib.contextmanager
def halves(dtype: str) -> Iterator[None]:
    """In the program that is traced inside, 16-bit numbers are of this dtype."""
    token = _HALF.set(dtype)
    try:
        yield
    finally:
        _HALF.reset(token)


def half() -> str:
    """What PTX calls the 16-bit numbers of the program that is traced."""
    return HALVES[half_dtype()]


def half_dtype() -> str:
    return _HALF.get()


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


def maximum(a, b):
    return arith.maxui(_v(a), _v(b))


def _v(x):
    return i32(x) if isinstance(x, int) else x


def sreg(name: str, again: bool = False) -> ir.Value:
    """A special register; read `again`, what follows from it is computed again too, and no register keeps it."""
    return ptx(f"mov.u32 $0, %{name};", results=[i32_t()], effects=again)[0]


def opaque_zero() -> ir.Value:
    """A float32 zero that LLVM does not see through: where only one branch needs it, it is made there."""
    return ptx("mov.f32 $0, 0f00000000;", results=[f32_t()])[0]


def opaque(value: int | ir.Value) -> ir.Value:
    """A number that LLVM does not see through."""
    if isinstance(value, int):
        return ptx(f"mov.u32 $0, {value};", results=[i32_t()])[0]
    return ptx("mov.u32 $0, $1;", value, results=[i32_t()])[0]


def uniform(value: ir.Value) -> ir.Value:
    """Lane 0's value, so that the compiler knows that the warp agrees on it."""
    return ptx("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", value, results=[i32_t()], effects=True)[0]


def set_registers(count: int, more: bool):
    """A thread's, by all of four warps that begin with a multiple of four; for `more` others must have set fewer."""
    ptx(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", convergent=True)


def cta_sync():
    ptx("bar.sync 0;", convergent=True)


def named_sync(which: int | ir.Value, threads: int):
    """Barrier among some of the CTA's warps."""
    if isinstance(which, int):
        ptx(f"bar.sync {which}, {threads};", convergent=True)
    else:
        ptx(f"bar.sync $0, {threads};", which, convergent=True)


def named_arrive(which: int, threads: int):
    """Arrive there without waiting: for those that the others wait for."""
    ptx(f"bar.arrive {which}, {threads};", convergent=True)


def warp_sync():
    ptx("bar.warp.sync 0xffffffff;", convergent=True)


def cluster_sync():
    ptx("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;", convergent=True)


def cluster_arrive():
    """`cluster_sync` in two, in which behind `cluster_wait` only barriers are seen, made in front of a
    `ptx_memory.fence_barrier_init`: what orders all memory takes tenths of a microsecond."""
    ptx("barrier.cluster.arrive.relaxed.aligned;", convergent=True)


def cluster_wait():
    ptx("barrier.cluster.wait.acquire.aligned;", convergent=True)


def mma_half(acc, a, b0, b1):
    """acc [4] += A (16 x 16, row) B (16 x 8, col), float32 accumulation."""
    return mma(half(), acc, a, b0, b1)


def mma(kind: str, acc, a, b0, b1):
    """The same of 16-bit numbers of this kind."""
    return ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, "
        "{$10, $11, $12, $13};",
        *a,
        b0,
        b1,
        *acc,
        results=[f32_t()] * 4,
        convergent=True,
    )


LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E)


def exp2(x):
    return ptx("ex2.approx.ftz.f32 $0, $1;", x, results=[f32_t()])[0]


def reciprocal(x):
    """1 / x within an ulp; of infinity 0."""
    return ptx("rcp.approx.ftz.f32 $0, $1;", x, results=[f32_t()])[0]


def rsqrt(x):
    """1 / sqrt(x), correctly rounded twice."""
    return ptx("{ .reg .f32 r;\nsqrt.rn.f32 r, $1;\nrcp.rn.f32 $0, r; }", x, results=[f32_t()])[0]


def divide(a, b):
    """a / b, correctly rounded."""
    return ptx("div.rn.f32 $0, $1, $2;", a, b, results=[f32_t()])[0]


# For kernels with wgmma. ptxas makes calls of what is above, for numbers near the ends of their range, and where its
# code may be linked to other code, as JAX 0.12 has it, lets no two wgmma overlap in a kernel that calls. Here float64
# is right to its last bit but one, which is enough for the same float32.


def rsqrt_without_call(x):
    """`rsqrt`, of x that is not negative."""
    # q and h double their digits; where y is 0 or infinite x is infinite or 0, and its own root
    code = """rsqrt.approx.ftz.f64 y, a;
testp.normal.f64 p, y;
setp.ne.and.f64 p, y, 0d0000000000000000, p;
mov.f64 q, a;
@p mul.f64 q, a, y;
mul.f64 h, y, 0d3FE0000000000000;
neg.f64 n, h;
@p fma.rn.f64 r, n, q, 0d3FE0000000000000;
@p fma.rn.f64 q, q, r, q;
@p fma.rn.f64 h, h, r, h;
neg.f64 n, q;
@p fma.rn.f64 r, n, q, a;
@p fma.rn.f64 q, r, h, q;"""
    return divide_without_call(f32(1.0), _by_float64(code, x))


def divide_without_call(a, b):
    """`divide`, of an a that is not -0, of which it makes 0."""
    # y doubles its digits twice; where it is 0 or infinite b is infinite or 0, and q is a y
    code = """rcp.approx.ftz.f64 y, b;
testp.normal.f64 p, y;
setp.ne.and.f64 p, y, 0d0000000000000000, p;
mul.f64 q, a, y;
neg.f64 n, b;
@p fma.rn.f64 r, n, y, 0d3FF0000000000000;
@p fma.rn.f64 y, y, r, y;
@p fma.rn.f64 r, n, y, 0d3FF0000000000000;
@p fma.rn.f64 y, y, r, y;
@p mul.f64 q, a, y;
testp.finite.f64 f, q;
and.pred p, p, f;
@p fma.rn.f64 r, n, q, a;
@p fma.rn.f64 q, r, y, q;"""
    return _by_float64(code, a, b)


def _by_float64(code: str, *operands):
    """q, of the operands a and b."""
    given = "".join(f"cvt.f64.f32 {name}, ${i};\n" for i, name in enumerate("ab"[: len(operands)], 1))
    code = f"{{ .reg .f64 a, b, y, h, n, r, q;\n.reg .pred p, f;\n{given}{code}\ncvt.rn.f32.f64 $0, q; }}"
    return ptx(code, *operands, results=[f32_t()])[0]


def shuffle_xor(x, distance: int):
    """The value, of 32 bits, of the lane whose number differs in the bit `distance`."""
    code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return ptx(code, x, results=[x.type], effects=True, convergent=True)[0]


def ballot(condition):
    """A word with the bits of the lanes in which the condition holds; the same in all lanes of the warp."""
    code = "{ .reg .pred p;\nsetp.ne.b32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return ptx(code, arith.extui(i32_t(), condition), results=[i32_t()], effects=True, convergent=True)[0]


def lowest_bit(word):
    """The place of a word's lowest bit that is set."""
    return ptx("{ .reg .b32 r;\nbrev.b32 r, $1;\nclz.b32 $0, r; }", word, results=[i32_t()])[0]


def any_lane(condition):
    """Whether the condition holds in any lane of the warp; the same in all of them."""
    code = "{ .reg .pred p, q;\nsetp.ne.b32 p, $1, 0;\nvote.sync.any.pred q, p, 0xffffffff;\nselp.b32 $0, 1, 0, q; }"
    held = ptx(code, arith.extui(i32_t(), condition), results=[i32_t()], effects=True, convergent=True)[0]
    return eq(held, 1)


def over_lanes(join, x, distances: Sequence[int]):
    """`join` of a value over the lanes whose numbers differ in these bits; every one of them gets it."""
    for distance in distances:
        x = join(x, shuffle_xor(x, distance))
    return x


def over_quad(join, x):
    """`join` of a value over the four lanes 4 g .. 4 g + 3; every one of them gets it."""
    return over_lanes(join, x, (1, 2))


def total(parts: Sequence[Sequence[ir.Value]]) -> list[ir.Value]:
    """Lists of float32 values added up element by element, in their order."""
    return functools.reduce(lambda a, b: [arith.addf(x, y) for x, y in zip(a, b, strict=True)], parts)


def unpack_half(word):
    """A word's two numbers in float32, the lower half first."""
    code = {
        "bf16": "{ .reg .b32 a;\nshl.b32 a, $2, 16;\nmov.b32 $0, a;\nand.b32 a, $2, 0xffff0000;\nmov.b32 $1, a; }",
        "f16": "{ .reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.f32.f16 $0, l;\ncvt.f32.f16 $1, h; }",
    }[half()]
    return ptx(code, word, results=[f32_t()] * 2)


def pack_half(lo, hi):
    """Two float32 numbers, rounded."""
    return ptx(f"cvt.rn.{half()}x2.f32 $0, $2, $1;", lo, hi, results=[i32_t()])[0]


def round_half(x):
    """A float32 number rounded to 16 bits' precision."""
    code = {
        "bf16": "{ .reg .b16 h, z;\ncvt.rn.bf16.f32 h, $1;\nmov.b16 z, 0;\nmov.b32 $0, {z, h}; }",
        "f16": "{ .reg .b16 h;\ncvt.rn.f16.f32 h, $1;\ncvt.f32.f16 $0, h; }",
    }[half()]
    return ptx(code, x, results=[f32_t()])[0]


def pack_halves(lo, hi):
    """The lower halves of two words in one."""
    return ptx("prmt.b32 $0, $1, $2, 0x5410;", lo, hi, results=[i32_t()])[0]


def wgmma_fence():
    ptx("wgmma.fence.sync.aligned;", convergent=True)


def wgmma_commit():
    ptx("wgmma.commit_group.sync.aligned;", convergent=True)


def wgmma_wait(pending: int):
    ptx(f"wgmma.wait_group.sync.aligned {pending};", convergent=True)


def wgmma_finish(acc):
    """The sums acc once all wgmmas are done: values of their own, so that nothing that reads them comes earlier."""
    count = len(acc)
    out = llvm.inline_asm(
        llvm.StructType.get_literal([f32_t()] * count),
        list(acc),
        "wgmma.wait_group.sync.aligned 0;",
        ",".join(["=f"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
        convergent=True,
    )
    return [llvm.extractvalue(f32_t(), out, [i]) for i in range(count)]


def wgmma_half(acc, a, b_descriptor):
    """acc [N / 2] += A (64 x 16 over a warpgroup, registers) B (16 x N, shared memory), N = 8, 16, 32 or 64.

    Asynchronous: neither acc nor a may be read or written until wgmma_wait; the accumulators are tied in place.
    """
    count = len(acc)
    names = ", ".join(f"${i}" for i in range(count))
    a_names = ", ".join(f"${2 * count + i}" for i in range(4))
    code = (
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.{half()}.{half()} {{{names}}}, {{{a_names}}}, "
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


def if_values(cond, body, otherwise):
    """The values of `body()` where cond holds, else the values `otherwise`, of the same types."""
    branch = scf.IfOp(cond, [v.type for v in otherwise], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp(body())
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(otherwise)
    return list(branch.results)
