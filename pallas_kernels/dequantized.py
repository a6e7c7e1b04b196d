"""Dequantize, then a plain dot: the path for many rows, where a 16-bit weight's traffic is small beside the product.

The weight is written once in its dtype as e2m1 * scale, which that holds exactly (at most 6 significant bits), and the
global scale is applied to the float32 sums: so the product has cuBLAS's own error and no rounding of the weight.
"""

import jax.numpy as jnp

from . import dequantize_kernel
from .layout import EPILOGUE_FACTOR, KernelWeight, undivided


def _weight(weight: KernelWeight, by: str):
    """W [N, K] in 16 bits and what its products must be divided by, over the global scale."""
    if by == "dequantize":
        return undivided(weight), 1.0
    if by == "dequantize-triton":
        from . import triton_kernel  # needs triton, which only this path does

        w = triton_kernel.dequantize(weight)
    else:
        w = dequantize_kernel.dequantize(weight.data, weight.dtype)
    return w[: weight.n, : weight.k], 1.0 / EPILOGUE_FACTOR


def matmul(x_MK, weight: KernelWeight, global_scale, by: str = "dequantize"):
    """x W^T in float32 [M, N]; `by` is one of `variants.DEQUANTIZING`: XLA, or the Mosaic GPU or the Triton kernel."""
    w, divisor = _weight(weight, by)
    y = jnp.dot(x_MK.astype(w.dtype), w.T, preferred_element_type=jnp.float32)
    return y * (1.0 / (jnp.asarray(global_scale, jnp.float32).reshape(()) * divisor))


def matmul_dx(dy_MN, weight: KernelWeight, global_scale, by: str = "dequantize"):
    """dy W in float32 [M, K]."""
    w, divisor = _weight(weight, by)
    dx = jnp.dot(dy_MN.astype(w.dtype), w, preferred_element_type=jnp.float32)
    return dx * (1.0 / (jnp.asarray(global_scale, jnp.float32).reshape(()) * divisor))
