"""Log-probabilities and entropies of given tokens, against the definition."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, tiny_adapter, tiny_model

from qerl_jax.models.params import norms_of
from qerl_jax.models.transformer import head, logits
from qerl_jax.noise import perturb_norms
from qerl_jax.rl import logprobs
from qerl_jax.rl.logprobs import per_token_logps, token_logps

MODEL = tiny_model()


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


@pytest.mark.parametrize(("at_a_time", "rows"), [(127, 127), (128, 128), (130, 256), (300, 300), (2**20, 300)])
def test_chunks_that_are_not_short_are_whole_tiles_of_128(monkeypatch, at_a_time, rows):
    monkeypatch.setattr(logprobs, "_LOGITS_BUDGET", at_a_time * CONFIG.vocab_size)
    hidden, targets = jnp.ones((300, CONFIG.hidden_size)), jnp.zeros(300, jnp.int32)
    program = str(jax.make_jaxpr(lambda hidden: token_logps(MODEL, hidden, targets, 1.0))(hidden))
    assert set(re.findall(rf"f32\[(\d+),{CONFIG.vocab_size}\] = (?:dot_general|sub|exp)", program)) == {str(rows)}


def test_chunks_behind_what_is_wanted_are_left_out(monkeypatch):
    monkeypatch.setattr(logprobs, "_LOGITS_BUDGET", 4 * CONFIG.vocab_size)
    hidden = jax.random.normal(jax.random.key(0), (10, CONFIG.hidden_size))
    targets = jax.random.randint(jax.random.key(1), (10,), 0, CONFIG.vocab_size)

    def of_wanted(hidden, wanted):
        return jnp.stack(token_logps(MODEL, hidden, targets, 0.7, wanted))

    whole = of_wanted(hidden, 10)
    slopes = jax.grad(lambda hidden: of_wanted(hidden, 10)[0].sum())(hidden)
    for wanted, chunks in ((0, 0), (1, 4), (4, 4), (5, 8), (8, 8), (9, 10)):
        found, back = jax.vjp(functools.partial(of_wanted, wanted=wanted), hidden)
        np.testing.assert_allclose(found[:, :chunks], whole[:, :chunks], rtol=1e-6)
        assert not found[:, chunks:].any()
        gradient = back(jnp.ones((2, 10)))[0]
        np.testing.assert_allclose(gradient[:chunks], slopes[:chunks], rtol=1e-4, atol=1e-5)
        assert not gradient[chunks:].any()


def test_large_logits_cost_no_digits(monkeypatch):
    monkeypatch.setattr(logprobs, "head", lambda model, logits: logits)
    logits = 1e4 + jax.random.normal(jax.random.key(0), (10, CONFIG.vocab_size))
    targets = jnp.arange(10)
    logps, backward = jax.vjp(lambda logits: token_logps(MODEL, logits, targets, 1.0)[0], logits)
    below = np.asarray(logits, np.float64) - np.asarray(logits, np.float64).max(1, keepdims=True)
    expected = below - np.log(np.exp(below).sum(1, keepdims=True))
    np.testing.assert_allclose(logps, expected[np.arange(10), targets], rtol=1e-6)
    gradient = np.eye(CONFIG.vocab_size)[targets] - np.exp(expected)
    np.testing.assert_allclose(backward(jnp.ones(10))[0], gradient, rtol=1e-5)


def test_no_tokens():
    hidden, targets = jnp.zeros((0, CONFIG.hidden_size)), jnp.zeros(0, jnp.int32)
    (logps, entropies), backward = jax.vjp(lambda hidden: token_logps(MODEL, hidden, targets, 1.0), hidden)
    assert logps.shape == entropies.shape == (0,)
    assert backward((logps, entropies))[0].shape == hidden.shape


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_tokens_log_probability_is_that_of_the_logits(monkeypatch, checkpointing):
    """Of rows padded on the left and on the right, under noise, at a temperature; and its gradient."""
    monkeypatch.setattr(logprobs, "_LOGITS_BUDGET", 4 * CONFIG.vocab_size)
    adapter = tiny_adapter(MODEL, scale=0.3)
    tokens = jax.random.randint(jax.random.key(5), (3, 6), 0, CONFIG.vocab_size)
    mask = jnp.array([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    norms = perturb_norms(norms_of(MODEL, adapter), 0.1, jax.random.key(6))
    counted = mask[:, 1:] * mask[:, :-1]

    def loss(logps):
        return jnp.sum(counted * logps * jnp.arange(1.0, 6)), jnp.where(counted, logps, 0)

    def by_logits(adapter):
        scores = logits(MODEL, tokens, adapter=adapter, norms=norms, attention_mask=mask) / 0.7
        return loss(jnp.take_along_axis(jax.nn.log_softmax(scores)[:, :-1], tokens[:, 1:, None], 2)[..., 0])

    def by_token(adapter):
        of = {"adapter": adapter, "norms": norms, "attention_mask": mask, "temperature": 0.7}
        return loss(per_token_logps(MODEL, tokens, **of, gradient_checkpointing=checkpointing))

    (_, expected), wanted = jax.jit(jax.value_and_grad(by_logits, has_aux=True))(adapter)
    (_, found), gradient = jax.jit(jax.value_and_grad(by_token, has_aux=True))(adapter)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max() + 1e-6)
    with pytest.raises(ValueError, match="tokens are of one place"):
        per_token_logps(MODEL, tokens[:, :1])
    with pytest.raises(ValueError, match="allowed: 0 to"):
        per_token_logps(MODEL, tokens.at[0, 0].set(CONFIG.vocab_size))
    with pytest.raises(TypeError, match="norms is of type tuple; expected a Norms"):
        logits(MODEL, tokens, norms=(1.0,))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.float16, bool])
def test_a_mask_of_any_dtype_counts_as_far_as_a_row_goes(dtype):
    tokens = jax.random.randint(jax.random.key(7), (1, 260), 0, CONFIG.vocab_size)
    mask = (jnp.arange(260) > 1)[None]
    for function in (logits, per_token_logps):
        whole, found = (function(MODEL, tokens, attention_mask=mask.astype(of)) for of in (jnp.int32, dtype))
        np.testing.assert_array_equal(found[:, 2:], whole[:, 2:])
