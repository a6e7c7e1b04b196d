"""Log-probabilities and entropies of given tokens, against the definition."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, tiny_model

from qerl_jax.models.transformer import head
from qerl_jax.rl import logprobs
from qerl_jax.rl.logprobs import joined_rows, token_logps

MODEL = tiny_model()


def test_rows_are_prompt_then_completion_then_its_last_token():
    prompt = jnp.array([[1, 2, 3], [4, 9, 9], [5, 6, 9]])
    completion = jnp.array([[11, 12], [13, 9], [9, 9]])
    rows = joined_rows(prompt, jnp.array([3, 1, 2]), completion, jnp.array([2, 1, 0]))
    assert rows.tolist() == [[1, 2, 3, 11, 12], [4, 13, 13, 13, 13], [5, 6, 9, 9, 9]]


@pytest.mark.parametrize("at_a_time", [4, 5, 100])
def test_tokens_in_chunks_are_the_softmaxs_at_the_temperature(monkeypatch, at_a_time):
    monkeypatch.setattr(logprobs, "_LOGITS_BUDGET", at_a_time * CONFIG.vocab_size)
    hidden = 3 * jax.random.normal(jax.random.key(0), (10, CONFIG.hidden_size))
    targets = jax.random.randint(jax.random.key(1), (10,), 0, CONFIG.vocab_size)
    weights = jnp.arange(1.0, 11)

    @jax.jit
    def run(hidden):
        (logps, entropies), backward = jax.vjp(lambda hidden: token_logps(MODEL, hidden, targets, 0.7), hidden)
        none = jnp.zeros(10)
        return logps, entropies, backward((weights, none))[0], backward((none, weights))[0]

    logps, entropies, gradient, entropys_gradient = run(hidden)
    scores = np.asarray(head(MODEL, hidden), np.float64) / 0.7
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(logps, np.log(probabilities[np.arange(10), targets]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(entropies, -(probabilities * np.log(probabilities)).sum(1), rtol=1e-4, atol=1e-5)

    # d logp / d logits = (one-hot of the token - probabilities) / temperature
    dlogits = np.asarray(weights)[:, None] * (np.eye(CONFIG.vocab_size)[targets] - probabilities) / 0.7
    expected = jax.vjp(lambda h: head(MODEL, h), hidden)[1](jnp.asarray(dlogits, jnp.float32))[0]
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3)
    assert not entropys_gradient.any()
    # All tokens' logits, at once or kept from every chunk for the backward pass, would be 10 by 61 numbers or more.
    shapes = [tuple(map(int, found.split("x"))) for found in re.findall(r"<([\dx]+)xf32>", run.lower(hidden).as_text())]
    assert any(math.prod(shape) >= 10 * 61 for shape in shapes if 61 in shape[1:]) == (at_a_time == 100)
