"""x W^T and dy W through the wide kernel: arguments in the shapes that it takes."""

import jax
import jax.numpy as jnp

from . import wide_kernel
from .layout import KernelWeight
from .wide_plan import WideConfig


def _data(weight: KernelWeight) -> jax.Array:
    return weight.data.reshape(weight.data.shape[0], -1)


def _scale(global_scale) -> jax.Array:
    return jnp.asarray(global_scale, jnp.float32).reshape(1)


def matmul_all(x_MK, weights, global_scales, biases, config: WideConfig, out_dtype=jnp.bfloat16) -> list[jax.Array]:
    """x W_i^T + bias_i [M, N_i] in bfloat16 or float32; `biases` is empty or has one [N_i] for each weight."""
    m, k = x_MK.shape
    wide_out = out_dtype != jnp.bfloat16
    kernel = wide_kernel.build(m, k, tuple(w.n for w in weights), config, False, bool(biases), wide_out)
    bias = [b.astype(jnp.float32) for b in biases]
    ys = kernel(x_MK.astype(jnp.bfloat16), *map(_data, weights), *map(_scale, global_scales), *bias)
    return [y.astype(out_dtype) for y in ys]


def matmul(x_MK, weight: KernelWeight, global_scale, config: WideConfig, out_dtype=jnp.bfloat16) -> jax.Array:
    """x W^T [M, N]."""
    return matmul_all(x_MK, [weight], [global_scale], (), config, out_dtype)[0]


def matmul_dx(dy_MN, weight: KernelWeight, global_scale, config: WideConfig, out_dtype=jnp.bfloat16) -> jax.Array:
    """dy W [M, K]."""
    m, n = dy_MN.shape
    wide_out = out_dtype != jnp.bfloat16
    kernel = wide_kernel.build(m, n, (weight.k,), config, True, False, wide_out)
    y = kernel(dy_MN.astype(jnp.bfloat16), _data(weight), _scale(global_scale))[0]
    return y.astype(out_dtype)
