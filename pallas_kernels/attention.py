"""decode_attention: one decoding step's attention over a shared prompt and each sample's own keys, with the new key's
rotation and its writing to the cache: a Mosaic kernel for Hopper, a Triton one for other GPUs, and plain JAX, which
they are tested against.

Letters: B samples, H query heads, K key-value heads, E head size, N prompts of P slots, C slots of a completion.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import attention_kernel
from .attention_plan import HEAD_SIZES, MAX_GROUP, AttentionConfig, AttentionPlan, check_heads
from .hidden import hidden_parts
from .operands import padded_a, padded_rank
from .ptx import HALVES
from .stream_plan import RESIDENT
from .variants import capability, has_kernels, kernel_family

# Measured on an H200 (docs/log.md): 32 CTAs are as fast as fewer; 64 take 1.4 us longer, and save each other as
# much with 800 positions. Two samples to a unit pay from prompts of this length on where that leaves a unit to each
# multiprocessor, and always where it leaves more.
FREE_CTAS, WORTH_A_CTA, WORTH_A_PAIR = 32, 416, 512
A_WAVE = 0.6  # what a wave of CTAs takes besides its contexts, of what one pair's takes


class PromptKV(NamedTuple):
    """Keys and values of the prompts [N, P, K, E], rotated; which one each sample continues [B], its length [B]."""

    k: jax.Array
    v: jax.Array
    of: jax.Array
    lengths: jax.Array


class OwnKV(NamedTuple):
    """Keys and values of the completions [B, C, K, E], rotated; how many each sample has so far [B], less than C, or -1
    if it ended."""

    k: jax.Array
    v: jax.Array
    lengths: jax.Array


class HeadNorms(NamedTuple):
    """Qwen3's RMSNorm of every query and key head: scales [E] in float32, and epsilon."""

    q: jax.Array
    k: jax.Array
    eps: float


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    prompt: PromptKV,
    own: OwnKV,
    norms: HeadNorms | None = None,
    *,
    group: int = 1,
    in_units: bool = False,
    a: jax.Array | None = None,
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, ...]:
    """softmax(q K^T / sqrt(E)) V for one new token per sample, over its prompt, its own keys, and its new key.

    Args:
      q, k, v: [B, H * E], [B, K * E], [B, K * E], as the projections gave them: neither normed nor rotated.
      cos, sin: float32 [B, E / 2], of the new token's angles.
      prompt, own: the caches, keys and values in q's dtype or in a narrower one (`stored`), each in one for both
        caches. The new key and value are written at each sample's `own.lengths`, in place where the
        caller gives the caches away.
      norms: per-head norms, where the family has them.
      group: so many samples in a row continue the same prompt, so that the kernel may read it once for some or all.
      in_units: the result's columns in unit order, for a `between_attentions` that reads them so.
      a: [R, H * E], LoRA's A of the projection that reads the result, for a `between_attentions` that wants the
        product with it.
      config: a configuration of the Mosaic kernel; None chooses the kernel for the device, and one.

    Returns:
      [B, H * E] in q's dtype, zeros for samples that have ended, and the updated keys and values of the completions;
      with `a` also the result's product with it, in a part for each head (`hidden.hidden_parts`).

    Raises:
      ValueError: the kernel, or the given configuration of it, does not take the shape or the dtypes (see
        `takes_decode_attention`), or Triton's is asked for `in_units` or `a`.
    """
    B, E = q.shape[0], prompt.k.shape[-1]
    H, K = q.shape[1] // E, prompt.k.shape[2]
    kept = own.k.dtype, own.v.dtype
    if q.dtype.name not in HALVES or {k.dtype, v.dtype} != {q.dtype}:
        found = ", ".join(str(x.dtype) for x in (q, k, v))
        raise ValueError(f"queries, keys and values are {found}; the kernel takes {' or '.join(HALVES)}, of all three")
    allowed = _cache_dtypes(q.dtype)
    if kept != (prompt.k.dtype, prompt.v.dtype) or not {*kept} <= allowed:
        found = ", ".join(str(array.dtype) for array in (prompt.k, prompt.v, own.k, own.v))
        names = " and ".join(sorted(dtype.name for dtype in allowed))
        raise ValueError(f"prompts' and own keys and values are {found}; {q.dtype} queries take {names}")
    if config is None and kernel_family() == "triton":
        if in_units or a is not None:
            raise ValueError("the Triton kernel's result is in no other order, nor multiplied by A")
        check_heads(H, K, E)
        from . import triton_attention  # needs triton, which only this path does

        q, k, v = _as_attended(q, k, v, cos, sin, norms, E)
        return triton_attention.attend(q, stored(k, own.k.dtype), stored(v, own.v.dtype), *prompt, *own)
    N, P = prompt.k.shape[:2]
    sizes = [dtype.itemsize for dtype in kept]
    C = own.k.shape[1]
    config = config or choose_attention(B, K, group, P, C, *sizes, together=a is None)
    if a is not None and a.shape[1:] != q.shape[1:]:
        raise ValueError(f"A must be [R, {q.shape[1]}], got {a.shape}")
    of_product = [] if a is None else [padded_a(a, q.shape[1], q.dtype.name)]
    ranks = 0 if a is None else padded_rank(a.shape[0])
    plan = AttentionPlan(B, H, K, E, N, P, C, norms is not None, config, *sizes, in_units, ranks)
    kernel = attention_kernel.build(plan, None if norms is None else norms.eps, q.dtype.name)
    wide = [v.astype(jnp.float32) for v in (cos, sin, *([] if norms is None else [norms.q, norms.k]))]
    positions = [v.astype(jnp.int32) for v in (prompt.of, prompt.lengths, own.lengths)]
    return kernel(q, k, v, *wide[:2], prompt.k, prompt.v, *positions, *wide[2:], *of_product, own.k, own.v)


def takes_decode_attention(
    dtype: jnp.dtype, heads: int, kv_heads: int, head_dim: int, keys: jnp.dtype, values: jnp.dtype
) -> bool:
    """Whether the device that is compiled for runs a kernel, and the kernel takes the shape, queries of this dtype, and
    caches of these."""
    fits = head_dim in HEAD_SIZES and heads // kv_heads <= MAX_GROUP and {keys, values} <= _cache_dtypes(dtype)
    return has_kernels() and jnp.dtype(dtype).name in HALVES and fits


def _cache_dtypes(dtype: jnp.dtype) -> set[jnp.dtype]:
    """Of keys and of values, that the kernel takes for queries of this dtype."""
    has_no_narrow = kernel_family() == "triton" and capability() < 89  # before Ada Triton has no E4M3
    return {jnp.dtype(dtype)} if has_no_narrow else {jnp.dtype(dtype), jnp.dtype(jnp.float8_e4m3fn)}


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """New keys or values as a cache of this dtype keeps them: what is too large for 8 bits becomes the largest number
    there is, 448 in E4M3, where a cast would make it NaN."""
    if jnp.dtype(dtype).itemsize > 1:
        return x.astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def choose_attention(
    B: int, K: int, group: int, P: int, C: int, key_bytes: int = 2, value_bytes: int = 2, together: bool = True
) -> AttentionConfig:
    """The kernel's configuration for caches of P and C slots, of which completions fill half on average.

    Two samples to a unit where that leaves more units than multiprocessors, or one to each and the prompt is long. Of
    such pairs a CTA has as many of a group as make waves of CTAs the cheapest. Otherwise the largest cluster that one
    wave holds, of more than FREE_CTAS in all only where each CTA gets enough of the context; and small CTAs where
    several share a multiprocessor. A ring has the same bytes whatever those of a number in the cache. `together` allows
    several pairs in a CTA.
    """
    pairs, depth = B // 2 * K, 12 // (key_bytes + value_bytes)
    shares = pairs > RESIDENT[1] or (2 * pairs > RESIDENT[1] and P >= WORTH_A_PAIR)
    slots = 2 if group % 2 == 0 and B % group == 0 and shares else 1
    if slots == 2 and together:
        of_a_cta = [units for units in (4, 2, 1) if group // 2 % units == 0]
        joined = min(of_a_cta, key=lambda units: -(-pairs // units // RESIDENT[1]) * (units + A_WAVE))
        if joined > 1:
            return AttentionConfig(slots, 1, 8, depth, joined)
    units, positions = B // slots * K, P + C // 2
    fitting = [c for c in RESIDENT if units <= RESIDENT[c]]
    cluster = max((c for c in fitting if units * c <= FREE_CTAS or positions >= c * WORTH_A_CTA), default=1)
    return AttentionConfig(slots, cluster, 8 if units <= RESIDENT[1] else 4, depth)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of [..., E] by angles [..., E / 2], halves convention, in float32; x's dtype."""
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _normed(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps) * scale).astype(x.dtype)


def _as_attended(
    q: jax.Array, k: jax.Array, v: jax.Array, cos: jax.Array, sin: jax.Array, norms: HeadNorms | None, E: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values by heads [B, .., E], normed, rotated and `marked`."""
    q, k, v = (x.reshape(len(x), -1, E) for x in (q, k, v))
    if norms is not None:
        q, k = _normed(q, norms.q, norms.eps), _normed(k, norms.k, norms.eps)
    q, k = (_rotated(x, cos[:, None], sin[:, None]) for x in (q, k))
    return q, *marked(k, v)


def marked(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """New keys and values [..., E] as the cache gets them: where a float16 value is not finite, since the network has
    overflowed, it is 0 and its key NaN.

    A position that a sample does not see has a weight of 0, and 0 times such a value is NaN: it would spoil the slot's
    next sample, and in the kernel the one that shares a tile. Its score, though, is not looked at. Of the sample itself
    all that follows is NaN, as before.
    """
    if v.dtype != jnp.float16:
        return k, v
    finite = jnp.isfinite(v).all(-1, keepdims=True)
    return jnp.where(finite, k, jnp.asarray(jnp.nan, k.dtype)), jnp.where(finite, v, 0)


def decode_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    prompt: PromptKV,
    own: OwnKV,
    norms: HeadNorms | None = None,
    a: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """`decode_attention` in plain JAX."""
    B, (P, K, E), C = q.shape[0], prompt.k.shape[1:], own.k.shape[1]
    q, k, v = _as_attended(q, k, v, cos, sin, norms, E)
    place = jnp.maximum(own.lengths, 0)
    here = (jnp.arange(C) == place[:, None]) & (own.lengths >= 0)[:, None]
    own_k, own_v = (
        jnp.where(here[:, :, None, None], stored(new, old.dtype)[:, None], old) for old, new in ((own.k, k), (own.v, v))
    )
    keys, values = (
        jnp.concatenate([shared[prompt.of], mine], axis=1).astype(q.dtype)
        for shared, mine in ((prompt.k, own_k), (prompt.v, own_v))
    )
    live = jnp.concatenate(
        [jnp.arange(P) < prompt.lengths[:, None], jnp.arange(C) <= own.lengths[:, None]], axis=1
    )  # [B, P + C]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bkqe,bpke->bkqp", q.reshape(B, K, -1, E), keys, preferred_element_type=wide)
    scores = jnp.where(live[:, None, None], scores * E**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bkqp,bpke->bkqe", weights, values).reshape(B, -1)
    out = jnp.where((own.lengths >= 0)[:, None], out, 0)
    hidden = [] if a is None else [hidden_parts(out, padded_a(a, out.shape[1], q.dtype.name), q.shape[1])]
    return out, own_k, own_v, *hidden
