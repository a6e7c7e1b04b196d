"""Measures candidate configurations of the streaming kernel; pallas_kernels/fp4_table.json comes from it.

    python -m benchmarks.fp4_sweep OUT.json [--m 1 8 16] [--shapes 3584x37888 ...] [--limit 12] [--rank 32] [--wgmma]

With --rank the call has an adapter of this rank for each of its matrices (q, k, v; gate, up), as a decode step has, and
what is found are entries for calls with adapters. Programs are compiled in threads, before anything is measured. Rows
of OUT that are not measured again stay.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiling import Programs
from benchmarks.fp4_matmul import ROTATE_BYTES, device_us, make_operand, rotated
from benchmarks.fp4_rows import MODELS, SPLITS
from benchmarks.report import of_device, require_gpu, write_text
from pallas_kernels import layout, stream_kernel, variants
from pallas_kernels.operands import number
from pallas_kernels.stream_plan import RESIDENT, StreamConfig
from pallas_kernels.stream_variants import by_rule

SHAPES = list(dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes))
GLOBAL_SCALE, SCALING = 2688.0, 0.5
# Of the result; `config` in StreamConfig's order, of which older rows have the first seven.
COLUMNS = ["k", "n", "m", "rank", "config", "device_us", "max_relative_error"]


def candidates(m, k, n, ranks, wgmma):
    """Configurations that fit: the table's, then the best by the kernel's own rule for each cluster size, in turn, and
    all of them with rings deeper by one, and less deep."""
    of_cluster = {}
    for config in by_rule(m, k, n, ranks, wgmma=wgmma):
        of_cluster.setdefault(config.cluster, []).append(config)
    found = [c for turn in itertools.zip_longest(*of_cluster.values()) for c in turn if c is not None]
    entries = [variants.TABLE.get((k, sum(n), m, with_lora)) for with_lora in (True, False)[not any(ranks) :]]
    entries = [entry for entry in entries if entry is not None and entry.wgmma == wgmma]
    if entries:  # promoted as often as the table's entry; what a cut errs then, fp4_error says
        found = entries + [dataclasses.replace(config, promote=entries[0].promote) for config in found]
    rings = ({}, {"depth": -1}, {"depth": 1}, {"x_depth": -1}, {"x_depth": 1})
    found = [
        dataclasses.replace(c, **{name: getattr(c, name) + more for name, more in by.items()})
        for by, c in itertools.product(rings, found)
    ]
    return [c for c in dict.fromkeys(found) if variants.takes_lora(m, k, n, c, ranks)]


def operand_of(k, n, rank) -> Callable[[jax.Array], Any]:
    """A key -> the packed weights of a call [N_i, K], and their adapters (A, B), none with rank 0."""
    if rank:
        return make_operand(("lora", rank), k, n)
    one = make_operand("nvfp4", k, n)
    return lambda key: ([one(key)], [])


def product(m, k, n, rank, config, wide_out=False) -> Callable[..., list[jax.Array]]:
    """x [M, K] and one of `operand_of` -> y_i [M, N_i]."""
    kernel = stream_kernel.build(m, k, n, config, wide_out=wide_out, ranks=(rank,) * len(n) if rank else ())

    def run(x, operand):
        weights, pairs = operand
        scales = [number(GLOBAL_SCALE)] * len(n)
        adapters = stream_kernel.lora_operands([(*pair, SCALING) for pair in pairs], k)
        x = jnp.pad(x, ((0, 0), (0, -k % layout.COLS)))
        return kernel(x, *(weight.data for weight in weights), *scales, *adapters)

    return run


def relative_error(ys, x, operand):
    """max |y - x W^T - s h B^T| / (|x| |W|^T + s |h| |B|^T) over some columns, in float64; h = x A^T, which the kernel
    rounds to BF16."""
    weights, pairs = operand
    x, worst = np.asarray(x, np.float64), 0.0
    for i, (y, weight) in enumerate(zip(ys, weights, strict=True)):
        columns = np.random.default_rng().integers(0, weight.n, 96 // len(weights))
        sub = layout.KernelWeight(weight.data[columns // 16], 16 * len(columns), weight.k)
        w = np.asarray(layout.dequantize(sub, jnp.float32(GLOBAL_SCALE), jnp.float32), np.float64)
        w = w.reshape(len(columns), 16, -1)[np.arange(len(columns)), columns % 16]
        true, size = x @ w.T, np.abs(x) @ np.abs(w).T
        if pairs:
            a, b = (np.asarray(matrix, np.float64) for matrix in pairs[i])
            h = SCALING * (x @ a.T)
            true, size = true + h @ b[columns].T, size + np.abs(h) @ np.abs(b[columns]).T
        worst = max(worst, float((np.abs(np.asarray(y, np.float64)[:, columns] - true) / size).max()))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES])
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--rank", type=int, default=0, help="of adapters, a multiple of 16; 0: none")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--resident", nargs="*", default=[], help="clusters resident at once, as SIZE=COUNT")
    parser.add_argument("--wgmma", action="store_true")
    parser.add_argument("--table", default="", help="a table to merge what is faster and right into")
    args = parser.parse_args()
    if args.rank % 16:
        parser.error(f"--rank is {args.rank}; allowed: multiples of 16, to which calls pad others")
    if args.table and not {*args.m} <= {*variants.RANGES}:
        parser.error(f"--table takes M of {variants.RANGES}, found {args.m}")
    require_gpu()
    for entry in args.resident:
        cluster, count = map(int, entry.split("="))
        RESIDENT[cluster] = count
    start, programs, rows, cases = time.time(), Programs(), [], []
    for shape, m in itertools.product(args.shapes, args.m):
        k, total = map(int, shape.split("x"))
        n = SPLITS.get((k, total), (total,)) if args.rank else (total,)
        ranks = (args.rank,) * len(n) if args.rank else ()
        count = max(2, math.ceil(ROTATE_BYTES / (k * total * 0.5625)))
        given = jax.eval_shape(operand_of(k, total, args.rank), jax.random.key(0))
        x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
        for config in candidates(m, k, n, ranks, args.wgmma)[: args.limit]:
            row = {"k": k, "n": total, "m": m, "rank": args.rank, "config": [*vars(config).values()]}
            cases.append((k, n, m, count, config, row))
            checked, timed = (product(m, k, n, args.rank, config, wide_out) for wide_out in (True, False))
            programs.start((k, n, m, config, "checked"), checked, x, given)
            programs.start((k, n, m, config, "timed"), rotated(timed, count), [x] * count, [given] * count)
    programs.wait()
    print(f"{len(programs)} programs after {time.time() - start:.0f} s", flush=True)
    for (k, n, m, count), group in itertools.groupby(cases, key=lambda case: case[:4]):
        make = jax.jit(operand_of(k, sum(n), args.rank))
        operands = [make(key) for key in jax.random.split(jax.random.key(sum(n)), count)]
        xs = list(jax.random.normal(jax.random.key(m), (count, m, k), jnp.bfloat16))
        done = []
        for *_, config, row in group:
            if time.time() - start > args.seconds:
                print("out of time at", k, n, m, config)
                break
            measure(row, xs, operands, programs, (k, n, m, config))
            rows.append(row)
            if "us" in row:
                done.append(row)
        report(k, n, m, done)
        write(rows, args.out)
    if args.table:
        merge(rows, args.table)
    return 0


def write(rows, path):
    """One line a configuration. What the file has of other shapes, M and ranks stays, if it is of the same device and
    JAX."""
    of = of_device() | {"columns": COLUMNS}
    lines = [
        [r["k"], r["n"], r["m"], r["rank"], r["config"], round(r["us"], 2), float(f"{r['error']:.2g}")]
        for r in rows
        if "us" in r
    ]
    if os.path.exists(path):
        with open(path) as f:
            before = json.load(f)
        measured = {(*line[:4], line[4][6]) for line in lines}
        if all(before[name] == of[name] for name in of):
            lines = [line for line in before["rows"] if (*line[:4], line[4][6]) not in measured] + lines
    write_text(path, json.dumps(of)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]}\n")


def measure(row, xs, operands, programs, key):
    """Puts error, device time and rate into the row, or what refused the configuration."""
    try:
        ys = programs.get((*key, "checked"))(xs[0], operands[0])
        row["error"] = relative_error(ys, xs[0], operands[0])
        row["us"] = device_us(programs.get((*key, "timed")), xs, operands) / len(operands)
        row["tb_per_s"] = row["k"] * row["n"] * 0.5625 / row["us"] * 1e-6
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        row["refused"] = str(error)[:100]
        print("REFUSED", json.dumps(row), flush=True)
    if "error" in row and not row["error"] <= allowed(row):
        print("WRONG", json.dumps(row), flush=True)


def allowed(row) -> float:
    """The largest relative error: of float32 sums, or of x A^T rounded to BF16."""
    return 2.0**-8 if row["rank"] else 1e-6


def report(k, n, m, done):
    if not done:
        return
    best, *others = sorted(done, key=lambda r: r["us"])
    print("BEST", k, n, m, f"{best['tb_per_s']:.2f} TB/s, error {max(r['error'] for r in done):.1e}", end=": ")
    for r in [best, *others[:7], *others[7:][-1:]]:
        print(f"{r['us']:.2f} {r['config']}", end="; ")
    print(len(done), flush=True)


def merge(rows, path):
    """What is right and more than 1% faster than the table's entry in the same run takes its place; entries for calls
    with adapters lie behind the others, which such calls have where they have none of their own."""
    with open(path) as f:
        table = {(e.get("lora", False), e["k"], e["n"], e["m"]): e for e in json.load(f)}
    times = {(key_of(r), StreamConfig(*r["config"])): r["us"] for r in rows if "us" in r}
    right = sorted((r for r in rows if "us" in r and r["error"] < allowed(r)), key=lambda r: -r["us"])
    for key, r in sorted({key_of(r): r for r in right}.items(), key=lambda item: item[0]):  # the last, so the fastest
        own = table.get(key)
        used = own or table.get((False, *key[1:]))
        measured_before = own.get("us", math.inf) if own else math.inf
        if used is None or r["us"] < 0.99 * times.get((key, StreamConfig(*used["config"])), measured_before):
            entry = {name: r[name] for name in ("k", "n", "m")} | ({"lora": True} if key[0] else {})
            table[key] = entry | {"config": r["config"], "us": round(r["us"], 2)}
    write_text(path, json.dumps([table[key] for key in sorted(table)]).replace("}, {", "},\n {") + "\n")


def key_of(row) -> tuple[bool, int, int, int]:
    return row["rank"] > 0, row["k"], row["n"], row["m"]


if __name__ == "__main__":
    sys.exit(main())
