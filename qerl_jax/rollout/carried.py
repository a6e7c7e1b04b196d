"""What a loop over tokens carries from step to step, in the form that takes the fewest kernels.

Little is computed between the layers of one step and those of the next, but on a GPU each kernel there takes 2 to 4 us.
XLA makes one kernel of what has one shape and reads the same arrays. So what a step needs to know of the slots is
carried as arrays [S], which the step before has made together.

Dimension letters: S slots, W words of a key.
"""

import jax
import jax.numpy as jnp


def words_of(keys_S: jax.Array) -> tuple[jax.Array, ...]:
    """PRNG keys word by word, each [S]."""
    words_SW = jax.random.key_data(keys_S)
    return tuple(words_SW[:, word] for word in range(words_SW.shape[1]))


def keys_of(words: tuple[jax.Array, ...], like: jax.Array) -> jax.Array:
    """The keys of which `words_of` made these words; `like` is any key of their kind."""
    return jax.random.wrap_key_data(jnp.stack(words, axis=1), impl=jax.random.key_impl(like))


def more_than(number: jax.Array | int, mask_S: jax.Array) -> jax.Array:
    """Whether more than `number` are true, as one kernel; a sum and a comparison are two."""

    def joined(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = one[0] + other[0]
        return total, total > 0

    counts_S = mask_S.astype(jnp.int32).at[0].add(-jnp.asarray(number, jnp.int32))
    both = jax.lax.reduce((counts_S, counts_S > 0), (jnp.int32(0), jnp.bool(False)), joined, (0,))
    # Without the barrier JAX drops the sum, which nobody reads, from the reduction, and what is left does not compile.
    return jax.lax.optimization_barrier(both)[1]
