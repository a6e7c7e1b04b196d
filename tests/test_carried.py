"""What a loop over tokens carries between its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rollout.carried import keys_of, more_than, words_of


@pytest.mark.parametrize("impl, words", [("threefry2x32", 2), ("rbg", 4)])
def test_keys_come_back_from_their_words(impl, words):
    keys = jax.random.split(jax.random.key(5, impl=impl), 3)
    apart = words_of(keys)
    assert [word.shape for word in apart] == [(3,)] * words
    again = keys_of(apart, keys)
    assert again.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys))


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_whether_more_than_a_number_are_true(size):
    run = jax.jit(more_than)
    for true in {0, 1, size // 2, size}:
        mask = np.random.default_rng(size).permutation(size) < true
        for number in (-1, 0, 1, true - 1, true, size):
            assert bool(run(number, jnp.asarray(mask))) == (true > number), (true, number)


def test_a_loop_goes_on_while_more_than_a_number_are_true():
    """In the condition of a loop too, from which JAX takes what nobody reads: 5, 4, 3 > 2 of five."""
    steps, mask = jax.jit(
        lambda: jax.lax.while_loop(
            lambda state: more_than(2, state[1]),
            lambda state: (state[0] + 1, jnp.arange(5) > state[0]),
            (jnp.int32(0), jnp.ones(5, bool)),
        )
    )()
    assert (int(steps), int(mask.sum())) == (3, 2)
