"""Random packed weights, and outputs that begin as NaN: what the tests of the matmul kernels on a GPU are made of."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layout, repack


def random_weight(rng, n, k, scale_low=0, scale_high=0x7F):
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = rng.integers(scale_low, scale_high, (n, k // 16), dtype=np.uint8)
    return repack(jnp.asarray(packed), jnp.asarray(scale))


def dequantized(weight, gs):
    return np.asarray(layout.dequantize(weight, gs, jnp.float32), np.float64)


def poison(m, width):
    """NaN in memory that is freed at once, so that the output may get it."""
    jnp.full((m, width), jnp.nan, jnp.float32).block_until_ready()
