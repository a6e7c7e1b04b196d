"""What a kernel reads beside x and the weights: numbers, biases and adapters in the shapes that all kernels take.

Letters: K inputs and N outputs of a weight, R LoRA's rank.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .layout import ROWS


def number(value) -> jax.Array:
    """A number as the kernel takes it, float32 [1]. What is computed from it the kernel computes: every operation on a
    scalar outside it would be a launch."""
    return jnp.asarray(value, jnp.float32).reshape(1)


def check_added(weights, loras, biases):
    """Raises ValueError where LoRA pairs or biases are not of their weights' shapes: they would be broadcast."""
    for w, lora, bias in zip(weights, loras, biases, strict=True):
        if lora is not None:
            a, b, _ = lora
            if a.shape[0] == 0:
                raise ValueError("LoRA's rank must be at least 1; a weight without an adapter has None")
            if a.shape[1:] != (w.k,) or b.shape != (w.n, a.shape[0]):
                raise ValueError(f"lora has A {a.shape} and B {b.shape}, the weight {w.shape} takes [R, K] and [N, R]")
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
