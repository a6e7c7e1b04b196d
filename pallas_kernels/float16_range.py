"""Two operands that may be beyond float16's range: kept as a 16th, they end at a million instead of 65504.

These are silu(gate) * up, and a norm's x where the division by the root mean square follows the products (wide_norm.py,
block_kernel.py). Networks that were trained in bfloat16 have outliers in both. The other operands are far from 65504:
norms' outputs, queries, keys and values, attention's averages; x A^T times a small weight's global scale is nearer. A
power of two changes no rounding from 2^-10 on; what is smaller is rounded by 2^-21 at most.

Nothing but the operands themselves has another size. Who divides by the root mean square multiplies by 16 too, and so
does down, at the end of its product. In the backward pass only A's and B's gradients are products with what is scaled.
"""

import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from . import ptx as p

_SCALES = {"float16": 2.0**-4}


def range_scale(dtype) -> float:
    """What such operands are multiplied by before they are rounded to `dtype`; 1 but for float16."""
    return _SCALES.get(jnp.dtype(dtype).name, 1.0)


def reading_scaled(dtype, global_scale, lora):
    """A weight's global scale, a divisor, and its (A, B, scaling) or None, as they are to be where x comes times
    `range_scale(dtype)`, for any kernel. In a decode step this would be a launch of its own."""
    scale = range_scale(dtype)
    if scale == 1:
        return global_scale, lora
    return global_scale * scale, None if lora is None else (*lora[:2], lora[2] / scale)


def into_range(values):
    """float32 values of a kernel times the scale of what it multiplies in."""
    return _times(range_scale(p.half_dtype()), values)


def out_of_range(values):
    """Over it."""
    return _times(of_scaled(True), values)


def of_scaled(scaled: bool) -> float:
    """What a kernel's products with x have to be multiplied by if x is `scaled`."""
    return 1 / range_scale(p.half_dtype()) if scaled else 1.0


def _times(factor: float, values):
    return values if factor == 1 else [arith.mulf(v, p.f32(factor)) for v in values]
