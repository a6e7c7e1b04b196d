"""Weight formats: how a linear layer's frozen weight [N, K] is held. A plain array is the `bf16` format."""

import jax
import jax.numpy as jnp

from qerl_jax.formats.kernel_nvfp4 import KernelNVFP4, canonical, repacked
from qerl_jax.formats.nvfp4 import NVFP4Weight, dequantize_nvfp4, global_scale, quantize_nvfp4

__all__ = [
    "FORMATS",
    "KernelNVFP4",
    "NVFP4Weight",
    "Weight",
    "canonical",
    "dequantize",
    "dequantize_nvfp4",
    "global_scale",
    "quantize_nvfp4",
    "repacked",
]

Weight = jax.Array | NVFP4Weight | KernelNVFP4
FORMATS = ("nvfp4", "bf16")


def dequantize(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """The matrix [N, K] that a weight of any format stands for, in `dtype`."""
    if isinstance(weight, KernelNVFP4):
        weight = canonical(weight)
    return dequantize_nvfp4(weight, dtype) if isinstance(weight, NVFP4Weight) else weight.astype(dtype)
