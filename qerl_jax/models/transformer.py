"""The decoder-only transformer as pure functions of (model, adapter, tokens).

Rows are contiguous: prompt, completion, then padding on the right, so causal attention alone hides the padding and a
row's values do not depend on its neighbours. Left-padded batches are accepted through an attention mask.

The residual stream is float32 whatever the compute dtype, that of the embeddings: every layer adds to it, and in
16 bits each of those sums would be rounded at the size of the whole stream. The sampler and the learner compute the
same sums in different orders. Once they differ, so do their roundings, and these roundings would be the largest of all.
Projections read the stream normed and rounded to the compute dtype, and those that write to it give float32.

Dimension letters: B rows, T positions, D hidden size, V vocabulary, H query heads, K key-value heads, Q = H / K query
heads per key-value head, E head size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.attention import causal_attention, packed_attention, prompts_attention
from qerl_jax.models.config import MLP, QKV, ModelConfig
from qerl_jax.models.linear import gated_mlp, linears, matmul
from qerl_jax.models.packed_rows import PackedRows
from qerl_jax.models.params import Adapter, Layer, LoRA, Model, Norms, bias_name, check_kinds, check_norms, norms_of
from qerl_jax.models.rope import rotated, rotation

KV = tuple[jax.Array, jax.Array]
Observe = Callable[[str, jax.Array], None]
# Of a layer and its projected queries, keys and values [B, T, heads * E]: the attention's output [B, T, H * E], and the
# rotated keys and values.
Attend = Callable[[Layer, jax.Array, jax.Array, jax.Array], tuple[jax.Array, KV]]


def embedded(model: Model, tokens: jax.Array) -> jax.Array:
    """The residual stream before the first layer, [..., D]."""
    return widened(jnp.asarray(model.base.embed)[tokens])


def widened(x: jax.Array) -> jax.Array:
    """In the residual stream's dtype."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float, dtype: jnp.dtype | None = None) -> jax.Array:
    """x / rms(x) * scale over the last axis in float32; only the product is rounded to `dtype` (None: x's), so that
    AQN's small noise survives."""
    wide = widened(x)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(variance + eps) * scale_D).astype(dtype or x.dtype)


def final_norm(model: Model, scale_D: jax.Array, x: jax.Array) -> jax.Array:
    """Hidden states after the last norm, in the compute dtype."""
    return rms_norm(x, scale_D, model.config.rms_norm_eps, model.base.embed.dtype)


def rotation_at(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rotation of queries and keys at `positions_BT`, the same for all layers."""
    return rotation(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling)


def split_heads(
    config: ModelConfig, layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array, turn: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projected [B, T, heads * E] -> [B, T, heads, E], queries and keys normed where the family does, and rotated."""
    q, k, v = (y.reshape(*y.shape[:2], -1, config.head_dim) for y in (q, k, v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
    return rotated(q, *turn), rotated(k, *turn), v


def _project(
    layer: Layer,
    lora: dict[str, LoRA],
    x: jax.Array,
    *names: str,
    observe: Observe | None = None,
    unrounded: bool = False,
) -> tuple[jax.Array, ...]:
    if observe is not None:
        observe(names[0], x)
    return linears(x, *_operands(layer, lora, names), unrounded=unrounded)


def _operands(layer: Layer, lora: dict[str, LoRA], names: Sequence[str]) -> tuple[list[Any], list[Any], list[Any]]:
    """Weights, LoRA pairs and biases of projections."""
    weights, loras = [getattr(layer, name) for name in names], [lora.get(name) for name in names]
    return weights, loras, [getattr(layer, bias_name(name)) for name in names]


def attention_inputs(
    config: ModelConfig,
    dtype: jnp.dtype,
    layer: Layer,
    lora: dict[str, LoRA],
    scale_D: jax.Array,
    x_BTD: jax.Array,
    observe: Observe | None = None,
) -> tuple[jax.Array, ...]:
    """A layer's queries, keys and values [B, T, heads * E]; the arguments are those of `block`."""
    h = rms_norm(x_BTD, scale_D, config.rms_norm_eps, dtype)
    return _project(layer, lora, h, *QKV, observe=observe)


def after_attention(
    config: ModelConfig,
    dtype: jnp.dtype,
    layer: Layer,
    lora: dict[str, LoRA],
    scale_D: jax.Array,
    x_BTD: jax.Array,
    attended: jax.Array,
    observe: Observe | None = None,
) -> jax.Array:
    """The residual stream behind a layer, of that before it and the attention's output [B, T, H * E]."""
    x_BTD += _project(layer, lora, attended, "o_proj", observe=observe, unrounded=True)[0]
    h = rms_norm(x_BTD, scale_D, config.rms_norm_eps, dtype)
    if observe is not None:
        observe(MLP[0], h)
    reads_down = None if observe is None else functools.partial(observe, MLP[-1])
    return x_BTD + gated_mlp(h, *_operands(layer, lora, MLP), reads_down)


def block(
    config: ModelConfig,
    dtype: jnp.dtype,
    attend: Attend,
    layer: Layer,
    lora: dict[str, LoRA],
    scales: tuple[jax.Array, jax.Array],
    x_BTD: jax.Array,
    observe: Observe | None = None,
) -> tuple[jax.Array, KV]:
    """One layer, computed in `dtype` on the residual stream (see the module's docstring). `observe(name, x)` is told
    what the projection `name`, and those beside it, read."""
    attended, kv = attend(layer, *attention_inputs(config, dtype, layer, lora, scales[0], x_BTD, observe))
    return after_attention(config, dtype, layer, lora, scales[1], x_BTD, attended, observe), kv


def attend_causally(config: ModelConfig, positions_BT: jax.Array, mask_BT: jax.Array | None) -> Attend:
    """The attention of whole rows."""
    turn = rotation_at(config, positions_BT)

    def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KV]:
        q, k, v = split_heads(config, layer, q, k, v, turn)
        return causal_attention(q, k, v, mask_BT).reshape(*q.shape[:2], -1), (k, v)

    return attend


def attend_in_pack(config: ModelConfig, pack: PackedRows, trains: bool) -> Attend:
    """The attention of a pack's rows, with a gradient if it `trains`, else in a single frame; queries, keys and values
    are [1, L, heads * E]."""
    turn = rotation_at(config, pack.place_L[None])

    def attend(layer: Layer, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KV]:
        q, k, v = split_heads(config, layer, q, k, v, turn)
        attention = packed_attention if trains else prompts_attention
        return attention(q[0], k[0], v[0], pack).reshape(*q.shape[:2], -1), (k, v)

    return attend


def run_layer(
    config: ModelConfig,
    layer: Layer,
    x_BTD: jax.Array,
    observe: Observe | None = None,
) -> jax.Array:
    """One layer alone on whole rows, without an adapter: for what goes through a network layer by layer.

    Args:
      config: the network's.
      layer: its weights.
      x_BTD: the residual stream before it, rows padded on the right; the layer computes in its dtype.
      observe: called once for each group of projections that read the same input, as it is traced: the name of the
        first of them (q_proj, o_proj, gate_proj, down_proj) and that input [B, T, inputs].

    Returns:
      The residual stream after it [B, T, D], rounded to that dtype.
    """
    B, T, _ = x_BTD.shape
    attend = attend_causally(config, jnp.broadcast_to(jnp.arange(T), (B, T)), None)
    scales = layer.input_norm, layer.post_attention_norm
    return block(config, x_BTD.dtype, attend, layer, {}, scales, widened(x_BTD), observe)[0].astype(x_BTD.dtype)


def lora_of(adapter: Adapter | None, layer: int) -> dict[str, LoRA]:
    return {} if adapter is None else adapter.lora[layer]


@jax.custom_vjp
def in_turn(trained: Any) -> Any:
    """The identity; but in the backward pass all its gradients are complete before any of them is used, so a layer's
    before the layers below it begin. Nothing else waits for an adapter's gradients. A compiler that puts them off has
    to keep what they multiply, the largest activations, for all layers."""
    return trained


in_turn.defvjp(lambda trained: (trained, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))


def forward(
    model: Model,
    adapter: Adapter | None,
    tokens_BT: jax.Array,
    *,
    norms: Norms | None = None,
    attention_mask_BT: jax.Array | None = None,
    pack: PackedRows | None = None,
    gradient_checkpointing: bool = False,
    keep: Callable[[int, KV], KV] | None = None,
) -> tuple[jax.Array, tuple[KV, ...]]:
    """Final hidden states of whole rows.

    Args:
      model: the frozen network.
      adapter: LoRA and trained norms; None is the reference policy.
      tokens_BT: int32.
      norms: norm scales to use instead of the clean ones (see `qerl_jax.noise`).
      attention_mask_BT: 1 where a token is real; None where rows are padded on the right only.
      pack: where the rows stand that the one row of `tokens_BT` [1, L] is a pack of; not with a mask.
      gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
      keep: makes of a layer's number, keys and values what is returned of them, before the next layer begins; a pack
        has then one frame, and no gradient.

    Returns:
      hidden_BTD after the final norm, and each layer's rotated keys and values [B, T, K, E], or what `keep` made of
      them.
    """
    config, base = model.config, model.base
    norms = norms_of(model, adapter) if norms is None else norms
    B, T = tokens_BT.shape
    if pack is not None:
        attend = attend_in_pack(config, pack, trains=keep is None)
    elif attention_mask_BT is None:
        attend = attend_causally(config, jnp.broadcast_to(jnp.arange(T), (B, T)), None)
    else:
        positions_BT = jnp.maximum(jnp.cumsum(attention_mask_BT, axis=1) - 1, 0)
        attend = attend_causally(config, positions_BT, attention_mask_BT)
    plain = functools.partial(block, config, base.embed.dtype, attend)
    run = jax.checkpoint(plain) if gradient_checkpointing else plain
    x_BTD = embedded(model, tokens_BT)
    if isinstance(x_BTD, jax.core.Tracer):  # so that it is traced and lowered once for all layers of a kind
        run = jax.jit(run)
    caches = []
    for i, layer in enumerate(base.layers):
        scales = norms.input[i], norms.post_attention[i]
        x_BTD, kv = run(layer, *in_turn((lora_of(adapter, i), scales, x_BTD)))
        if keep is not None:
            x_BTD, kv = jax.lax.optimization_barrier((x_BTD, keep(i, kv)))
        caches.append(kv)
    return final_norm(model, norms.final, x_BTD), tuple(caches)


def head(model: Model, hidden_MD: jax.Array) -> jax.Array:
    """float32 logits [M, V] of hidden states [M, D]."""
    matrix = model.base.embed if model.base.lm_head is None else model.base.lm_head
    return matmul(hidden_MD, jax.lax.stop_gradient(matrix), jnp.float32)


def logits(
    model: Model,
    tokens_BT: jax.Array,
    *,
    adapter: Adapter | None = None,
    norms: Norms | None = None,
    attention_mask: jax.Array | None = None,
) -> jax.Array:
    """float32 logits [B, T, V] of every position.

    Differentiable with respect to the adapter in reverse mode, not in forward mode. Without the FP4 kernels so is its
    gradient, in float32 also in forward mode (`jax.hessian`).

    Args:
      model: the network.
      tokens_BT: int32 from 0 to V - 1, of one row and one token at least. Ids outside are refused where they are known;
        in a trace the nearest one is taken.
      adapter: LoRA and trained norms; None is the base alone.
      norms: norm scales to use instead, such as `perturb_norms` gives.
      attention_mask: [B, T], 1 where a token is real; needed where padding comes before a real token, as on the left.

    Raises:
      TypeError: an argument of another kind. ValueError: tokens or a mask of another shape, an id that the vocabulary
        does not have, or an adapter that does not belong to the network.
    """
    tokens_BT, mask_BT = checked_tokens(model, tokens_BT, adapter, norms, attention_mask)
    hidden_BTD, _ = forward(model, adapter, tokens_BT, norms=norms, attention_mask_BT=mask_BT)
    B, T, D = hidden_BTD.shape
    return head(model, hidden_BTD.reshape(B * T, D)).reshape(B, T, -1)


def checked_tokens(
    model: Model,
    tokens_BT: jax.Array,
    adapter: Adapter | None,
    norms: Norms | None,
    attention_mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Tokens with ids that the vocabulary has, and the mask as truth values, once all is as `logits` says; raises what
    it names."""
    check_kinds(model, adapter)
    if norms is not None:
        check_norms(model, norms)
    if not hasattr(tokens_BT, "dtype"):
        raise TypeError(f"tokens are of type {type(tokens_BT).__name__}; expected an array [B, T] of whole numbers")
    if tokens_BT.ndim != 2 or 0 in tokens_BT.shape or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        found = f"{tokens_BT.dtype} {list(tokens_BT.shape)}"
        raise ValueError(f"tokens are {found}; expected whole numbers [B, T], one row and one token or more")
    known = None if isinstance(tokens_BT, jax.core.Tracer) else np.asarray(tokens_BT)
    if known is not None and (strange := model.config.unknown_id(known)) is not None:
        raise ValueError(f"tokens have the id {strange}; allowed: 0 to {model.config.vocab_size - 1}")
    # As truth values, whose running sum is 32 bits wide: that of int8 would be int8 too, and end at 127.
    mask_BT = None if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
    if mask_BT is not None and mask_BT.shape != tokens_BT.shape:
        raise ValueError(f"attention_mask is {list(mask_BT.shape)}; expected {list(tokens_BT.shape)}, as tokens are")
    # JAX would count an id below 0 from the vocabulary's end, and make NaN of a target beyond it.
    return jnp.clip(tokens_BT.astype(jnp.int32), 0, model.config.vocab_size - 1), mask_BT
