"""Device times of fp4_matmul beside cuBLAS BF16 in the same run, weights rotated past the L2.

    python -m benchmarks.fp4_matmul [--out benchmarks/results/h200/fp4_matmul.json] [--models 7B 14B 32B] [--m 1 8 ...]
        [--ops forward dx lora] [--ranks 8 32 128] [--formats nvfp4 mxfp4 nf4] [--triton-m 8 64] [--keep]

Times are CUPTI kernel times, every kernel of a call included, the median of several passes over the rotated weights,
of which there are as many as `operands` says. tb_per_s counts the weight's own bytes (NVFP4: 0.5625 a weight). A row of
op "lora" is one call with an adapter for each of its matrices (q, k, v; gate, up); formats without a kernel are
dequantized and multiplied by XLA. All programs are compiled first, in threads; then a row takes about a tenth of a
second. With --keep rows of the file that this run does not measure stay, if they are from the same device and JAX.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.compiling import Programs
from benchmarks.fp4_rows import MARLIN, MODELS, SPLITS, merged, print_row, summarize
from benchmarks.report import of_device, require_gpu, write
from pallas_kernels import KernelWeight, describe, fp4_matmul, fp4_matmul_dx, layout, variants
from pallas_kernels.operands import padded_rank
from qerl_jax.formats import PACKED

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
ROTATE_BYTES = 1e9  # twenty times the L2, which may keep some of what is used again soon
FEW_ROWS = 256  # above, a product's own time hides where its weights come from, and two weights are enough
# What the products of 16-bit weights are compared with is cuBLAS, not XLA's own matrix kernels, whose autotuning would
# also take most of a run.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weight(key, n, k, dtype="bfloat16"):
    """Random codes; scale bytes in 0x10-0x4F."""
    bits = jax.random.bits(key, (-(-n // 16), -(-k // 256), layout.QUAD_WORDS), jnp.uint32)
    is_code = jnp.arange(layout.QUAD_WORDS) < layout.CODE_BYTES // 4
    return KernelWeight(jnp.where(is_code, bits, (bits & 0x3F3F3F3F) + 0x10101010), n, k, dtype)


def device_us(f, *args, passes=3):
    """Median over passes of the sum of all kernels' device times in one call of f."""
    _, times = profiler.measure(f, iterations=passes)(*args)
    return float(np.median(times)) * 1e3


def rotated(op, count):
    """One program that applies op to `count` weights in turn, each with an x of its own."""
    return jax.jit(lambda xs, ws: [op(xs[i], ws[i]) for i in range(count)])


def ceilings():
    """Read bandwidth (TB/s) and BF16 matmul rate (TFLOP/s) of this machine."""
    big = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)
    read = big.nbytes / device_us(jax.jit(lambda x: x.astype(jnp.float32).sum()), big) * 1e-6
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in (1, 2))
    rate = 2 * 8192**3 / device_us(jax.jit(jnp.dot), a, b) * 1e-6
    return {"read_tb_per_s": read, "bf16_tflops": rate}


class Case(NamedTuple):
    """One line of the table: the operation on x [m, width] and one operand of a kind, and what else its row says."""

    op: Callable[[jax.Array, Any], Any]
    width: int
    kind: Hashable
    row: dict[str, Any]


def make_operand(kind: Hashable, k: int, n: int) -> Callable[[jax.Array], Any]:
    """A function that makes an operand of this kind, random, from a key."""
    if kind == "nvfp4":
        return lambda key: random_weight(key, n, k)
    if kind == "plain":
        return lambda key: jax.random.normal(key, (n, k), jnp.bfloat16)
    if isinstance(kind, str):
        return lambda key: PACKED[kind].quantize(jax.random.normal(key, (n, k), jnp.bfloat16), None)
    _, rank = kind

    def weights_and_adapters(key):
        ns, keys = SPLITS.get((k, n), (n,)), jax.random.split(key, 3)
        parts = [jax.random.split(part, len(ns)) for part in keys]
        weights = [random_weight(part, n_i, k) for part, n_i in zip(parts[0], ns, strict=True)]
        a = [jax.random.normal(part, (rank, k), jnp.bfloat16) for part in parts[1]]
        b = [jax.random.normal(part, (n_i, rank), jnp.bfloat16) for part, n_i in zip(parts[2], ns, strict=True)]
        return weights, list(zip(a, b, strict=True))

    return weights_and_adapters


def cases(k: int, n: int, m: int, args: argparse.Namespace) -> Iterator[Case]:
    """What is measured for m rows."""
    scale, one = jnp.float32(2688.0), {"format": "nvfp4"}
    backends = [None] * (m in args.m) + ["triton"] * (m in args.triton_m)
    for backend in backends if "forward" in args.ops and "nvfp4" in args.formats else ():
        row = one | {"op": "forward", "variant": str(variants.choose(m, k, (n,), backend))}
        yield Case(lambda x, w, b=backend: fp4_matmul(x, w, scale, backend=b), k, "nvfp4", row)
    if "dx" in args.ops and m in args.dx_m:
        row = one | {"op": "dx", "variant": str(variants.choose_dx(m, k, (n,)))}
        yield Case(lambda x, w: fp4_matmul_dx(x, w, scale), n, "nvfp4", row)
    if "lora" in args.ops and m in args.lora_m:
        for rank in args.ranks:
            yield lora_case(k, n, m, rank)
    for name in args.formats if "forward" in args.ops and m in args.formats_m else ():
        if name != "nvfp4":
            row = {"format": name, "op": "forward", "variant": "dequantize"}
            dequantize = PACKED[name].dequantize
            yield Case(lambda x, w, f=dequantize: jnp.dot(x, f(w, jnp.bfloat16).T), k, name, row)


def lora_case(k: int, n: int, m: int, rank: int) -> Case:
    ns = SPLITS.get((k, n), (n,))
    scales = [jnp.float32(2688.0)] * len(ns)

    def op(x, operand):
        weights, pairs = operand
        return fp4_matmul(x, weights, scales, lora=[(*pair, 0.5) for pair in pairs])

    ranks = (padded_rank(rank),) * len(ns)
    variant, inside = variants.choose(m, k, ns, None, ranks), variants.lora_inside(m, k, ns, ranks)
    row = {"format": "nvfp4", "op": "lora", "rank": rank, "variant": str(variant), "lora_inside": inside}
    return Case(op, k, ("lora", rank), row)


def plain_case(case: Case) -> Case:
    """cuBLAS's product of 16-bit weights for the same x or dy."""
    if case.row["op"] == "dx":
        return Case(jnp.dot, case.width, "plain", {"op": "bf16 dx"})
    return Case(lambda x, w: jnp.dot(x, w.T), case.width, "plain", {"op": "bf16"})


def all_rows(args: argparse.Namespace) -> list[int]:
    """Every M at which something is measured."""
    rows = {*args.m, *args.triton_m}
    for op, more in (("dx", args.dx_m), ("lora", args.lora_m)):
        rows |= {*more} if op in args.ops else set()
    return sorted(rows | ({*args.formats_m} if {*args.formats} - {"nvfp4"} else set()))


class Shape:
    """The programs of one matrix: `start` traces them and lets threads compile them, `measure` gives its rows."""

    def __init__(self, k: int, n: int, args: argparse.Namespace, programs: Programs):
        self.k, self.n, self.programs = k, n, programs
        self.cases = {m: list(cases(k, n, m, args)) for m in all_rows(args)}
        self.sizes: dict[Hashable, int] = {}

    def start(self) -> None:
        k, n, key = self.k, self.n, jax.random.key(0)
        for m, found in self.cases.items():
            for case in found:
                for measured, options in ((case, None), (plain_case(case), CUBLAS)):
                    make = make_operand(measured.kind, k, n)
                    self.programs.start(("make", k, n, measured.kind), make, key)
                    operand = jax.eval_shape(make, key)
                    self.sizes[measured.kind] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(operand))
                    count = self.count(m, measured.kind)
                    xs = [jax.ShapeDtypeStruct((m, case.width), jnp.bfloat16)] * count
                    program = self.program(m, measured)
                    self.programs.start(program, rotated(measured.op, count), xs, [operand] * count, options=options)

    def program(self, m: int, case: Case) -> Hashable:
        variant = case.row.get("variant", "").split("(")[0]
        return (self.k, self.n, m, case.kind, case.row["op"], case.width, variant)

    def count(self, m: int, kind: Hashable) -> int:
        """Operands that are used in turn, so that none is found in the L2."""
        return max(2, int(np.ceil(ROTATE_BYTES / self.sizes[kind]))) if m <= FEW_ROWS else 2

    def measure(self) -> list[dict[str, Any]]:
        k, n, rows, operands, bf16 = self.k, self.n, [], {}, {}
        for m, found in self.cases.items():
            for case in found:
                for kind in (case.kind, "plain"):
                    make, made = self.programs.get(("make", k, n, kind)), operands.setdefault(kind, [])
                    made += [make(jax.random.key(i)) for i in range(len(made), self.count(m, kind))]

                def us(measured, m=m):
                    count = self.count(m, measured.kind)
                    program, xs = self.programs.get(self.program(m, measured)), inputs(m, measured.width, count)
                    return device_us(program, xs, operands[measured.kind][:count]) / count

                time_us, plain = us(case), plain_case(case)
                plain_key = m, plain.row["op"]
                if plain_key not in bf16:
                    bf16[plain_key] = us(plain)
                is_packed = case.row["format"] == "nvfp4"
                size = k * n * 0.5625 if is_packed else self.sizes[case.kind]
                rows.append(case.row | {
                    "m": m, "k": k, "n": n, "device_us": time_us, "bf16_us": bf16[plain_key],
                    "tb_per_s": size / time_us * 1e-6, "operands": self.count(m, case.kind),
                })  # fmt: skip
                if case.row["op"] == "forward" and is_packed and m in MARLIN.get((k, n), {}):
                    rows[-1]["marlin_us"] = MARLIN[k, n][m]
                print_row(rows[-1])
        return rows


def inputs(m: int, width: int, count: int) -> list[jax.Array]:
    """Random x, 64 rows repeated; made on the host, where nothing is compiled for it."""
    few = np.random.default_rng(m).standard_normal((64, width), np.float32).astype(ml_dtypes.bfloat16)
    x = np.tile(few, (-(-m // 64), 1))[:m]
    return [jax.device_put(x) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/h200/fp4_matmul.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--m", type=int, nargs="+", default=ROWS)
    parser.add_argument("--ops", nargs="+", default=["forward", "dx"], choices=["forward", "dx", "lora"])
    parser.add_argument("--dx-m", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--lora-m", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"], choices=list(PACKED))
    parser.add_argument("--formats-m", type=int, nargs="+", default=[8, 1024], help="rows for formats without a kernel")
    parser.add_argument("--triton-m", type=int, nargs="+", default=[], help="rows for the portable kernel")
    parser.add_argument("--keep", action="store_true", help="keep the file's other rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this long")
    args = parser.parse_args()
    require_gpu(hopper=False)
    start, before = time.time(), None
    if args.keep and os.path.exists(args.out):
        with open(args.out) as f:
            before = json.load(f)
    print(describe())
    programs, shapes = Programs(), []
    for k, n in dict.fromkeys(s for model in args.models for s in MODELS[model]):
        shapes.append(Shape(k, n, args, programs))
        shapes[-1].start()
    traced = time.time() - start
    programs.wait()
    print(f"{len(programs)} programs traced in {traced:.0f} s, compiled after {time.time() - start:.0f} s", flush=True)
    result = of_device() | ceilings() | {"rows": []}
    print(f"read {result['read_tb_per_s']:.2f} TB/s, BF16 {result['bf16_tflops']:.0f} TFLOP/s")
    whole = result | {"summary": {}}
    for shape in shapes:
        if time.time() - start > args.seconds:
            print("out of time before", (shape.k, shape.n))
            break
        result["rows"] += shape.measure()
        whole = result | {"rows": merged(before, result) if before else result["rows"]}
        whole["summary"] = summarize(whole["rows"])
        write(args.out, whole)
    print(f"{time.time() - start:.0f} s")
    for name, value in whole["summary"].items():
        print(f"{name}: {value:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
