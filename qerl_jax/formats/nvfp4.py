"""NVFP4: w ~= e2m1 code * (E4M3 block scale / float32 global scale), one block scale per 16 inputs.

A weight [N, K] (out, in) is held as compressed-tensors' `nvfp4-pack-quantized` stores it, byte for byte:
  packed        uint8 [N, K/2]           two E2M1 codes a byte, the first of a pair in the low nibble, bit 3 the sign
  scale         float8_e4m3fn [N, K/16]  block scales, already multiplied by the global scale
  global_scale  float32 []               448 * 6 / amax of the tensor (or of the group of tensors that share it)

The quantizer mirrors that program's arithmetic, in which amax / 6 and the global scale are rounded to the weight's own
dtype and the global scale is a reciprocal times 2688. Neither division nor rounding can be left to XLA as they stand:
on CPU it multiplies by the reciprocal of a broadcast divisor, on GPU its float32 division is approximate, one ulp off
for up to a third of all values, and a conversion to bfloat16 and back vanishes; `_divide` and `_rounded` see to that.
"""

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.formats.row_blocks import in_row_blocks

BLOCK = 16
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_ZERO_SCALE = 0.125  # what compressed-tensors writes for a block whose scale rounds to zero
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbouring levels; an exact tie goes to the level with an even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class NVFP4Weight(flax.struct.PyTreeNode):
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


def _divide(a: jax.Array, b: jax.Array | float) -> jax.Array:
    """a / b, correctly rounded: the float64 quotient of two float32 numbers is never near enough to the middle between
    two float32 numbers to round to the wrong one."""
    with jax.enable_x64(True):
        quotient = a.astype(jnp.float64) / jnp.broadcast_to(b, a.shape).astype(jnp.float64)
        return _rounded(quotient, a.dtype).astype(a.dtype)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` with the precision of `dtype`, in its own dtype. A pair of conversions (there and back) will not do: XLA
    drops it on a GPU, which moved 32 of the quickstart policy's 400 thousand code bytes."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def global_scale(amax: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The float32 global scale [] for a largest magnitude `amax` of a weight in `dtype`; 1 for an all-zero weight."""
    top = jnp.maximum(amax.astype(jnp.float32), jnp.float32(jnp.finfo(dtype).tiny))
    scale = _rounded(_rounded(_divide(jnp.float32(1), top), dtype) * jnp.float32(_E2M1_MAX * _E4M3_MAX), dtype)
    return jnp.where(jnp.isfinite(scale), scale, 1.0)


def encode_e2m1(x: jax.Array) -> jax.Array:
    """uint8 codes 0..15 of the nearest E2M1 value, ties to even code; |x| > 6 saturates; the sign of an underflowing
    negative is kept (code 8), that of an exact -0.0 is not."""
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for lower, middle in enumerate(_MIDPOINTS):
        above = magnitude > middle if lower % 2 == 0 else magnitude >= middle
        code = code + above.astype(jnp.uint8)
    return code + jnp.where(x < 0, jnp.uint8(8), jnp.uint8(0))


def decode_e2m1(codes: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Values of E2M1 codes 0..15."""
    return jnp.asarray([*_LEVELS, *(-level for level in _LEVELS)], dtype)[codes]


def quantize_nvfp4(w_NK: jax.Array, shared_global_scale: jax.Array | None = None) -> NVFP4Weight:
    """Round-to-nearest quantization, equal byte for byte to compressed-tensors 0.20.

    Args:
      w_NK: float32 or bfloat16 [N, K], K a multiple of 16.
      shared_global_scale: float32 [], where several tensors share one (q/k/v, gate/up); None computes it from `w_NK`.

    Raises:
      ValueError: w_NK is not a matrix, K is not a multiple of 16, or the dtype is another.
    """
    if w_NK.ndim != 2 or w_NK.shape[1] % BLOCK or w_NK.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"NVFP4 takes float32 or bfloat16 [N, K] with K % {BLOCK} == 0; got {w_NK.dtype}{w_NK.shape}")
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
        block_scale = _rounded(_divide(amax, _E2M1_MAX), w_nK.dtype) * whole
        scale = jax.lax.optimization_barrier(jnp.minimum(block_scale, _E4M3_MAX).astype(jnp.float8_e4m3fn))
        scale = jnp.where(scale.astype(jnp.float32) == 0, jnp.float32(_ZERO_SCALE).astype(jnp.float8_e4m3fn), scale)
        step = _divide(scale.astype(jnp.float32), whole)
        codes = encode_e2m1(_divide(blocks, step[..., None])).reshape(n, K)
        return codes[:, 0::2] | (codes[:, 1::2] << 4), scale

    packed, scale = in_row_blocks(rows, w_NK)
    return NVFP4Weight(packed, scale, whole)


def dequantize_nvfp4(weight: NVFP4Weight, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """[N, K]: code * (block scale / global scale) in float32, then rounded to `dtype`."""
    N, K = weight.shape
    codes = jnp.stack([weight.packed & 15, weight.packed >> 4], axis=-1).reshape(N, K // BLOCK, BLOCK)
    scale = weight.scale.astype(jnp.float32)
    step = scale * weight.global_scale if weight.scale_multiplies else _divide(scale, weight.global_scale)
    return (decode_e2m1(codes) * step[..., None]).reshape(N, K).astype(dtype)
