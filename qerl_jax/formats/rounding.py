"""Arithmetic that is rounded once and correctly, on every backend.

Neither division nor rounding can be left to XLA. On a CPU it multiplies by the reciprocal of a broadcast divisor. On a
GPU its float32 division is approximate, one ulp off for up to a third of all values; it joins a product and a sum into
one operation, and drops a conversion to bfloat16 and back.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def divide(a: jax.Array, b: jax.Array | float) -> jax.Array:
    """a / b, correctly rounded: the float64 quotient of two float32 numbers is never near enough to the middle between
    two float32 numbers to round to the wrong one."""
    with jax.enable_x64(True):
        quotient = a.astype(jnp.float64) / jnp.broadcast_to(b, a.shape).astype(jnp.float64)
        return rounded(quotient, a.dtype).astype(a.dtype)


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` with the precision of `dtype`, in its own dtype. A pair of conversions (there and back) will not do: XLA
    drops it on a GPU, which moved 32 of the quickstart policy's 400 thousand code bytes."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)
