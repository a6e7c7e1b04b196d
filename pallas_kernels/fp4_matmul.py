"""fp4_matmul: y = x W^T + s (x A^T) B^T + bias with W in NVFP4, by the variant that the committed table names.

Legend: M rows, K inputs, N outputs, R the LoRA rank. The gradient is taken with respect to x, A and B only: the base
weight, its global scale and the bias are frozen.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from . import dequantized, stream_kernel, variants, wide
from .layout import COLS, KernelWeight
from .operands import (
    all_biases,
    check_added,
    check_dy,
    check_inputs,
    number,
    one_number,
    padded_ranks,
    per_weight,
    result_dtype,
)
from .reference import fp4_matmul_dx_reference, fp4_matmul_reference
from .stream_plan import STREAM_ROWS
from .wide_plan import WideConfig


def fp4_matmul(x_MK, weight, global_scale, *, lora=None, bias=None, backend=None, out_dtype=None):
    """y = x W^T + s (x A^T) B^T + bias, with float32 sums.

    Args:
      x_MK: [M, K] in the weights' dtype, to which the kernels cast others; M = 0 gives an empty result.
      weight: KernelWeight of shape [N, K], or a list of them that share x (q, k, v; gate, up), of one dtype.
      global_scale: float32 scalar, w = e2m1 * scale / global_scale; for a list, a list, of which for the gradient none
        is 2^100 times another.
      lora: None or (a_RK, b_NR, scaling); for a list, a list (entries may be None) or None. The kernel multiplies in
        16 bits: cast float32 masters once, outside a decode loop. A rank that is no multiple of 16 is padded.
      bias: None or [N]; for a list, a list (entries may be None) or None.
      backend: None (by the table), "mosaic" (the streaming kernel), "wide" (the kernel for many rows), "triton" (the
        portable kernel), "dequantize", "dequantize-mosaic", "dequantize-triton" (dequantize + dot, by XLA or by a
        kernel), or "reference".
      out_dtype: of y; None is x's dtype. float32 is the sums as they are, for what is added to something wider; the
        backward pass multiplies in x's dtype all the same.

    Returns:
      y_MN; for a list of weights, a tuple of them.

    Raises:
      ValueError: shapes that do not agree, or a backend that cannot take the shape, naming the constraint.
      TypeError: an x or an out_dtype of whole numbers, or a weight that is no KernelWeight.
    """
    single = not isinstance(weight, list | tuple)
    weights = (weight,) if single else tuple(weight)
    if single:
        global_scale, lora, bias = [global_scale], [lora], [bias]
    scales, loras, biases = per_weight(len(weights), global_scale, lora, bias)
    check_inputs(x_MK, weights)
    check_added(weights, loras, biases)
    route = Route(backend, variants.capability())
    out = _linear(route, result_dtype(x_MK, out_dtype), x_MK, weights, scales, loras, biases)
    return out[0] if single else out


def fp4_matmul_dx(dy_MN, weight: KernelWeight, global_scale, *, backend=None):
    """dx = dy W [M, K] from the same packed bytes, float32 sums, in dy's dtype. It has no gradient.

    Raises:
      ValueError, TypeError: as `fp4_matmul` does.
    """
    check_dy(dy_MN, weight)
    scale = one_number("global_scale", global_scale)
    return product_dx(Route(backend, variants.capability()))((dy_MN,), (weight,), (scale,), None)


class Route(NamedTuple):
    """What the path is chosen by. JAX keeps traces under it, so that one for another device is not taken for this."""

    backend: str | None
    target: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(route, out_dtype, x, weights, scales, loras, biases):
    return product(route, out_dtype)(x, weights, scales, biases, loras)


def _add_lora(ys, x, loras):
    """Float32 ys + s (x A^T) B^T, x A^T rounded to x's dtype."""
    outs = []
    for y, lora, h in zip(ys, loras, _hidden(x, loras), strict=True):
        if lora is not None:
            _, b, scaling = lora
            y = y + scaling * jnp.dot(h.astype(x.dtype), b.astype(x.dtype).T, preferred_element_type=jnp.float32)
        outs.append(y)
    return tuple(outs)


def _hidden(x, loras):
    """x A^T of every adapter in float32, as one product: at few rows a product costs its launch, not its bytes."""
    if not any(lora is not None for lora in loras):
        return (None,) * len(loras)
    return _of_each(jnp.dot(x, _all_a(loras, x.dtype).T, preferred_element_type=jnp.float32), loras, axis=1)


def _all_a(loras, dtype):
    """A of all adapters, one below the other [sum of R, K]."""
    return jnp.concatenate([lora[0].astype(dtype) for lora in loras if lora is not None])


def _of_each(joint, loras, axis):
    """Each adapter's ranks along an axis that has those of all, None where there is no adapter."""
    start, out = 0, []
    for lora in loras:
        rank = 0 if lora is None else lora[0].shape[0]
        out.append(None if lora is None else jax.lax.slice_in_dim(joint, start, start + rank, axis=axis))
        start += rank
    return tuple(out)


def _linear_fwd(route, out_dtype, x, weights, scales, loras, biases):
    return product(route, out_dtype)(x, weights, scales, biases, loras), (x, weights, scales, loras)


def _linear_bwd(route, _, saved, dys):
    x, weights, scales, loras = saved
    dys = [dy.astype(x.dtype) for dy in dys]
    more, d_loras = lora_gradients(x, loras, dys)
    return product_dx(route)(tuple(dys), weights, scales, more).astype(x.dtype), None, None, d_loras, None


def lora_gradients(x, loras, dys, scale=1.0):
    """dh [M, R] in float32 and A [R, K] of all adapters together, whose product they add to dx, or None; and their
    gradients, where x comes as `scale` times what it is."""
    if not any(lora is not None for lora in loras):
        return None, loras
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    adapted = [(*lora, dy) for lora, dy in zip(loras, dys, strict=True) if lora is not None]
    dh = jnp.concatenate([scaling * dot(dy, b.astype(dy.dtype)) for _, b, scaling, dy in adapted], axis=1)
    das, d_loras = _of_each(dot(dh.astype(x.dtype).T, x), loras, axis=0), []
    for lora, da, h, dy in zip(loras, das, _hidden(x, loras), dys, strict=True):
        if lora is None:
            d_loras.append(None)
            continue
        a, b, scaling = lora
        da, db = da / scale, scaling / scale * dot(dy.T, h.astype(dy.dtype))
        d_loras.append((da.astype(a.dtype), db.astype(b.dtype), None))
    return (dh, _all_a(loras, x.dtype)), tuple(d_loras)


_linear.defvjp(_linear_fwd, _linear_bwd)


@functools.cache
def product(route, out_dtype):
    """x, weights, scales, biases, loras -> y_i."""

    @custom_vmap
    def base(x, weights, scales, biases, loras):
        m, k = x.shape
        if m == 0:
            return tuple(jnp.zeros((0, w.n), out_dtype) for w in weights)
        n = tuple(w.n for w in weights)
        ranks = padded_ranks(loras)
        variant = variants.choose(m, k, n, route.backend, ranks)
        if isinstance(variant, WideConfig):
            return tuple(wide.matmul_all(x, weights, scales, biases, variant, out_dtype, loras))
        if variant == "reference":
            ys = [fp4_matmul_reference(x.astype(jnp.float32), w, s) for w, s in zip(weights, scales, strict=True)]
        elif variant == "triton":
            from . import triton_kernel  # needs triton, which only this path does

            inside, outside = loras, (None,) * len(weights)
            if not variants.triton_takes(ranks):
                inside, outside = outside, inside
            ys, loras = triton_kernel.matmul(x, weights, scales, inside), outside
        elif variant in variants.DEQUANTIZING:
            ys = [dequantized.matmul(x, w, s, variant) for w, s in zip(weights, scales, strict=True)]
        elif not any(ranks) or variants.takes_lora(m, k, n, variant, ranks):
            wide_out = jnp.dtype(out_dtype).name != weights[0].dtype
            ys = _mosaic(x, weights, scales, biases, loras, variant, wide_out=wide_out)
            return tuple(y.astype(out_dtype) for y in ys)
        elif variants.apart(m, k, n, variant, ranks):
            each = zip(weights, scales, biases, loras, strict=True)
            return tuple(base(x, *((part,) for part in parts))[0] for parts in each)
        else:
            ys = _mosaic(x, weights, scales, biases, (None,) * len(weights), variant, wide_out=True)
            biases = (None,) * len(weights)
        ys = [y if b is None else y + b.astype(jnp.float32) for y, b in zip(ys, biases, strict=True)]
        return tuple(y.astype(out_dtype) for y in _add_lora(ys, x, loras))

    @base.def_vmap
    def fold(axis_size, in_batched, x, weights, scales, biases, loras):
        x_batched, *others, loras_batched = in_batched
        if any(jax.tree.leaves(others)):
            raise ValueError(
                "fp4_matmul under vmap takes a batch of x and of LoRA only, not of weights, scales or biases"
            )
        if any(jax.tree.leaves(loras_batched)):  # an adapter for each row block: outside the kernel

            def one(x, loras):
                sums = product(route, jnp.float32)(x, weights, scales, biases, (None,) * len(weights))
                return tuple(y.astype(out_dtype) for y in _add_lora(sums, x, loras))

            axes = jax.tree.map(lambda batched: 0 if batched else None, (x_batched, loras_batched))
            return jax.vmap(one, axes, axis_size=axis_size)(x, loras), (True,) * len(weights)
        if not x_batched:
            return base(x, weights, scales, biases, loras), (False,) * len(weights)
        batch, m, k = x.shape
        ys = base(x.reshape(batch * m, k), weights, scales, biases, loras)
        return tuple(y.reshape(batch, m, y.shape[-1]) for y in ys), (True,) * len(weights)

    return without_gradient(base)


@functools.cache
def product_dx(route, wide_out=False):
    """dys, weights, scales, and dh [M, R] in float32 and A [R, K] or None -> the sum of dy W over the weights + dh A,
    rounded once."""

    def rounded(dys):
        return jnp.float32 if wide_out else dys[0].dtype

    @custom_vmap
    def dx(dys, weights, scales, lora):
        (m, _), k, out_dtype = dys[0].shape, weights[0].k, rounded(dys)
        if m == 0:
            return jnp.zeros((0, k), out_dtype)
        variant = variants.choose_dx(m, k, tuple(w.n for w in weights), route.backend)
        if isinstance(variant, WideConfig):
            return wide.matmul_dx(dys, weights, scales, variant, out_dtype, lora)
        each = zip(dys, weights, scales, strict=True)
        if variant == "reference":
            parts = [fp4_matmul_dx_reference(dy.astype(jnp.float32), w, s) for dy, w, s in each]
        else:
            parts = [dequantized.matmul_dx(dy, w, s, variant) for dy, w, s in each]
        if lora is not None:
            parts.append(_of_adapters(*lora, dys[0].dtype))
        return sum(parts[1:], parts[0]).astype(out_dtype)

    @dx.def_vmap
    def fold(axis_size, in_batched, dys, weights, scales, lora):
        dys_batched, *others, lora_batched = in_batched
        if any(jax.tree.leaves(others)):
            raise ValueError("fp4_matmul_dx under vmap takes a batch of dy only, not of weights or scales")
        if lora is not None and lora_batched[1]:  # an adapter for each row block: outside the kernel

            def one(dys, lora):
                sums = product_dx(route, wide_out=True)(dys, weights, scales, None)
                return (sums + _of_adapters(*lora, dys[0].dtype)).astype(rounded(dys))

            axes = jax.tree.map(lambda batched: 0 if batched else None, (dys_batched, lora_batched))
            return jax.vmap(one, axes, axis_size=axis_size)(dys, lora), True

        rows = functools.partial(all_rows, axis_size)
        more = None if lora is None else (rows(lora[0], lora_batched[0]), lora[1])
        out = dx(tuple(map(rows, dys, dys_batched)), weights, scales, more)
        return out.reshape(axis_size, dys[0].shape[-2], weights[0].k), True

    return without_gradient(dx)


def without_gradient(f):
    """f, which says so where it is differentiated."""

    def refuse(*_):
        raise TypeError("fp4_matmul and fp4_mlp have first derivatives only, and fp4_matmul_dx has none")

    alone = jax.custom_vjp(f)
    alone.defvjp(refuse, refuse)
    return alone


def all_rows(axis_size, x, batched):
    """The rows of a batch of matrices [batch, M, K], or of one as often, one matrix below the other."""
    x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(axis_size * x.shape[1], x.shape[2])


def _of_adapters(dh, a, dtype):
    """dh A in float32, of what is rounded to `dtype`."""
    return jnp.dot(dh.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)


def _mosaic(x, weights, scales, biases, loras, config, *, wide_out):
    """The streaming kernel, 64 rows at a time."""
    (m, k), dtype = x.shape, weights[0].dtype
    x = jnp.pad(x.astype(dtype), ((0, 0), (0, -k % COLS)))
    own, ranks = all_biases(biases, [w.n for w in weights]), padded_ranks(loras)
    rest = [w.data for w in weights] + [number(scale) for scale in scales] + own
    rest += stream_kernel.lora_operands(loras, x.shape[1], dtype)
    parts = []
    for start in range(0, m, STREAM_ROWS):
        rows = x[start : start + STREAM_ROWS]
        n = tuple(w.n for w in weights)
        more = {"wide_out": wide_out, "ranks": ranks, "dtype": dtype}
        kernel = stream_kernel.build(rows.shape[0], k, n, config, bool(own), **more)
        parts.append(kernel(rows, *rest))
    return tuple(parts[0]) if len(parts) == 1 else tuple(jnp.concatenate(ys) for ys in zip(*parts, strict=True))
