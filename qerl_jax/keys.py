"""PRNG keys, as functions take them: checked, and of a kind that draws the same in any batch."""

import jax
import jax.numpy as jnp


def check_key(key: jax.Array) -> None:
    """Raises ValueError for what is no PRNG key, typed or of words; for several of them, too."""
    typed = jnp.issubdtype(getattr(key, "dtype", jnp.bool_), jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    if getattr(words, "ndim", 0) != 1 or words.dtype != jnp.uint32 or len(words) < 2:
        found = " ".join(repr(key).split())  # an array's is of several lines
        raise ValueError(f"the key is {found:.80}; expected one PRNG key, as jax.random.key(seed) makes it")


def of_threefry(key: jax.Array) -> jax.Array:
    """The key as one of JAX's threefry; a key of another implementation serves as its seed. (`rbg` draws all numbers of
    a batch from the batch's first key, so that a sample's would depend on what stands beside it.)

    Raises:
      ValueError: it is no key, typed or of words.
    """
    check_key(key)
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    threefry = jax.random.wrap_key_data(jnp.asarray(words[:2]), impl="threefry2x32")
    for i in range(2, len(words)):
        threefry = jax.random.fold_in(threefry, words[i])
    return threefry
