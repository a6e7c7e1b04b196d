"""The cache of keys and values, and the attention of one new token per slot over it: a kernel on Hopper, and with
jax-triton from Ampere on; plain JAX elsewhere.

A prompt's keys are stored once, in a row of the pool, however many samples go on from it; a slot holds its own sample's
keys in a contiguous row. Both keep the dtype of their arrays, of the network's compute dtype or of 8 bits, and what is
read is cast to the query's. For the kernel a position's heads stand side by side, without it a head's positions, as
products take them: on a GPU XLA otherwise carries a transposed copy of all layers' through the loop.

Dimension letters: S slots, R rows of the prompt pool, A prompts, P prompt positions, L tokens of several prompts, C
completion positions, K key-value heads, Q query heads per key-value head, E head size; G slots per row where the slots
stand in groups, then N = S / G.
"""

from collections.abc import Callable
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import (
    HeadNorms,
    OwnKV,
    PromptKV,
    decode_attention,
    in_unit_order,
    marked,
    stored,
    takes_decode_attention,
)
from qerl_jax.errors import UserError
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.params import Layer, Model
from qerl_jax.models.transformer import KV, rotation_at, split_heads
from qerl_jax.option_names import KVCacheDtype

# The attention's output, the layer's keys and values, and the output's x A^T, see `TokenAttend`.
Attended = tuple[jax.Array, KV, jax.Array | None]


class TokenAttend(Protocol):
    """The attention of one layer for one new token per slot."""

    def __call__(self, layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array | None = None) -> Attended:
        """`a` is LoRA's A of the projection that reads the output. Their product, for `between_attentions`, is
        None where there is no `a`, or no kernel that makes it."""


_NEGATIVE = -1e30  # finite, so that a row in which everything is masked stays free of NaN


class KVCache(flax.struct.PyTreeNode):
    """Keys and values, a tuple entry per layer: of the kernel's shapes, or without it each [.., K, positions, E]."""

    prompt: tuple[KV, ...]  # each [R, P, K, E]
    completion: tuple[KV, ...]  # each [S, C, K, E]
    prompt_lengths_R: jax.Array  # int32


def kv_dtypes(kv_cache_dtype: KVCacheDtype, wide: jnp.dtype) -> tuple[jnp.dtype, jnp.dtype]:
    """The dtypes of keys and of values where the compute dtype is `wide`."""
    narrow = jnp.dtype(jnp.float8_e4m3fn)
    return (narrow if kv_cache_dtype == "fp8" else wide), (wide if kv_cache_dtype == "auto" else narrow)


def cache_dtypes(model: Model, kv_cache_dtype: KVCacheDtype) -> tuple[jnp.dtype, jnp.dtype]:
    """The dtypes of keys and of values of a model's cache, see `SamplingSettings`.

    Raises:
      UserError: 8-bit keys for a model whose keys have biases. Those of trained models make some numbers of a key
        hundreds of times larger than what changes from token to token, which 3 bits of mantissa then lose: vLLM's and
        TensorRT-LLM's 8-bit caches are known to make Qwen2 and Qwen2.5 answer nonsense.
    """
    wide = model.base.embed.dtype
    if kv_cache_dtype == "fp8" and any(layer.k_bias is not None for layer in model.base.layers):
        raise UserError(
            f"kv_cache_dtype is fp8, and the keys of {model.config.model_type} have biases, beside which 8 bits lose "
            "what differs from token to token; allowed for this model: fp8_values, which keeps its keys in "
            f"{wide.name}, and auto"
        )
    return kv_dtypes(kv_cache_dtype, wide)


def empty_kv(model: Model, rows: int, positions: int, kv_cache_dtype: KVCacheDtype = "auto") -> tuple[KV, ...]:
    """Zero keys and values for each layer, as `KVCache` has them."""
    config, (keys, values) = model.config, cache_dtypes(model, kv_cache_dtype)
    heads, E = config.num_key_value_heads, config.head_dim
    kernel = has_kernel(config, model.base.embed.dtype, keys, values)
    shape = (rows, positions, heads, E) if kernel else (rows, heads, positions, E)
    return tuple((jnp.zeros(shape, keys), jnp.zeros(shape, values)) for _ in model.base.layers)


def has_kernel(config: ModelConfig, wide: jnp.dtype, keys: jnp.dtype, values: jnp.dtype) -> bool:
    """Whether a token's attention is a kernel's, for queries of dtype `wide` and a cache of these dtypes."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return takes_decode_attention(wide, *heads, keys, values)


def as_cached(config: ModelConfig, new: KV, cached: KV) -> KV:
    """Keys and values [A, P, K, E] of prompts, of the network's dtype, as those of `cached` stand."""
    k, v = new
    if not has_kernel(config, k.dtype, *(array.dtype for array in cached)):
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return k, v


def put_tokens(config: ModelConfig, kept: KV, new: KV, rows_L: jax.Array, places_L: jax.Array) -> KV:
    """A layer's `prompt` entries of the cache, with keys and values [L, K, E] of tokens, in the network's dtype, at
    places of rows. All places are different; those of rows beyond the pool are dropped."""
    heads_first = not has_kernel(config, new[0].dtype, *(array.dtype for array in kept))
    at = (rows_L, slice(None), places_L) if heads_first else (rows_L, places_L)
    k, v = (
        old.at[at].set(stored(one, old.dtype), mode="drop", unique_indices=True)
        for old, one in zip(kept, marked(*new), strict=True)
    )
    return k, v


def token_attention(
    config: ModelConfig,
    cache: KVCache,
    prompt_of_S: jax.Array,
    lengths_S: jax.Array,
    steps_S: jax.Array,
    group: int | None,
    in_units: bool = False,
) -> Callable[[int], TokenAttend]:
    """The attention of layer i for one new token per slot, which also puts the token's key and value in the cache.

    Args:
      prompt_of_S: each slot's row of the pool.
      lengths_S: tokens of the prompt there.
      steps_S: the completion position of the new token; -1 in slots whose result is of no interest.
      group: G where slot s is known to read row s // G, so that a row is read once for its whole group; None where
        slots read any row.
      in_units: the result's columns in unit order, see `between_attentions`.
    """
    turn = rotation_at(config, (lengths_S + steps_S)[:, None])
    cos_SF, sin_SF = (part[:, 0] for part in turn)

    def by_kernel(i: int, layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array | None) -> Attended:
        prompt = PromptKV(*cache.prompt[i], prompt_of_S, lengths_S)
        own = OwnKV(*cache.completion[i], steps_S)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm, layer.k_norm, config.rms_norm_eps)
        out, own_k, own_v, *hidden = decode_attention(
            q[:, 0], k[:, 0], v[:, 0], cos_SF, sin_SF, prompt, own, norms, group=group or 1, in_units=in_units, a=a
        )
        return out[:, None], (own_k, own_v), hidden[0] if hidden else None

    def plainly(i: int, layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array | None) -> Attended:
        q, k, v = split_heads(config, layer, q, k, v, turn)
        own = write_token(cache.completion[i], marked(k[:, 0], v[:, 0]), steps_S)
        q_SKQE = q.reshape(q.shape[0], config.num_key_value_heads, -1, config.head_dim)
        out = cached_attention(q_SKQE, cache.prompt[i], own, prompt_of_S, lengths_S, steps_S, group)
        out = out.reshape(q.shape[0], -1)
        return (in_unit_order(out) if in_units else out)[:, None], own, None

    def of_layer(i: int) -> TokenAttend:
        def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array | None = None) -> Attended:
            kernel = has_kernel(config, q.dtype, *(array.dtype for array in cache.completion[i]))
            return (by_kernel if kernel else plainly)(i, layer, q, k, v, a)

        return attend

    return of_layer


def write_token(kept: KV, new: KV, steps_S: jax.Array) -> KV:
    """`kept` [S, K, C, E] with each slot's new key and value [S, K, E] at its own position `steps_S`, -1 being the last
    one."""
    slots_S = jnp.arange(steps_S.shape[0])
    k, v = (
        old.at[slots_S, :, steps_S].set(stored(one, old.dtype), unique_indices=True, indices_are_sorted=True)
        for old, one in zip(kept, new, strict=True)
    )
    return k, v


def cached_attention(
    q_SKQE: jax.Array,
    prompt: KV,
    completion: KV,
    prompt_of_S: jax.Array,
    lengths_S: jax.Array,
    steps_S: jax.Array,
    group: int | None,
) -> jax.Array:
    """One query per slot over its prompt and over positions 0..step of its own completion, [S, K, Q, E].

    Args:
      q_SKQE: rotated queries.
      prompt, completion: one layer's entries of the cache, [R, K, P, E] and [S, K, C, E] each.
      prompt_of_S: each slot's row of the pool.
      lengths_S: tokens of the prompt there.
      steps_S: the position of each slot's newest key; -1 for none.
      group: G where slot s is known to read row s // G, so that a row is read once for its whole group; None where
        slots read any row, and each then gets a copy.
    """
    dtype = q_SKQE.dtype
    S, K, Q, E = q_SKQE.shape
    if group is None:
        # Not before the layer's turn: XLA would copy those of all layers at once.
        q_SKQE, prompt_of_S = jax.lax.optimization_barrier((q_SKQE, prompt_of_S))
        prompt = prompt[0][prompt_of_S], prompt[1][prompt_of_S]
    prompt_k, prompt_v, own_k, own_v = (rows.astype(dtype) for rows in (*prompt, *completion))
    G = group or 1
    N, _, P, _ = prompt_k.shape
    grouped = q_SKQE.reshape(N, G, K, Q, E)
    scores_P = jnp.einsum("ngkqe,nkpe->ngkqp", grouped, prompt_k, preferred_element_type=jnp.float32)
    scores_C = jnp.einsum("skqe,skce->skqc", q_SKQE, own_k, preferred_element_type=jnp.float32)
    live_P = jnp.arange(P) < lengths_S[:, None, None, None]
    live_C = jnp.arange(own_k.shape[2]) <= steps_S[:, None, None, None]
    scores = [
        jnp.where(live_P, scores_P.reshape(S, K, Q, P), _NEGATIVE),
        jnp.where(live_C, scores_C, _NEGATIVE),
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * E**-0.5, axis=-1).astype(dtype)
    from_prompt = jnp.einsum("ngkqp,nkpe->ngkqe", weights[..., :P].reshape(N, G, K, Q, P), prompt_v)
    return from_prompt.reshape(S, K, Q, E) + jnp.einsum("skqc,skce->skqe", weights[..., P:], own_v)
