"""What a kernel reads beside x and the weights: numbers, biases and adapters in the shapes that all kernels take.

Letters: K inputs and N outputs of a weight, R LoRA's rank.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .layout import ROWS, KernelWeight, check_data


def number(value) -> jax.Array:
    """A number as the kernel takes it, float32 [1]. What is computed from it the kernel computes: every operation on a
    scalar outside it would be a launch."""
    return jnp.asarray(value, jnp.float32).reshape(1)


def one_number(name: str, value) -> jax.Array:
    """A number as float32 []; ValueError where there is none or there are several."""
    if value is None or np.size(value) != 1:
        raise ValueError(f"{name} must be one number, got {None if value is None else f'shape {np.shape(value)}'}")
    return jnp.asarray(value, jnp.float32).reshape(())


def check_weight(weight):
    """Raises TypeError for what is no KernelWeight, ValueError for one whose data are not those of its shape."""
    if not isinstance(weight, KernelWeight):
        raise TypeError(f"a weight is {type(weight).__name__}; expected a KernelWeight, which `repack` makes")
    check_data(weight)


def check_floats(name: str, dtype):
    """Raises TypeError for whole numbers, to which a product would be cut."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} is {dtype}; expected a float dtype, in which the product is computed")


def check_inputs(x_MK, weights):
    """Raises ValueError where these weights do not all take x, TypeError where it holds whole numbers."""
    check_floats("x", x_MK.dtype)
    if x_MK.ndim != 2:
        raise ValueError(f"x must be [M, K], got shape {x_MK.shape}")
    for w in weights:
        check_weight(w)
        if w.n == 0:
            raise ValueError(f"a weight must have outputs, got {w.shape}")
        if w.k != x_MK.shape[1]:
            raise ValueError(f"x has K = {x_MK.shape[1]}, the weight {w.shape} expects K = {w.k}")
    if len({w.dtype for w in weights}) > 1:
        raise ValueError(f"weights that share x must have one dtype, got {', '.join(w.dtype for w in weights)}")


def check_dy(dy_MN, weight):
    """The same for the outputs' gradient and the one weight."""
    check_floats("dy", dy_MN.dtype)
    check_weight(weight)
    if dy_MN.ndim != 2 or dy_MN.shape[1] != weight.n:
        raise ValueError(f"dy must be [M, {weight.n}], got shape {dy_MN.shape}")


def result_dtype(x_MK, out_dtype) -> jnp.dtype:
    """`out_dtype`, or x's where it is None; TypeError for whole numbers."""
    dtype = jnp.dtype(x_MK.dtype if out_dtype is None else out_dtype)
    check_floats("out_dtype", dtype)
    return dtype


def per_weight(count, global_scale, lora, bias):
    """Of each of `count` weights its global scale, float32 [], its (A, B, scaling) and its bias, or None."""
    found = []
    for name, value in (("global_scale", global_scale), ("lora", lora), ("bias", bias)):
        try:
            entries = (None,) * count if value is None else tuple(value)
        except TypeError:
            raise ValueError(f"{name} must be a list, with one entry for each of the {count} weights") from None
        if len(entries) != count:
            raise ValueError(f"{name} must have one entry for each of the {count} weights, got {len(entries)}")
        found.append(entries)
    scales, loras, biases = found
    for entry in loras:
        if entry is not None and not (isinstance(entry, list | tuple) and len(entry) == 3):
            of = f" of {len(entry)}" if isinstance(entry, list | tuple) else ""
            raise ValueError(f"a weight's lora must be (A, B, scaling) or None, got {type(entry).__name__}{of}")
    scales = tuple(one_number("global_scale", scale) for scale in scales)
    return scales, tuple(None if entry is None else tuple(entry) for entry in loras), biases


def check_added(weights, loras, biases):
    """Raises ValueError where LoRA's arrays or biases are not of their weights' shapes: they would be broadcast."""
    for w, lora, bias in zip(weights, loras, biases, strict=True):
        if lora is not None:
            a, b, scaling = lora
            if a.shape[0] == 0:
                raise ValueError("LoRA's rank must be at least 1; a weight without an adapter has None")
            if a.shape[1:] != (w.k,) or b.shape != (w.n, a.shape[0]):
                raise ValueError(f"lora has A {a.shape} and B {b.shape}, the weight {w.shape} takes [R, K] and [N, R]")
            if scaling is None or np.shape(scaling) not in ((), (1,)):
                found = None if scaling is None else f"shape {np.shape(scaling)}"
                raise ValueError(f"lora's scaling must be one number, got {found}")
        if bias is not None and bias.shape != (w.n,):
            raise ValueError(f"bias is {bias.shape}, the weight {w.shape} takes [N]")


def all_biases(biases, n: Sequence[int]) -> list[jax.Array]:
    """One in float32 for each weight, of n_i outputs, or none at all."""
    if all(bias is None for bias in biases):
        return []
    return [jnp.zeros(n_i) if bias is None else bias.astype(jnp.float32) for bias, n_i in zip(biases, n, strict=True)]


def padded_rank(rank: int) -> int:
    """Kernels take LoRA's ranks 16 at a time."""
    return -(-rank // ROWS) * ROWS


def padded_ranks(loras) -> tuple[int, ...]:
    """Of (A, B, scaling) or None for each weight, 0 for None; () if none has one."""
    ranks = tuple(0 if lora is None else padded_rank(lora[0].shape[0]) for lora in loras)
    return ranks if any(ranks) else ()


def padded_a(a_RK: jax.Array, k: int, dtype: str) -> jax.Array:
    """A [R, K] as [padded R, k] in `dtype`."""
    more = padded_rank(a_RK.shape[0]) - a_RK.shape[0]
    return jnp.pad(a_RK.astype(dtype), ((0, more), (0, k - a_RK.shape[1])))


def adapter(lora, k: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A [R, K], B [N, R] and scaling as A [padded R, k] and B [N, padded R] in `dtype`, and the number."""
    a_RK, b_NR, scaling = lora
    a_RK = padded_a(a_RK, k, dtype)
    more = a_RK.shape[0] - b_NR.shape[1]
    return a_RK, jnp.pad(b_NR.astype(dtype), ((0, 0), (0, more))), number(scaling)


def adapters(loras, k: int, dtype: str) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """All A, all B and all scalings of the weights that have an adapter."""
    present = [adapter(lora, k, dtype) for lora in loras if lora is not None]
    return [a for a, _, _ in present], [b for _, b, _ in present], [scaling for _, _, scaling in present]
