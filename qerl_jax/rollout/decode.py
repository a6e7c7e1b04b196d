"""Prefill of prompts and decoding of one token per slot: the transformer over a cache.

Dimension letters: S slots, A prompts that are prefilled, R rows of the pool, P prompt positions, T tokens of a chunk, D
hidden size, K key-value heads, E head size.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import reads_units, stored
from qerl_jax.models.attention import plain_attention
from qerl_jax.models.params import Adapter, Layer, Model, Norms
from qerl_jax.models.transformer import (
    KV,
    block,
    embedded,
    final_norm,
    forward,
    lora_of,
    rotation_at,
    split_heads,
)
from qerl_jax.rollout.attention import KVCache, as_cached, token_attention
from qerl_jax.rollout.fused import layer_parts, run_layers

# What prompts leave: their last tokens' hidden states [R, D], and each layer's keys and values, as `KVCache` has them.
Prefilled = tuple[jax.Array, tuple[KV, ...]]
PREFILL_TOKENS = 8192  # prompt tokens that are in the network at once, which bounds the activations' memory
# Of a longer prompt so many, whose scores with all of the prompt's keys are kept: 3 GB at 7B with 16,384 tokens, where
# those of 8,192 tokens would be 23.
CHUNK_TOKENS = 1024


def prefill(
    model: Model,
    adapter: Adapter | None,
    tokens_AP: jax.Array,
    lengths_A: jax.Array,
    norms: Norms,
    pool: Prefilled,
    rows_A: jax.Array,
    tokens_at_once: int = PREFILL_TOKENS,
) -> Prefilled:
    """Runs prompts (padded on the right) once each, into rows of a pool.

    At most `tokens_at_once` tokens go through the network together: some of the prompts or, where a single prompt is
    longer than that, one smaller chunk of it after the other, each attending to those before. What they leave goes
    into the pool before the next ones begin. So however many prompts there are, it exists once, in the cache's dtype.

    Args:
      pool: what prompts leave, for R of them; keys and values in any dtype of the cache.
      rows_A: each prompt's row of the pool, all different; a prompt whose row is beyond the pool is dropped.

    Returns:
      The pool with the prompts.
    """
    A, P = tokens_AP.shape
    in_chunks = tokens_at_once < P
    # Filled up with the last token, as packs are: 0 times what another one may overflow to in float16 is NaN.
    tokens_AP = jnp.take_along_axis(tokens_AP, jnp.minimum(jnp.arange(P), lengths_A[:, None] - 1), axis=1)

    def run(pool: Prefilled, prompts: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Prefilled, None]:
        (tokens, lengths, rows), (hidden_RD, layers) = prompts, pool

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[rows].set(stored(new, old.dtype), mode="drop", unique_indices=True)

        def keep(i: int, kv: KV) -> KV:
            k, v = as_cached(model.config, kv, layers[i])
            if in_chunks:  # else XLA may order the whole pool, by a copy, as chunks' products want their keys
                k, v = (with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in (k, v))
            return put(layers[i][0], k), put(layers[i][1], v)

        if in_chunks:
            last, caches = _in_chunks(model, adapter, tokens, lengths, norms, min(tokens_at_once, CHUNK_TOKENS))
            layers = tuple(keep(i, kv) for i, kv in enumerate(caches))
        else:
            hidden, layers = forward(model, adapter, tokens, norms=norms, keep=keep)
            last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return (put(hidden_RD, last), layers), None

    together = max(1, tokens_at_once // P)
    if together >= A:
        return run(pool, (tokens_AP, lengths_A, rows_A))[0]
    parts = -(-A // together)
    padding = parts * together - A
    tokens = jnp.pad(tokens_AP, ((0, padding), (0, 0))).reshape(parts, together, P)
    lengths = jnp.pad(lengths_A, (0, padding), constant_values=1).reshape(parts, together)
    beyond = pool[0].shape[0] + A + jnp.arange(padding, dtype=rows_A.dtype)
    rows = jnp.concatenate([rows_A, beyond]).reshape(parts, together)
    return jax.lax.scan(run, pool, (tokens, lengths, rows))[0]


def _in_chunks(
    model: Model, adapter: Adapter | None, tokens_AP: jax.Array, lengths_A: jax.Array, norms: Norms, T: int
) -> tuple[jax.Array, tuple[KV, ...]]:
    """`prefill` of prompts longer than T tokens; chunks behind the end of the longest one are left out."""
    config, dtype = model.config, model.base.embed.dtype
    A, P = tokens_AP.shape
    wide = -(-P // T) * T
    tokens_AP = jnp.pad(tokens_AP, ((0, 0), (0, wide - P)), mode="edge")  # see `prefill`: with the prompt's last token
    empty = jnp.zeros((A, wide, config.num_key_value_heads, config.head_dim), dtype)
    State = tuple[jax.Array, jax.Array, tuple[KV, ...]]

    def chunk(state: State) -> State:
        start, last_AD, caches = state
        positions_AT = jnp.broadcast_to(start + jnp.arange(T), (A, T))
        mask = jnp.arange(wide) <= positions_AT[:, None, :, None]
        turn = rotation_at(config, positions_AT)
        x_ATD = embedded(model, jax.lax.dynamic_slice_in_dim(tokens_AP, start, T, axis=1))
        updated = []
        for i, layer in enumerate(model.base.layers):

            def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> tuple[jax.Array, KV]:
                q, k, v = split_heads(config, layer, q, k, v, turn)
                all_k, all_v = (
                    jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
                    for old, new in zip(caches[i], (k, v), strict=True)
                )
                out = plain_attention(q, all_k, all_v, mask)
                return out.reshape(A, T, -1), (all_k, all_v)

            scales = norms.input[i], norms.post_attention[i]
            x_ATD, kv = block(config, dtype, attend, layer, lora_of(adapter, i), scales, x_ATD)
            updated.append(kv)
        hidden_ATD = final_norm(model, norms.final, x_ATD)
        at_A = lengths_A - 1 - start
        found_AD = jnp.take_along_axis(hidden_ATD, jnp.clip(at_A, 0, T - 1)[:, None, None], axis=1)[:, 0]
        last_AD = jnp.where(((at_A >= 0) & (at_A < T))[:, None], found_AD, last_AD)
        return start + T, last_AD, tuple(updated)

    begin: State = (jnp.int32(0), jnp.zeros((A, config.hidden_size), dtype), ((empty, empty),) * len(model.base.layers))
    _, last_AD, caches = jax.lax.while_loop(lambda state: state[0] < jnp.max(lengths_A), chunk, begin)
    return last_AD, tuple((k[:, :P], v[:, :P]) for k, v in caches)


def decode_step(
    model: Model,
    adapter: Adapter | None,
    tokens_S: jax.Array,
    cache: KVCache,
    prompt_of_S: jax.Array,
    lengths_S: jax.Array,
    steps_S: jax.Array,
    norms: Norms,
    group: int | None,
) -> tuple[jax.Array, KVCache]:
    """Feeds each slot's completion token number `steps_S` (0-based, -1 for none) after a prompt of `lengths_S` tokens;
    `group` is that of `token_attention`.

    Returns:
      Hidden states after the final norm [S, D], and the cache with the new keys and values. For slots without a token
      they have no meaning; the cache keeps theirs at a position that is written again before it is read.
    """
    parts = layer_parts(model, adapter, tokens_S.shape[0])
    in_units = parts is not None and all(reads_units(tokens_S.shape[0], part) for part in parts)
    attend = token_attention(model.config, cache, prompt_of_S, lengths_S, steps_S, group, in_units)
    x_SD = embedded(model, tokens_S)
    if parts is not None:
        x_SD, updated = run_layers(model, adapter, norms, parts, attend, x_SD, in_units)
        return final_norm(model, norms.final, x_SD), cache.replace(completion=tuple(updated))
    x_S1D, updated = x_SD[:, None], []
    for i, layer in enumerate(model.base.layers):
        scales = norms.input[i], norms.post_attention[i]

        def attend_alone(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> tuple[jax.Array, KV]:
            out, kv, _ = attend(i)(layer, q, k, v)
            return out, kv

        x_S1D, kv = block(model.config, model.base.embed.dtype, attend_alone, layer, lora_of(adapter, i), scales, x_S1D)
        updated.append(kv)
    return final_norm(model, norms.final, x_S1D[:, 0]), cache.replace(completion=tuple(updated))
