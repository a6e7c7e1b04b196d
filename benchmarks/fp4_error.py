"""Errors of the streaming kernel's sums on adversarial inputs beside cuBLAS's own, with times, for every shape.

    python -m benchmarks.fp4_error OUT.json [--m 16 32 64] [--promote 0 32 64] [--also TABLE.json] [--seconds 200]

Weights hold all codes and all scale bytes 0x00-0x7E; in the case "positive" all terms of a sum are positive, so that
truncated additions show most. An error is the largest of |y - x W^T| / (|x| |W|^T) over sampled outputs, in float64. A
row is right where `ratio`, the larger of both cases' errors over cuBLAS's, is at most 1.25. The table's configuration
is tried with each value of --promote too (see StreamConfig.promote; with smaller rings where its totals take their
room), and so are those of --also, a file in the form of fp4_table.json. Times are CUPTI's, with float32 outputs.
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
from benchmarks.fp4_matmul import CUBLAS, device_us, random_weight
from benchmarks.fp4_rows import MODELS
from pallas_kernels import layout, repack, stream_kernel, variants
from pallas_kernels.stream_plan import StreamConfig, make_plan

SHAPES = tuple(dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes))
CASES = ("codes", "positive")
SAMPLES = 64
SMALLEST = 3 * 2.0**-24  # below this an error is that of float32 itself
ROTATE_BYTES = 150e6  # two and a half times the L2
ROWS = 64


@functools.partial(jax.jit, static_argnums=(1, 2))
def operands(key, k, n, positive):
    """x [64, K] and W [N, K], packed and plain; every value is exact in bfloat16."""
    packed = jax.random.bits(key, (n, k // 2), jnp.uint8) & jnp.where(positive, jnp.uint8(0x77), jnp.uint8(0xFF))
    scale = (jnp.arange(n * k // 16) % 0x7F).astype(jnp.uint8).reshape(n, k // 16)
    weight = repack(packed, scale)
    x = jax.random.normal(jax.random.fold_in(key, 1), (ROWS, k))
    x = jnp.where(positive, jnp.abs(x), x).astype(jnp.bfloat16)
    return x, weight.data, layout.dequantize(weight, jnp.float32(1.0), jnp.bfloat16)


def plain_product(x, dense):
    return jnp.dot(x, dense.T, preferred_element_type=jnp.float32)


def promoted(config: StreamConfig, promote: int, m: int, k: int, n: int) -> StreamConfig | None:
    """The configuration with another `promote`, and smaller rings if only those leave room; None without room."""
    if promote and not config.wgmma:
        promote = StreamConfig.promote  # with mma.sync it is every quad
    for depth in range(config.depth, 1, -1):
        for x_depth in range(config.x_depth, 1, -1):
            tried = dataclasses.replace(config, promote=promote, depth=depth, x_depth=x_depth)
            try:
                make_plan(m, k, (n,), tried)
            except ValueError:
                continue
            return tried
    return None


def weights_of(k: int, n: int) -> int:
    """Weights that a program multiplies by in turn: the two cases, and others to leave the L2."""
    return min(24, max(2, int(np.ceil(ROTATE_BYTES / (k * n * 0.5625)))))


def start(programs: Programs, k: int, n: int, ms, configs_of) -> None:
    """Compile what `measure` runs for a shape."""
    shape, count = jax.ShapeDtypeStruct, weights_of(k, n)
    programs.start(
        ("operands", k, n),
        lambda key, positive: operands(key, k, n, positive),
        jax.random.key(0), jnp.bool_(True),
    )  # fmt: skip
    dense, one = shape((n, k), jnp.bfloat16), shape((1,), jnp.float32)
    data = [shape((-(-n // layout.ROWS), -(-k // layout.COLS), layout.QUAD_WORDS), jnp.uint32)] * count
    for m in ms:
        programs.start(("plain", m, k, n), plain_product, shape((m, k), jnp.bfloat16), dense, options=CUBLAS)
        for config in configs_of(m, k, n):
            kernel = stream_kernel.build(m, k, (n,), config, wide_out=True)

            def run(xs, weights, scale, kernel=kernel):
                return [kernel(x, w, scale)[0] for x, w in zip(xs, weights, strict=True)]

            programs.start((m, k, n, config), run, [shape((m, k), jnp.bfloat16)] * count, data, one)


def measure(programs: Programs, k: int, n: int, ms, configs_of, rng, timed: bool = True) -> list[dict]:
    """A row for each m and configuration."""
    make, columns = programs.get(("operands", k, n)), np.sort(rng.choice(n, SAMPLES, replace=False))
    made = [make(jax.random.key(rng.integers(2**31)), jnp.bool_(case == "positive")) for case in CASES]
    others = range(weights_of(k, n) - len(CASES))
    xs = [x for x, _, _ in made] + [made[0][0] * (2.0 + i) for i in others]
    data = [packed for _, packed, _ in made] + [random_weight(jax.random.key(i), n, k).data for i in others]
    products = []
    for x, _, dense in made:
        w, x64 = np.asarray(dense[columns], np.float64), np.asarray(x, np.float64)
        products.append((x64 @ w.T, np.abs(x64) @ np.abs(w).T + 1e-300))

    def error(case, y):
        true, size = products[case]
        return float((np.abs(np.asarray(y, np.float64)[:, columns] - true[: len(y)]) / size[: len(y)]).max())

    rows = []
    for m in ms:
        plain = programs.get(("plain", m, k, n))
        theirs = [error(i, plain(made[i][0][:m], made[i][2])) for i in range(len(CASES))]
        few = [x[:m] for x in xs]
        for place, config in enumerate(configs_of(m, k, n)):
            program, scale = programs.get((m, k, n, config)), stream_kernel.number(1.0)
            row = {"k": k, "n": n, "m": m, "config": list(dataclasses.astuple(config)), "table": place == 0}
            ys = program(few, data, scale)
            mine = [error(i, ys[i]) for i in range(len(CASES))]
            for name, ours, cublas in zip(CASES, mine, theirs, strict=True):
                row |= {name: ours, f"{name}_cublas": cublas}
            row["ratio"] = max(a / max(b, SMALLEST / 1.25) for a, b in zip(mine, theirs, strict=True))
            if timed:
                row["us"] = device_us(program, few, data, scale) / len(data)
            rows.append(row)
    return rows


def print_row(row):
    short = {name: row[name] for name in (*CASES, *(f"{case}_cublas" for case in CASES))}
    print(
        f"{row['k']:5} x {row['n']:<5} M={row['m']:<2} {'table' if row['table'] else '     '} "
        f"{row['us']:7.2f} us  ratio {row['ratio']:5.2f}{'' if row['ratio'] <= 1.25 else ' WRONG'}  "
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
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this long")
    args = parser.parse_args()
    begin, rows, rng, programs, also = time.time(), [], np.random.default_rng(), Programs(), {}
    if args.also:
        with open(args.also) as f:
            for entry in json.load(f):
                key = (entry["m"], entry["k"], entry["n"])
                also.setdefault(key, []).append(StreamConfig(*entry["config"]))

    @functools.cache
    def configs_of(m, k, n):
        table = variants.config_for(m, k, (n,))
        tried = [promoted(table, promote, m, k, n) for promote in args.promote]
        return list(dict.fromkeys([table, *filter(None, tried), *also.get((m, k, n), [])]))

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
        with open(args.out, "w") as f:
            json.dump({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, f, indent=1)
    print(f"{time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
