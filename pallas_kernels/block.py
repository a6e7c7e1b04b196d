"""between_attentions: what a decode step computes between two attentions, by one kernel for up to 16 rows, for
more by one or two for each matmul.

Letters: M rows, D hidden size, K inputs and N outputs of a weight, R LoRA's rank.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import block_kernel, layer_calls
from .attention_plan import KEYS
from .block_plan import MAX_ROWS, PANEL, WARPS, BlockPlan, Part, make_block_plan
from .counters import first_counters
from .float16_range import range_scale, reading_scaled
from .fragment_order import from_unit_order
from .hidden import hidden_shape, sum_hidden
from .layer_part import LayerPart, Projection, operands
from .layout import dequantize
from .operands import check_added
from .stream_plan import RESIDENT
from .variants import capability, has_room_for_a_wave

# Of o's A, which attention fetches before it has x where its cache has 16 bits (`AttentionPlan.early_ranks`).
EARLY_RANKS = 2 * KEYS


def takes_between_attentions(rows: int, dtype: jnp.dtype, layer: LayerPart) -> bool:
    """Whether the device that is compiled for runs the kernels, and they take the shape."""
    if capability() != 90 or not has_room_for_a_wave():
        return False
    # for all rows of the panels: which kernel computes a row must not depend on how many there are
    rows, check = (-(-rows // PANEL) * PANEL, plan_of) if rows <= MAX_ROWS else (rows, layer_calls.calls_of)
    try:
        _check_layer(dtype, layer)
        check(rows, layer)
    except ValueError:
        return False
    return True


def _check_layer(dtype: jnp.dtype, layer: LayerPart) -> None:
    """x of another dtype, and inputs of another size, would be read as if they had the weights'."""
    if jnp.dtype(dtype).name != layer.dtype:
        raise ValueError(f"x is {jnp.dtype(dtype).name}; the layout of the layer's weights is for {layer.dtype}")
    _check_sizes(layer)


def _check_sizes(layer: LayerPart) -> None:
    o, gate, up, down, *qkv = (projection.weight for group in layer.groups for projection in group)
    fits = gate.shape == up.shape == (gate.n, o.n) and down.shape == (o.n, gate.n) and all(w.k == o.n for w in qkv)
    if not fits:
        sizes = ", ".join(str(w.shape) for w in (o, gate, up, down, *qkv))
        raise ValueError(f"weights [N, K] of o, gate, up, down, q, k and v that do not follow each other: {sizes}")


def _check_inputs(x: jax.Array, residual: jax.Array, layer: LayerPart, norms: Sequence[jax.Array]) -> None:
    rows, hidden = x.shape[0], layer.o.weight.n
    wanted = {"x": (x, (rows, layer.o.weight.k)), "residual": (residual, (rows, hidden))}
    wanted |= {f"norms[{i}]": (scale, (hidden,)) for i, scale in enumerate(norms)}
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(array.shape)}")
    if residual.dtype != jnp.float32:
        raise ValueError(f"the residual stream must be float32, got {residual.dtype}")
    if len(norms) != 1 + bool(layer.qkv):
        raise ValueError(f"{1 + bool(layer.qkv)} norms are needed, got {len(norms)}")
    for group in layer.groups:
        check_added([p.weight for p in group], [p.lora for p in group], [p.bias for p in group])


def reads_units(rows: int, layer: LayerPart) -> bool:
    """Whether `between_attentions` is faster where x comes in unit order (`in_unit_order`), which it then takes."""
    return rows > MAX_ROWS and layer_calls.reads_units(rows, layer)


def wanted_a(rows: int, layer: LayerPart) -> jax.Array | None:
    """o's A, where `between_attentions`, which must take the shape, is faster if x A^T comes with x; else None. With
    more warps, for long streams (32B with ranks up to 64), it was not faster; and of more ranks than attention fetches
    early it waits for every 16."""
    if layer.o.lora is None or layer.o.rank > EARLY_RANKS or rows > MAX_ROWS or plan_of(rows, layer).warps != WARPS:
        return None
    return layer.o.lora[0]


def plan_of(rows: int, layer: LayerPart, given: int = 0) -> BlockPlan:
    """How the kernel divides the work, with so many given parts of o's x A^T; raises ValueError naming the constraint
    when it does not take the shape."""
    parts = []
    for i, group in enumerate(layer.groups):
        (k,) = {projection.weight.k for projection in group}
        parts.append(
            Part(
                k,
                tuple(projection.weight.n for projection in group),
                tuple(projection.rank for projection in group),
                tuple(projection.bias is not None for projection in group),
                paired=i == 1,
                normed=i in (1, 3),
                joins=i in (0, 2),
                scaled=i == 2,
                given=given if i == 0 else 0,
            )
        )
    return make_block_plan(rows, layer.o.weight.n, tuple(parts), RESIDENT[1])


def between_attentions(
    x: jax.Array,
    residual: jax.Array,
    layer: LayerPart,
    norms: Sequence[jax.Array],
    eps: float,
    in_units: bool = False,
    hidden: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """residual + o(x); + down(silu(gate(h)) * up(h)) of its norm h; and q, k, v of the norm of that.

    Products are in the weights' dtype, with float32 sums. Not rounded in between: what joins the residual stream. Up to
    16 rows all of it is one kernel, in which neither gate and up are rounded, nor the norm before the division by the
    root of the mean square, which follows the products; with more one or two for each matmul (layer_calls.py).

    Args:
      x: [M, K] in that dtype, the attention's output, M up to 256.
      residual: float32 [M, D].
      layer: the projections.
      norms: float32 [D], the scale behind the attention and, if there are q, k, v, that before them.
      eps: the norms' epsilon.
      in_units: whether x's columns are in unit order, where `reads_units` says so.
      hidden: x A^T of o's A, in parts that are still to be added up (`hidden.hidden_parts`), see `wanted_a`; None has
        it made here.

    Returns:
      The residual stream float32 [M, D], and q, k, v in x's dtype [M, N].

    Raises:
      ValueError: the kernels do not take the shape or x's dtype (see `takes_between_attentions`), or arrays do not fit
        each other.
    """
    _check_layer(x.dtype, layer)
    _check_inputs(x, residual, layer, norms)
    if hidden is not None and (layer.o.lora is None or x.shape[0] > MAX_ROWS):
        has = "an" if layer.o.lora is not None else "no"
        raise ValueError(
            f"x A^T is taken of up to {MAX_ROWS} rows where o has an adapter, got {x.shape[0]} rows and {has} adapter"
        )
    if hidden is not None:
        wanted = hidden_shape(hidden.shape[0], layer.o.rank, x.shape[0])
        if (hidden.shape, hidden.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(f"x A^T must be {wanted.dtype} {wanted.shape}, got {hidden.dtype} {hidden.shape}")
    if x.shape[0] > MAX_ROWS:
        return layer_calls.between_attentions(x, residual, layer, norms, eps, in_units)
    if in_units:
        raise ValueError(f"x in unit order is for more than {MAX_ROWS} rows, got {x.shape[0]}")
    plan = plan_of(x.shape[0], layer, 0 if hidden is None else hidden.shape[0])
    weights = tuple(tuple(map(operands, group)) for group in layer.groups)
    scales = tuple(jnp.asarray(scale, jnp.float32) for scale in norms)
    sync = jnp.asarray(first_counters(plan.sync_words))
    given = block_kernel.Operands(x, residual, weights, scales, sync, hidden)
    outs = block_kernel.build(plan, eps, layer.dtype)(given)
    return outs["residual2"], tuple(outs[f"y{w}"] for w in range(len(layer.qkv)))


def between_attentions_reference(
    x: jax.Array,
    residual: jax.Array,
    layer: LayerPart,
    norms: Sequence[jax.Array],
    eps: float,
    in_units: bool = False,
    hidden: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`between_attentions` in plain JAX: the products in float32, what they read rounded to x's dtype, any that
    is of floats. Raises ValueError where arrays do not fit each other."""
    _check_sizes(layer)
    _check_inputs(x, residual, layer, norms)
    x = from_unit_order(x) if in_units else x
    dtype = x.dtype

    def product(x: jax.Array, projection: Projection, hidden: jax.Array | None = None) -> jax.Array:
        dot = functools.partial(jnp.dot, precision="highest", preferred_element_type=jnp.float32)
        wide = x.astype(jnp.float32)
        y = dot(wide, dequantize(projection.weight, projection.global_scale, jnp.float32).T)
        if projection.lora is not None:
            a, b, scaling = projection.lora
            hidden = dot(wide, a.astype(jnp.float32).T) if hidden is None else hidden[:, : a.shape[0]]
            y = y + scaling * dot(hidden.astype(dtype).astype(jnp.float32), b.astype(jnp.float32).T)
        return y if projection.bias is None else y + projection.bias

    def normed(residual: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.mean(jnp.square(residual), -1, keepdims=True)
        return (residual * jax.lax.rsqrt(mean + eps) * scale).astype(dtype)

    residual = residual + product(x, layer.o, None if hidden is None else sum_hidden(hidden, x.shape[0]))
    h = normed(residual, norms[0])
    inner = jax.nn.silu(product(h, layer.gate)) * product(h, layer.up) * range_scale(dtype)
    scale, lora = reading_scaled(dtype, layer.down.global_scale, layer.down.lora)
    residual = residual + product(inner.astype(dtype), layer.down._replace(global_scale=scale, lora=lora))
    if not layer.qkv:
        return residual, ()
    h = normed(residual, norms[1])
    return residual, tuple(product(h, projection).astype(dtype) for projection in layer.qkv)
