"""fp4_mlp: y = (silu(x Wg^T) * (x Wu^T)) Wd^T with all three in NVFP4, each with its LoRA pair and bias.

Where the wide kernel multiplies, SwiGLU is a part of it: forward of gate's and up's product, backward of down's dx,
whose sums become the gradients of gate and up on their way out. Forward, gate and up are not rounded before they are
joined, as in the kernels of a decode step; the backward pass has them in 16 bits.

Legend as in fp4_matmul.py, with F the outputs of gate and up; `inner` is silu(gate) * up times the `range_scale` of the
weights' dtype, in which kernels multiply (float16_range.py).
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from . import variants, wide
from .float16_range import range_scale, reading_scaled
from .fp4_matmul import Route, all_rows, lora_gradients, product, product_dx, without_gradient
from .operands import check_added, check_inputs, check_weight, padded_ranks, per_weight, result_dtype
from .wide_plan import WideConfig


def fp4_mlp(x_MK, weights, global_scales, *, lora=None, bias=None, backend=None, out_dtype=None):
    """y = (silu(gate) * up) Wd^T of gate = x Wg^T and up = x Wu^T, with float32 sums; silu(gate) * up is rounded once.

    Args:
      x_MK: [M, K] in the weights' dtype.
      weights: KernelWeights of gate and up [F, K] and of down [N, F].
      global_scales: of each weight.
      lora, bias: lists of what `fp4_matmul` takes for each weight, or None.
      backend, out_dtype: as `fp4_matmul` takes them; out_dtype is y's.

    Returns:
      y_MN. Its gradient is taken with respect to x, A and B only.

    Raises:
      ValueError: shapes that do not agree, or a backend that cannot take the shape, naming the constraint.
      TypeError: an x or an out_dtype of whole numbers, or a weight that is no KernelWeight.
    """
    if len(weights) != 3:
        raise ValueError(f"weights are those of gate, up and down, got {len(weights)}")
    for weight in weights:
        check_weight(weight)
    gate, up, down = weights
    if not gate.n == up.n == down.k or len({w.dtype for w in weights}) > 1:
        found = ", ".join(f"{w.shape} {w.dtype}" for w in weights)
        raise ValueError(f"gate, up and down must be [F, K], [F, K] and [N, F] of one dtype, got {found}")
    check_inputs(x_MK, (gate, up))
    scales, loras, biases = per_weight(3, global_scales, lora, bias)
    check_added(weights, loras, biases)
    route = Route(backend, variants.capability())
    return _mlp(route, result_dtype(x_MK, out_dtype), x_MK, tuple(weights), scales, loras, biases)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(route, out_dtype, x, weights, scales, loras, biases):
    (inner,) = _joined(route, False)(x, weights[:2], scales[:2], biases[:2], loras[:2])
    return _down(route, out_dtype, inner, weights, scales, loras, biases)


def _down(route, out_dtype, inner, weights, scales, loras, biases):
    scale, lora = reading_scaled(weights[2].dtype, scales[2], loras[2])
    return product(route, out_dtype)(inner, weights[2:], (scale,), biases[2:], (lora,))[0]


def _mlp_fwd(route, out_dtype, x, weights, scales, loras, biases):
    inner, gate, up = _joined(route, True)(x, weights[:2], scales[:2], biases[:2], loras[:2])
    y = _down(route, out_dtype, inner, weights, scales, loras, biases)
    return y, (x, inner, gate, up, weights, scales, loras)


def _mlp_bwd(route, _, saved, dy):
    x, inner, gate, up, weights, scales, loras = saved
    dy = dy.astype(x.dtype)
    more, d_down = lora_gradients(inner, loras[2:], [dy], range_scale(weights[2].dtype))
    d_gate_up = _dx_through(route)(dy, weights[2], scales[2], more, gate, up)
    more, d_loras = lora_gradients(x, loras[:2], d_gate_up)
    dx = product_dx(route)(d_gate_up, weights[:2], scales[:2], more)
    return dx.astype(x.dtype), None, None, (*d_loras, *d_down), None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _refuse(batched):
    if any(jax.tree.leaves(batched)):
        raise ValueError("fp4_mlp under vmap takes a batch of x and of LoRA only, not of weights, scales or biases")


@functools.cache
def _joined(route, keeps):
    """x, and of gate and up weights, scales, biases, loras -> inner [M, F] in x's dtype; if it `keeps` them gate and up
    behind it."""

    def apart(x, weights, scales, biases, loras):
        gate, up = product(route, jnp.dtype(jnp.float32))(x, weights, scales, biases, loras)
        inner = _swiglu(gate, up) * range_scale(weights[0].dtype)
        return tuple(y.astype(x.dtype) for y in ((inner, gate, up) if keeps else (inner,)))

    @custom_vmap
    def joined(x, weights, scales, biases, loras):
        (m, k), n = x.shape, tuple(w.n for w in weights)
        variant = variants.choose(m, k, n, route.backend, padded_ranks(loras)) if m else None
        if isinstance(variant, WideConfig):
            of = x, weights, scales, biases, variant, x.dtype, loras
            return tuple(wide.matmul_all(*of, swiglu=True, keeps=keeps))
        return apart(x, weights, scales, biases, loras)

    @joined.def_vmap
    def fold(axis_size, in_batched, x, weights, scales, biases, loras):
        x_batched, *others, loras_batched = in_batched
        _refuse(others)
        if any(jax.tree.leaves(loras_batched)):  # an adapter for each row block
            axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
            ys = jax.vmap(apart, axes, axis_size=axis_size)(x, weights, scales, biases, loras)
        else:
            ys = joined(all_rows(axis_size, x, x_batched), weights, scales, biases, loras)
            ys = tuple(y.reshape(axis_size, -1, y.shape[-1]) for y in ys)
        return ys, (True,) * len(ys)

    return without_gradient(joined)


@functools.cache
def _dx_through(route):
    """dy [M, N], down's weight and scale, dh and A or None (see `product_dx`), gate and up -> their gradients [M, F] in
    dy's dtype."""

    def apart(dy, weight, scale, lora, gate, up):
        d = product_dx(route, wide_out=True)((dy,), (weight,), (scale,), lora)
        _, gradients = jax.vjp(_swiglu, gate.astype(jnp.float32), up.astype(jnp.float32))
        return tuple(gradient.astype(dy.dtype) for gradient in gradients(d))

    @custom_vmap
    def through(dy, weight, scale, lora, gate, up):
        variant = variants.choose_dx(dy.shape[0], weight.k, (weight.n,), route.backend) if dy.shape[0] else None
        if isinstance(variant, WideConfig):
            return wide.matmul_dx_through_swiglu(dy, weight, scale, variant, dy.dtype, lora, gate, up)
        return apart(dy, weight, scale, lora, gate, up)

    @through.def_vmap
    def fold(axis_size, in_batched, dy, weight, scale, lora, gate, up):
        dy_batched, *others, lora_batched, gate_batched, up_batched = in_batched
        _refuse(others)
        if lora is not None and lora_batched[1]:
            axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
            ys = jax.vmap(apart, axes, axis_size=axis_size)(dy, weight, scale, lora, gate, up)
        else:
            rows = functools.partial(all_rows, axis_size)
            more = None if lora is None else (rows(lora[0], lora_batched[0]), lora[1])
            rest = (rows(one, batched) for one, batched in ((gate, gate_batched), (up, up_batched)))
            ys = tuple(
                y.reshape(axis_size, -1, y.shape[-1]) for y in through(rows(dy, dy_batched), weight, scale, more, *rest)
            )
        return ys, (True, True)

    return without_gradient(through)
