"""Prefill of prompts and decoding of one token per sample: the transformer over a cache.

Dimension letters: N prompts, G completions per prompt, P prompt slots, C slots of a completion, B = N * G rows, T = 1
position, D hidden size, K key-value heads, Q query heads per key-value head, E head size.
"""

import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.models.transformer import KV, block, forward, lora_of, rms_norm
from qerl_jax.rollout.attention import KVCache, cached_attention


def prefill(
    model: Model,
    adapter: Adapter | None,
    tokens_NP: jax.Array,
    lengths_N: jax.Array,
    num_generations: int,
    max_completion_length: int,
    norms: Norms | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the prompts (padded on the right) once each; returns the last token's hidden state [N, D] and the cache."""
    hidden_NPD, prompt = forward(model, adapter, tokens_NP, norms=norms)
    last_ND = jnp.take_along_axis(hidden_NPD, (lengths_N - 1)[:, None, None], axis=1)[:, 0]
    N, _, K, E = prompt[0][0].shape
    empty = jnp.zeros((N, num_generations, max_completion_length, K, E), hidden_NPD.dtype)
    return last_ND, KVCache(prompt, tuple((empty, empty) for _ in prompt), lengths_N)


def decode_step(
    model: Model,
    adapter: Adapter | None,
    tokens_NG: jax.Array,
    cache: KVCache,
    step: jax.Array,
    norms: Norms,
) -> tuple[jax.Array, KVCache]:
    """Feeds each sample's completion token number `step` (0-based); returns hidden states [N * G, D] and the cache."""
    config = model.config
    N, G = tokens_NG.shape
    K, E = config.num_key_value_heads, config.head_dim
    positions_BT = jnp.repeat(cache.prompt_lengths_N + step, G)[:, None]
    x_BTD = model.base.embed[tokens_NG.reshape(N * G, 1)]
    updated = []
    for i, layer in enumerate(model.base.layers):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> tuple[jax.Array, KV]:
            own_k, own_v = (
                jax.lax.dynamic_update_slice_in_dim(old, new.reshape(N, G, 1, K, E), step, axis=2)
                for old, new in zip(cache.completion[i], (k, v), strict=True)
            )
            q_NGKQE = q.reshape(N, G, K, -1, E)
            out = cached_attention(q_NGKQE, cache.prompt[i], (own_k, own_v), cache.prompt_lengths_N, step)
            return out.reshape(N * G, 1, -1), (own_k, own_v)

        scales = norms.input[i], norms.post_attention[i]
        x_BTD, kv = block(config, attend, layer, lora_of(adapter, i), scales, x_BTD, positions_BT)
        updated.append(kv)
    hidden_BD = rms_norm(x_BTD, norms.final, config.rms_norm_eps)[:, 0]
    return hidden_BD, cache.replace(completion=tuple(updated))
