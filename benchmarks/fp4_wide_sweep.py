"""Times of the wide kernel's configurations on an NVIDIA GPU, each result checked against float64 on sampled outputs.

    python -m benchmarks.fp4_wide_sweep OUT.json --case forward 3584 37888 1024 --case dx 3584 37888 1024
        [--config 256 2 1 4 2 0 ...] [--table pallas_kernels/wide_table.json] [--seconds 100]
    python -m benchmarks.fp4_wide_sweep OUT.json --case forward 9728 2560 128 --units [--rank 0 32] [--count 9]

A case is an operation, K, N and M; a configuration WideConfig's six numbers (without one, `candidates`). `--units`
multiplies an x in unit order, as a decode step's is, and with a `--rank` that is not 0 adds an adapter whose x A^T the
kernel's spare CTAs make; configurations that leave none are left out. `--table` writes the fastest configuration of
each case that the kernel got right into the table; above 64 rows only, since the entries for fewer say where the
streaming kernel is slower, which is not measured here.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fp4_matmul import CUBLAS, ROTATE_BYTES, device_us, random_weight, rotated
from benchmarks.report import of_device, require_gpu, write, write_text
from pallas_kernels import dequantize_kernel, wide, wide_variants
from pallas_kernels.fragment_order import from_unit_order
from pallas_kernels.wide_plan import Handover, WideConfig, make_plan

SAMPLES = 64


def candidates(op: str, k: int, n: int, m: int, count: int) -> list[WideConfig]:
    """The configurations with the least estimated times."""
    d, r = (k, n) if op == "forward" else (n, k)
    few = next((rows for rows in wide_variants.FEW_ROWS if m <= rows), None)
    m_tiles = (few or 128,) if m <= 128 else (128, 256) if m <= 256 else (128, *wide_variants.M_TILES)
    promote = wide_variants.promotion(k) if few else 0
    plans = wide_variants.fitting(wide_variants.cuts(m_tiles, promote, m <= 256), op, m, d, (r,))
    return [plan.config for plan in plans[:count]]


def expected(op, x, weight, lora, rows, outputs):
    """The product of sampled rows and outputs in float64, and |x| |W|, with the bare weight e2m1 * scale; and what an
    adapter adds, with |h| |B|, as h is rounded."""
    w = dequantize_kernel.dequantize(weight.data)
    w = w[outputs, : weight.k] if op == "forward" else w[: weight.n, outputs].T
    w, x = np.asarray(w, np.float64) * 128, np.asarray(x[rows], np.float64)
    true, size = x @ w.T, np.abs(x) @ np.abs(w).T
    if not lora:
        return true, size, 0.0
    a, b, scaling = (np.asarray(v, np.float64) for v in lora)
    h, b = scaling * (x @ a.T), b[outputs]
    return true + h @ b.T, size, np.abs(h) @ np.abs(b).T


def adapter(key, rank, k, n):
    """A, B and scaling, that change outputs about as much as the weights make them."""
    a, b = jax.random.normal(key, (rank, k), jnp.bfloat16), jax.random.normal(key, (n, rank), jnp.bfloat16)
    return a / k**0.5, b, jnp.ones(1)


def sweep_case(op, k, n, m, units, rank, configs, pool, note):
    scale = jnp.float32(1.0)
    lora, handover = adapter(jax.random.key(k), rank, k, n) if rank else (), Handover(units=units)
    count = max(2, int(np.ceil(ROTATE_BYTES / (k * n * 0.5625)))) if m <= 256 else 2
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), count)
    weights = [random_weight(key, n, k) for key in keys]
    width = k if op == "forward" else n
    xs = [jax.random.normal(key, (m, width), jnp.bfloat16) for key in keys]
    rng = np.random.default_rng()
    outputs = np.sort(rng.choice(n if op == "forward" else k, SAMPLES, replace=False))
    rows = np.sort(rng.choice(m, min(m, SAMPLES), replace=False))
    in_order = from_unit_order(xs[-1]) if units else xs[-1]
    true, size, of_lora = expected(op, in_order, weights[-1], lora, rows, outputs)

    def product(x, weight, scale, config):
        if op == "dx":
            return wide.matmul_dx([x], [weight], [scale], config)
        of = [weight.data], [scale.reshape(1)], (), (n,), (rank,), config, jnp.bfloat16
        return wide.multiply(x, lora, *of, makes_h=bool(rank), handover=handover)[0]

    def compiled(config):
        f = rotated(lambda x, w: product(x, w, scale, config), count)
        return f.lower(xs, weights).compile()

    configs = [config for config in configs if not rank or takes_adapter(k, n, m, rank, config, handover)]
    jobs = [pool.submit(compiled, config) for config in configs]
    results = []
    for config, job in zip(configs, jobs, strict=True):
        f = job.result()
        y = np.asarray(f(xs, weights)[-1][rows][:, outputs], np.float64)
        ok = bool((np.abs(y - true) <= 2**-8 * (np.abs(true) + of_lora) + 1e-5 * size).all())
        us = device_us(f, xs, weights) / count
        results.append({"config": list(dataclasses.astuple(config)), "us": us, "ok": ok})
        note(f"  {op} {k}x{n} M={m} rank {rank} {config}: {us:.1f} us {'' if ok else 'WRONG'}")
    few = max(2, int(np.ceil(ROTATE_BYTES / (2 * k * n)))) if m <= 256 else 2
    plain = [jax.random.normal(keys[i % count], (n, k), jnp.bfloat16) for i in range(few)]
    xs = [xs[i % count] for i in range(few)]
    g = (lambda x, w: jnp.dot(x, w.T)) if op == "forward" else jnp.dot
    bf16 = device_us(rotated(g, few).lower(xs, plain).compile(compiler_options=CUBLAS), xs, plain) / few
    right = [r for r in results if r["ok"]]
    best = min(right, key=lambda r: r["us"], default=None)
    if best:
        note(f"{op} {k}x{n} M={m}: {best['us']:.1f} us {best['config']}, BF16 {bf16:.1f}: {best['us'] / bf16:.3f}")
    case = {"op": op, "k": k, "n": n, "m": m, "units": units, "rank": rank}
    return case | {"bf16_us": bf16, "best": best, "results": results}


def takes_adapter(k, n, m, rank, config, handover) -> bool:
    try:
        make_plan(m, k, (n,), False, config, (rank,), makes_h=True, handover=handover)
    except ValueError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--case", nargs=4, action="append", required=True, metavar=("OP", "K", "N", "M"))
    parser.add_argument("--config", nargs=6, type=int, action="append")
    parser.add_argument("--count", type=int, default=4, help="configurations of a case; 2 from M > 1024")
    parser.add_argument("--units", action="store_true")
    parser.add_argument("--rank", type=int, nargs="+", default=[0])
    parser.add_argument("--table")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this long")
    args = parser.parse_args()
    if args.table and any(int(case[3]) not in wide_variants.RANGES for case in args.case):
        parser.error(f"--table takes M of {wide_variants.RANGES}, found {[int(case[3]) for case in args.case]}")
    if args.table and (args.units or args.rank != [0]):
        parser.error("--table takes neither --units nor --rank: it is of calls without adapters, of plain arrays")
    if (args.units or args.rank != [0]) and any(case[0] != "forward" for case in args.case):
        parser.error("--units and --rank are of forward")
    require_gpu()
    start, found = time.time(), []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (op, *numbers), rank in itertools.product(args.case, args.rank):
            if time.time() - start > args.seconds:
                print("out of time before", op, numbers)
                break
            case = (op, *map(int, numbers))
            configs = (
                [WideConfig(*c) for c in args.config]
                if args.config
                else candidates(*case, args.count if case[3] <= 1024 else 2)
            )
            note = functools.partial(print, flush=True)
            found.append(sweep_case(*case, args.units, rank, configs, pool, note))
            write(args.out, of_device() | {"rows": found})
    if args.table:
        write_entries(args.table, [_entry(case) for case in found if case["best"]])
    return 0


def write_entries(path, entries):
    """Put entries into the table of a file, in place of those for the same operation, K, N and M."""
    with open(path) as f:
        table = {_key(entry): entry for entry in [*json.load(f), *entries]}
    write_text(path, "[\n" + ",\n".join(json.dumps(table[key]) for key in sorted(table)) + "\n]\n")


def _key(entry):
    return entry["op"], entry["k"], entry["n"], entry["m"]


def _entry(case):
    us = {"us": round(case["best"]["us"], 2), "bf16_us": round(case["bf16_us"], 2)}
    return {name: case[name] for name in ("op", "k", "n", "m")} | {"config": case["best"]["config"]} | us


if __name__ == "__main__":
    sys.exit(main())
