"""Prompts that go through the network in parts, against one plain forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_adapter, tiny_model

from qerl_jax.models.params import norms_of
from qerl_jax.models.transformer import forward
from qerl_jax.rollout import decode
from qerl_jax.rollout.attention import empty_kv
from qerl_jax.rollout.decode import pack_of, prefill

MODEL = tiny_model()
ADAPTER = tiny_adapter(MODEL)
NORMS = norms_of(MODEL, ADAPTER)
LENGTHS = np.array([5, 1, 4, 7, 11])
TOKENS = jax.random.randint(jax.random.key(0), (5, 11), 0, MODEL.config.vocab_size)


def empty(rows):
    """A pool for so many prompts of 11 tokens."""
    return jnp.zeros((rows, MODEL.config.hidden_size)), empty_kv(MODEL, rows, 11)


@functools.cache
def plainly():
    return jax.jit(forward)(MODEL, ADAPTER, TOKENS)


@pytest.mark.parametrize("at_once, whole", [
    *((n, True) for n in (1, 4, 10)), *((n, False) for n in (1, 4, 5, 10, 11, 22, 33, 1000))
])  # fmt: skip
def test_any_part_gives_the_same_keys_values_and_last_hidden_states(at_once, whole, monkeypatch):
    """Chunks of one prompt up to 10 tokens at once, then packs with slots for one, two, three and all full prompts;
    attention in chunks too, or `whole`, as where cuDNN computes it."""
    monkeypatch.setattr(decode, "by_cudnn", lambda dtype: whole)
    rows = jnp.array([5, 0, 7, 3, 1])  # the third is beyond the pool
    run = jax.jit(lambda *operands: prefill(*operands, at_once))
    last, layers = run(MODEL, ADAPTER, TOKENS, jnp.asarray(LENGTHS), NORMS, empty(7), rows)
    hidden, expected = plainly()
    where = {0: 5, 1: 0, 3: 3, 4: 1}
    for row, at in where.items():
        np.testing.assert_allclose(last[at], hidden[row, LENGTHS[row] - 1], atol=2e-5)
    for array in jax.tree.leaves((last, layers)):
        assert not np.any(array[jnp.array([2, 4, 6])])
    for cached, (expected_k, expected_v) in zip(layers, expected, strict=True):
        k, v = (array.swapaxes(1, 2) for array in cached)  # where there is no kernel, heads come before positions
        assert k.shape == v.shape == (7, *expected_k.shape[1:])
        for row, at in where.items():
            length = LENGTHS[row]
            np.testing.assert_allclose(k[at, :length], expected_k[row, :length], atol=2e-5)
            np.testing.assert_allclose(v[at, :length], expected_v[row, :length], atol=2e-5)


@pytest.mark.parametrize("at_once", [4, 11, 1000])
def test_prompts_of_numpy(at_once):
    tokens, rows = np.asarray(TOKENS), np.arange(5)
    last, _ = jax.jit(lambda pool: prefill(MODEL, ADAPTER, tokens, LENGTHS, NORMS, pool, rows, at_once))(empty(5))
    np.testing.assert_allclose(last, plainly()[0][np.arange(5), LENGTHS - 1], atol=2e-5)


def test_packs_go_by_tokens():
    """Slots of a pack and rows of its frame: full prompts in equal parts, and shorter ones with room for more."""
    assert pack_of(64, 300) == (7 * 300, (27, 300)) and pack_of(8, 300) == (4 * 300, (8, 300))
    assert pack_of(1, 2048) == (2048, (1, 2048)) and pack_of(9, 2048) == (2048, (4, 2048))
    assert pack_of(5, 2) == (10, (5, 2))


def test_prompts_of_several_seeds_at_once():
    """By `vmap`, in packs of which each seed needs another number."""
    lengths = jnp.array([[1, 1, 1, 2, 1], LENGTHS])
    run = jax.jit(lambda lengths: prefill(MODEL, ADAPTER, TOKENS, lengths, NORMS, empty(5), jnp.arange(5), 11))
    both = jax.vmap(run)(lengths)
    for i in range(2):
        for found, expected in zip(jax.tree.leaves(both), jax.tree.leaves(run(lengths[i])), strict=True):
            np.testing.assert_allclose(found[i], expected, atol=2e-5)


@pytest.mark.parametrize("at_once", [4, 11, 1000])
def test_what_fills_prompts_up_is_a_token_that_they_have(at_once):
    """0 times what another one may overflow to in float16 is NaN."""
    model = MODEL.replace(base=MODEL.base.replace(embed=MODEL.base.embed.at[0].set(jnp.nan)))
    tokens = jnp.where(jnp.arange(11) < LENGTHS[:, None], jnp.maximum(TOKENS, 1), 0)
    found = prefill(model, ADAPTER, tokens, jnp.asarray(LENGTHS), NORMS, empty(5), jnp.arange(5), at_once)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(found))


@pytest.mark.parametrize("at_once", [4, 11, 1000])
def test_values_too_large_for_8_bits_become_the_largest(at_once):
    """Where a cast would make them NaN."""
    large = tuple(layer.replace(v_bias=layer.v_bias + 1e4) for layer in MODEL.base.layers)
    model = MODEL.replace(base=MODEL.base.replace(layers=large))
    pool = empty(5)[0], empty_kv(MODEL, 5, 11, "fp8_values")
    _, layers = prefill(model, ADAPTER, TOKENS, jnp.asarray(LENGTHS), NORMS, pool, jnp.arange(5), at_once)
    for _, v in layers:
        assert all((v[row, :, :length] == 448).all() for row, length in enumerate(LENGTHS))


@pytest.mark.parametrize("at_once", [4, 10])
def test_chunks_behind_the_longest_prompt_are_left_out(at_once, monkeypatch):
    """Their keys stay the zeros that they were."""
    monkeypatch.setattr(decode, "CHUNK_TOKENS", 4)
    lengths = jnp.array([2, 1, 4])
    _, layers = prefill(MODEL, ADAPTER, TOKENS[:3], lengths, NORMS, empty(3), jnp.arange(3), at_once)
    for k, _ in layers:
        assert np.any(k[:, :, 3]) and not np.any(k[:, :, 4:])


@pytest.mark.parametrize("chunks", [2, 3, 5, 17])
def test_a_part_that_attention_copies_is_about_half_of_a_prompt(chunks, monkeypatch):
    """The narrower ones are for shorter prompts."""
    widths = []

    def attention(q, k, v, mask):
        widths.append(q.shape[1])
        return q

    monkeypatch.setattr(decode, "by_cudnn", lambda dtype: True)
    monkeypatch.setattr(decode, "causal_attention", attention)
    tokens, pool = jnp.zeros((1, 4 * chunks), int), (jnp.zeros((1, 32)), empty_kv(MODEL, 1, 4 * chunks))
    jax.eval_shape(lambda: prefill(MODEL, ADAPTER, tokens, jnp.array([9]), NORMS, pool, jnp.zeros(1, int), 4))
    assert min(widths) == 4 and max(widths) == 4 * chunks
    assert max(width for width in widths if width < 4 * chunks) == 4 * -(-chunks // 2)
