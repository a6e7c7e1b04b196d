"""NF4 (Dettmers et al. 2023, arXiv 2305.14314): w ~= level[code] * absmax, one absmax per 64 elements.

The 16 levels are quantiles of a normal distribution, scaled to [-1, 1]. A weight [N, K] is held as bitsandbytes stores
it, byte for byte (its `packed` has shape [N K / 2, 1]):
  packed  uint8 [N, K/2]         two codes a byte, the first of a pair in the HIGH nibble
  absmax  float32 [N K / 64]     the largest magnitude of each block

Blocks run along the flattened weight: where K is no multiple of 64 they cross rows. K must be even and N K a multiple
of 64. (bitsandbytes also takes a last block that is not full; no linear layer of a language model has one.)

With double quantization the absmax are 8-bit numbers: their mean is subtracted and each run of 256 is divided by its
own largest magnitude and rounded to one of 256 levels.
  absmax         uint8 [N K / 64]
  nested_absmax  float32 [ceil(N K / 64 / 256)]
  offset         float32 []    the mean, correctly rounded; PyTorch's sum may be a few ulp off, by the CPU it runs on

Inputs below 2^-126 count as zero on CPU, where XLA flushes subnormal numbers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from qerl_jax.formats.rounding import divide, rounded
from qerl_jax.formats.row_blocks import in_row_blocks
from qerl_jax.trees import Tree

BLOCK, NESTED_BLOCK = 64, 256
NEEDS = f"an even number of inputs and a number of elements in multiples of {BLOCK}"
# fmt: off
LEVELS = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32
)
# fmt: on
_MIDPOINTS = (LEVELS[1:] + LEVELS[:-1]) / np.float32(2)
_GRID = 65535  # bitsandbytes rounds to this many steps between -1 and 1 before it looks for the nearest of 256 levels


def _nested_levels() -> np.ndarray:
    """float32 [256], ascending: 0, 1 and, for each power of ten from 1e-6 to 1, the middles of 1, 2, 4 ... 64 equal
    parts of [0.1, 1], with both signs (Dettmers 2015, arXiv 1511.04561)."""
    levels = [np.float32(0), np.float32(1)]
    first, last = np.float32(0.1), np.float32(1)
    for i in range(7):
        parts = 2**i
        step = np.float64((last - first) / np.float32(parts))
        k = np.arange(parts + 1)
        # The lower half counts from the left end and the upper half from the right one, each rounded to float32 once.
        bounds = np.where(k < (parts + 1) // 2, first + step * k, last - step * (parts - k)).astype(np.float32)
        middles = (bounds[1:] + bounds[:-1]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        levels += [*middles, *-middles]
    return np.sort(np.array(levels, np.float32))


NESTED_LEVELS = _nested_levels()
_NEAREST_LEVEL = np.searchsorted(
    (NESTED_LEVELS[1:].astype(np.float64) + NESTED_LEVELS[:-1]) / 2, np.arange(_GRID + 1) / _GRID * 2 - 1
).astype(np.uint8)


def fits(N: int, K: int) -> bool:
    """Whether a weight [N, K] can be held."""
    return K % 2 == 0 and N * K % BLOCK == 0


class NF4Weight(Tree):
    """A packed weight [N, K] with float32 absmax; see the module docstring for the arrays."""

    packed: jax.Array
    absmax: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]


class NF4DoubleQuantWeight(Tree):
    """A packed weight [N, K] with 8-bit absmax; see the module docstring for the arrays."""

    packed: jax.Array
    absmax: jax.Array
    nested_absmax: jax.Array
    offset: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]


def quantize_nf4(w_NK: jax.Array) -> NF4Weight:
    """Nearest level of w / absmax, ties to the lower one, equal byte for byte to bitsandbytes 0.50.

    Args:
      w_NK: float32 or bfloat16 [N, K], K even, N K a multiple of 64.

    Raises:
      ValueError: w_NK is not such a matrix, or the dtype is another.
    """
    if w_NK.ndim != 2 or not fits(*w_NK.shape) or w_NK.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"NF4 takes float32 or bfloat16 [N, K] with {NEEDS}; got {w_NK.dtype}{w_NK.shape}")
    return _quantize(w_NK)


def quantize_nf4_double_quant(w_NK: jax.Array) -> NF4DoubleQuantWeight:
    """`quantize_nf4`, with the absmax quantized too."""
    weight = quantize_nf4(w_NK)
    return NF4DoubleQuantWeight(weight.packed, *_quantize_absmax(weight.absmax))


@jax.jit
def _quantize(w_NK: jax.Array) -> NF4Weight:
    def rows(w_nK: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = w_nK.astype(jnp.float32).reshape(-1, BLOCK)
        absmax = jnp.abs(blocks).max(-1)
        # bitsandbytes multiplies by the reciprocal.
        inverse = divide(jnp.ones_like(absmax), jnp.maximum(absmax, jnp.finfo(jnp.float32).tiny))
        scaled = blocks * inverse[:, None]
        codes = jnp.zeros(blocks.shape, jnp.uint8)
        for middle in _MIDPOINTS:
            codes = codes + (scaled > middle).astype(jnp.uint8)
        pairs = codes.reshape(w_nK.shape[0], -1, 2)
        return (pairs[..., 0] << 4) | pairs[..., 1], absmax

    packed, absmax = in_row_blocks(rows, w_NK, multiple=BLOCK // math.gcd(w_NK.shape[1], BLOCK))
    return NF4Weight(packed, absmax)


@jax.jit
def _quantize_absmax(absmax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(uint8 absmax, nested absmax, offset). In float64, rounded to float32 where bitsandbytes rounds.

    Constants to a gradient: JAX would trace its rules outside of the block that allows float64.
    """
    absmax = jax.lax.stop_gradient(absmax)
    with jax.enable_x64(True):
        single = jnp.float32
        offset = rounded(absmax.astype(jnp.float64).mean(), single)
        centred = rounded(absmax.astype(jnp.float64) - offset, single)
        blocks = jnp.pad(centred, (0, -centred.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
        nested = jnp.abs(blocks).max(-1, keepdims=True)
        x = rounded(blocks * rounded(1 / jnp.where(nested == 0, 1, nested), single), single)
        x = rounded(jnp.clip(x, -1, 1) + 1, single)
        place = jnp.floor(rounded(rounded(x / 2 * _GRID, single) + 0.5, single)).astype(jnp.int32)
        # Equal absmax leave nothing to scale; bitsandbytes writes zeros there.
        codes = jnp.where(nested == 0, jnp.uint8(0), jnp.asarray(_NEAREST_LEVEL)[place])
        return codes.reshape(-1)[: absmax.size], nested[:, 0].astype(single), offset.astype(single)


def dequantize_nf4(weight: NF4Weight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[N, K]: level * absmax in float32, then rounded to `dtype`."""
    codes = jnp.stack([weight.packed >> 4, weight.packed & 15], axis=-1)
    values = jnp.asarray(LEVELS)[codes].reshape(-1, BLOCK) * weight.absmax[:, None]
    return values.reshape(weight.shape).astype(dtype)


def dequantize_nf4_double_quant(weight: NF4DoubleQuantWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """[N, K]: level * (absmax level * nested absmax + offset), each product and sum rounded to float32, then to
    `dtype`."""
    with jax.enable_x64(True):
        nested = jnp.repeat(weight.nested_absmax, NESTED_BLOCK)[: weight.absmax.size].astype(jnp.float64)
        product = rounded(jnp.asarray(NESTED_LEVELS)[weight.absmax].astype(jnp.float64) * nested, jnp.float32)
        absmax = rounded(product + weight.offset.astype(jnp.float64), jnp.float32).astype(jnp.float32)
    return dequantize_nf4(NF4Weight(weight.packed, absmax), dtype)
