"""The portable NVFP4 product in Triton, for GPUs without the Mosaic kernel (Ampere, Ada; also Hopper and Blackwell).

It reads the same KernelWeight bytes: a program takes 16 `TILES` outputs and `BLOCK_M` rows of x and walks K in units of
64 columns, decoding them to BF16 (exact) and multiplying with tl.dot, float32 sums. Importing this module needs triton;
calling `matmul` needs jax_triton, which imports only beside a CUDA-enabled JAX (0.3.1 with triton 3.6, 0.4 with 3.7).
"""

import importlib.metadata

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .layout import COLS, QUAD_WORDS, KernelWeight
from .triton_versions import check_versions

TILES = 4


@triton.jit
def _rotate(word, left: tl.constexpr):
    return (word << left) | (word >> (32 - left))


@triton.jit
def _values(pairs, half: tl.constexpr, scale):
    """bfloat16 code * scale from one half of decoded pairs (bits 15, 8..6), in integer arithmetic up to the product."""
    bits = (pairs >> (16 * half)) & 0xFFFF
    exponent = (bits >> 7) & 3
    mantissa = (bits >> 6) & 1
    magnitude = tl.where(exponent > 0, (2 + mantissa) << (tl.maximum(exponent, 1) - 1), mantissa)
    value = magnitude.to(tl.int32).to(tl.float32) * 0.5
    return (tl.where(bits > 0x7FFF, -value, value) * scale[:, :, None]).to(tl.bfloat16)


@triton.jit
def _scale(byte):
    """e4m3 bits of a scale (0x00-0x7E) to float32."""
    exponent, mantissa = byte >> 3, byte & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    return tl.where(exponent > 0, normal, mantissa.to(tl.int32).to(tl.float32) * 0.001953125)


@triton.jit
def nvfp4_matmul(
    x_ptr,
    data_ptr,
    factor_ptr,
    y_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    QUADS: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y [M, N] = x [M, 256 QUADS] bf16 times W^T, times factor.

    WIDE multiplies in float32, for Triton's interpreter, whose dot takes bfloat16 bits for integers.
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    known = tile < ALL_TILES
    tile_at = tl.where(known, tile, 0).to(tl.int64) * (QUADS * 576)
    lane = tl.arange(0, 32)
    step = tl.arange(0, 4)
    column = tl.arange(0, 64)
    acc = tl.zeros([TILES * 16, BLOCK_M], tl.float32)
    for unit in range(QUADS * 4):
        quad_at = tile_at + (unit // 4) * 576
        word_at = quad_at[:, None, None] + (unit % 4) * 128 + lane[None, :, None] * 4 + step[None, None, :]
        words = tl.load(data_ptr + word_at, mask=known[:, None, None], other=0)
        scale_at = quad_at[:, None] + 512 + (unit % 4) // 2 * 32 + lane[None, :]
        scales = tl.load(data_ptr + scale_at, mask=known[:, None], other=0) >> ((unit % 2) * 16)
        low, high = _scale(scales & 0xFF), _scale((scales >> 8) & 0xFF)
        p0 = _rotate(words, 2) & 0x81C081C0
        p1 = _rotate(words, 6) & 0x81C081C0
        p2 = _rotate(words, 28) & 0x81C081C0
        p3 = (_rotate(words, 24) & 0x80C080C0) | (words & 0x01000100)
        # [tile, lane, step] -> + column of the pair -> + pair of the step -> + upper or lower eight rows
        upper = tl.join(
            tl.join(_values(p0, 0, low), _values(p0, 1, low)), tl.join(_values(p2, 0, low), _values(p2, 1, low))
        )
        lower = tl.join(
            tl.join(_values(p1, 0, high), _values(p1, 1, high)), tl.join(_values(p3, 0, high), _values(p3, 1, high))
        )
        w = tl.reshape(tl.join(upper, lower), [TILES, 8, 16, 2, 2, 2])  # tile g (t step) column pair half
        w = tl.reshape(tl.permute(w, [0, 5, 1, 2, 4, 3]), [TILES * 16, 64])
        x_at = rows[None, :].to(tl.int64) * (QUADS * 256) + unit * 64 + column[:, None]
        x = tl.load(x_ptr + x_at, mask=rows[None, :] < M, other=0.0)
        if WIDE:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
    acc = acc * tl.load(factor_ptr)
    outputs = tl.program_id(0) * TILES * 16 + tl.arange(0, TILES * 16)
    y_at = rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=(rows[None, :] < M) & (outputs[:, None] < N))


def block_m(m: int) -> int:
    return 16 if m <= 16 else 32 if m <= 32 else 64


def matmul(x_MK: jax.Array, weight: KernelWeight, global_scale, out_dtype=jnp.float32) -> jax.Array:
    """x W^T [M, N] in float32 or bfloat16; ImportError where jax-triton and triton do not fit."""
    check_versions(importlib.metadata.version("jax-triton"), triton.__version__)
    import jax_triton  # only where JAX has CUDA

    m, k = x_MK.shape
    tiles, quads, words = weight.data.shape
    if k != weight.k or words != QUAD_WORDS:
        raise ValueError(f"x has K = {k}, the weight {weight.shape} expects K = {weight.k}")
    if weight.dtype != "bfloat16":
        raise ValueError(f"the weight's layout is for {weight.dtype}; this kernel takes those for bfloat16")
    x = jnp.pad(x_MK.astype(jnp.bfloat16), ((0, 0), (0, -k % COLS)))
    factor = (1.0 / jnp.asarray(global_scale, jnp.float32)).reshape(1)
    return jax_triton.triton_call(
        x,
        weight.data,
        factor,
        kernel=nvfp4_matmul,
        out_shape=jax.ShapeDtypeStruct((m, weight.n), out_dtype),
        grid=(-(-tiles // TILES), -(-m // block_m(m))),
        num_warps=4,
        num_stages=3,
        M=m,
        N=weight.n,
        QUADS=quads,
        ALL_TILES=tiles,
        TILES=TILES,
        BLOCK_M=block_m(m),
        WIDE=False,
    )
