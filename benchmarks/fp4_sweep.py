"""Measures candidate configurations of the decode kernel; the table in pallas_kernels/variants.py comes from it.

python -m benchmarks.fp4_sweep OUT.json [--m 1 8 16] [--shapes 3584x37888 ...] [--limit 12]
"""

import argparse
import itertools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import layout, stream_kernel, variants
from pallas_kernels.stream_plan import RESIDENT, StreamConfig, make_plan

SHAPES = [
    (3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584), (5120, 7168), (5120, 5120), (5120, 27648), (13824, 5120),
    (5120, 55296), (27648, 5120),
]  # fmt: skip
ROTATE_BYTES = 200e6


def candidates(m, k, n):
    """Configurations that fit: the best by a rough estimate for each cluster size, in turn."""
    found = {}
    tiles_all, quads, m_tiles = -(-n // 16), -(-k // 256), next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    for cluster, tiles, warps_k in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4)):
        per_cta = -(-tiles_all // RESIDENT[cluster])
        warps_n = -(-per_cta // tiles)
        warps = warps_n * warps_k
        registers = tiles * m_tiles * 4
        if not 4 <= warps <= 31 or registers > (64 if warps <= 15 else 48 if warps <= 19 else 32):
            continue
        plans = []
        for depth in range(2, 13):
            try:
                plans.append(make_plan(m, k, (n,), StreamConfig(cluster, warps_n, warps_k, tiles, depth, 3)))
            except ValueError:
                continue
        enough = [q for q in plans if q.bytes_ahead >= 48_000]
        for plan in {enough[0], enough[len(enough) // 2]} if enough else set(plans[-1:]):
            busy = tiles_all / (per_cta * RESIDENT[cluster]) * quads / (-(-quads // cluster) * cluster)
            smsp = warps / (4 * -(-warps // 4))
            score = busy * smsp**0.3 * min(1, plan.bytes_ahead / 48_000) ** 0.7 * min(1, warps / 12) ** 0.4
            score *= 1 if tiles > 1 or m <= 8 else 0.9
            found.setdefault(cluster, []).append((score, plan.config))
    ranked = [[c for _, c in sorted(f, key=lambda f: -f[0])] for f in found.values()]
    return [c for turn in itertools.zip_longest(*ranked) for c in turn if c is not None]


def wgmma_candidates(m, k, n):
    """The same with wgmma; the registers must hold the sums and two steps of codes twice. Sums are promoted as often as
    in the table's entry, so that a faster one errs no more."""
    entry = variants.TABLE.get((k, n, m, False))
    promote = entry.promote if entry and entry.wgmma else StreamConfig.promote
    found = []
    tiles_all, quads, m_tiles = -(-n // 16), -(-k // 256), next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    for cluster, tiles, warps_k, x_depth in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (2, 3)):
        per_cta = -(-tiles_all // RESIDENT[cluster])
        warps_n = -(-per_cta // (4 * tiles)) * 4
        for depth in range(8, 1, -1):
            config = StreamConfig(cluster, warps_n, warps_k, tiles, depth, x_depth, True, promote=promote)
            try:
                plan = make_plan(m, k, (n,), config)
            except ValueError:
                continue
            if plan.bytes_ahead > 90_000 and depth > 2:
                continue
            room = min(1, 65536 / (plan.warpgroups * 128) / (tiles * m_tiles * 4 + 16 * tiles + 36))
            busy = tiles_all / (warps_n * tiles * RESIDENT[cluster]) * quads / (-(-quads // cluster) * cluster)
            score = busy * room * min(1, plan.bytes_ahead / 40_000) ** 0.5 * min(1, config.warps / 12) ** 0.3
            found.append((score, config))
            break
    return [c for _, c in sorted(found, key=lambda f: -f[0])]


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
            scale = stream_kernel.number(2688.0)
            configs = (wgmma_candidates if args.wgmma else candidates)(m, k, n)
            for config in configs[: args.limit]:
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
