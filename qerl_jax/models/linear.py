"""The one entry for every linear layer: y = x W^T + bias + scaling * (x A^T) B^T, with W frozen in any format."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import KernelWeight, fp4_matmul, fp4_mlp, joins_gate_and_up, lora_inside, range_scale
from qerl_jax.formats import KernelNVFP4, Weight, dequantize, format_of
from qerl_jax.models.params import LoRA


def fewest_rows() -> int:
    """The fewest rows of a product: two on a CPU, where XLA takes another path for a lone one. Its last bits differ,
    and a row's result must not depend on how many rows stand beside it."""
    return 2 if jax.default_backend() == "cpu" else 1


def matmul_rows(x_MK: jax.Array, w_NK: jax.Array, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x W^T [M, N]; too few rows are padded (see `fewest_rows`)."""
    rows = x_MK.shape[0]
    x_MK = jnp.pad(x_MK, ((0, max(0, fewest_rows() - rows)), (0, 0)))
    return jax.lax.dot_general(x_MK, w_NK, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)[:rows]


@jax.custom_vjp
def _unrounded(x_MK: jax.Array, w_NK: jax.Array) -> jax.Array:
    """x W^T [M, N] in float32 from 16 bits. Its gradients multiply in 16 bits; those that JAX derives would take the
    weight to float32."""
    return matmul_rows(x_MK, w_NK, jnp.float32)


def _unrounded_bwd(saved: tuple[jax.Array, jax.Array], dy_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_MK, w_NK = saved
    dy_MN = dy_MN.astype(x_MK.dtype)
    return dy_MN @ w_NK, dy_MN.T @ x_MK


_unrounded.defvjp(lambda x_MK, w_NK: (_unrounded(x_MK, w_NK), (x_MK, w_NK)), _unrounded_bwd)


def matmul(x_MK: jax.Array, w_NK: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """x W^T [M, N], in x's dtype or in float32; the products of its gradients have x's dtype."""
    return matmul_rows(x_MK, w_NK) if out_dtype == x_MK.dtype else _unrounded(x_MK, w_NK)


def _frozen_matmul(x_MK: jax.Array, weight: Weight, out_dtype: DTypeLike) -> jax.Array:
    return matmul(x_MK, jax.lax.stop_gradient(dequantize(weight, x_MK.dtype)), out_dtype)


def linear(x: jax.Array, weight: Weight, lora: LoRA | None = None, bias: jax.Array | None = None) -> jax.Array:
    """Applies a frozen weight and, if given, its LoRA pair.

    The weight gets no gradient: differentiation yields dx and the LoRA gradients only.

    Args:
      x: [..., K], float32, bfloat16 or float16; the result and the products have its dtype.
      weight: [N, K] in any of `qerl_jax.formats`.
      lora: A [R, K] and B [N, R] in float32, cast to x's dtype here.
      bias: [N].

    Returns:
      [..., N].

    Raises:
      ValueError: the last axis of x is not K. TypeError: x has whole numbers.
    """
    return linears(x, (weight,), (lora,), (bias,))[0]


def linears(
    x: jax.Array,
    weights: Sequence[Weight],
    loras: Sequence[LoRA | None],
    biases: Sequence[jax.Array | None],
    *,
    unrounded: bool = False,
) -> tuple[jax.Array, ...]:
    """`linear` for several weights that read the same x (q, k, v; gate, up), by one kernel where there is one for all
    of them, else by one each.

    For few rows the kernel adds LoRA and biases too; then the biases get no gradient either. `unrounded` results are
    the float32 sums whatever x's dtype, to be added to something wider.

    With the kernels a result is rounded once, after LoRA and bias, even where those are added outside of the kernel: if
    sampler and learner rounded at different places in their first layers, they would differ everywhere after.
    """
    out_dtype = jnp.promote_types(x.dtype, jnp.float32) if unrounded else x.dtype
    _check_inputs(x, weights, loras, biases)
    packed = [weight for weight in weights if isinstance(weight, KernelNVFP4)]
    if 0 < len(packed) < len(weights):  # each alone: together those that are packed would be decoded at every call
        each = zip(weights, loras, biases, strict=True)
        return tuple(linears(x, (w,), (lora,), (bias,), unrounded=unrounded)[0] for w, lora, bias in each)
    x_MK = x.reshape(-1, x.shape[-1])  # two dimensions: XLA's CPU gradient is 1.8 times faster than with [B, T, K]
    if packed and _kernel_takes(x_MK, packed, loras):
        ys = fp4_matmul(x_MK, *_tiles(packed), lora=_triples(loras), bias=biases, out_dtype=out_dtype)
    else:
        adds = packed and any(more is not None for more in (*loras, *biases))
        sums_dtype = jnp.promote_types(x.dtype, jnp.float32) if adds else out_dtype
        if packed:
            products = fp4_matmul(x_MK, *_tiles(packed), out_dtype=sums_dtype)
        else:
            # The backward pass decodes a weight again: kept for it, the decoded ones would be the whole 16-bit model.
            again = jax.checkpoint(_frozen_matmul, static_argnums=2)
            products = [(_frozen_matmul if format_of(w) == "bf16" else again)(x_MK, w, sums_dtype) for w in weights]
        sums = map(_adapted, products, [x_MK] * len(products), loras, biases)
        ys = tuple(y_MN.astype(out_dtype) for y_MN in sums)
    return tuple(y_MN.reshape(*x.shape[:-1], y_MN.shape[-1]) for y_MN in ys)


def gated_mlp(
    x: jax.Array,
    weights: Sequence[Weight],
    loras: Sequence[LoRA | None],
    biases: Sequence[jax.Array | None],
    reads_down: Callable[[jax.Array], None] | None = None,
) -> jax.Array:
    """down(silu(gate x) * up x), the sums of `linears` unrounded, of the weights, LoRA pairs and biases of gate, up and
    down.

    With Mosaic kernels for all three, SwiGLU is a part of them, and gate and up are not rounded before it; else they
    are rounded to x's dtype. `reads_down` is called with what down reads, which then has to exist, so no kernel joins
    them.
    """
    _check_inputs(x, weights[:2], loras[:2], biases[:2])
    out_dtype = jnp.promote_types(x.dtype, jnp.float32)
    packed = [weight for weight in weights if isinstance(weight, KernelNVFP4)]
    if reads_down is None and len(packed) == 3 and joins_gate_and_up():
        x_MK = x.reshape(-1, x.shape[-1])
        inner_MF = jax.ShapeDtypeStruct((x_MK.shape[0], weights[2].shape[1]), x.dtype)
        if _kernel_takes(x_MK, packed[:2], loras[:2]) and _kernel_takes(inner_MF, packed[2:], loras[2:]):
            y_MN = fp4_mlp(x_MK, *_tiles(packed), lora=_triples(loras), bias=biases, out_dtype=out_dtype)
            return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])
    gate, up = linears(x, weights[:2], loras[:2], biases[:2])
    inner = jax.nn.silu(gate.astype(out_dtype)) * up.astype(out_dtype)
    if reads_down is not None:
        reads_down(inner.astype(x.dtype))
    return _down(inner, x.dtype, weights[2], loras[2], biases[2])


def _down(inner: jax.Array, dtype: jnp.dtype, weight: Weight, lora: LoRA | None, bias: jax.Array | None) -> jax.Array:
    """The unrounded product of `inner`, which is rounded to `dtype` first, times its `range_scale`. What is carried
    back is what there would be without that scale, and not larger, as float16 ends at 65504."""
    _check_inputs(inner, (weight,), (lora,), (bias,))
    scale = range_scale(dtype)
    if scale == 1:
        return linears(inner.astype(dtype), (weight,), (lora,), (bias,), unrounded=True)[0]
    if lora is not None:  # whose gradients are products with what is scaled
        a, b = _scaled(1.0, 1 / scale, (lora.a, lora.b))
        lora = lora.replace(a=a, b=b)
    scaled = _scaled(scale, 1.0, inner).astype(dtype)
    y = _scaled(1 / scale, 1.0, linears(scaled, (weight,), (lora,), (None,), unrounded=True)[0])
    return y if bias is None else y + bias.astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scaled(forward: float, backward: float, tree: Any) -> Any:
    """All arrays times `forward`, and their cotangents times `backward`."""
    return jax.tree.map(lambda leaf: leaf * forward, tree)


_scaled.defvjp(
    lambda forward, backward, tree: (_scaled(forward, backward, tree), None),
    lambda forward, backward, _, cotangents: (jax.tree.map(lambda leaf: leaf * backward, cotangents),),
)


def _check_inputs(
    x: jax.Array, weights: Sequence[Weight], loras: Sequence[LoRA | None], biases: Sequence[jax.Array | None]
) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"linear: x is {x.dtype}; expected a float dtype, in which the product is computed")
    for weight, lora, bias in zip(weights, loras, biases, strict=True):
        N, K = weight.shape
        if x.shape[-1] != K:
            raise ValueError(f"linear: x has {x.shape[-1]} inputs, the weight [{N}, {K}] takes {K}")
        if lora is not None and (lora.a.shape[1:] != (K,) or lora.b.shape != (N, lora.a.shape[0])):
            raise ValueError(
                f"linear: lora has A {list(lora.a.shape)} and B {list(lora.b.shape)}; the weight [{N}, {K}] takes "
                f"[R, {K}] and [{N}, R]"
            )
        if bias is not None and bias.shape != (N,):
            raise ValueError(f"linear: bias is {list(bias.shape)}; the weight [{N}, {K}] takes [{N}]")


def _tiles(weights: Sequence[KernelNVFP4]) -> tuple[list[KernelWeight], list[jax.Array]]:
    """What the kernels take of weights: packed data and global scales."""
    return [w.tiles for w in weights], [w.divisor for w in weights]


def _triples(loras: Sequence[LoRA | None]) -> list[tuple[jax.Array, jax.Array, float] | None]:
    return [None if lora is None else (lora.a, lora.b, lora.scaling) for lora in loras]


def _kernel_takes(
    x_MK: jax.Array | jax.ShapeDtypeStruct, weights: Sequence[KernelNVFP4], loras: Sequence[LoRA | None]
) -> bool:
    """Whether one kernel multiplies by the weights and adds their LoRA pairs. It does so in the dtype of their
    layout."""
    M, K = x_MK.shape
    ranks = tuple(0 if lora is None else lora.a.shape[0] for lora in loras)
    fits = all(x_MK.dtype == w.tiles.dtype for w in weights)
    return fits and lora_inside(M, K, tuple(w.shape[0] for w in weights), ranks)


def _adapted(y_MN: jax.Array, x_MK: jax.Array, lora: LoRA | None, bias: jax.Array | None) -> jax.Array:
    """Adds the LoRA product and the bias, in y's dtype."""
    dtype, out_dtype = x_MK.dtype, y_MN.dtype
    if lora is not None:
        down_MR = matmul_rows(x_MK, lora.a.astype(dtype))
        y_MN += matmul(down_MR, lora.b.astype(dtype), out_dtype) * jnp.asarray(lora.scaling, out_dtype)
    return y_MN if bias is None else y_MN + bias.astype(out_dtype)
