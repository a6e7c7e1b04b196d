"""The programs of GPU tests, compiled in threads before the tests need them: most of their time was compilation.

`@ahead(start)` on a test says what it will run: `start(programs, **parameters)` with the parameters of each of its
cases. The fixture `programs` calls it for all selected tests of a file at once; a test then takes its programs by their
keys, as `start` has given them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import KernelWeight, fp4_matmul, layout, stream_kernel, variants, wide
from pallas_kernels.stream_plan import COUNTERS

shape = jax.ShapeDtypeStruct


def ahead(start):
    def mark(test):
        test.start = start
        return test

    return mark


def packed(n: int, k: int) -> jax.ShapeDtypeStruct:
    return shape((-(-n // layout.ROWS), -(-k // layout.COLS), layout.QUAD_WORDS), jnp.uint32)


def start_stream(programs, m, k, ns, config=None, ranks=()):
    """The streaming kernel with its sums in float32, before the last rounding; returns the key."""
    config = config or variants.config_for(m, k, ns, ranks)
    key, present = (
        ("stream", m, k, ns, config, ranks),
        [(n, r) for n, r in zip(ns, ranks, strict=True) if r] if ranks else [],
    )
    width = -(-k // layout.COLS) * layout.COLS
    shapes = [shape((m, width), jnp.bfloat16), *(packed(n, k) for n in ns), *[shape((1,), jnp.float32)] * len(ns)]
    shapes += [shape((r, width), jnp.bfloat16) for _, r in present] + [shape((n, r), jnp.bfloat16) for n, r in present]
    if present:
        shapes += [shape((1,), jnp.float32)] * len(present) + [shape((COUNTERS + 1,), jnp.uint32)]
    programs.start(key, stream_kernel.build(m, k, ns, config, wide_out=True, ranks=ranks), *shapes)
    return key


def start_call(programs, m, k, n):
    """`fp4_matmul` of x, packed data and a global scale."""
    key = ("call", m, k, n)
    shapes = shape((m, k), jnp.bfloat16), packed(n, k), shape((), jnp.float32)
    programs.start(key, lambda x, data, scale: fp4_matmul(x, KernelWeight(data, n, k), scale), *shapes)
    return key


def start_wide(programs, dx, m, k, n, config, dtype=jnp.float32):
    """The wide kernel, of x or dy, packed data and a global scale."""
    key = ("wide", dx, m, k, n, config, dtype)

    def f(x, weight, scale, *of):
        return wide.matmul_dx([x], [weight], [scale], *of) if dx else wide.matmul(x, weight, scale, *of)

    shapes = shape((m, n if dx else k), jnp.bfloat16), packed(n, k), shape((), jnp.float32)
    programs.start(key, lambda x, data, scale: f(x, KernelWeight(data, n, k), scale, config, dtype), *shapes)
    return key
