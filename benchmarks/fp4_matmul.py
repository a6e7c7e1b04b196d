"""Device times of fp4_matmul beside cuBLAS BF16 in the same run, weights rotated past the L2.

    python -m benchmarks.fp4_matmul [--out benchmarks/results/h200/fp4_matmul.json] [--models 7B 14B 32B] [--m 1 8 ...]

Times are CUPTI kernel times, every kernel of a call included, the median of several passes over the rotated weights.
tb_per_s counts packed bytes (0.5625 a weight).
"""

import argparse
import functools
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import KernelWeight, describe, fp4_matmul, fp4_matmul_dx, layout, variants

MODELS = {
    "7B": [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)],
    "14B": [(5120, 7168), (5120, 5120), (5120, 27648), (13824, 5120)],
    "32B": [(5120, 7168), (5120, 5120), (5120, 55296), (27648, 5120)],
}
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


def measure_shape(k, n, ms, dx_ms, ops):
    scale = jnp.float32(2688.0)
    size = k * n * 0.5625
    count = max(2, int(np.ceil(ROTATE_BYTES / size)))
    keys = jax.random.split(jax.random.key(k + n), count)
    packed = [random_weight(key, n, k) for key in keys]
    plain_count = max(2, int(np.ceil(ROTATE_BYTES / (2 * k * n))))
    plain = [jax.random.normal(key, (n, k), jnp.bfloat16) for key in keys[:plain_count]]
    rows = []
    for m in ms:
        for op in ops:
            if op == "dx" and m not in dx_ms:
                continue
            width = k if op == "forward" else n
            few = count if m <= 64 else 2
            xs = [jax.random.normal(jax.random.key(i), (m, width), jnp.bfloat16) for i in range(max(few, plain_count))]
            f = fp4_matmul if op == "forward" else fp4_matmul_dx
            g = (lambda x, w: jnp.dot(x, w.T)) if op == "forward" else jnp.dot
            us = device_us(rotated(lambda x, w, f=f: f(x, w, scale), few), xs, packed[:few]) / few
            bf16 = device_us(rotated(g, plain_count), xs, plain) / plain_count
            variant = variants.choose(m, k, (n,)) if op == "forward" else variants.choose_dx(m, k, n)
            marlin = MARLIN.get((k, n), {}).get(m) if op == "forward" else None
            rows.append({
                "format": "nvfp4", "op": op, "m": m, "k": k, "n": n, "device_us": us, "bf16_us": bf16,
                "tb_per_s": size / us * 1e-6, "variant": str(variant), "marlin_us": marlin,
            })  # fmt: skip
            print_row(rows[-1])
    return rows


def print_row(r):
    peer = f"{r['marlin_us'] / r['device_us']:5.2f}x" if r.get("marlin_us") else "     -"
    print(
        f"{r['format']:6} {r['op']:8} {r['k']:6}x{r['n']:<6} M={r['m']:<5} {r['device_us']:9.2f} us "
        f"{r['tb_per_s']:5.2f} TB/s  BF16 {r['bf16_us']:9.2f} us ({r['bf16_us'] / r['device_us']:5.2f}x)  "
        f"Marlin {peer}",
        flush=True,
    )


def summarize(rows):
    """Geometric means over Marlin, and the four matmuls of a layer in sequence."""
    out = {}
    for m in sorted({r["m"] for r in rows}):
        ratios = [r["marlin_us"] / r["device_us"] for r in rows if r["m"] == m and r.get("marlin_us")]
        if ratios:
            out[f"speedup_over_marlin_m{m}"] = float(np.exp(np.mean(np.log(ratios))))
    for model, shapes in MODELS.items():
        for m in sorted({r["m"] for r in rows if r["m"] <= 64}):
            found = [r for s in shapes for r in rows if (r["k"], r["n"], r["m"], r["op"]) == (*s, m, "forward")]
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
    parser.add_argument("--ops", nargs="+", default=["forward", "dx"])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this long")
    args = parser.parse_args()
    start = time.time()
    print(describe())
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **ceilings(), "rows": []}
    print(f"read {result['read_tb_per_s']:.2f} TB/s, BF16 {result['bf16_tflops']:.0f} TFLOP/s")
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    for k, n in dict.fromkeys(s for model in args.models for s in MODELS[model]):
        if time.time() - start > args.seconds:
            print("out of time before", (k, n))
            break
        result["rows"] += measure_shape(k, n, args.m, args.dx_m, args.ops)
        result["summary"] = summarize(result["rows"])
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)
    for name, value in result["summary"].items():
        print(f"{name}: {value:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
