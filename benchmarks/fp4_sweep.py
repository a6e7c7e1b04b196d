"""Measures candidate configurations of the decode kernel; the table in pallas_kernels/variants.py comes from it.

python -m benchmarks.fp4_sweep OUT.json [--m 1 8 16] [--shapes 3584x37888 ...] [--limit 12]
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import layout, stream_kernel, variants
from pallas_kernels.operands import number
from pallas_kernels.stream_plan import RESIDENT
from pallas_kernels.stream_variants import by_rule

SHAPES = [
    (3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584), (5120, 7168), (5120, 5120), (5120, 27648), (13824, 5120),
    (5120, 55296), (27648, 5120),
]  # fmt: skip
ROTATE_BYTES = 200e6


def candidates(m, k, n, wgmma):
    """Configurations that fit: the best by the kernel's own rule for each cluster size, in turn."""
    of_cluster = {}
    for config in by_rule(m, k, (n,), wgmma=wgmma):
        of_cluster.setdefault(config.cluster, []).append(config)
    found = [c for turn in itertools.zip_longest(*of_cluster.values()) for c in turn if c is not None]
    entry = variants.TABLE.get((k, n, m, False))
    if not wgmma or entry is None or not entry.wgmma:
        return found
    # promoted as often as the table's entry, so that a faster one errs no more
    return list(dict.fromkeys(dataclasses.replace(config, promote=entry.promote) for config in found))


def make_weights(key, k, n):
    """Random packed weights, enough copies to rotate past the L2; scale bytes stay below NaN."""
    t, q = -(-n // 16), -(-k // 256)
    count = max(2, int(np.ceil(ROTATE_BYTES / (t * q * layout.QUAD_BYTES))))
    word = jnp.arange(layout.QUAD_WORDS) < 512

    @jax.jit
    def one(key):
        bits = jax.random.bits(key, (t, q, layout.QUAD_WORDS), jnp.uint32)
        return jnp.where(word, bits, (bits & 0x3F3F3F3F) + 0x10101010)

    return [one(k) for k in jax.random.split(key, count)]


def device_us(f, *args, repeats=3):
    """Median over passes of all kernels' device time in a call."""
    _, times = profiler.measure(f, iterations=repeats)(*args)
    return float(np.median(times)) * 1e3


def relative_error(y, x, weight, global_scale, columns):
    """max |y - x W^T| / (|x| |W|^T) over some columns, in float64."""
    sub = layout.KernelWeight(weight.data[columns // 16], 16 * len(columns), weight.k)
    w = np.asarray(layout.dequantize(sub, global_scale, jnp.float32), np.float64)
    w = w.reshape(len(columns), 16, -1)[np.arange(len(columns)), columns % 16]
    x = np.asarray(x, np.float64)
    true, size = x @ w.T, np.abs(x) @ np.abs(w).T
    return float((np.abs(np.asarray(y, np.float64)[:, columns] - true) / size).max())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES])
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--resident", nargs="*", default=[], help="clusters resident at once, as SIZE=COUNT")
    parser.add_argument("--wgmma", action="store_true")
    parser.add_argument("--table", default="", help="a table to merge what is faster and right into")
    args = parser.parse_args()
    for entry in args.resident:
        cluster, count = map(int, entry.split("="))
        RESIDENT[cluster] = count
    start, rows = time.time(), []
    for shape in args.shapes:
        k, n = map(int, shape.split("x"))
        weights = make_weights(jax.random.key(n), k, n)
        size = k * n * 0.5625
        columns = np.random.default_rng().integers(0, n, 96)
        for m in args.m:
            xs = list(jax.random.normal(jax.random.key(m), (len(weights), m, k), jnp.bfloat16))
            scale = number(2688.0)
            for config in candidates(m, k, n, args.wgmma)[: args.limit]:
                if time.time() - start > args.seconds:
                    break
                row = {"k": k, "n": n, "m": m, "config": [*vars(config).values()]}
                try:
                    wide = stream_kernel.build(m, k, (n,), config, wide_out=True)
                    (y,) = wide(xs[0], weights[0], scale)
                    weight = layout.KernelWeight(weights[0], n, k)
                    row["error"] = relative_error(y, xs[0], weight, jnp.float32(2688.0), columns)
                    kernel = stream_kernel.build(m, k, (n,), config)
                    run = jax.jit(
                        lambda xs, s, ws, kernel=kernel: [kernel(x, w, s)[0] for x, w in zip(xs, ws, strict=True)]
                    )
                    row["us"] = device_us(run, xs, scale, weights) / len(weights)
                    row["tb_per_s"] = size / row["us"] * 1e-6
                except (ValueError, jax.errors.JaxRuntimeError) as error:
                    row["refused"] = str(error)[:100]
                    print("REFUSED", json.dumps(row), flush=True)
                rows.append(row)
                if row.get("error", 0) > 1e-6:
                    print("WRONG", json.dumps(row), flush=True)
            done = [r for r in rows if (r["k"], r["n"], r["m"]) == (k, n, m) and "us" in r]
            if done:
                best = min(done, key=lambda r: r["us"])
                print(
                    "BEST", k, n, m, f"{best['tb_per_s']:.2f} TB/s, error {max(r['error'] for r in done):.1e}", end=": "
                )
                for r in sorted(done, key=lambda r: r["us"])[:5] + sorted(done, key=lambda r: r["us"])[-1:]:
                    print(f"{r['us']:.2f} {r['config']}", end="; ")
                print(len(done), flush=True)
            with open(args.out, "w") as f:
                json.dump(rows, f)
    if args.table:
        merge(rows, args.table)
    return 0


def merge(rows, path):
    with open(path) as f:
        table = json.load(f)
    with_lora = [e for e in table if e.get("lora")]
    best = {(e["k"], e["n"], e["m"]): e for e in table if not e.get("lora")}
    for r in rows:
        key = (r["k"], r["n"], r["m"])
        old = best.get(key, {}).get("us") or float("inf")
        if "us" in r and r["error"] < 5e-6 and r["us"] < old:
            best[key] = {"k": r["k"], "n": r["n"], "m": r["m"], "config": r["config"], "us": round(r["us"], 2)}
    with open(path, "w") as f:
        f.write(json.dumps([best[key] for key in sorted(best)] + with_lora).replace("}, {", "},\n {") + "\n")


if __name__ == "__main__":
    sys.exit(main())
