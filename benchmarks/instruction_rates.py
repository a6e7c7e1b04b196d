"""Cycles that an instruction takes on one of a multiprocessor's four schedulers, alone and beside others.

    python -m benchmarks.instruction_rates benchmarks/results/h200/instruction_rates.json

Each warp runs a loop of independent instructions of a kind (`a+b`: of each in turn, of tensor products a third as many)
between two readings of the clock; `cycles` is the longest such time of a CTA of --warps, over the instructions of the
last kind that one scheduler's warps run. All multiprocessors run it at once. What decoding costs in the kernels is made
of these (docs/fp4_matmul.md).

`wgmmaN` are four of a warpgroup's products of 64 x 16 x N, weights in registers, which take 4 x N / 2 cycles; `beside`
them stand so many other instructions, and `cycles` is what all take. The next four are asked for while these are under
way. This loop is one turn of that: of several turns ptxas moves all products behind all others.
"""

import argparse
import concurrent.futures
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import of_device, require_gpu, write
from pallas_kernels import lane_level
from pallas_kernels import ptx as p
from pallas_kernels import ptx_memory as mem
from pallas_kernels.layout import DECODINGS

CTAS = 132
REGISTERS = 12  # independent chains of a warp
SUMS = 4  # and of tensor products
LOOPS, UNROLLED = 64, 4
PRODUCTS, PRODUCT_LOOPS = 4, 128
SCHEDULERS = 4
OPERAND_BYTES = 8192  # of the right operand of wgmma256; its numbers do not matter
STRIDES = 128 >> 4 << 16 | 256 >> 4 << 32  # of a descriptor, between 8 x 8 matrices along K and along N

# {i} is a chain's number; c0.. are operands that the compiler does not know.
_MASK = DECODINGS["bfloat16"].turned_mask(0)
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
    # eight codes of a word as fragments.py decodes them (13 instructions), and two that join the results
    "decode": "shl.b32 t0, r{i}, 2;\nshl.b32 t1, r{i}, 6;\nshf.l.wrap.b32 out, r{i}, r{i}, 28;\n"
    f"shf.l.wrap.b32 word, r{{i}}, r{{i}}, 24;\nand.b32 t0, t0, {_MASK:#x};\nand.b32 t1, t1, {_MASK:#x};\n"
    f"and.b32 out, out, {_MASK:#x};\n"
    "and.b32 r{i}, r{i}, 0x01000100;\nlop3.b32 r{i}, word, 0x80C080C0, r{i}, 0xEA;\n"
    "mul.rn.bf16x2 t0, t0, c0;\nmul.rn.bf16x2 t1, t1, c3;\nmul.rn.bf16x2 out, out, c0;\n"
    "mul.rn.bf16x2 r{i}, r{i}, c3;\nlop3.b32 r{i}, r{i}, t0, t1, 0x96;\nxor.b32 r{i}, r{i}, out;",
    "mma": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{m{s}0, m{s}1, m{s}2, m{s}3}}, {{c0, c1, c2, c3}}, "
    "{{c0, c1}}, {{m{s}0, m{s}1, m{s}2, m{s}3}};",
}
KINDS = [*(name for name in INSTRUCTIONS if name != "decode"), "hmul2_bf16+lop3", "hmul2_bf16+imad", "hmul2_bf16+ffma",
         "lop3+imad", "lop3+ffma", "mma+lop3"]  # fmt: skip
COLUMNS = [32, 64, 128, 256]  # N of the products
BESIDE = {"lop3": 1, "shf": 1, "hmul2_bf16": 1, "ffma": 1, "decode": 15}  # and how many instructions one of it is
SHARES = [0.125, 0.25, 0.375, 0.5, 0.75]  # instructions for each cycle of the products
WORDS = [0, 2, 4, 8]  # that are decoded beside four products


def body(kind: str) -> str:
    """One turn of the loop. Of tensor products there are a third as many as of others: one for three chains."""
    lines = []
    for turn in range(UNROLLED * REGISTERS):
        i = turn % REGISTERS
        for name in kind.split("+"):
            if name != "mma" or i < SUMS:
                lines.append(INSTRUCTIONS[name].format(i=i, s=i))
    return "\n".join(lines)


def products(n: int, other: str, beside: int) -> str:
    """One turn of the loop with a warpgroup's products of N columns."""
    sums = ", ".join(f"v{i}" for i in range(n // 2))
    one = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, {{c0, c1, c2, c3}}, d, 1, 1, 1, 0;"
    others = [INSTRUCTIONS[other].format(i=i % REGISTERS) for i in range(beside)]
    commit, wait = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"
    return "\n".join([*[one] * PRODUCTS, commit, *others, wait])


def count(kind: str) -> int:
    """Instructions of the last kind that a warp runs."""
    return LOOPS * UNROLLED * (SUMS if kind.split("+")[-1] == "mma" else REGISTERS)


def program(turn: str, loops: int, columns: int = 0) -> str:
    """Times `loops` turns; `columns` are N of their products, if they have any of a warpgroup."""
    sums = [f"m{s}{e}" for s in range(SUMS) for e in range(4)] + [f"v{i}" for i in range(columns // 2)]
    fence, finish = ("wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;") if columns else ("", "")
    once = '.pragma "nounroll";' if columns else ""
    chains = range(REGISTERS)
    return "\n".join([
        f"{{ .reg .b32 r<{REGISTERS}>, c<4>, t0, t1, n, out, word, began, ended;",
        f".reg .f32 f<{REGISTERS}>, fa, fb, {', '.join(sums)};",
        f".reg .b64 w<{REGISTERS}>, at, d;\n.reg .b16 h;\n.reg .pred again;",
        "ld.global.v4.b32 {c0, c1, c2, c3}, [$0];",
        f"shr.u32 word, $3, 4;\nand.b32 word, word, 0x3fff;\ncvt.u64.u32 d, word;\nor.b64 d, d, {STRIDES};",
        "mov.b32 fa, c0;\nmov.b32 fb, c1;",
        *(f"add.u32 r{i}, $2, {i};\nmov.b32 f{i}, r{i};" for i in chains),
        *(f"mov.f32 {m}, 0f00000000;" for m in sums),
        f"mov.u32 n, 0;\nbar.sync 0;\n{fence}\nmov.u32 began, %clock;\nloop_${{:uid}}:\n{once}",
        turn,
        f"add.u32 n, n, 1;\nsetp.lt.u32 again, n, {loops};\n@again bra loop_${{:uid}};\n{finish}",
        "mov.u32 ended, %clock;\nsub.u32 ended, ended, began;\nmov.u32 out, 0;",
        *(f"xor.b32 out, out, r{i};\nmov.b32 word, f{i};\nxor.b32 out, out, word;" for i in chains),
        *(f"mov.b32 word, {m};\nxor.b32 out, out, word;" for m in sums),
        "mul.wide.u32 at, $2, 8;\nadd.u64 at, at, $1;\nst.global.v2.b32 [at], {ended, out};\n}",
    ])  # fmt: skip


def build(code: str, warps: int):
    """The program `code` of operands uint32 [4] -> uint32 [32 warps, 2]: clock cycles, and what keeps results alive."""

    def instructions(_, given, out, shared):
        places = mem.global_address(given), mem.global_address(out), p.sreg("tid.x"), mem.shared_address(shared)
        p.ptx(code, *places, convergent=True)

    out = jax.ShapeDtypeStruct((32 * warps, 2), jnp.uint32)
    return jax.jit(lane_level.kernel(instructions, out, "bfloat16", grid=CTAS, warps=warps, shared=OPERAND_BYTES))


def longest(run) -> float:
    """Clock cycles of the warp that takes the longest."""
    operands = jnp.asarray([0x3F803F80, 0x00010001, 2, 0x3F803F80], jnp.uint32)
    run(operands)
    return float(np.asarray(run(operands))[:, 0].max())


def cases(kinds, columns, warps) -> Iterator[tuple[dict[str, Any], str, float]]:
    """What each row says, its program, and by how much its cycles are divided: by what a scheduler's warps run."""
    for kind, count_of in itertools.product(kinds, warps):
        row = {"instruction": kind, "warps": count_of}
        yield row, program(body(kind), LOOPS), count(kind) * count_of / SCHEDULERS
    for n, (other, size), count_of in itertools.product(columns, BESIDE.items(), warps):
        if count_of * (n // 2 + 64) > 2048:  # more have too few registers
            continue
        alone = PRODUCTS * n // 2
        for beside in WORDS if other == "decode" else [int(share * alone) for share in SHARES]:
            row = {"instruction": f"wgmma{n}", "alone": alone, "other": other, "beside": beside * size}
            code = program(products(n, other, beside), PRODUCT_LOOPS, n)
            yield row | {"warps": count_of}, code, PRODUCT_LOOPS * count_of / SCHEDULERS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--columns", type=int, nargs="*", default=COLUMNS)
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8, 12, 16], help="of a multiprocessor, times 4")
    args = parser.parse_args()
    require_gpu()
    rows = []
    operand = jax.ShapeDtypeStruct((4,), jnp.uint32)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        of = [(row, divisor, pool.submit(build(code, row["warps"]).lower(operand).compile))
              for row, code, divisor in cases(args.kinds, args.columns, args.warps)]  # fmt: skip
        for row, divisor, compiled in of:
            rows.append(row | {"cycles": round(longest(compiled.result()) / divisor, 2)})
            print(json.dumps(rows[-1]), flush=True)
    write(args.out, of_device() | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
