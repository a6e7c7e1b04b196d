"""The one table of packed formats: whatever depends on the format of a weight is looked up here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qerl_jax.formats import mxfp4, nf4, nvfp4
from qerl_jax.formats.kernel_nvfp4 import KernelNVFP4, canonical

PackedWeight = nvfp4.NVFP4Weight | KernelNVFP4 | mxfp4.MXFP4Weight | nf4.NF4Weight | nf4.NF4DoubleQuantWeight


class PackedFormat(NamedTuple):
    """How the weights of a packed format are made and read.

    Attributes:
      weight: their class.
      fits: whether a weight [N, K] can be held.
      needs: what `fits` asks for, in words.
      quantize: (w [N, K] in float32 or bfloat16, what `shared_scale` returned or None) -> weight, under jit.
      dequantize: (weight, dtype) -> [N, K], under jit.
      shared_scale: (largest magnitude of the tensors that read one input, their dtype) -> the scale that they share;
        None where each tensor stands for itself.
    """

    weight: type[PackedWeight]
    fits: Callable[[int, int], bool]
    needs: str
    quantize: Callable[[jax.Array, Any], PackedWeight]
    dequantize: Callable[[Any, DTypeLike], jax.Array]
    shared_scale: Callable[[jax.Array, jnp.dtype], jax.Array] | None = None


PACKED: dict[str, PackedFormat] = {
    "nvfp4": PackedFormat(
        nvfp4.NVFP4Weight,
        nvfp4.fits,
        f"NVFP4 needs {nvfp4.NEEDS}",
        nvfp4.quantize_nvfp4,
        nvfp4.dequantize_nvfp4,
        nvfp4.global_scale,
    ),
    "mxfp4": PackedFormat(
        mxfp4.MXFP4Weight,
        mxfp4.fits,
        f"MXFP4 needs {mxfp4.NEEDS}",
        lambda w_NK, shared: mxfp4.quantize_mxfp4(w_NK),
        mxfp4.dequantize_mxfp4,
    ),
    "nf4": PackedFormat(
        nf4.NF4Weight,
        nf4.fits,
        f"NF4 needs {nf4.NEEDS}",
        lambda w_NK, shared: nf4.quantize_nf4(w_NK),
        nf4.dequantize_nf4,
    ),
    "nf4_double_quant": PackedFormat(
        nf4.NF4DoubleQuantWeight,
        nf4.fits,
        f"NF4 needs {nf4.NEEDS}",
        lambda w_NK, shared: nf4.quantize_nf4_double_quant(w_NK),
        nf4.dequantize_nf4_double_quant,
    ),
}

_BY_CLASS: dict[type, str] = {made.weight: name for name, made in PACKED.items()}


def format_of(weight: Any) -> str:
    """The name of the format that a weight is in: a key of `PACKED`, or `bf16` for a plain array."""
    return "nvfp4" if isinstance(weight, KernelNVFP4) else _BY_CLASS.get(type(weight), "bf16")


def dequantize(weight: Any, dtype: DTypeLike) -> jax.Array:
    """The matrix [N, K] that a weight of any format stands for, in `dtype`. Under jit; see `dequantized`."""
    if isinstance(weight, KernelNVFP4):
        weight = canonical(weight)
    name = format_of(weight)
    return weight.astype(dtype) if name == "bf16" else PACKED[name].dequantize(weight, dtype)


# `dequantize` for callers outside of a trace, where each of its operations would write its whole result: 5 to 8 times
# slower, in 7 times the memory of the matrix.
dequantized = jax.jit(dequantize, static_argnames="dtype")
