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

from pallas_kernels import decode_kernel, layout, stream_kernel, stream_plan
from pallas_kernels.decode_plan import DecodeConfig, make_plan
from pallas_kernels.stream_plan import StreamConfig

SHAPES = [
    (3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584), (5120, 7168), (5120, 5120), (5120, 27648), (13824, 5120),
    (5120, 55296), (27648, 5120),
]  # fmt: skip
ROTATE_BYTES = 200e6


def candidates(m, k, n):
    """Configurations that fit, best first by a rough estimate."""
    found = []
    splits = [(1, 16), (1, 12), (2, 8), (4, 4), (8, 2), (1, 8), (2, 4), (4, 2), (2, 6), (3, 4), (6, 2), (4, 3)]
    for cluster, (warps_n, warps_k), tiles in itertools.product((1, 2, 4, 8), splits, (1, 2, 4)):
        if tiles * max(1, m // 8) > 16:
            continue
        units_warp = -(-(-(-k // 64) // cluster) // warps_k)
        for parts in (1, 2, 3):
            slot_units = -(-units_warp // parts)
            if parts > 1 and (slot_units == -(-units_warp // (parts - 1)) or slot_units * tiles < 2):
                continue
            for depth in range(12, 1, -1):
                c = DecodeConfig(cluster, warps_n, warps_k, tiles, slot_units, depth)
                try:
                    plan = make_plan(m, k, (n,), c)
                except ValueError:
                    continue
                ring = c.warps * c.depth * plan.slot
                if ring > 140_000 and depth > 2:
                    continue
                ahead = c.warps * (c.depth - 1) * plan.slot
                balance = plan.groups / (-(-plan.groups // plan.clusters) * (132 // cluster))
                even = plan.units / (cluster * warps_k * units_warp)
                group_us = plan.rows * k / cluster * 0.5625 / 30e3  # at 30 GB/s a multiprocessor
                score = balance**0.7 * even**0.5 * min(1, ahead / 50_000) ** 0.6 * group_us / (group_us + 0.25)
                score *= (1 - 0.04 * cluster) * (c.warps / 16) ** 0.15
                found.append((score, c))
                break
    return [c for _, c in sorted(found, key=lambda f: -f[0])]


def stream_candidates(m, k, n):
    """The same for the streaming kernel."""
    found = []
    tiles_all, units, m_tiles = -(-n // 16), -(-k // 64), next(t for t in (1, 2, 4, 8) if 8 * t >= m)
    for cluster, tiles, warps_k, slot_units in itertools.product((1, 2, 4, 8), (1, 2, 3, 4), range(1, 13), (1, 2, 4, 7)):
        per_cta = -(-tiles_all // stream_plan.RESIDENT[cluster])
        warps_n = -(-per_cta // tiles)
        if not 6 <= warps_n * warps_k <= 27 or tiles * m_tiles * 4 > (96 if warps_n * warps_k < 12 else 64):
            continue
        for depth in range(12, 1, -1):
            c = StreamConfig(cluster, warps_n, warps_k, tiles, slot_units, depth)
            try:
                plan = stream_plan.make_plan(m, k, (n,), c)
            except ValueError:
                continue
            ring = c.warps * c.depth * plan.slot
            if ring > 150_000 and depth > 3:
                continue
            ahead = min(ring, c.warps * depth * plan.slot)
            fill = per_cta / (warps_n * tiles)
            busy = tiles_all / (per_cta * stream_plan.RESIDENT[cluster])
            smsp = c.warps / (4 * -(-c.warps // 4))
            score = fill**0.5 * busy * smsp**0.3 * min(1, ahead / 90_000) ** 0.5 * (0.9 if plan.ragged else 1)
            score *= min(1, c.warps / 16) ** 0.3 * (1 - 0.03 * cluster) * (0.95 if slot_units == 1 else 1)
            score *= min(1, tiles * (1 if m <= 8 else 0.75)) ** 0.3
            found.append((score, c))
            break
    return [c for _, c in sorted(found, key=lambda f: -f[0])]


def make_weights(key, k, n):
    """Random packed weights, enough copies to rotate past the L2; scale bytes stay below NaN."""
    t, u = -(-n // 16), -(-k // 64)
    count = max(2, int(np.ceil(ROTATE_BYTES / (t * u * layout.UNIT_BYTES))))
    word = jnp.arange(layout.UNIT_WORDS) < 128

    @jax.jit
    def one(key):
        bits = jax.random.bits(key, (t, u, layout.UNIT_WORDS), jnp.uint32)
        return jnp.where(word, bits, (bits & 0x3F3F3F3F) + 0x10101010)

    return [one(k) for k in jax.random.split(key, count)]


def device_us(f, *args, name, repeats=2):
    """Mean and median device time of the kernels whose name contains `name`."""
    measured = profiler.measure(f, aggregate=False, iterations=repeats)
    _, timings = measured(*args)
    times = [t * 1e3 for run in timings for kernel, t in run if name in kernel]
    if not times:
        raise RuntimeError(f"no kernel named {name} among {sorted({kernel for run in timings for kernel, _ in run})}")
    return float(np.mean(times)), float(np.median(times))


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
    parser.add_argument("--configs", default="", help="a Python list of argument tuples instead of the candidates")
    parser.add_argument("--kernel", default="stream")
    args = parser.parse_args()
    kernels, propose, make = {
        "stream": (stream_kernel, stream_candidates, StreamConfig),
        "decode": (decode_kernel, candidates, DecodeConfig),
    }[args.kernel]
    start, rows = time.time(), []
    for shape in args.shapes:
        k, n = map(int, shape.split("x"))
        weights = make_weights(jax.random.key(n), k, n)
        size = k * n * 0.5625
        columns = np.random.default_rng().integers(0, n, 96)
        for m in args.m:
            x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
            factor = decode_kernel.epilogue_factor(2688.0)
            configs = [make(*c) for c in eval(args.configs)] if args.configs else propose(m, k, n)
            for config in configs[: args.limit]:
                if time.time() - start > args.seconds:
                    break
                row = {"k": k, "n": n, "m": m, "config": [*vars(config).values()]}
                try:
                    wide = kernels.build(m, k, (n,), config, wide_out=True)
                    (y,) = wide(x, weights[0], factor)
                    weight = layout.KernelWeight(weights[0], n, k)
                    row["error"] = relative_error(y, x, weight, jnp.float32(2688.0), columns)
                    kernel = kernels.build(m, k, (n,), config)
                    run = jax.jit(lambda x, f, ws, kernel=kernel: [kernel(x, w, f)[0] for w in ws])
                    row["mean_us"], row["us"] = device_us(run, x, factor, weights, name="nvfp4_decode")
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
                print("BEST", k, n, m, f"{best['tb_per_s']:.2f} TB/s, error {max(r['error'] for r in done):.1e}", end=": ")
                for r in sorted(done, key=lambda r: r["us"])[:5] + sorted(done, key=lambda r: r["us"])[-1:]:
                    print(f"{r['us']:.2f} {r['config']}", end="; ")
                print(len(done), flush=True)
            with open(args.out, "w") as f:
                json.dump(rows, f)
    return 0


if __name__ == "__main__":
    sys.exit(main())
