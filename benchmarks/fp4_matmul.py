"""Device times of fp4_matmul beside cuBLAS BF16 in the same run, weights rotated past the L2.

    python -m benchmarks.fp4_matmul [--out benchmarks/results/h200/fp4_matmul.json] [--models 7B 14B 32B] [--m 1 8 ...]
        [--ops forward dx lora] [--ranks 8 32 128] [--formats nvfp4 mxfp4 nf4] [--backend triton] [--keep]

Times are CUPTI kernel times, every kernel of a call included, the median of several passes over the rotated weights.
tb_per_s counts the weight's own bytes (NVFP4: 0.5625 a weight). A row of op "lora" is one call with an adapter for each
of its matrices (q, k, v; gate, up); formats without a kernel are dequantized and multiplied by XLA. With --keep rows of
the file that this run does not measure stay, if they are from the same device and JAX.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import KernelWeight, describe, fp4_matmul, fp4_matmul_dx, layout, variants
from pallas_kernels.stream_plan import padded_rank
from qerl_jax.formats import PACKED

MODELS = {
    "7B": [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)],
    "14B": [(5120, 7168), (5120, 5120), (5120, 27648), (13824, 5120)],
    "32B": [(5120, 7168), (5120, 5120), (5120, 55296), (27648, 5120)],
}
# The matrices of a call that multiplies by several.
SPLITS = {
    (3584, 4608): (3584, 512, 512), (3584, 37888): (18944, 18944), (5120, 7168): (5120, 1024, 1024),
    (5120, 27648): (13824, 13824), (5120, 55296): (27648, 27648),
}  # fmt: skip
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
ROTATE_BYTES = 250e6
# Marlin NVFP4 (vLLM 0.22.1) on an H200, microseconds by M.
MARLIN = {
    (3584, 4608): {1: 10.9, 8: 11.2, 16: 12.0, 32: 13.3, 64: 18.9, 128: 27.1, 256: 35.6, 1024: 112, 4096: 470},
    (3584, 3584): {1: 10.0, 8: 9.8, 16: 10.4, 32: 11.9, 64: 16.6, 128: 23.0, 256: 31.3, 1024: 89, 4096: 354},
    (3584, 37888): {1: 37.0, 8: 35.8, 16: 39.0, 32: 43.8, 64: 61.9, 128: 113, 256: 236, 1024: 1034, 4096: 3587},
    (18944, 3584): {1: 26.7, 8: 25.1, 16: 26.5, 32: 29.9, 64: 46.1, 128: 79.6, 256: 115, 1024: 475, 4096: 1699},
    (5120, 7168): {1: 14.4, 8: 14.9, 16: 15.7, 32: 19.4, 64: 28.8, 128: 39.8, 256: 64.2, 1024: 260, 4096: 963},
    (5120, 5120): {1: 13.0, 8: 13.1, 16: 14.2, 32: 16.3, 64: 23.9, 128: 34.4, 256: 49.8, 1024: 178, 4096: 690},
    (5120, 27648): {1: 38.4, 8: 37.2, 16: 40.3, 32: 45.2, 64: 63.7, 128: 116, 256: 224, 1024: 1055, 4096: 3634},
    (13824, 5120): {1: 25.6, 8: 25.7, 16: 24.8, 32: 30.8, 64: 46.2, 128: 68.2, 256: 128, 1024: 562, 4096: 1716},
    (5120, 55296): {1: 71.6, 8: 68.7, 16: 74.5, 32: 83.0, 64: 116, 128: 224, 256: 500, 1024: 2059, 4096: 7219},
    (27648, 5120): {1: 47.4, 8: 38.1, 16: 40.1, 32: 53.5, 64: 82.2, 128: 118, 256: 225, 1024: 955, 4096: 3394},
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_weight(key, n, k):
    """Random codes; scale bytes in 0x10-0x4F."""
    bits = jax.random.bits(key, (-(-n // 16), -(-k // 256), layout.QUAD_WORDS), jnp.uint32)
    is_code = jnp.arange(layout.QUAD_WORDS) < layout.CODE_BYTES // 4
    return KernelWeight(jnp.where(is_code, bits, (bits & 0x3F3F3F3F) + 0x10101010), n, k)


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
    """One line of the table: the operation on x [m, width] and one of `operands`, and what else its row says."""

    op: Callable[[jax.Array, Any], Any]
    width: int
    operands: list[Any]
    row: dict[str, Any]


def cases(k, n, m, args, packed, other):
    """What is measured for m rows; `packed` are NVFP4 weights, `other` those of other formats by their names."""
    scale, one = jnp.float32(2688.0), {"format": "nvfp4"}
    if "forward" in args.ops and packed:
        row = one | {"op": "forward", "variant": str(variants.choose(m, k, (n,), args.backend))}
        yield Case(lambda x, w: fp4_matmul(x, w, scale, backend=args.backend), k, packed, row)
    if "dx" in args.ops and m in args.dx_m and packed:
        row = one | {"op": "dx", "variant": str(variants.choose_dx(m, k, n, args.backend))}
        yield Case(lambda x, w: fp4_matmul_dx(x, w, scale, backend=args.backend), n, packed, row)
    if "lora" in args.ops and m <= variants.STREAM_ROWS:
        for rank in args.ranks:
            yield lora_case(k, n, m, rank, len(packed), args.backend)
    for name, weights in other.items():
        row = {"format": name, "op": "forward", "variant": "dequantize"}
        dequantize = PACKED[name].dequantize
        yield Case(lambda x, w, f=dequantize: jnp.dot(x, f(w, jnp.bfloat16).T), k, weights, row)


def lora_case(k, n, m, rank, count, backend):
    ns, operands = SPLITS.get((k, n), (n,)), []
    for i in range(count):
        keys = jax.random.split(jax.random.key(rank + i), 3 * len(ns)).reshape(3, len(ns))
        weights = [random_weight(key, n_i, k) for key, n_i in zip(keys[0], ns, strict=True)]
        a = [jax.random.normal(key, (rank, k), jnp.bfloat16) for key in keys[1]]
        b = [jax.random.normal(key, (n_i, rank), jnp.bfloat16) for key, n_i in zip(keys[2], ns, strict=True)]
        operands.append((weights, list(zip(a, b, strict=True))))
    scales = [jnp.float32(2688.0)] * len(ns)

    def op(x, operand):
        weights, pairs = operand
        return fp4_matmul(x, weights, scales, lora=[(*pair, 0.5) for pair in pairs], backend=backend)

    ranks = (padded_rank(rank),) * len(ns)
    variant = variants.choose(m, k, ns, backend, ranks)
    inside = variants.lora_inside(m, k, ns, ranks) and backend is None
    row = {"format": "nvfp4", "op": "lora", "rank": rank, "variant": str(variant), "lora_inside": inside}
    return Case(op, k, operands, row)


def measure_shape(k, n, args):
    def enough(size):
        return max(2, int(np.ceil(ROTATE_BYTES / size)))

    keys = jax.random.split(jax.random.key(k + n), enough(k * n * 0.5625))
    packed = [random_weight(key, n, k) for key in keys] if "nvfp4" in args.formats else []
    plain = [jax.random.normal(key, (n, k), jnp.bfloat16) for key in keys[: enough(2 * k * n)]]
    quantized = {}
    for name in args.formats:
        if name != "nvfp4":
            quantize = jax.jit(lambda w, f=PACKED[name].quantize: f(w, None))
            quantized[name] = [quantize(w) for w in plain]
    rows = []
    for m in args.m:
        times = {}
        for case in cases(k, n, m, args, packed, quantized):
            few = case.operands if m <= 64 else case.operands[:2]
            xs = [
                jax.random.normal(jax.random.key(i), (m, case.width), jnp.bfloat16)
                for i in range(max(len(few), len(plain)))
            ]
            us = device_us(rotated(case.op, len(few)), xs, few) / len(few)
            is_dx = case.row["op"] == "dx"
            if is_dx not in times:
                g = jnp.dot if is_dx else (lambda x, w: jnp.dot(x, w.T))
                times[is_dx] = device_us(rotated(g, len(plain)), xs, plain) / len(plain)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(case.operands[0]))
            if case.row["format"] == "nvfp4":
                size = k * n * 0.5625
            rows.append(case.row | {
                "m": m, "k": k, "n": n, "device_us": us, "bf16_us": times[is_dx], "tb_per_s": size / us * 1e-6,
            })  # fmt: skip
            if case.row["op"] == "forward" and m in MARLIN.get((k, n), {}):
                rows[-1]["marlin_us"] = MARLIN[k, n][m]
            print_row(rows[-1])
    return rows


def key_of(row):
    """What a row measures; a forced backend's rows stand beside the table's own."""
    family = row["variant"].split("(")[0].split(" ")[0]
    chosen = family if family in ("triton", "dequantize") else ""
    return (row["format"], row["op"], row["m"], row["k"], row["n"], row.get("rank", 0), chosen)


def merged(old, new):
    """The rows of a result `old` that `new` has not, before those of `new`; none of another device or JAX."""
    if (old["device"], old["jax"]) != (new["device"], new["jax"]):
        return new["rows"]
    measured = {key_of(row) for row in new["rows"]}
    return [row for row in old["rows"] if key_of(row) not in measured] + new["rows"]


def print_row(r):
    peer = f"{r['marlin_us'] / r['device_us']:5.2f}x" if r.get("marlin_us") else "     -"
    op = f"{r['op']}{r.get('rank', '')}"
    print(
        f"{r['format']:6} {op:8} {r['k']:6}x{r['n']:<6} M={r['m']:<5} {r['device_us']:9.2f} us "
        f"{r['tb_per_s']:5.2f} TB/s  BF16 {r['bf16_us']:9.2f} us ({r['bf16_us'] / r['device_us']:5.2f}x)  "
        f"Marlin {peer}",
        flush=True,
    )


def _by_table(row):
    return row["format"] == "nvfp4" and key_of(row)[-1] == ""


def summarize(rows):
    """Geometric means over Marlin, and the four matmuls of a layer in sequence."""
    out = {}
    for m in sorted({r["m"] for r in rows}):
        ratios = [r["marlin_us"] / r["device_us"] for r in rows if r["m"] == m and r.get("marlin_us") and _by_table(r)]
        if ratios:
            out[f"speedup_over_marlin_m{m}"] = float(np.exp(np.mean(np.log(ratios))))
    for model, shapes in MODELS.items():
        for m in sorted({r["m"] for r in rows if r["m"] <= 64}):
            mine = [r for r in rows if r["m"] == m and _by_table(r)]
            found = [r for s in shapes for r in mine if (r["k"], r["n"], r["op"]) == (*s, "forward")]
            if len(found) == 4:
                out[f"layer_{model}_m{m}_tb_per_s"] = (
                    sum(k * n * 0.5625 for k, n in shapes) * 1e-6 / sum(r["device_us"] for r in found)
                )
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/h200/fp4_matmul.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--m", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dx-m", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--ops", nargs="+", default=["forward", "dx"], choices=["forward", "dx", "lora"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"], choices=list(PACKED))
    parser.add_argument("--backend", choices=variants.BACKENDS, help="force one; the table's by default")
    parser.add_argument("--keep", action="store_true", help="keep the file's other rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this long")
    args = parser.parse_args()
    start, before = time.time(), None
    if args.keep and os.path.exists(args.out):
        with open(args.out) as f:
            before = json.load(f)
    print(describe())
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **ceilings(), "rows": []}
    print(f"read {result['read_tb_per_s']:.2f} TB/s, BF16 {result['bf16_tflops']:.0f} TFLOP/s")
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    for k, n in dict.fromkeys(s for model in args.models for s in MODELS[model]):
        if time.time() - start > args.seconds:
            print("out of time before", (k, n))
            break
        result["rows"] += measure_shape(k, n, args)
        whole = result | {"rows": merged(before, result) if before else result["rows"]}
        whole["summary"] = summarize(whole["rows"])
        with open(args.out, "w") as f:
            json.dump(whole, f, indent=1)
    for name, value in whole["summary"].items():
        print(f"{name}: {value:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
