"""Errors of the streaming kernel's sums on adversarial inputs beside cuBLAS's own, for every shape of the table.

    python -m benchmarks.fp4_error OUT.json [--m 8 16 32 64] [--promote 0 32 64] [--seconds 200]

Weights hold all codes and all scale bytes 0x00-0x7E; in the case "positive" all terms of a sum are positive, so that
truncated additions show most. An error is the largest of |y - x W^T| / (|x| |W|^T) over sampled outputs, in float64. A
row is right where `ratio`, the error over cuBLAS's, is at most 1.25. With --promote other values than the table's are
tried too (see StreamConfig.promote).
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

from benchmarks.fp4_matmul import MODELS
from pallas_kernels import layout, repack, stream_kernel, variants

SAMPLES = 64
SMALLEST = 3 * 2.0**-24  # below this an error is that of float32 itself


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def operands(key, k, n, positive):
    """x [64, K] and W [N, K], packed and plain; every value is exact in bfloat16."""
    packed = jax.random.bits(key, (n, k // 2), jnp.uint8) & (0x77 if positive else 0xFF)
    scale = (jnp.arange(n * k // 16) % 0x7F).astype(jnp.uint8).reshape(n, k // 16)
    weight = repack(packed, scale)
    x = jax.random.normal(jax.random.fold_in(key, 1), (64, k))
    x = (jnp.abs(x) if positive else x).astype(jnp.bfloat16)
    return x, weight, layout.dequantize(weight, jnp.float32(1.0), jnp.bfloat16)


@jax.jit
def plain_product(x, dense):
    return jnp.dot(x, dense.T, preferred_element_type=jnp.float32)


def measure(k, n, m, positive, promotes, made, columns):
    x, weight, dense = made
    x, sampled = x[:m], np.asarray(dense[columns], np.float64)
    x64 = np.asarray(x, np.float64)
    true, size = x64 @ sampled.T, np.abs(x64) @ np.abs(sampled).T + 1e-300

    def error(y):
        return float((np.abs(np.asarray(y[:, columns], np.float64) - true) / size).max())

    row = {"k": k, "n": n, "m": m, "case": "positive" if positive else "codes"}
    row["cublas"] = error(plain_product(x, dense))
    table = variants.config_for(m, k, (n,))
    for promote in dict.fromkeys((table.promote, *promotes)):
        config = dataclasses.replace(table, promote=promote)
        try:
            kernel = stream_kernel.build(m, k, (n,), config, wide_out=True)
        except ValueError as refusal:
            row[f"promote_{promote}"] = str(refusal)
            continue
        row[f"promote_{promote}"] = error(kernel(x, weight.data, stream_kernel.number(1.0))[0])
    row |= {"config": str(table), "ratio": row[f"promote_{table.promote}"] / max(row["cublas"], SMALLEST / 1.25)}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--promote", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this long")
    args = parser.parse_args()
    start, rows, rng = time.time(), [], np.random.default_rng()
    for k, n in dict.fromkeys(shape for model in args.models for shape in MODELS[model]):
        if time.time() - start > args.seconds:
            print("out of time before", (k, n))
            break
        columns = np.sort(rng.choice(n, SAMPLES, replace=False))
        for positive in (False, True):
            made = operands(jax.random.key(rng.integers(2**31)), k, n, positive)
            rows += [measure(k, n, m, positive, args.promote, made, columns) for m in args.m]
            for row in rows[-len(args.m) :]:
                print(
                    json.dumps({name: f"{v:.2g}" if isinstance(v, float) else v for name, v in row.items()}), flush=True
                )
        with open(args.out, "w") as f:
            json.dump({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
