"""E2M1, the 4-bit float of NVFP4 and MXFP4: values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, with bit 3 set, their negatives."""

import jax
import jax.numpy as jnp

LARGEST = 6.0
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbouring levels; an exact tie goes to the level with an even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_e2m1(x: jax.Array) -> jax.Array:
    """uint8 codes 0..15 of the nearest E2M1 value, ties to even code; |x| > 6 saturates; the sign of an underflowing
    negative is kept (code 8), that of an exact -0.0 is not."""
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for lower, middle in enumerate(_MIDPOINTS):
        above = magnitude > middle if lower % 2 == 0 else magnitude >= middle
        code = code + above.astype(jnp.uint8)
    return code + jnp.where(x < 0, jnp.uint8(8), jnp.uint8(0))


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """float32 values of E2M1 codes 0..15."""
    return jnp.asarray([*_LEVELS, *(-level for level in _LEVELS)], jnp.float32)[codes]


def pack_pairs(codes_NK: jax.Array) -> jax.Array:
    """uint8 [N, K/2]: two codes a byte, the first of a pair in the low nibble."""
    return codes_NK[:, 0::2] | (codes_NK[:, 1::2] << 4)


def unpack_pairs(packed: jax.Array) -> jax.Array:
    """The inverse of `pack_pairs`: codes [N, K]."""
    N, half = packed.shape
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(N, 2 * half)
