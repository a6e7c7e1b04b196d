"""Causal attention of whole rows: by cuDNN on a GPU from Ampere on in 16 bits, by XLA's products elsewhere; padded rows
or a pack.

Dimension letters: B rows, T positions, H query heads, K key-value heads, E head size; L token slots of a pack, F rows
of a frame and W its width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.variants import capability
from qerl_jax.models.flash_attention import flash_attention, flash_backward, flash_forward
from qerl_jax.models.packed_rows import AsItStands, PackedRows, Placed, placed


def by_cudnn(dtype: jnp.dtype) -> bool:
    """Whether attention in this dtype is cuDNN's, which keeps no scores and needs a GPU from Ampere on."""
    return dtype.itemsize == 2 and jax.default_backend() == "gpu" and capability() >= 80


def causal_attention(q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array, mask_BT: jax.Array | None) -> jax.Array:
    """Grouped-query causal attention [B, T, H, E]; `mask_BT` hides key positions (left padding)."""
    if mask_BT is None and by_cudnn(q_BTHE.dtype):
        return flash_attention(q_BTHE, k_BTKE, v_BTKE)
    mask = None if mask_BT is None else mask_BT[:, None, None, :].astype(bool)
    return plain_attention(q_BTHE, k_BTKE, v_BTKE, mask, is_causal=True)


def plain_attention(
    q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array, mask: jax.Array | None, is_causal: bool = False
) -> jax.Array:
    """Grouped-query attention by XLA's products. JAX asks for float32 sums, which products of float16 do not have on a
    CPU; there everything between inputs and result is float32."""
    dtype = q_BTHE.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        q_BTHE, k_BTKE, v_BTKE = (x.astype(jnp.float32) for x in (q_BTHE, k_BTKE, v_BTKE))
    return jax.nn.dot_product_attention(
        q_BTHE, k_BTKE, v_BTKE, mask=mask, is_causal=is_causal, implementation="xla"
    ).astype(dtype)


@jax.custom_vjp
def packed_attention(q_LHE: jax.Array, k_LKE: jax.Array, v_LKE: jax.Array, pack: PackedRows) -> jax.Array:
    """`causal_attention` of each row of a pack, [L, H, E].

    The rows are taken out into one of the pack's frames. What the gradient needs is kept in the pack's own order: kept
    by the branches, one for each frame, it would take room for all frames at once.
    """
    return _in_frame(pack, _attend, q_LHE, k_LKE, v_LKE)


def _fwd(q: jax.Array, k: jax.Array, v: jax.Array, pack: PackedRows) -> tuple[jax.Array, tuple[Any, ...]]:
    if not by_cudnn(q.dtype):
        return packed_attention(q, k, v, pack), (pack, q, k, v)
    o, log_sums_LH = _in_frame(pack, _forward, q, k, v)
    return o, (pack, q, k, v, log_sums_LH, o)


def _bwd(kept: tuple[Any, ...], do_LHE: jax.Array) -> tuple[Any, ...]:
    pack, *operands = kept
    backward = _backward if len(operands) > 3 else _attend_backward
    return *_in_frame(pack, backward, do_LHE, *operands), None


packed_attention.defvjp(_fwd, _bwd)


def prompts_attention(q_LHE: jax.Array, k_LKE: jax.Array, v_LKE: jax.Array, pack: PackedRows) -> jax.Array:
    """`packed_attention` without a gradient in a pack's only frame; by cuDNN in a time that goes by its rows' lengths,
    whatever the frame's are."""
    (frame,) = pack.frames
    q, k, v = map(placed(pack, frame).take_out, (q_LHE, k_LKE, v_LKE))
    if by_cudnn(q.dtype):
        lengths_F = pack.lengths_N[: frame.rows]
        out_FWHE = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, query_seq_lengths=lengths_F, key_value_seq_lengths=lengths_F,
            implementation="cudnn",
        )  # fmt: skip
    else:
        out_FWHE = causal_attention(q, k, v, None)
    # Behind a row cuDNN leaves anything. Slots there repeat its last token, and with another attention they might
    # overflow in float16 where that does not: 0 times their values would be NaN.
    place_L = pack.row_L * frame.width + pack.place_L
    return out_FWHE.reshape(-1, *q.shape[2:]).at[place_L].get(mode="promise_in_bounds")


def _in_frame(pack: PackedRows, function: Callable[..., Any], *operands: jax.Array) -> Any:
    """`function(placed, *operands)` in the frame that the pack's rows are taken out into."""
    branches = [functools.partial(function, placed(pack, frame)) for frame in pack.frames]
    return branches[0](*operands) if len(branches) == 1 else jax.lax.switch(pack.frame, branches, *operands)


def _attend(at: Placed | AsItStands, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (at.take_out(x) for x in (q, k, v))
    return at.put_back(causal_attention(q, k, v, None))


def _attend_backward(
    at: Placed | AsItStands, do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, ...]:
    gradients: tuple[jax.Array, ...] = jax.vjp(functools.partial(_attend, at), q, k, v)[1](do)
    return gradients


def _forward(at: Placed | AsItStands, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    o_FWHE, log_sums_FHW = flash_forward(*map(at.take_out, (q, k, v)))
    return at.put_back(o_FWHE), at.put_back(log_sums_FHW.swapaxes(1, 2))


def _backward(
    at: Placed | AsItStands,
    do: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_sums_LH: jax.Array,
    o: jax.Array,
) -> tuple[jax.Array, ...]:
    # Queries that are no token's have no gradient, and so add nothing to the keys' and values'.
    sums_FHW = at.take_out(log_sums_LH).swapaxes(1, 2)
    gradients = flash_backward(*map(at.take_out, (q, k, v)), sums_FHW, at.take_out_gradient(do), at.take_out(o))
    return tuple(map(at.put_back_gradient, gradients))
