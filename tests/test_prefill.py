"""Prompts that go through the network in parts, against one plain forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_adapter, tiny_model

from qerl_jax.models.params import norms_of
from qerl_jax.models.transformer import forward
from qerl_jax.rollout.decode import prefill

MODEL = tiny_model()
ADAPTER = tiny_adapter(MODEL)
NORMS = norms_of(MODEL, ADAPTER)
LENGTHS = np.array([11, 1, 4, 8, 5])
TOKENS = jax.random.randint(jax.random.key(0), (5, 11), 0, MODEL.config.vocab_size)


@functools.cache
def plainly():
    return jax.jit(forward)(MODEL, ADAPTER, TOKENS)


@pytest.mark.parametrize("at_once", [1, 4, 5, 10, 11, 25, 1000])
def test_any_part_gives_the_same_keys_values_and_last_hidden_states(at_once):
    """Chunks of one prompt up to 10 tokens at once, then one prompt at a time, two (the last alone), all."""
    last, layers = jax.jit(prefill, static_argnums=5)(MODEL, ADAPTER, TOKENS, jnp.asarray(LENGTHS), NORMS, at_once)
    hidden, expected = plainly()
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(last[row], hidden[row, length - 1], atol=2e-5)
    for (k, v), (expected_k, expected_v) in zip(layers, expected, strict=True):
        assert k.shape == v.shape == expected_k.shape
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(k[row, :length], expected_k[row, :length], atol=2e-5)
            np.testing.assert_allclose(v[row, :length], expected_v[row, :length], atol=2e-5)


def test_chunks_behind_the_longest_prompt_are_left_out():
    """Their keys stay the zeros that they were."""
    _, layers = prefill(MODEL, ADAPTER, TOKENS[:3], jnp.array([2, 1, 4]), NORMS, 4)
    for k, _ in layers:
        assert np.any(k[:, 3]) and not np.any(k[:, 4:])
