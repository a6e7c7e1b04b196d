"""The kernel that makes a matmul's inputs (pallas_kernels/inputs_kernel.py): its time for what a layer's matmuls read.

    python -m benchmarks.fp4_inputs OUT.json [--models 7B 14B 32B] [--m 64 128 256] [--rank 32]

us by CUPTI, of 24 calls that each have adapters of their own. `plain_us` is XLA's for the reference in the same run,
all of its kernels; between kernels it rests about a microsecond each time, which is in neither.
"""

import argparse
import functools
import json
import sys

import jax
import jax.numpy as jnp

from benchmarks.fp4_block import EPS, SHAPES, SIZES
from benchmarks.fp4_matmul import device_us
from benchmarks.report import of_device, require_gpu, write
from pallas_kernels import inputs_kernel
from pallas_kernels.inputs_plan import GIVEN, NORMED, make_inputs_plan

CALLS = 24


def measure(source, m, k, ranks, ordered):
    def numbers(seed, *shape, dtype=jnp.bfloat16):
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    parts = {
        GIVEN: [numbers(0, m, k)],
        NORMED: [numbers(0, m, k, dtype=jnp.float32), numbers(1, m, k, dtype=jnp.float32), jnp.ones(k)],
    }[source]
    adapters = [[numbers(10 * i + j, rank, k) for j, rank in enumerate(ranks)] for i in range(CALLS)]
    kernel, one = inputs_kernel.build(m, k, ranks, source, ordered, EPS), [jnp.ones(1)] * (2 * len(ranks))
    plain = functools.partial(inputs_kernel.reference, make_inputs_plan(m, k, ranks, source, ordered), EPS)
    ours = jax.jit(lambda parts, adapters: [kernel(*parts, *a, *one) for a in adapters])
    theirs = jax.jit(lambda parts, adapters: [plain(*_own(parts, a), *a, *one) for a in adapters])
    return {
        "source": source, "m": m, "k": k, "ranks": ranks, "ordered": ordered,
        "us": device_us(ours, parts, adapters) / CALLS, "plain_us": device_us(theirs, parts, adapters) / CALLS,
    }  # fmt: skip


def _own(parts, adapters):
    """The parts as if they were this call's own: else XLA computes x once for all."""
    return jax.lax.optimization_barrier((parts, adapters))[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--models", nargs="+", default=SIZES, choices=list(SHAPES))
    parser.add_argument("--m", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rank", type=int, default=32)
    args = parser.parse_args()
    require_gpu()
    rows = []
    for name in args.models:
        hidden, inner, heads, _ = SHAPES[name]
        for m in args.m:
            ordered = m if m <= 64 else 0  # as o and q, k, v of 7B do not want it
            for source, k, count, order in (
                (GIVEN, heads, 1, 0), (NORMED, hidden, 2, ordered), (GIVEN, inner, 1, ordered), (NORMED, hidden, 3, 0)
            ):  # fmt: skip
                row = measure(source, m, k, (args.rank,) * count, order)
                rows.append({"model": name, **row})
                print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
                write(args.out, of_device() | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
