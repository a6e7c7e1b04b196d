"""y = x W^T in plain JAX: the oracle of the kernels, and the path on CPUs and GPUs without one."""

import jax
import jax.numpy as jnp

from .layout import KernelWeight, dequantize
from .operands import check_added, check_dy, check_inputs


def fp4_matmul_reference(x_MK, weight: KernelWeight, global_scale, *, lora=None, bias=None) -> jax.Array:
    """y = x W^T + s (x A^T) B^T + bias, all products and sums in float32, rounded once to x's dtype.

    Args:
      x_MK: [M, K], any float dtype.
      weight: KernelWeight of shape [N, K].
      global_scale: float32 scalar (or [1]); w = e2m1 * scale / global_scale.
      lora: None or (a_RK, b_NR, scaling).
      bias: None or [N].

    Returns:
      y_MN in x's dtype.

    Raises:
      ValueError, TypeError: as `fp4_matmul` does.
    """
    check_inputs(x_MK, (weight,))
    check_added((weight,), (lora,), (bias,))

    def dot(a, b):
        return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    x = x_MK.astype(jnp.float32)
    y = dot(x, dequantize(weight, global_scale, jnp.float32).T)
    if lora is not None:
        a_RK, b_NR, scaling = lora
        y = y + scaling * dot(dot(x, a_RK.astype(jnp.float32).T), b_NR.astype(jnp.float32).T)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x_MK.dtype)


def fp4_matmul_dx_reference(dy_MN, weight: KernelWeight, global_scale) -> jax.Array:
    """dx = dy W [M, K], in float32, rounded once to dy's dtype. Raises as `fp4_matmul_dx` does."""
    check_dy(dy_MN, weight)
    w = dequantize(weight, global_scale, jnp.float32)
    dx = jnp.dot(dy_MN.astype(jnp.float32), w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return dx.astype(dy_MN.dtype)
