"""Attention of one new token per sample over its prompt and its own completion, from a cache.

Dimension letters: N prompts, G completions per prompt, P prompt slots, C slots of a completion, K key-value heads, Q
query heads per key-value head, E head size.
"""

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.transformer import KV

_NEGATIVE = -1e30  # finite, so that a row in which everything is masked stays free of NaN


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of one decode batch, a tuple entry per layer.

    The prompt part is stored once per prompt and read by its whole group; the completion part has one row per sample.
    """

    prompt: tuple[KV, ...]  # each [N, P, K, E]
    completion: tuple[KV, ...]  # each [N, G, C, K, E]
    prompt_lengths_N: jax.Array  # int32


def cached_attention(
    q_NGKQE: jax.Array, prompt: KV, completion: KV, lengths_N: jax.Array, step: jax.Array
) -> jax.Array:
    """One query per sample over its prompt's keys and its own completion's keys 0..step, [N, G, K, Q, E]."""
    (prompt_k, prompt_v), (own_k, own_v) = prompt, completion
    P, C, E = prompt_k.shape[1], own_k.shape[2], q_NGKQE.shape[-1]
    scores_P = jnp.einsum("ngkqe,npke->ngkqp", q_NGKQE, prompt_k, preferred_element_type=jnp.float32)
    scores_C = jnp.einsum("ngkqe,ngcke->ngkqc", q_NGKQE, own_k, preferred_element_type=jnp.float32)
    live_P = jnp.arange(P) < lengths_N[:, None, None, None, None]
    live_C = jnp.arange(C) <= step
    scores = jnp.concatenate([jnp.where(live_P, scores_P, _NEGATIVE), jnp.where(live_C, scores_C, _NEGATIVE)], axis=-1)
    weights = jax.nn.softmax(scores * E**-0.5, axis=-1).astype(q_NGKQE.dtype)
    return jnp.einsum("ngkqp,npke->ngkqe", weights[..., :P], prompt_v) + jnp.einsum(
        "ngkqc,ngcke->ngkqe", weights[..., P:], own_v
    )
