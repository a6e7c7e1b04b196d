"""The smallest logit that top-k or top-p keeps, without sorting the vocabulary.

A float32's bits, read as an integer (turned round for negative numbers), are in the order of the floats, so the
threshold is found exactly by halving the range of bit patterns: 32 times, whatever the vocabulary, one pass that counts
(top-k) or sums (top-p) what lies above a candidate. On an H200 a sort of 152k logits takes 386 us for 8 rows and 2.6 ms
for 256. Subnormal candidates count as zero everywhere, as they do on a CPU.

Dimension letters: B rows, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_ROUNDS = 32


def kth_largest(logits_BV: jax.Array, k: int) -> jax.Array:
    """The k-th largest value of each row [B, 1], 1 <= k <= V; exact. NaN is not allowed."""
    B = logits_BV.shape[0]
    return _turn(lambda floor_B1: jnp.sum(logits_BV >= floor_B1, axis=-1, keepdims=True) >= k, B)[0]


def nucleus_floor(logits_BV: jax.Array, top_p: float) -> jax.Array:
    """A value [B, 1] such that the logits at or above it are those before which, in descending order, less than
    `top_p` of the probability lies. Equal logits are all kept or all dropped. 0 < top_p <= 1."""
    weights_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True))
    enough_B1 = top_p * jnp.sum(weights_BV, axis=-1, keepdims=True)

    def too_low(value_B1: jax.Array) -> jax.Array:
        above_B1 = jnp.sum(jnp.where(logits_BV > value_B1, weights_BV, 0), axis=-1, keepdims=True)
        return above_B1 >= enough_B1

    return _turn(too_low, logits_BV.shape[0])[1]


def _turn(holds: Callable[[jax.Array], jax.Array], rows: int) -> tuple[jax.Array, jax.Array]:
    """Where a condition turns that holds from -inf up to some value and not beyond: the last float32 [B, 1] at which it
    holds, and the one after it. Where it holds nowhere, -inf and the lowest finite one."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        fine = holds(_float(middle))
        return jnp.where(fine, middle, low), jnp.where(fine, high, middle)

    low = jnp.broadcast_to(_ordinal(-jnp.inf), (rows, 1))
    high = jnp.broadcast_to(_ordinal(jnp.inf), (rows, 1)) + jnp.uint32(1)
    low, high = jax.lax.fori_loop(0, _ROUNDS, halve, (low, high))
    return _float(low), _float(high)


def _ordinal(value: float) -> jax.Array:
    """The place of a float32 among all of them, uint32."""
    bits = jax.lax.bitcast_convert_type(jnp.float32(value), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _float(ordinal: jax.Array) -> jax.Array:
    """The float32 at a place; zero for subnormal ones."""
    bits = jnp.where(ordinal >> 31, ordinal & jnp.uint32(0x7FFFFFFF), ~ordinal)
    bits = jnp.where(bits & jnp.uint32(0x7F800000), bits, jnp.uint32(0))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
