"""The kernel's weight layout: tensor-core fragments of 16 x 64 codes, decodable with shifts and masks.

Legend: N output rows, K input columns, T row tiles (16 rows), Q quads (256 columns, 4 units of 64), lanes 0..31, steps
0..3 of a unit (one m16n8k16 each), pairs 0..3 of a word.

A *quad* covers 16 rows and 256 columns of W and is 2304 contiguous bytes: 4 units x 512 bytes of codes, then 2 pairs of
units x 128 bytes of scales. A matrix [N, K] is [T, Q] quads, row tile by row tile, so that one warp reads one run of
memory. In a unit, lane 4 g + t (g = 0..7, t = 0..3) owns rows g and g + 8 and the columns of *one* scale block,
16 t .. 16 t + 15: 32 codes, one 16-byte load, two scale bytes. Step j multiplies the block's elements 4 j .. 4 j + 3;
that reorders K inside the unit, which is free as long as x is read in the same order (lane (g, t) then reads 32
contiguous bytes of x row g). A lane reads only bytes that it loaded itself, so weights need no synchronisation at all.

    word j of lane (g, t):  pair 0 = W[g,   4j], W[g,   4j+1]     pair 1 = W[g+8, 4j],   W[g+8, 4j+1]
                            pair 2 = W[g, 4j+2], W[g, 4j+3]       pair 3 = W[g+8, 4j+2], W[g+8, 4j+3]

    scale word of lane (g, t), one for two units u, u + 1:  bytes  u row g | u row g+8 | u+1 row g | u+1 row g+8

A code's bits s e1 e0 m must reach bits 15, 8, 7, 6 of a bfloat16, which then is the code's value times 2^-126, or bits
15, 11, 10, 9 of a float16, times 2^-14. So where they lie in a 32-bit word depends on the dtype that the kernels
multiply in (`DECODINGS`). For bfloat16 pairs 0, 1, 2 need one rotation and one mask each; pair 3 takes its e1 without
rotation and the rest from a rotation by 24. No layout of 4 codes in 16 bits does with one rotation per pair (searched
exhaustively): 4 rotations + 5 logic operations for 8 codes is the least. For float16 it is 4 + 6, three of the
rotations shifts to the left, which run as multiplications on the other pipe, where bfloat16 has two.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

ROWS, UNIT, COLS, BLOCK = 16, 64, 256, 16
QUAD_WORDS = 576  # 4 x 128 of codes, 2 x 32 of scales
QUAD_BYTES = 4 * QUAD_WORDS
CODE_BYTES = 2048  # of a quad; its scales follow

# What products of decoded codes and scales leave to the end: they are code * scale * 2^-7.
EPILOGUE_FACTOR = 128.0


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How codes and scale bytes become numbers of a 16-bit dtype.

    Attributes:
      dest_bits: where the bits m, e0, e1, s of a code go.
      turns: of each pair the left rotation that brings them there.
      direct: of each pair the bits (0 = m ..) that lie there already, and are not rotated.
      scale_shift: what a scale byte is shifted to the left by, to be its value times a power of two.
      scale_steps: the powers of two that it is multiplied by then, each exactly.
      exponent_bias, exponent_at: of the dtype, and the bit at which its exponent begins.
    """

    dest_bits: tuple[int, int, int, int]
    turns: tuple[int, int, int, int]
    direct: tuple[tuple[int, ...], ...]
    scale_shift: int
    scale_steps: tuple[int, ...]
    exponent_bias: int
    exponent_at: int

    def _both(self, bits) -> int:
        return sum(1 << self.dest_bits[bit] for bit in bits) * 0x10001

    def turned_mask(self, pair: int) -> int:
        """Of a pair's bits behind the rotation."""
        return self._both(bit for bit in range(4) if bit not in self.direct[pair])

    def direct_mask(self, pair: int) -> int:
        return self._both(self.direct[pair])

    def source_bit(self, pair: int, half: int, bit: int) -> int:
        """Bit of the 32-bit word that holds bit `bit` (0 = m, 1 = e0, ..) of the code in `half` of `pair`."""
        turn = 0 if bit in self.direct[pair] else self.turns[pair]
        return (self.dest_bits[bit] + 16 * half - turn) % 32

    def power_of_two(self, exponent: int) -> int:
        """Twice in a word."""
        return (self.exponent_bias + exponent << self.exponent_at) * 0x10001


# Codes become value * 2^-126 and scales, from their bytes << 4, scale * 2^-120; or value * 2^-14 and scale * 2^-8. The
# scales are multiplied by 2^239, or 2^15, so that products are code * scale * 2^-7: 6 bits, exact in either.
DECODINGS = {
    "bfloat16": Decoding((6, 7, 8, 15), (2, 6, 28, 24), ((), (), (), (2,)), 4, (127, 112), 127, 7),
    "float16": Decoding((9, 10, 11, 15), (9, 5, 28, 3), ((), (2,), (), (0,)), 7, (15,), 15, 10),
}


@functools.cache
def _turns_and_masks(dtype: str) -> tuple[np.ndarray, ...]:
    """Of each pair: its rotation to the left and to the right, the mask behind it, and that of bits that lie there."""
    made = DECODINGS[dtype]
    of_pairs = [(turn, 32 - turn, made.turned_mask(i), made.direct_mask(i)) for i, turn in enumerate(made.turns)]
    return tuple(np.array(of_pairs, np.uint32).T)


def decode_word(word: np.ndarray, dtype: str = "bfloat16") -> np.ndarray:
    """The kernel's decoding in NumPy: uint32 words -> for each pair [4, ...], two bit patterns of the dtype."""
    word = np.asarray(word, np.uint32)
    left, right, turned, direct = (v.reshape(4, *[1] * word.ndim) for v in _turns_and_masks(dtype))
    return (word << left | word >> right) & turned | word & direct


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["n", "k", "dtype"])
@dataclasses.dataclass(frozen=True)
class KernelWeight:
    """An NVFP4 matrix in the kernel's layout.

    Attributes:
      data: uint32 [T, Q, 576], T = ceil(n / 16) and Q = ceil(k / 256); missing rows, columns are zero codes and scales.
      n, k: the matrix's own shape (static).
      dtype: what the kernels multiply in, "bfloat16" or "float16" (static): where a code's bits lie.
    """

    data: jax.Array = dataclasses.field(repr=False)
    n: int
    k: int
    dtype: str = "bfloat16"

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k


def check_data(weight: KernelWeight):
    """Raises ValueError where a weight's data are not those of its shape, as of a stack of layers, of which `scan` or
    indexing must take one first."""
    wanted = (-(-weight.n // ROWS), -(-weight.k // COLS), QUAD_WORDS)
    if weight.data.shape != wanted:
        raise ValueError(f"the data of a weight {weight.shape} must be {list(wanted)}, got {list(weight.data.shape)}")


def _check(packed, scale):
    if packed.ndim != 2:
        raise ValueError(f"packed must be [N, K/2], got shape {packed.shape}")
    n, half = packed.shape
    if packed.dtype != jnp.uint8:
        raise ValueError(f"packed must be uint8, got {packed.dtype}")
    if half % (BLOCK // 2):
        raise ValueError(f"K must be a multiple of {BLOCK}, got K = {2 * half}")
    if scale.shape != (n, half // (BLOCK // 2)):
        raise ValueError(f"scale must have shape {(n, half // (BLOCK // 2))}, got {scale.shape}")
    if scale.dtype not in (jnp.float8_e4m3fn, jnp.uint8):
        raise ValueError(f"scale must be float8_e4m3fn or its bytes (uint8), got {scale.dtype}")
    return n, 2 * half


def repack(packed: jax.Array, scale: jax.Array, dtype: DTypeLike = jnp.bfloat16) -> KernelWeight:
    """Canonical NVFP4 arrays to the kernel's layout; done once, when weights are loaded.

    Args:
      packed: uint8 [N, K/2], element 2i in the low nibble of byte i.
      scale: float8_e4m3fn (or its bytes) [N, K/16]; bytes 0x00-0x7E only, which the loader checks: a negative or NaN
        scale decodes to another number here.
      dtype: bfloat16 or float16, in which the kernels will multiply.

    Returns:
      KernelWeight with data uint32 [ceil(N/16), ceil(K/256), 576].
    """
    name = jnp.dtype(dtype).name
    if name not in DECODINGS:
        raise ValueError(f"dtype is {name}; allowed: {', '.join(DECODINGS)}")
    return _repack(packed, scale, name)


@functools.partial(jax.jit, static_argnames="dtype")
def _repack(packed, scale, dtype):
    n, k = _check(packed, scale)
    source_bit = DECODINGS[dtype].source_bit
    t, q = -(-n // ROWS), -(-k // COLS)
    packed = jnp.pad(packed, ((0, t * ROWS - n), (0, (q * COLS - k) // 2)))
    if scale.dtype != jnp.uint8:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    scale = jnp.pad(scale, ((0, t * ROWS - n), (0, (q * COLS - k) // BLOCK))).astype(jnp.uint32)
    # rows: (T, row half, g); columns: (Q, unit, block t, step j, pair half, byte)
    codes = packed.reshape(t, 2, 8, q, 4, 4, 4, 2).astype(jnp.uint32)
    codes = codes.transpose(0, 3, 4, 2, 5, 6, 7, 1)  # T Q unit g t j pair-half row-half
    words = jnp.zeros(codes.shape[:6], jnp.uint32)
    for pair in range(4):
        byte = codes[..., pair // 2, pair % 2]
        for half in range(2):
            for bit in range(4):
                words |= ((byte >> (4 * half + bit)) & 1) << source_bit(pair, half, bit)
    words = words.reshape(t, q, 512)
    # columns: (Q, pair of units, unit in it, block t)
    scale = scale.reshape(t, 2, 8, q, 2, 2, 4).transpose(0, 3, 4, 2, 6, 5, 1)  # T Q pair g t unit row-half
    scale = scale.reshape(t, q, 64, 4)
    scale_words = scale[..., 0] | scale[..., 1] << 8 | scale[..., 2] << 16 | scale[..., 3] << 24
    return KernelWeight(jnp.concatenate([words, scale_words], axis=-1), n, k, dtype)


@jax.jit
def unpack(weight: KernelWeight) -> tuple[jax.Array, jax.Array]:
    """The inverse of `repack`, bit for bit: packed uint8 [N, K/2] and scale float8_e4m3fn [N, K/16]."""
    check_data(weight)
    t, q, _ = weight.data.shape
    words, source_bit = weight.data[..., :512].reshape(t, q, 4, 8, 4, 4), DECODINGS[weight.dtype].source_bit
    pairs = []
    for pair in range(4):
        byte = jnp.zeros(words.shape, jnp.uint32)
        for half in range(2):
            for bit in range(4):
                byte |= ((words >> source_bit(pair, half, bit)) & 1) << (4 * half + bit)
        pairs.append(byte)
    codes = jnp.stack(pairs, -1).reshape(t, q, 4, 8, 4, 4, 2, 2).transpose(0, 7, 3, 1, 2, 4, 5, 6)
    packed = codes.reshape(t * ROWS, q * COLS // 2)[: weight.n, : weight.k // 2].astype(jnp.uint8)
    shifts = jnp.arange(4, dtype=jnp.uint32) * 8
    scale = (weight.data[..., 512:, None] >> shifts) & 0xFF
    scale = scale.reshape(t, q, 2, 8, 4, 2, 2).transpose(0, 6, 3, 1, 2, 5, 4)
    scale = scale.reshape(t * ROWS, q * (COLS // BLOCK))[: weight.n, : weight.k // BLOCK].astype(jnp.uint8)
    return packed, jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)


def dequantize(weight: KernelWeight, global_scale: jax.Array, dtype=jnp.bfloat16) -> jax.Array:
    """W [N, K] = e2m1 * (scale / global_scale), computed in float32 and rounded once to dtype."""
    packed, scale = unpack(weight)
    # One division, then one product: both round once, in float32, as the writers of the format do (a GPU's division may
    # be one ulp off). Without the barrier XLA, on a CPU, multiplies by the reciprocal of what it broadcasts.
    divisor = jnp.broadcast_to(jnp.asarray(global_scale, jnp.float32).reshape(()), scale.shape)
    return _products(packed, scale.astype(jnp.float32) / jax.lax.optimization_barrier(divisor)).astype(dtype)


def undivided(weight: KernelWeight) -> jax.Array:
    """e2m1 * scale [N, K] in the weight's dtype, which holds it exactly."""
    packed, scale = unpack(weight)
    return _products(packed, scale.astype(jnp.float32)).astype(weight.dtype)


def _products(packed, block):
    """Codes, of packed uint8 [N, K/2], times the numbers of their blocks, float32 [N, K/16]."""
    codes = jnp.stack([packed & 15, packed >> 4], -1).reshape(*block.shape, BLOCK)
    magnitude = codes & 7
    exponent = jnp.maximum(magnitude >> 1, 1)
    value = ((magnitude & 1) + jnp.where(magnitude > 1, 2, 0)).astype(jnp.float32) * 0.5
    value = value * jnp.left_shift(1, exponent.astype(jnp.int32) - 1).astype(jnp.float32)
    value = jnp.where(codes & 8, -value, value)
    return (value * block[..., None]).reshape(packed.shape[0], 2 * packed.shape[1])
