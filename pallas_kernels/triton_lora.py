"""x A^T of the adapters of weights that read the same x, for the portable kernel (triton_kernel.py).

A warp multiplies 16 rows of an A by a part of K. The parts' sums are added up, in order, by who reads them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .triton_call import call
from .triton_plan import blocks, starts

BLOCK_K = tl.constexpr(128)
BLOCK_R = tl.constexpr(16)
PARTS, STAGES = (16, 8, 4, 2, 1), 4


@triton.jit
def lora_hidden(
    x_ptr,
    all_a,
    out_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    RANKS: tl.constexpr,
    FIRST_RANKS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out [PARTS, M, ALL_RANKS] float32: x [M, STRIDE] A^T over each part of K, of each A [R, K]; of A number i
    programs begin at PROGRAMS[i], and ranks at FIRST_RANKS[i]."""
    block, part = tl.program_id(0), tl.program_id(1)
    a_ptr, rank, before, first = all_a[0], RANKS[0], 0, 0
    for i in tl.static_range(1, len(RANKS)):
        if block >= PROGRAMS[i]:
            a_ptr, rank, before, first = all_a[i], RANKS[i], PROGRAMS[i], FIRST_RANKS[i]
    r = (block - before) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    SHARE: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS)
    acc = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    for index in tl.range(0, SHARE, num_stages=STAGES):
        k = (part * SHARE + index) * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + r[:, None] * K + k[None, :], mask=(r[:, None] < rank) & (k[None, :] < K), other=0.0)
        x = tl.load(x_ptr + m[None, :] * STRIDE + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        if WIDE:  # Triton's interpreter has no products of bfloat16
            a, x = a.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(a, x, acc, input_precision="ieee")
    at = (part * M + m[None, :]) * ALL_RANKS + first + r[:, None]
    tl.store(out_ptr + at, acc, mask=(m[None, :] < M) & (r[:, None] < rank))


def parts_of(k: int) -> int:
    """Parts of K, of one block at least."""
    return next(parts for parts in PARTS if parts * BLOCK_K.value <= max(k, BLOCK_K.value))


def hidden_constants(
    m: int, k: int, stride: int, ranks: Sequence[int], block_m: int, wide: bool = False
) -> dict[str, object]:
    """Compile-time arguments of `lora_hidden`, for x whose rows begin `stride` apart."""
    *first, count = starts(ranks)
    adapters = {"RANKS": tuple(ranks), "FIRST_RANKS": tuple(first), "ALL_RANKS": count}
    programs = {
        "PROGRAMS": starts(blocks(ranks, BLOCK_R.value)),
        "PARTS": parts_of(k),
        "BLOCK_M": block_m,
        "STAGES": STAGES,
    }
    return {"M": m, "K": k, "STRIDE": stride} | adapters | programs | {"WIDE": wide}


def hidden_grid(m: int, k: int, ranks: Sequence[int], block_m: int) -> tuple[int, int, int]:
    """Programs along the ranks, the parts of K and the rows."""
    return sum(blocks(ranks, BLOCK_R.value)), parts_of(k), -(-m // block_m)


def hidden_parts(x: jax.Array, k: int, all_a: Sequence[jax.Array], ranks: Sequence[int], block_m: int) -> jax.Array:
    """x A^T [parts, M, sum of ranks] in float32, where x [M, >= k] and each A [R, k] have one dtype; what stands for
    an A of rank 0 is not read.

    Raises:
      ImportError: see `triton_call.call`.
    """
    m, stride = x.shape
    return call(
        lora_hidden,
        (x, tuple(all_a)),
        jax.ShapeDtypeStruct((parts_of(k), m, sum(ranks)), jnp.float32),
        hidden_grid(m, k, ranks, block_m),
        hidden_constants(m, k, stride, ranks, block_m),
        num_warps=1,
        num_stages=STAGES,
    )
