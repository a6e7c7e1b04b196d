"""NVFP4: w ~= e2m1 code * (E4M3 block scale / float32 global scale), one block scale per 16 inputs.

A weight [N, K] (out, in) is held as compressed-tensors' `nvfp4-pack-quantized` stores it, byte for byte:
  packed        uint8 [N, K/2]           two E2M1 codes a byte, the first of a pair in the low nibble, bit 3 the sign
  scale         float8_e4m3fn [N, K/16]  block scales, already multiplied by the global scale
  global_scale  float32 []               448 * 6 / amax of the tensor (or of the group of tensors that share it)

The quantizer mirrors that program's arithmetic, in which amax / 6 and the global scale are rounded to the weight's own
dtype and the global scale is a reciprocal times 2688. Inputs below 2^-126 count as zero on CPU, where XLA flushes
subnormal numbers: such a negative one may get code 0 for 8, which stand for the same value.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qerl_jax.formats import e2m1
from qerl_jax.formats.e2m1 import decode_e2m1, encode_e2m1, pack_pairs, unpack_pairs
from qerl_jax.formats.rounding import divide, rounded
from qerl_jax.formats.row_blocks import in_row_blocks
from qerl_jax.trees import Tree

BLOCK = 16
NEEDS = f"inputs in multiples of {BLOCK}"
E4M3_MAX = 448.0
_ZERO_SCALE = 0.125  # what compressed-tensors writes for a block whose scale rounds to zero


def fits(N: int, K: int) -> bool:
    """Whether a weight [N, K] can be held."""
    return K % BLOCK == 0


class NVFP4Weight(Tree):
    """A packed weight [N, K]; see the module docstring for the arrays.

    `scale_multiplies` is set for weights of modelopt, whose second scale is the reciprocal: w ~= code * (block scale *
    global scale). Both are kept as they were stored, since the rounded reciprocal of one gives other last bits.
    """

    packed: jax.Array
    scale: jax.Array
    global_scale: jax.Array
    scale_multiplies: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def divisor(self) -> jax.Array:
        """The global scale as one that divides, rounded to float32: what the GPU kernels take."""
        return 1 / self.global_scale if self.scale_multiplies else self.global_scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]


def global_scale(amax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The float32 global scale [] for a largest magnitude `amax` of a weight in `dtype`; 1 for an all-zero weight."""
    top = jnp.maximum(amax.astype(jnp.float32), jnp.float32(jnp.finfo(dtype).tiny))
    scale = rounded(rounded(divide(jnp.float32(1), top), dtype) * jnp.float32(e2m1.LARGEST * E4M3_MAX), dtype)
    return jnp.where(jnp.isfinite(scale), scale, 1.0)


def quantize_nvfp4(w_NK: jax.Array, shared_global_scale: jax.Array | None = None) -> NVFP4Weight:
    """Round-to-nearest quantization, equal byte for byte to compressed-tensors 0.20.

    Args:
      w_NK: float32 or bfloat16 [N, K], K a multiple of 16.
      shared_global_scale: float32 [], where several tensors share one (q/k/v, gate/up); None computes it from `w_NK`.

    Raises:
      ValueError: w_NK is not a matrix, K is not a multiple of 16, or the dtype is another.
    """
    if w_NK.ndim != 2 or not fits(*w_NK.shape) or w_NK.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"NVFP4 takes float32 or bfloat16 [N, K] with {NEEDS}; got {w_NK.dtype}{w_NK.shape}")
    return _quantize(w_NK, shared_global_scale)


@jax.jit
def _quantize(w_NK: jax.Array, shared_global_scale: jax.Array | None) -> NVFP4Weight:
    if shared_global_scale is None:
        shared_global_scale = global_scale(jnp.abs(w_NK).max(), w_NK.dtype)
    whole = jnp.asarray(shared_global_scale, jnp.float32).reshape(())

    def rows(w_nK: jax.Array) -> tuple[jax.Array, jax.Array]:
        n, K = w_nK.shape
        blocks = w_nK.astype(jnp.float32).reshape(n, K // BLOCK, BLOCK)
        amax = jnp.abs(blocks).max(-1)
        block_scale = rounded(divide(amax, e2m1.LARGEST), w_nK.dtype) * whole
        scale = jax.lax.optimization_barrier(jnp.minimum(block_scale, E4M3_MAX).astype(jnp.float8_e4m3fn))
        scale = jnp.where(scale.astype(jnp.float32) == 0, jnp.float32(_ZERO_SCALE).astype(jnp.float8_e4m3fn), scale)
        step = divide(scale.astype(jnp.float32), whole)
        return pack_pairs(encode_e2m1(divide(blocks, step[..., None])).reshape(n, K)), scale

    packed, scale = in_row_blocks(rows, w_NK)
    return NVFP4Weight(packed, scale, whole)


def dequantize_nvfp4(weight: NVFP4Weight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[N, K]: code * (block scale / global scale) in float32, then rounded to `dtype`."""
    N, K = weight.shape
    values = decode_e2m1(unpack_pairs(weight.packed)).reshape(N, K // BLOCK, BLOCK)
    scale = weight.scale.astype(jnp.float32)
    step = scale * weight.global_scale if weight.scale_multiplies else divide(scale, weight.global_scale)
    return (values * step[..., None]).reshape(N, K).astype(dtype)
