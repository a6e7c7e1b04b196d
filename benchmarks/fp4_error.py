"""Errors of the kernels' sums on adversarial inputs beside cuBLAS's own, with times, for every shape.

    python -m benchmarks.fp4_error OUT.json [--m 16 32 64] [--promote 0 32 64] [--also TABLE.json] [--seconds 200]
    python -m benchmarks.fp4_error OUT.json --m 128 256 --promote 0 32 64 128 [--table pallas_kernels/wide_table.json]

Weights hold all codes and all scale bytes 0x00-0x7E; in the case "positive" all terms of a sum are positive, so that
truncated additions show most. An error is the largest of |y - x W^T| / (|x| |W|^T) over sampled outputs, in float64. A
row is right where `ratio`, the larger of both cases' errors over cuBLAS's, is at most 1.25. What is chosen for calls
without and with adapters, which are left out, is tried with each value of --promote too (see StreamConfig.promote, with
smaller rings where its totals take their room, and WideConfig.promote), and so are the configurations of --also, a file
in the form of fp4_table.json. Times, also cuBLAS's, are CUPTI's, with float32 outputs. --table names wide_table.json:
where, above 64 rows, what it chooses is not right, the fastest that is takes its place, without a time.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiling import Programs
from benchmarks.fp4_matmul import CUBLAS, FEW_ROWS, device_us
from benchmarks.fp4_rows import MODELS
from benchmarks.fp4_wide_sweep import write_entries
from benchmarks.report import of_device, require_gpu, write
from pallas_kernels import KernelWeight, layout, repack, stream_kernel, variants, wide, wide_plan
from pallas_kernels.operands import number
from pallas_kernels.stream_plan import StreamConfig, make_plan
from pallas_kernels.wide_plan import WideConfig

SHAPES = tuple(dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes))
CASES = ("codes", "positive")
SAMPLES = 64
SMALLEST = 3 * 2.0**-24  # below this an error is that of float32 itself
ROTATE_BYTES = 150e6  # two and a half times the L2
LIMIT = 1.25
SAFE = 1.1  # of a configuration that a table takes: other seeds give other errors


def operands(key, rows, k, n, positive):
    """x [rows, K] and W [N, K], packed and plain; every value is exact in bfloat16."""
    packed = jax.random.bits(key, (n, k // 2), jnp.uint8) & jnp.where(positive, jnp.uint8(0x77), jnp.uint8(0xFF))
    scale = (jnp.arange(n * k // 16) % 0x7F).astype(jnp.uint8).reshape(n, k // 16)
    weight = repack(packed, scale)
    x = jax.random.normal(jax.random.fold_in(key, 1), (rows, k))
    x = jnp.where(positive, jnp.abs(x), x).astype(jnp.bfloat16)
    return x, weight.data, layout.dequantize(weight, jnp.float32(1.0), jnp.bfloat16)


def plain_product(x, dense):
    return jnp.dot(x, dense.T, preferred_element_type=jnp.float32)


@jax.jit
def sampled(y, rows, columns):
    return y[rows][:, columns]


def of_the_table(m: int, k: int, n: int) -> list[StreamConfig | WideConfig]:
    """For calls without adapters, and another for calls with them where there is one."""
    with variants.compiling_for(90):
        return list(dict.fromkeys(variants.choose(m, k, (n,), None, ranks) for ranks in ((), (32,))))


def product(config: StreamConfig | WideConfig, m: int, k: int, n: int):
    """The kernel as a function of x, packed data and a scale [1], with its sums in float32."""
    if isinstance(config, WideConfig):
        return lambda x, data, scale: wide.matmul(x, KernelWeight(data, n, k), scale, config, jnp.float32)
    kernel = stream_kernel.build(m, k, (n,), config, wide_out=True)
    return lambda x, data, scale: kernel(jnp.pad(x, ((0, 0), (0, -k % layout.COLS))), data, scale)[0]


def promoted(
    config: StreamConfig | WideConfig, promote: int, m: int, k: int, n: int
) -> StreamConfig | WideConfig | None:
    """The configuration with another `promote`, and smaller rings if only those leave room; None without room, or
    where a chain is no longer than that already."""
    if isinstance(config, WideConfig):
        chain = wide_plan.make_plan(m, k, (n,), False, config).longest_chain
        return dataclasses.replace(config, promote=promote) if promote < chain else None
    for depth in range(config.depth, 1, -1):
        for x_depth in range(config.x_depth, 1, -1):
            tried = dataclasses.replace(config, promote=promote, depth=depth, x_depth=x_depth)
            try:
                make_plan(m, k, (n,), tried)
            except ValueError:
                continue
            return tried
    return None


def weights_of(m: int, k: int, n: int, bytes_each: float = 0.5625) -> int:
    """Weights that a program multiplies by in turn: the two cases, and others to leave the L2."""
    if m > FEW_ROWS:
        return len(CASES)
    return min(24, max(len(CASES), int(np.ceil(ROTATE_BYTES / (k * n * bytes_each)))))


def start(programs: Programs, k: int, n: int, ms, configs_of) -> None:
    """Compile what `measure` runs for a shape."""
    shape, rows = jax.ShapeDtypeStruct, max(ms)
    programs.start(
        ("operands", rows, k, n),
        lambda key, positive: operands(key, rows, k, n, positive),
        jax.random.key(0), jnp.bool_(True),
    )  # fmt: skip
    dense, one = shape((n, k), jnp.bfloat16), shape((1,), jnp.float32)
    data = shape((-(-n // layout.ROWS), -(-k // layout.COLS), layout.QUAD_WORDS), jnp.uint32)
    for m in ms:
        x, count = shape((m, k), jnp.bfloat16), weights_of(m, k, n, 2)
        programs.start(("plain", m, k, n), _each(plain_product), [x] * count, [dense] * count, options=CUBLAS)
        count = weights_of(m, k, n)
        for config in configs_of(m, k, n):
            programs.start((m, k, n, config), _each(product(config, m, k, n)), [x] * count, [data] * count, one)


def _each(f):
    return lambda xs, weights, *rest: [f(x, w, *rest) for x, w in zip(xs, weights, strict=True)]


def measure(programs: Programs, k: int, n: int, ms, configs_of, rng, timed: bool = True) -> list[dict]:
    """A row for each m and configuration."""
    make, columns = programs.get(("operands", max(ms), k, n)), np.sort(rng.choice(n, min(n, SAMPLES), replace=False))
    keys = [jax.random.key(seed) for seed in rng.integers(2**31, size=weights_of(min(ms), k, n))]
    made = [make(key, jnp.bool_(i < len(CASES) and CASES[i] == "positive")) for i, key in enumerate(keys)]
    xs, data, dense = zip(*made, strict=True)
    weights = [np.asarray(dense[case][columns], np.float64) for case in range(len(CASES))]
    rows = []
    for m in ms:
        tried = np.sort(rng.choice(m, min(m, FEW_ROWS), replace=False))
        some = [np.asarray(xs[case][tried], np.float64) for case in range(len(CASES))]
        true = [x @ w.T for x, w in zip(some, weights, strict=True)]
        size = [np.abs(x) @ np.abs(w).T + 1e-300 for x, w in zip(some, weights, strict=True)]

        def errors(ys, tried=tried, true=true, size=size):
            got = [np.asarray(sampled(ys[case], tried, columns), np.float64) for case in range(len(CASES))]
            return [float((np.abs(y - t) / s).max()) for y, t, s in zip(got, true, size, strict=True)]

        count, few, scale = weights_of(m, k, n, 2), [x[:m] for x in xs], number(1.0)
        plain, plain_operands = programs.get(("plain", m, k, n)), (few[:count], list(dense[:count]))
        theirs = errors(plain(*plain_operands))
        cublas_us = {"cublas_us": device_us(plain, *plain_operands) / count} if timed else {}
        count = weights_of(m, k, n)
        for config in configs_of(m, k, n):
            program, mine_operands = programs.get((m, k, n, config)), (few[:count], list(data[:count]), scale)
            row = {"k": k, "n": n, "m": m, "config": list(dataclasses.astuple(config))}
            row["table"] = config in of_the_table(m, k, n)
            mine = errors(program(*mine_operands))
            for name, ours, cublas in zip(CASES, mine, theirs, strict=True):
                row |= {name: ours, f"{name}_cublas": cublas}
            row["ratio"] = max(a / max(b, SMALLEST / LIMIT) for a, b in zip(mine, theirs, strict=True))
            if timed:
                row |= {"us": device_us(program, *mine_operands) / count} | cublas_us
            rows.append(row)
    return rows


def right_entries(rows: list[dict]) -> list[dict]:
    """Entries of wide_table.json for the shapes whose own errs too much: the fastest that safely does not."""
    entries = []
    for row in rows:
        if row["table"] and row["m"] > variants.STREAM_ROWS and row["ratio"] > LIMIT:
            key = {name: row[name] for name in ("k", "n", "m")}
            right = [r for r in rows if r["ratio"] <= SAFE and all(r[name] == key[name] for name in key)]
            if right:
                best = min(right, key=lambda r: r["us"])
                entries.append({"op": "forward", **key, "config": best["config"], "us": None, "bf16_us": None})
    return entries


def print_row(row):
    short = {name: row[name] for name in (*CASES, *(f"{case}_cublas" for case in CASES))}
    print(
        f"{row['k']:5} x {row['n']:<5} M={row['m']:<4} {'table' if row['table'] else '     '} "
        f"{row['us']:7.2f} us, cuBLAS {row['cublas_us']:7.2f}  "
        f"ratio {row['ratio']:5.2f}{'' if row['ratio'] <= LIMIT else ' WRONG'}  "
        + ", ".join(f"{name} {value:.1e}" for name, value in short.items())
        + f"  {row['config']}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--m", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--promote", type=int, nargs="*", default=[0, 32, 64])
    parser.add_argument("--also", default="", help="further configurations, in the form of fp4_table.json")
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES])
    parser.add_argument("--table", help="wide_table.json, where what errs too much is replaced")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this long")
    args = parser.parse_args()
    require_gpu()
    begin, rows, rng, programs, also = time.time(), [], np.random.default_rng(), Programs(), {}
    if args.also:
        with open(args.also) as f:
            for entry in json.load(f):
                key = (entry["m"], entry["k"], entry["n"])
                also.setdefault(key, []).append(StreamConfig(*entry["config"]))

    @functools.cache
    def configs_of(m, k, n):
        table = of_the_table(m, k, n)
        tried = [promoted(config, promote, m, k, n) for config in table for promote in args.promote]
        return list(dict.fromkeys([*table, *filter(None, tried), *also.get((m, k, n), [])]))

    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    for k, n in shapes:
        start(programs, k, n, args.m, configs_of)
    programs.wait()
    print(f"{len(programs)} programs compiled in {time.time() - begin:.0f} s", flush=True)
    for k, n in shapes:
        if time.time() - begin > args.seconds:
            print("out of time before", (k, n))
            break
        rows += measure(programs, k, n, args.m, configs_of, rng)
        for row in [r for r in rows if (r["k"], r["n"]) == (k, n)]:
            print_row(row)
        write(args.out, of_device() | {"rows": rows})
    if args.table:
        write_entries(args.table, right_entries(rows))
    print(f"{time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
