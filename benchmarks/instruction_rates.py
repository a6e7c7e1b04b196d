"""Cycles that an instruction takes on one of a multiprocessor's four schedulers, alone and beside others.

    python -m benchmarks.instruction_rates benchmarks/results/h200/instruction_rates.json

Each warp runs a loop of independent instructions of a kind (`a+b`: of each in turn, of tensor products a third as many)
between two readings of the clock; `cycles` is the longest such time of a CTA of --warps, over the instructions of the
last kind that one scheduler's warps run. All multiprocessors run it at once. What decoding costs in the kernels is made
of these (docs/fp4_matmul.md).

`wgmmaN` is a warpgroup's product of 64 x 16 x N, weights in registers (`_shared`: in shared memory), one under way
while the next is asked for; there is one to N / 64 x 12 other instructions, which as integer logic take N / 64 x 24
cycles where the product takes N / 2.
"""

import argparse
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lane_level
from pallas_kernels import ptx as p
from pallas_kernels import ptx_memory as mem

CTAS = 132
REGISTERS = 12  # independent chains of a warp
SUMS = 4  # and of tensor products
LOOPS, UNROLLED = 64, 4
SCHEDULERS = 4
OPERAND_BYTES = 8192  # of the right operand of wgmma256; its numbers do not matter
STRIDES = 128 >> 4 << 16 | 256 >> 4 << 32  # of a descriptor, between 8 x 8 matrices along K and along N

# {i} is a chain's number; c0.. are operands that the compiler does not know.
INSTRUCTIONS = {
    "lop3": "lop3.b32 r{i}, r{i}, c0, c1, 0x96;",
    "shf": "shf.l.wrap.b32 r{i}, r{i}, r{i}, 28;",
    "prmt": "prmt.b32 r{i}, r{i}, c0, c1;",
    "iadd": "add.u32 r{i}, r{i}, c0;",
    "imad": "mad.lo.u32 r{i}, r{i}, c0, c1;",
    "imad_wide": "mul.wide.u32 w{i}, r{i}, c0;\ncvt.u32.u64 r{i}, w{i};",
    "hmul2_bf16": "mul.rn.bf16x2 r{i}, r{i}, c0;",
    "hfma2_bf16": "fma.rn.bf16x2 r{i}, r{i}, c0, c1;",
    "ffma": "fma.rn.f32 f{i}, f{i}, fa, fb;",
    "cvt_e4m3x2": "cvt.u16.u32 h, r{i};\ncvt.rn.f16x2.e4m3x2 r{i}, h;",
    "mma": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{m{s}0, m{s}1, m{s}2, m{s}3}}, {{c0, c1, c2, c3}}, "
    "{{c0, c1}}, {{m{s}0, m{s}1, m{s}2, m{s}3}};",
}
KINDS = [*INSTRUCTIONS, "hmul2_bf16+lop3", "hmul2_bf16+imad", "hmul2_bf16+ffma", "lop3+imad", "lop3+ffma", "mma+lop3"]
WARPGROUP_KINDS = [f"wgmma{n}{where}{other}" for n in (32, 64, 256) for where in ("", "_shared")
                   for other in ("", "+lop3", "+hmul2_bf16")]  # fmt: skip


def body(kind: str) -> str:
    """One turn of the loop. Of tensor products there are a third as many as of others: one for three chains."""
    lines = []
    for turn in range(UNROLLED * REGISTERS):
        i = turn % REGISTERS
        for name in kind.split("+"):
            if name.startswith("wgmma"):
                if turn * 64 % (REGISTERS * columns(kind)) == 0:
                    lines.append(warpgroup_product(columns(kind), shared="_shared" in name))
            elif name != "mma" or i < SUMS:
                lines.append(INSTRUCTIONS[name].format(i=i, s=i))
    return "\n".join(lines)


def columns(kind: str) -> int:
    """N of `wgmmaN`; 0 without it."""
    found = re.search(r"wgmma(\d+)", kind)
    return int(found[1]) if found else 0


def warpgroup_product(n: int, shared: bool) -> str:
    sums = ", ".join(f"v{i}" for i in range(n // 2))
    left, transposed = ("d", "0, 0") if shared else ("{c0, c1, c2, c3}", "0")
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, {left}, d, 1, 1, 1, {transposed};\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;"
    )


def count(kind: str) -> int:
    """Instructions of the last kind that a warp runs."""
    last = kind.split("+")[-1]
    if last.startswith("wgmma"):
        return LOOPS * UNROLLED * 64 // columns(kind)
    return LOOPS * UNROLLED * (SUMS if last == "mma" else REGISTERS)


def program(kind: str) -> str:
    sums = [f"m{s}{e}" for s in range(SUMS) for e in range(4)] + [f"v{i}" for i in range(columns(kind) // 2)]
    fence, finish = ("wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;") if columns(kind) else ("", "")
    chains = range(REGISTERS)
    return "\n".join([
        f"{{ .reg .b32 r<{REGISTERS}>, c<4>, t0, t1, n, out, word;",
        f".reg .f32 f<{REGISTERS}>, fa, fb, {', '.join(sums)};",
        f".reg .b64 w<{REGISTERS}>, at, d;\n.reg .b16 h;\n.reg .pred again;",
        "ld.global.v4.b32 {c0, c1, c2, c3}, [$0];",
        f"shr.u32 word, $3, 4;\nand.b32 word, word, 0x3fff;\ncvt.u64.u32 d, word;\nor.b64 d, d, {STRIDES};",
        "mov.b32 fa, c0;\nmov.b32 fb, c1;",
        *(f"add.u32 r{i}, $2, {i};\nmov.b32 f{i}, r{i};" for i in chains),
        *(f"mov.f32 {m}, 0f00000000;" for m in sums),
        f"mov.u32 n, 0;\nbar.sync 0;\n{fence}\nmov.u32 t0, %clock;\nloop_${{:uid}}:",
        body(kind),
        f"add.u32 n, n, 1;\nsetp.lt.u32 again, n, {LOOPS};\n@again bra loop_${{:uid}};\n{finish}",
        "mov.u32 t1, %clock;\nsub.u32 t1, t1, t0;\nmov.u32 out, 0;",
        *(f"xor.b32 out, out, r{i};\nmov.b32 word, f{i};\nxor.b32 out, out, word;" for i in chains),
        *(f"mov.b32 word, {m};\nxor.b32 out, out, word;" for m in sums),
        "mul.wide.u32 at, $2, 8;\nadd.u64 at, at, $1;\nst.global.v2.b32 [at], {t1, out};\n}",
    ])  # fmt: skip


def build(kind: str, warps: int):
    """operands uint32 [4] -> uint32 [32 warps, 2]: clock cycles, and what keeps the results alive."""

    def instructions(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
        def run(ctx, given, out, shared):
            places = mem.global_address(given), mem.global_address(out), p.sreg("tid.x"), mem.shared_address(shared)
            p.ptx(program(kind), *places, convergent=True)

        run(*refs)

    return jax.jit(
        plgpu.kernel(
            instructions,
            out_type=jax.ShapeDtypeStruct((32 * warps, 2), jnp.uint32),
            scratch_types=[plgpu.SMEM((OPERAND_BYTES,), jnp.int8)],
            grid=(CTAS,),
            grid_names=("ctas",),
            num_threads=warps // 4,
            thread_name="warpgroup",
            compiler_params=lane_level.PARAMS,
        )
    )


def cycles(kind: str, warps: int) -> float:
    """Of one instruction of the last kind, with those between, on a scheduler."""
    operands = jnp.asarray([0x3F803F80, 0x00010001, 2, 0x3F803F80], jnp.uint32)
    run = build(kind, warps)
    run(operands)
    return float(np.asarray(run(operands))[:, 0].max()) / (count(kind) * warps / SCHEDULERS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, *WARPGROUP_KINDS])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 12, 16], help="of a multiprocessor, multiples of 4")
    args = parser.parse_args()
    rows = []
    for kind in args.kinds:
        for warps in (w for w in args.warps if columns(kind) < 256 or w <= 12):  # more have too few registers
            rows.append({"instruction": kind, "warps": warps, "cycles": round(cycles(kind, warps), 2)})
            print(json.dumps(rows[-1]), flush=True)
    with open(args.out, "w") as f:
        json.dump({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, f, indent=1)
        f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
