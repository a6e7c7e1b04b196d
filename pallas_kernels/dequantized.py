"""Dequantize, then a plain dot: the path for many rows, where a 16-bit weight's traffic is small beside the product.

The weight is written once in its dtype as e2m1 * scale, which that holds exactly (at most 6 significant bits), and the
global scale is applied to the float32 sums: so the product has cuBLAS's own error and no rounding of the weight.
"""

import jax
import jax.numpy as jnp

from . import dequantize_kernel
from .layout import DECODINGS, EPILOGUE_FACTOR, KernelWeight


def exact(weight: KernelWeight) -> jax.Array:
    """e2m1 * scale in the weight's dtype [N, K]: W * global_scale, exactly."""
    t, q, _ = weight.data.shape
    words = weight.data[..., :512].reshape(t, q, 4, 8, 4, 4)  # T Q unit g t j
    parts = []
    for pair in range(4):
        halves = []
        for half in range(2):
            code = jnp.zeros(words.shape, jnp.uint32)
            for bit in range(4):
                place = DECODINGS[weight.dtype].source_bit(pair, half, bit)
                code |= ((words >> place) & 1) << bit
            halves.append(code)
        parts.append(jnp.stack(halves, -1))
    codes = jnp.stack([jnp.stack(parts[0::2], -2), jnp.stack(parts[1::2], -2)], 2)  # T Q half unit g t j pair-half col
    magnitude, exponent = codes & 1, (codes >> 1) & 3
    value = jnp.where(exponent > 0, (2 + magnitude) << jnp.maximum(exponent, 1) - 1, magnitude).astype(jnp.float32)
    value = jnp.where(codes >> 3 == 1, -value, value) * 0.5
    shifts = jnp.arange(4, dtype=jnp.uint32) * 8
    scale = ((weight.data[..., 512:, None] >> shifts) & 0xFF).astype(jnp.uint8)
    scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32)
    scale = scale.reshape(t, q, 2, 8, 4, 2, 2).transpose(0, 1, 6, 2, 5, 3, 4).reshape(t, q, 2, 4, 8, 4)
    w = (value * scale[..., None, None, None]).astype(weight.dtype)  # T Q row-half unit g t j pair-half col
    w = w.transpose(0, 2, 4, 1, 3, 5, 6, 7, 8).reshape(16 * t, 256 * q)
    return w[: weight.n, : weight.k]


def _weight(weight: KernelWeight, by: str):
    """W [N, K] in 16 bits and what its products must be divided by, over the global scale."""
    if by == "dequantize":
        return exact(weight), 1.0
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
