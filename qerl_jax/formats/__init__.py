"""Weight formats: how a linear layer's frozen weight [N, K] is held. A plain array is the `bf16` format."""

import jax
import jax.numpy as jnp

from qerl_jax.formats.nvfp4 import NVFP4Weight, dequantize_nvfp4, global_scale, quantize_nvfp4

__all__ = ["FORMATS", "NVFP4Weight", "Weight", "dequantize", "dequantize_nvfp4", "global_scale", "quantize_nvfp4"]

Weight = jax.Array | NVFP4Weight
FORMATS = ("nvfp4", "bf16")


def dequantize(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The matrix [N, K] that a weight of any format stands for, in `dtype`."""
    return dequantize_nvfp4(weight, dtype) if isinstance(weight, NVFP4Weight) else weight.astype(dtype)
