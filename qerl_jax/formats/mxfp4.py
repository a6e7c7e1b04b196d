"""MXFP4: w ~= e2m1 code * 2^(scale - 127), one scale per 32 inputs.

A weight [N, K] (out, in) is held as compressed-tensors' `mxfp4-pack-quantized` stores it, byte for byte:
  packed  uint8 [N, K/2]   two E2M1 codes a byte, the first of a pair in the low nibble, bit 3 the sign
  scale   uint8 [N, K/32]  E8M0: the exponent of a power of two, biased by 127 (255 is NaN and never written)

The exponent is floor(log2 amax) - 2, and one more where amax's mantissa is 1.75 or above: there the largest element
would round up beyond 6. (The rule of the OCP specification, without that one, saturates them; torchao calls ours EVEN.)
An all-zero block has scale 0. Inputs below 2^-126 count as zero on CPU, where XLA flushes subnormal numbers.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qerl_jax.formats.e2m1 import decode_e2m1, encode_e2m1, pack_pairs, unpack_pairs
from qerl_jax.formats.row_blocks import in_row_blocks
from qerl_jax.trees import Tree

BLOCK = 32
NEEDS = f"inputs in multiples of {BLOCK}"
_BIAS = 127
_QUARTER_MANTISSA = 1 << 21  # added to a float32's bits it carries into the exponent from mantissa 1.75 on


def fits(N: int, K: int) -> bool:
    """Whether a weight [N, K] can be held."""
    return K % BLOCK == 0


class MXFP4Weight(Tree):
    """A packed weight [N, K]; see the module docstring for the arrays."""

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]


def _times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2^exponent for |exponent| <= 127, in two factors: 2^-127 itself is subnormal, zero on CPU."""
    first = exponent >> 1

    def power(e: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((e + _BIAS) << 23, jnp.float32)

    return x * power(first) * power(exponent - first)


def quantize_mxfp4(w_NK: jax.Array) -> MXFP4Weight:
    """Round-to-nearest quantization, equal byte for byte to compressed-tensors 0.20.

    Args:
      w_NK: float32 or bfloat16 [N, K], K a multiple of 32.

    Raises:
      ValueError: w_NK is not a matrix, K is not a multiple of 32, or the dtype is another.
    """
    if w_NK.ndim != 2 or not fits(*w_NK.shape) or w_NK.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"MXFP4 takes float32 or bfloat16 [N, K] with {NEEDS}; got {w_NK.dtype}{w_NK.shape}")
    return _quantize(w_NK)


@jax.jit
def _quantize(w_NK: jax.Array) -> MXFP4Weight:
    def rows(w_nK: jax.Array) -> tuple[jax.Array, jax.Array]:
        n, K = w_nK.shape
        blocks = w_nK.astype(jnp.float32).reshape(n, K // BLOCK, BLOCK)
        bits = jax.lax.bitcast_convert_type(jnp.abs(blocks).max(-1), jnp.int32)
        scale = jnp.maximum(((bits + _QUARTER_MANTISSA) >> 23) - 2, 0)
        codes = encode_e2m1(_times_power_of_two(blocks, (_BIAS - scale)[..., None]))
        return pack_pairs(codes.reshape(n, K)), scale.astype(jnp.uint8)

    packed, scale = in_row_blocks(rows, w_NK)
    return MXFP4Weight(packed, scale)


def dequantize_mxfp4(weight: MXFP4Weight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[N, K]: code * 2^(scale - 127) in float32, then rounded to `dtype`."""
    N, K = weight.shape
    values = decode_e2m1(unpack_pairs(weight.packed)).reshape(N, K // BLOCK, BLOCK)
    exponent = weight.scale.astype(jnp.int32) - _BIAS
    return _times_power_of_two(values, exponent[..., None]).reshape(N, K).astype(dtype)
