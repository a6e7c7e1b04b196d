"""The portable attention kernel in Triton: one new token per sample, over its prompt and its own keys.

Letters as in attention.py, with Q = H / K query heads per key-value head. A *unit* is one key-value head of a sample.
Its context, the prompt's keys and then its own, is cut into tiles of BLOCK positions, which several programs take in
turn, each with a running maximum and sum. The first of them begins with the new key, which it also writes to the cache
with the value, so nobody reads a position that is being written. What the programs leave is put together by XLA, in
order: a sample's numbers do not depend on what stands beside it.

Importing this module needs triton; its calls need jax_triton.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.custom_batching import custom_vmap

from .triton_call import call
from .variants import multiprocessors

LOG2_E = 1.4426950408889634
ROWS = tl.constexpr(16)  # of a product's tile, of which Q are a unit's
NEGATIVE = tl.constexpr(-1e30)  # finite, so that a part that has no position stays free of NaN
BLOCK, WARPS, STAGES = 64, 4, 2
# Programs that all units have together for a multiprocessor, and each alone, at most.
PROGRAMS, PARTS = 4, (8, 4, 2, 1)


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    first,
    count,
    most,
    total,
    acc,
    STRIDE: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Maximum, sum and weighted values with every PARTS-th tile of `count` positions, from number `first` on."""
    for tile in tl.range(first, tl.cdiv(count, BLOCK), PARTS, num_stages=STAGES):
        position = tile * BLOCK + tl.arange(0, BLOCK)
        live = position < count
        offsets = position[:, None] * STRIDE + tl.arange(0, E)[None, :]
        k = tl.load(k_ptr + offsets, mask=live[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        scores = tl.where(live[None, :], scores, NEGATIVE)
        larger = tl.maximum(most, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - larger[:, None]), tl.exp2(most - larger)
        v = tl.load(v_ptr + offsets, mask=live[:, None], other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * kept[:, None], input_precision="ieee")
        most, total = larger, total * kept + tl.sum(weights, 1)
    return most, total, acc


@triton.jit
def decode_attention_part(
    q_ptr,
    k_ptr,
    v_ptr,
    prompt_k_ptr,
    prompt_v_ptr,
    of_ptr,
    lengths_ptr,
    steps_ptr,
    own_k_ptr,
    own_v_ptr,
    acc_ptr,
    most_ptr,
    total_ptr,
    B: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of a unit and one of its parts: weighted values [PARTS, B, H, E], and the maximum, in powers of two, and the sum
    of their weights [PARTS, B, H], all float32. The new key and value are written in place."""
    Q: tl.constexpr = H // K
    sample, head, part = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    step = tl.load(steps_ptr + sample)
    is_alive = step >= 0
    row, e = tl.arange(0, ROWS), tl.arange(0, E)
    heads, is_query = sample * H + head * Q + row, row < Q
    q = tl.load(q_ptr + heads[:, None] * E + e[None, :], mask=is_query[:, None], other=0.0)
    if WIDE:  # Triton's interpreter has no products of bfloat16
        q = q.to(tl.float32)

    begins = is_alive & (part == 0)
    new = (sample * K + head) * E + e
    k, v = tl.load(k_ptr + new), tl.load(v_ptr + new)
    place = (sample.to(tl.int64) * C + step) * (K * E) + head * E + e
    tl.store(own_k_ptr + place, k, mask=begins)
    tl.store(own_v_ptr + place, v, mask=begins)
    most = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * SCALE
    most = tl.where(begins, most, NEGATIVE)
    total = tl.zeros([ROWS], tl.float32) + tl.where(begins, 1.0, 0.0)
    acc = tl.zeros([ROWS, E], tl.float32) + tl.where(begins, v.to(tl.float32)[None, :], 0.0)

    length = tl.where(is_alive, tl.load(lengths_ptr + sample), 0)
    prompt = tl.load(of_ptr + sample).to(tl.int64) * (P * K * E) + head * E
    most, total, acc = _attend(
        q, prompt_k_ptr + prompt, prompt_v_ptr + prompt, part, length, most, total, acc,
        K * E, E, PARTS, BLOCK, STAGES, SCALE,
    )  # fmt: skip
    own = sample.to(tl.int64) * (C * K * E) + head * E
    turn = (part + PARTS - tl.cdiv(length, BLOCK) % PARTS) % PARTS  # whose it is after the prompt's last tile
    most, total, acc = _attend(
        q, own_k_ptr + own, own_v_ptr + own, turn, step, most, total, acc,
        K * E, E, PARTS, BLOCK, STAGES, SCALE,
    )  # fmt: skip

    at = part * (B * H) + heads
    tl.store(acc_ptr + at[:, None].to(tl.int64) * E + e[None, :], acc, mask=is_query[:, None])
    tl.store(most_ptr + at, most, mask=is_query)
    tl.store(total_ptr + at, total, mask=is_query)


def parts_for(units: int, positions: int, multiprocessors: int) -> int:
    """Programs for each unit, whose caches have so many positions."""
    fits = (p for p in PARTS if p * units <= PROGRAMS * multiprocessors and p * BLOCK <= positions)
    return next(fits, 1)


def attention_constants(
    q: jax.Array, prompt_k: jax.Array, own_k: jax.Array, parts: int, wide: bool = False
) -> dict[str, object]:
    """Compile-time arguments of `decode_attention_part`."""
    (B, H, E), (P, K), C = q.shape, prompt_k.shape[1:3], own_k.shape[1]
    sizes = {"B": B, "H": H, "K": K, "E": E, "P": P, "C": C, "PARTS": parts, "BLOCK": BLOCK, "STAGES": STAGES}
    return sizes | {"SCALE": E**-0.5 * LOG2_E, "WIDE": wide}


@custom_vmap
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    of: jax.Array,
    lengths: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    steps: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `attention.decode_attention` gives, of what `attention.PromptKV` and `attention.OwnKV` hold.

    Args:
      q: [B, H, E], rotated, of 16 bits.
      k, v: [B, K, E], rotated, as the caches store them.

    Raises:
      ImportError: see `triton_call.call`.
    """
    (B, H, E), (P, K), C = q.shape, prompt_k.shape[1:3], own_k.shape[1]
    parts = parts_for(B * K, P + C, multiprocessors())
    positions = [x.astype(jnp.int32) for x in (of, lengths, steps)]
    left = [jax.ShapeDtypeStruct((parts, B, H, *last), jnp.float32) for last in ((E,), (), ())]
    written = [jax.new_ref(cache) for cache in (own_k, own_v)]
    acc, most, total = call(
        decode_attention_part,
        (q, k, v, prompt_k, prompt_v, *positions, *written),
        left,
        (B * K, parts),
        attention_constants(q, prompt_k, own_k, parts),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    own_k, own_v = map(jax.freeze, written)
    return joined(acc, most, total, steps, q.dtype), own_k, own_v


@attend.def_vmap
def _attend_all(axis_size, in_batched, *operands):
    """A batch of calls as one, of all samples and all prompts."""
    batch = [
        x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, is_batched in zip(operands, in_batched, strict=True)
    ]
    prompts, of = batch[3].shape[1], 5
    batch[of] += prompts * jnp.arange(axis_size, dtype=batch[of].dtype)[:, None]
    results = attend(*(x.reshape(axis_size * x.shape[1], *x.shape[2:]) for x in batch))
    return tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results), (True,) * len(results)


def joined(acc: jax.Array, most: jax.Array, total: jax.Array, steps: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The attention's output [B, H * E] of what the parts left; zeros for samples that have ended."""
    parts, B = acc.shape[:2]
    highest = most[0]
    for part in range(1, parts):
        highest = jnp.maximum(highest, most[part])
    out, weight = 0.0, 0.0
    for part in range(parts):  # in order, which a reduction of XLA's need not have
        share = jnp.exp2(most[part] - highest)
        out, weight = out + share[..., None] * acc[part], weight + share * total[part]
    out = (out / weight[..., None]).reshape(B, -1)
    return jnp.where((steps >= 0)[:, None], out, 0).astype(dtype)
