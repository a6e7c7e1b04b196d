"""Random numbers and packed weights, true values by NumPy, and outputs that begin as NaN: what tests of the kernels
share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import KernelWeight, LayerPart, Projection, repack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BYTE = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], -1)  # both values of a byte, the low nibble's first
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
CASES = ("all codes and scales", "zeros", "positive", "large global", "small global")


def normal(rng, *shape: int, size: float = 1, dtype=jnp.float32) -> jax.Array:
    """Drawn by NumPy: jax.random compiles a program for each shape, which takes longer than most tests."""
    return jnp.asarray(size * rng.standard_normal(shape, np.float32), dtype)


def tiny_layer(rank: int, qkv: bool = True, dtype=jnp.bfloat16) -> LayerPart:
    """Of hidden size 256, with 512 inputs of o and of down; up to the last layer's end without q, k, v."""
    rng = np.random.default_rng(rank)

    def projection(n, k, biased, adapted):
        packed = rng.integers(0, 256, (n, k // 2), np.uint8)
        weight = repack(jnp.asarray(packed), jnp.asarray(rng.integers(40, 60, (n, k // 16), np.uint8)), dtype)
        a, b = (normal(rng, *s, size=s[1] ** -0.5, dtype=dtype) for s in ((rank, k), (n, rank)))
        bias = normal(rng, n) if biased else None
        return Projection(weight, jnp.float32(30), bias, (a, b, jnp.float32(0.5)) if adapted else None)

    return LayerPart(
        projection(256, 512, False, True),
        projection(512, 256, False, True),
        projection(512, 256, False, False),
        projection(256, 512, True, True),
        tuple(projection(n, 256, True, n != 128) for n in (256, 128, 64)) if qkv else (),
    )


class Matrix(NamedTuple):
    """W [N, K] in the kernel's layout, its code times scale, exact, and its global scale, by which that is divided."""

    weight: KernelWeight
    values: np.ndarray
    global_scale: np.float32

    @property
    def dense(self) -> np.ndarray:
        return self.values / np.float64(self.global_scale)


def from_bytes(packed: np.ndarray, scale: np.ndarray, global_scale: float, dtype: str = "bfloat16") -> Matrix:
    n, blocks = scale.shape
    values = BYTE[packed].reshape(n, blocks, 16) * E4M3[scale][:, :, None]
    weight = repack(jnp.asarray(packed), jnp.asarray(scale), dtype)
    return Matrix(weight, values.reshape(n, -1), np.float32(global_scale))


def random_matrix(
    rng, n: int, k: int, global_scale: float, scale_low: int = 0, scale_high: int = 0x7F, dtype: str = "bfloat16"
) -> Matrix:
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return from_bytes(packed, rng.integers(scale_low, scale_high, (n, k // 16), dtype=np.uint8), global_scale, dtype)


def adversarial(rng, case: str, m: int, n: int, k: int) -> tuple[jax.Array, Matrix]:
    """x [M, K] and W with all codes and all scale bytes 0x00-0x7E, as one of CASES has them."""
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = (np.arange(n * k // 16) % 0x7F).astype(np.uint8).reshape(n, k // 16)
    x = rng.standard_normal((m, k), np.float32)
    if case == "zeros":
        packed[: n // 2], scale[n // 2 :] = 0, 0
    elif case == "positive":
        packed, x = packed & 0x77, np.abs(x)
    global_scale = {"large global": 2.0**100, "small global": 2.0**-100}.get(case, 1.0)
    return jnp.asarray(x, jnp.bfloat16), from_bytes(packed, scale, global_scale)


def poison(*shape: int) -> None:
    """NaN in memory that is freed at once, so that the output may get it."""
    jax.device_put(np.full(shape, np.nan, np.float32)).block_until_ready()


def swiglu(true, bound):
    """silu(gate) * up of the true two, and its error in float32 where they have errors up to their bounds."""
    (gate, up), (of_gate, of_up) = true, bound
    silu = gate / (1 + np.exp(-gate))
    # silu's slope is at most 1.1; what exp2 takes is rounded
    error = 1.1 * of_gate * (np.abs(up) + of_up) + np.abs(silu) * of_up + 1e-6 * (1 + np.abs(gate)) * np.abs(silu * up)
    return silu * up, error
