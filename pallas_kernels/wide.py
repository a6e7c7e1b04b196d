"""x W^T and dy W, and LoRA's part of each, through the wide kernel: arguments in the shapes that it takes."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import inputs_kernel, variants, wide_kernel
from .inputs_plan import CHUNK, GIVEN, MAX_ROWS, InputsPlan
from .layout import EPILOGUE_FACTOR, KernelWeight
from .operands import adapters, all_biases, number, padded_rank, padded_ranks
from .wide_plan import PLAIN, Handover, WideConfig


def _flat(data: jax.Array) -> jax.Array:
    """A KernelWeight's data as the kernel takes it, a row for each row tile."""
    return data.reshape(data.shape[0], -1)


def matmul_all(
    x_MK,
    weights,
    global_scales,
    biases,
    config: WideConfig,
    out_dtype=jnp.bfloat16,
    loras=(),
    swiglu: bool = False,
    keeps: bool = False,
) -> list[jax.Array]:
    """x W_i^T + bias_i + s_i (x A_i^T) B_i^T [M, N_i]; `biases` is empty or has one [N_i] or None for each weight,
    `loras` is empty or has (A, B, s) or None for each. With `swiglu`, of gate and up, silu(gate) * up in float16's
    range (float16_range.py), and if it `keeps` them those two behind it."""
    x_MK = x_MK.astype(weights[0].dtype)
    data, scales = [w.data for w in weights], list(map(number, global_scales))
    n = tuple(w.n for w in weights)
    ranks = padded_ranks(loras)
    makes_h = variants.spare_ctas_make_h(*x_MK.shape, n, ranks, config, swiglu)
    of = data, scales, all_biases(biases, n), n, ranks, config, out_dtype, swiglu, makes_h
    return multiply(x_MK, _lora_operands(x_MK, scales, loras, makes_h), *of, keeps=keeps)


def multiply(
    x_MK,
    lora,
    data,
    scales,
    biases,
    n,
    ranks,
    config: WideConfig,
    out_dtype,
    swiglu: bool = False,
    makes_h=False,
    handover: Handover = PLAIN,
    eps: float = 0.0,
    handed: Sequence[jax.Array] = (),
    keeps: bool = False,
) -> list[jax.Array]:
    """The same of the kernel's own operands: `lora` is what `_lora_operands` gives. See `wide_kernel.build` for the
    rest; `handed` are the operands of `handover`."""
    m, k = x_MK.shape
    dtype = x_MK.dtype.name
    wide_out = jnp.dtype(out_dtype).name != dtype
    of = ranks, swiglu, makes_h, handover, eps, dtype
    kernel = wide_kernel.build(m, k, n, config, False, bool(biases), wide_out, *of, keeps=keeps)
    ys = kernel(x_MK, *lora, *map(_flat, data), *scales, *biases, *handed)
    count = 3 if keeps else len(n)
    return [*(y.astype(out_dtype) for y in ys[:count]), *ys[count:]]


def _lora_operands(x_MK, global_scales, loras, makes_h: bool) -> list[jax.Array]:
    """What the kernel takes for adapters: A, or one product x A^T for all of them, scaled so that
    the weights' own scaling at the end makes it s x A^T; B of each; and, with A, their scalings."""
    all_a, all_b, scalings = adapters(loras, x_MK.shape[1], x_MK.dtype.name)
    if makes_h or not all_a:
        return [*all_a, *all_b, *scalings]
    scales = [scale for lora, scale in zip(loras, global_scales, strict=True) if lora is not None]
    return [_down(x_MK, all_a, scales, scalings), *all_b]


def _down(x_MK, all_a, scales, scalings) -> jax.Array:
    """s x A^T scale / EPILOGUE_FACTOR of every adapter [M, sum of ranks] in x's dtype; scales and scalings are [1]."""
    (m, k), ranks, dtype = x_MK.shape, tuple(a.shape[0] for a in all_a), x_MK.dtype.name
    if m <= MAX_ROWS and k % CHUNK == 0:
        make = inputs_kernel.build(m, k, ranks, GIVEN, dtype=dtype)
    else:
        make = functools.partial(inputs_kernel.reference, InputsPlan(m, k, ranks, GIVEN), 0.0, dtype=dtype)
    return make(x_MK, *all_a, *scales, *scalings)["h"]


def matmul(x_MK, weight: KernelWeight, global_scale, config: WideConfig, out_dtype=jnp.bfloat16) -> jax.Array:
    """x W^T [M, N]."""
    return matmul_all(x_MK, [weight], [global_scale], (), config, out_dtype)[0]


def matmul_dx(
    dys, weights: Sequence[KernelWeight], global_scales, config: WideConfig, out_dtype=jnp.bfloat16, lora=None
) -> jax.Array:
    """The sum of dy_i W_i [M, K] of dy_i [M, N_i], or with `lora`, dh [M, R] in float32 and A [R, K], that + dh A."""
    return _dx(dys, weights, global_scales, config, out_dtype, lora)[0]


def matmul_dx_through_swiglu(
    dy, weight: KernelWeight, global_scale, config: WideConfig, out_dtype, lora, gate_MK, up_MK
) -> tuple[jax.Array, jax.Array]:
    """The gradients [M, K] of gate and up, where `matmul_dx` of one weight would give that of silu(gate) * up."""
    gate_up = [array.astype(weight.dtype) for array in (gate_MK, up_MK)]
    d_gate, d_up = _dx((dy,), (weight,), (global_scale,), config, out_dtype, lora, gate_up)
    return d_gate, d_up


def _dx(dys, weights, global_scales, config: WideConfig, out_dtype, lora, gate_up=()) -> list[jax.Array]:
    n, dtype = tuple(weight.n for weight in weights), weights[0].dtype
    wide_out = jnp.dtype(out_dtype).name != dtype
    ranks = () if lora is None else (padded_rank(lora[1].shape[0]),)
    of = dys[0].shape[0], sum(n), (weights[0].k,), config, True, False, wide_out, ranks, bool(gate_up)
    kernel = wide_kernel.build(*of, dtype=dtype, inputs=n)
    more = [] if lora is None else _dx_lora_operands(*lora, global_scales[0], *ranks, dtype)
    data, scales = [_flat(weight.data) for weight in weights], map(number, global_scales)
    results = kernel(*(dy.astype(dtype) for dy in dys), *more, *data, *scales, *gate_up)
    return [result.astype(out_dtype) for result in results]


def _dx_lora_operands(dh_MR, a_RK, global_scale, rank: int, dtype: str) -> list[jax.Array]:
    """dh and A^T as the kernel takes h and B: scaled, as it scales all sums in the end, so that each is rounded once
    and dh, which may be near to what float16 holds, does not grow: by a power of two A, by what is left of it dh."""
    more = rank - a_RK.shape[0]
    fraction, exponent = jnp.frexp(jnp.asarray(global_scale, jnp.float32).reshape(()) / EPILOGUE_FACTOR)
    power = jnp.ldexp(jnp.float32(1), exponent)
    dh_MR, a_KR = (dh_MR * fraction).astype(dtype), (a_RK.astype(dtype).astype(jnp.float32) * power).astype(dtype).T
    return [jnp.pad(dh_MR, ((0, 0), (0, more))), jnp.pad(a_KR, ((0, 0), (0, more)))]
