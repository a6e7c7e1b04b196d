"""Prefill of prompts and decoding of one token per slot: the transformer over a cache.

Dimension letters: S slots, A prompts that are prefilled, N of a pack, L its token slots, R rows of the pool, P prompt
positions, T tokens of a chunk, W positions of all chunks, D hidden size, K key-value heads, E head size.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import marked, reads_units, stored
from qerl_jax.models.attention import by_cudnn, causal_attention, plain_attention
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.packed_rows import Frame, packed_rows
from qerl_jax.models.packs import in_packs
from qerl_jax.models.params import Adapter, Layer, LoRA, Model, Norms
from qerl_jax.models.transformer import (
    KV,
    after_attention,
    attention_inputs,
    block,
    embedded,
    final_norm,
    forward,
    lora_of,
    rotation_at,
    split_heads,
)
from qerl_jax.rollout.attention import KVCache, as_cached, put_tokens, token_attention
from qerl_jax.rollout.fused import layer_parts, run_layers

# What prompts leave: their last tokens' hidden states [R, D], and each layer's keys and values, as `KVCache` has them.
Prefilled = tuple[jax.Array, tuple[KV, ...]]
_Prompts = tuple[jax.Array, jax.Array, jax.Array]  # tokens, lengths, and rows of the pool; of one without its dimension
# Tokens of several prompts that are in the network at once: enough for fast products, and few, since a pack is computed
# whole however full it is. In attention there is room for four times as many, as that pads each prompt.
PACK_TOKENS = 2048
_ROOM = 4
# Of a prompt that may have more tokens than a pack, those that are in a layer's products at once, fewer for the same
# reason. Without cuDNN's attention their scores with all of the prompt's keys are kept, 3 GB at 7B with 16,384 tokens.
CHUNK_TOKENS = 1024


def prefill(
    model: Model,
    adapter: Adapter | None,
    tokens_AP: jax.Array,
    lengths_A: jax.Array,
    norms: Norms,
    pool: Prefilled,
    rows_A: jax.Array,
    tokens_at_once: int = PACK_TOKENS,
) -> Prefilled:
    """Runs prompts (padded on the right) once each, into rows of a pool.

    They go through the network in packs of some of them; or, where one may be longer than a pack, one by one, through
    each layer's products one chunk after the other. Either way time goes by the packs or chunks that their tokens fill,
    not by P. What they leave goes into the pool before the next ones begin. So however many prompts there are, it
    exists once, in the cache's dtype.

    Args:
      pool: what prompts leave, for R of them; keys and values in any dtype of the cache. Behind a prompt's own its row
        keeps what it had, or anything.
      rows_A: each prompt's row of the pool, all different; a prompt whose row is beyond the pool is dropped.
      tokens_at_once: those of a pack, see PACK_TOKENS.

    Returns:
      The pool with the prompts.
    """
    A, P = tokens_AP.shape
    prompts = jnp.asarray(tokens_AP), jnp.asarray(lengths_A), jnp.asarray(rows_A)
    if tokens_at_once < P:
        chunk = min(tokens_at_once, CHUNK_TOKENS)

        def one(pool: Prefilled, prompt: _Prompts) -> tuple[Prefilled, None]:
            return _in_chunks(model, adapter, norms, chunk, pool, prompt), None

        return jax.lax.scan(one, pool, prompts)[0]
    slots, frame = pack_of(A, P, tokens_at_once)

    def some(pool: Prefilled, prompts: _Prompts, places_N: jax.Array) -> Prefilled:
        return _in_a_pack(model, adapter, norms, slots, frame, pool, prompts, places_N < A)

    if slots == A * P:
        return some(pool, prompts, jnp.arange(A))
    return in_packs(some, pool, prompts, prompts[1], slots=slots, frames=(frame,))


def pack_of(prompts: int, max_prompt_length: int, tokens_at_once: int = PACK_TOKENS) -> tuple[int, Frame]:
    """The token slots of a pack of some of so many prompts, and the frame in which they attend. There is one frame, so
    that a prompt's numbers do not depend on the others' lengths. Full prompts are in equal parts."""
    full = -(-tokens_at_once // max_prompt_length)
    full = -(-prompts // -(-prompts // full))
    rows = min(prompts, _ROOM * tokens_at_once // max_prompt_length)
    return full * max_prompt_length, Frame(rows, max_prompt_length)


def _in_a_pack(
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    slots: int,
    frame: Frame,
    pool: Prefilled,
    prompts: _Prompts,
    given_N: jax.Array,
) -> Prefilled:
    """`prefill` of those of N prompts that are `given`, the first of them."""
    (tokens_NP, lengths_N, rows_N), (hidden_RD, layers) = prompts, pool
    pack = packed_rows(jnp.where(given_N, lengths_N, 0), slots, (frame,))
    beyond = hidden_RD.shape[0] + jnp.max(rows_N) + 1  # rows there are dropped
    rows_L = jnp.where(pack.live_L, rows_N[pack.row_L], beyond + jnp.arange(slots))

    def keep(i: int, kv: KV) -> KV:
        k, v = kv
        return put_tokens(model.config, layers[i], (k[0], v[0]), rows_L, pack.place_L)

    tokens_1L = tokens_NP[pack.row_L, pack.place_L][None]
    hidden_1LD, layers = forward(model, adapter, tokens_1L, norms=norms, pack=pack, keep=keep)
    last_ND = hidden_1LD[0, pack.starts_N + pack.lengths_N - 1]
    rows_N = jnp.where(given_N, rows_N, beyond + jnp.arange(len(rows_N)))
    return _put_rows(hidden_RD, last_ND, rows_N), layers


def _put_rows(old: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    return old.at[rows].set(stored(new, old.dtype), mode="drop", unique_indices=True)


def _in_chunks(
    model: Model, adapter: Adapter | None, norms: Norms, T: int, pool: Prefilled, prompt: _Prompts
) -> Prefilled:
    """`prefill` of one prompt [P] by itself, layer by layer, through a layer's products T tokens after T."""
    (tokens_P, length, row), (hidden_RD, layers) = prompt, pool
    config, dtype, P = model.config, model.base.embed.dtype, len(tokens_P)
    W, chunks = -(-P // T) * T, -(-length // T)
    # Filled up with the last token, as packs are: 0 times what another one may overflow to in float16 is NaN.
    x_1WD = embedded(model, tokens_P[jnp.minimum(jnp.arange(W), length - 1)][None])
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    qkv = tuple(jnp.zeros((1, W, count, config.head_dim), dtype) for count in heads)
    run = jax.jit(functools.partial(_layer_in_chunks, config, dtype, T))  # so that it is lowered once for all layers

    def keep(i: int, k: jax.Array, v: jax.Array) -> KV:
        kv = as_cached(config, marked(k[:, :P], v[:, :P]), layers[i])
        # Else XLA may order the whole pool, by a copy, as chunks' products want their keys.
        k, v = (with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in kv)
        return _put_rows(layers[i][0], k, row[None]), _put_rows(layers[i][1], v, row[None])

    kept = []
    for i, layer in enumerate(model.base.layers):
        scales = norms.input[i], norms.post_attention[i]
        x_1WD, qkv = run(layer, lora_of(adapter, i), scales, x_1WD, qkv, chunks)
        x_1WD, kv = jax.lax.optimization_barrier((x_1WD, keep(i, *qkv[1:])))
        kept.append(kv)
    last_1D = final_norm(model, norms.final, x_1WD[:, length - 1])
    return _put_rows(hidden_RD, last_1D, row[None]), tuple(kept)


def _layer_in_chunks(
    config: ModelConfig,
    dtype: jnp.dtype,
    T: int,
    layer: Layer,
    lora: dict[str, LoRA],
    scales: tuple[jax.Array, jax.Array],
    x_1WD: jax.Array,
    qkv: tuple[jax.Array, ...],
    chunks: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`block` of a whole prompt in the first `chunks` of T positions: queries, keys and values [1, W, heads, E] of one
    after the other, in place of those of the layer before; attention; and what follows it, again in chunks."""
    W = x_1WD.shape[1]

    def at(i: jax.Array, whole: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(whole, i * T, T, axis=1)

    def put(i: jax.Array, whole: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, new, i * T, axis=1)

    def project(i: jax.Array, qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn = rotation_at(config, (i * T + jnp.arange(T))[None])
        q, k, v = attention_inputs(config, dtype, layer, lora, scales[0], at(i, x_1WD))
        return tuple(put(i, *both) for both in zip(qkv, split_heads(config, layer, q, k, v, turn), strict=True))

    q, k, v = jax.lax.fori_loop(0, chunks, project, qkv)
    whole = _of_the_first(chunks * T, T, q, k, v) if by_cudnn(dtype) else None

    def finish(i: jax.Array, x_1WD: jax.Array) -> jax.Array:
        if whole is None:
            seen = jnp.arange(W) <= i * T + jnp.arange(T)[:, None]
            attended = plain_attention(at(i, q), k, v, seen[None, None])
        else:
            attended = at(i, whole)
        x_1TD = at(i, x_1WD)
        return put(i, x_1WD, after_attention(config, dtype, layer, lora, scales[1], x_1TD, attended.reshape(1, T, -1)))

    return jax.lax.fori_loop(0, chunks, finish, x_1WD), (q, k, v)


def _of_the_first(count: jax.Array, least: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of the first `count` positions, and of less than as many behind them; zeros for the others."""
    W = q.shape[1]
    widths = [W]
    while widths[0] > least:  # by halves, so that what a part copies and fills up is about half of the whole
        widths.insert(0, -(-widths[0] // least // 2) * least)

    def attend(width: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = causal_attention(q[:, :width], k[:, :width], v[:, :width], None)
        return jnp.pad(out, ((0, 0), (0, W - width), (0, 0), (0, 0)))

    shorter = jnp.sum(jnp.array(widths[:-1], jnp.int32) < count)
    return jax.lax.switch(shorter, [functools.partial(attend, width) for width in widths], q, k, v)


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
