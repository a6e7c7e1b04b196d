"""The portable NVFP4 kernels in Triton, for GPUs without the Mosaic ones (Ampere, Ada, Blackwell; also Hopper).

They read the same KernelWeight bytes. In `nvfp4_matmul` a program takes some row tiles of 16 outputs of one of several
weights, up to 64 rows of x and a part of K, which it walks in quads of 256 columns. A lane's 16 bytes of a unit hold
just the weights that mma.m16n8k16 wants of it, so the tile that they are reshaped to needs no exchange between lanes:
Triton finds that itself where K's order in a unit is [step, block of 16, 4 columns], in which x is read too. Sums of
the parts of K are float32 and are added by XLA, in order, with what follows the product.

Importing this module needs triton; its calls need jax_triton.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .layout import COLS, EPILOGUE_FACTOR, QUAD_WORDS, ROWS, KernelWeight
from .operands import number
from .triton_call import call
from .triton_decode import decoding_constants, weights_of_unit
from .triton_lora import hidden_parts
from .triton_plan import TritonPlan, blocks, make_plan, starts
from .variants import multiprocessors

DEQUANTIZED = 4  # row tiles that a program of `nvfp4_dequantize` takes
# Up to so many rows the programs add up the parts of x A^T themselves; with more they are too many bytes.
SUMMED_BY_ALL = 8


@triton.jit
def nvfp4_matmul(
    x_ptr,
    h_ptr,
    all_data,
    scales,
    all_b,
    scalings,
    sums_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    FIRST_N: tl.constexpr,
    ALL_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    QUADS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    RANKS: tl.constexpr,
    FIRST_RANKS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    H_PARTS: tl.constexpr,
    LORA_PART: tl.constexpr,
    FACTOR: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    FLOAT16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """sums [.., M, ALL_N] float32: x [M, 256 QUADS] W^T over each part of K, of weights that stand one behind the
    other: of number i programs begin at PROGRAMS[i], outputs at FIRST_N[i] and ranks at FIRST_RANKS[i]. In LORA_PART,
    the first or one more, there is scaling h B^T too, with B [N, R] and h the sum of [H_PARTS, M, ALL_RANKS] in x's
    dtype."""
    block, part = tl.program_id(0), tl.program_id(1)
    data_ptr, scale_ptr, b_ptr, scaling_ptr = all_data[0], scales[0], all_b[0], scalings[0]
    n, rank, before, first, first_rank = N[0], RANKS[0], 0, 0, 0
    for i in tl.static_range(1, len(N)):
        if block >= PROGRAMS[i]:
            data_ptr, scale_ptr, b_ptr, scaling_ptr = all_data[i], scales[i], all_b[i], scalings[i]
            n, rank, before, first, first_rank = N[i], RANKS[i], PROGRAMS[i], FIRST_N[i], FIRST_RANKS[i]
    block -= before

    SHARE: tl.constexpr = (QUADS + SPLIT - 1) // SPLIT
    tile = tl.minimum(block * TILES + tl.arange(0, TILES), tl.cdiv(n, 16) - 1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_ptr = data_ptr + tile[:, None].to(tl.int64) * (QUADS * 576)
    k = tl.arange(0, 64)
    column = k % 16 // 4 * 16 + k // 16 * 4 + k % 4  # of a unit, in the order in which it is multiplied
    column = tl.max_contiguous(tl.multiple_of(column, 4), 4)
    row_ptr = x_ptr + rows[None, :].to(tl.int64) * (QUADS * 256) + column[:, None]
    acc = tl.zeros([TILES * 16, BLOCK_M], tl.float32)
    steps = SHARE
    if LORA_PART == SPLIT:
        steps = tl.where(part < SPLIT, SHARE, 0)
    for index in tl.range(0, steps, num_stages=STAGES):
        known = (rows[None, :] < M) & (part * SHARE + index < QUADS)
        quad = tl.minimum(part * SHARE + index, QUADS - 1)  # a part's that are not there: the last one's, times zero
        for unit in tl.static_range(4):
            w = weights_of_unit(tile_ptr + quad * 576, unit, TILES, PAIRS, SCALE, FLOAT16, WIDE)
            w = tl.reshape(tl.permute(w, [0, 6, 1, 3, 2, 5, 4]), [TILES * 16, 64])
            x = tl.load(row_ptr + quad * 256 + unit * 64, mask=known, other=0.0)
            acc = tl.dot(w, x.to(w.dtype), acc, input_precision="ieee")
    acc *= FACTOR / tl.load(scale_ptr)
    outputs = block * TILES * 16 + tl.arange(0, TILES * 16)[:, None]
    if RANK > 0:
        has_adapter = (part == LORA_PART) & (rank > 0)
        if has_adapter:
            r = tl.arange(0, RANK)
            h_at = rows[None, :] * ALL_RANKS + first_rank + r[:, None]
            h = tl.zeros([RANK, BLOCK_M], tl.float32)
            for _ in tl.static_range(H_PARTS):
                h += tl.load(h_ptr + h_at, mask=(rows[None, :] < M) & (r[:, None] < rank), other=0.0)
                h_at += M * ALL_RANKS
            b = tl.load(b_ptr + outputs * rank + r[None, :], mask=(outputs < n) & (r[None, :] < rank), other=0.0)
            h = h.to(b.dtype)
            if WIDE:
                b, h = b.to(tl.float32), h.to(tl.float32)
            acc += tl.dot(b, h, input_precision="ieee") * tl.load(scaling_ptr)
    at = (part * M + rows[None, :]).to(tl.int64) * ALL_N + first + outputs
    tl.store(sums_ptr + at, acc, mask=(rows[None, :] < M) & (outputs < n))


@triton.jit
def nvfp4_dequantize(
    data_ptr,
    out_ptr,
    QUADS: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    FLOAT16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """W * global_scale / 128 [16 ALL_TILES, 256 QUADS]; a program takes a quad of TILES row tiles."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    quad = tl.program_id(1)
    quad_ptr = data_ptr + tl.minimum(tile, ALL_TILES - 1)[:, None].to(tl.int64) * (QUADS * 576) + quad * 576
    rows = tl.program_id(0) * TILES * 16 + tl.arange(0, TILES * 16)
    row_ptr = out_ptr + rows[:, None].to(tl.int64) * (QUADS * 256) + quad * 256 + tl.arange(0, 64)[None, :]
    for unit in tl.static_range(4):
        w = weights_of_unit(quad_ptr, unit, TILES, PAIRS, SCALE, FLOAT16, WIDE)
        w = tl.reshape(tl.permute(w, [0, 6, 1, 2, 3, 5, 4]), [TILES * 16, 64])
        tl.store(row_ptr + unit * 64, w, mask=rows[:, None] < ALL_TILES * 16)


def matmul_constants(
    m: int, weights: Sequence[KernelWeight], ranks: Sequence[int], h_parts: int, plan: TritonPlan, wide: bool = False
) -> dict[str, object]:
    """Compile-time arguments of `nvfp4_matmul`, for weights with adapters of these ranks (0: none), whose x A^T comes
    in so many parts."""
    (*first, count), (*first_rank, all_ranks) = starts([w.n for w in weights]), starts(ranks)
    outputs = {"N": tuple(w.n for w in weights), "FIRST_N": tuple(first), "ALL_N": count}
    most = max(ranks) and max(16, triton.next_power_of_2(max(ranks)))  # at least 16, for a product
    adapters = {"RANKS": tuple(ranks), "FIRST_RANKS": tuple(first_rank), "ALL_RANKS": all_ranks, "RANK": most}
    adapters |= {"H_PARTS": h_parts, "LORA_PART": lora_part(h_parts, plan)}
    programs = {"PROGRAMS": starts(_blocks(weights, plan)), "QUADS": weights[0].data.shape[1]}
    planned = {"TILES": plan.tiles, "BLOCK_M": plan.block_m, "SPLIT": plan.split, "STAGES": plan.stages}
    decoding = {"FACTOR": EPILOGUE_FACTOR} | decoding_constants(weights[0].dtype, wide)
    return {"M": m} | outputs | programs | planned | adapters | decoding


def _blocks(weights: Sequence[KernelWeight], plan: TritonPlan) -> list[int]:
    return blocks([w.data.shape[0] for w in weights], plan.tiles)


def lora_part(h_parts: int, plan: TritonPlan) -> int:
    """Which programs multiply by B: the first part's or, to add up several parts of x A^T, some of their own, since
    that takes nearly as long as a part's product."""
    return plan.split if h_parts > 1 else 0


def matmul_grid(m: int, weights: Sequence[KernelWeight], h_parts: int, plan: TritonPlan) -> tuple[int, int, int]:
    """Programs along the outputs, the parts of K and what is added to them, and the rows."""
    parts = max(plan.split, lora_part(h_parts, plan) + 1)
    return sum(_blocks(weights, plan)), parts, -(-m // plan.block_m)


def dequantize_constants(weight: KernelWeight, wide: bool = False) -> dict[str, object]:
    """Compile-time arguments of `nvfp4_dequantize`."""
    tiles, quads, _ = weight.data.shape
    return {"QUADS": quads, "ALL_TILES": tiles, "TILES": DEQUANTIZED} | decoding_constants(weight.dtype, wide)


def dequantize_grid(weight: KernelWeight) -> tuple[int, int]:
    """Programs along the outputs and along K."""
    return -(-weight.data.shape[0] // DEQUANTIZED), weight.data.shape[1]


def matmul(
    x_MK: jax.Array,
    weights: Sequence[KernelWeight],
    global_scales: Sequence[jax.Array],
    loras: Sequence[tuple | None],
    plan: TritonPlan | None = None,
) -> list[jax.Array]:
    """x W^T + s (x A^T) B^T [M, N] in float32, of weights of one dtype, to which x and x A^T are cast.

    Args:
      global_scales, loras: of each weight, as `fp4_matmul` takes them.

    Raises:
      ImportError: see `triton_call.call`.
    """
    (m, k), dtype = x_MK.shape, weights[0].dtype
    if any(k != w.k or w.data.shape[2] != QUAD_WORDS for w in weights):
        raise ValueError(f"x has K = {k}, the weights {[w.shape for w in weights]} expect theirs")
    plan = plan or make_plan(m, [w.data.shape[0] for w in weights], weights[0].data.shape[1], multiprocessors())
    x = jnp.pad(x_MK.astype(dtype), ((0, 0), (0, -k % COLS)))
    scales = [number(scale) for scale in global_scales]
    # For what is not there stands something that is.
    ranks = [0 if lora is None else lora[0].shape[0] for lora in loras]
    all_a, all_b = ([x if lora is None else lora[i].astype(dtype) for lora in loras] for i in (0, 1))
    scalings = [scales[0] if lora is None else number(lora[2]) for lora in loras]

    h = scales[0].reshape(1, 1, 1)
    if any(ranks):
        h = hidden_parts(x, k, all_a, ranks, plan.block_m)
        if m > SUMMED_BY_ALL:
            h = _sum_of_parts(h)[None]
    grid = matmul_grid(m, weights, len(h), plan)
    sums = call(
        nvfp4_matmul,
        (x, h, *map(tuple, ([w.data for w in weights], scales, all_b, scalings))),
        jax.ShapeDtypeStruct((grid[1], m, sum(w.n for w in weights)), jnp.float32),
        grid,
        matmul_constants(m, weights, ranks, len(h), plan),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    y = _sum_of_parts(sums)
    return [y[:, first:end] for first, end in itertools.pairwise(starts([w.n for w in weights]))]


def _sum_of_parts(parts: jax.Array) -> jax.Array:
    """Of the first axis, in order, which a reduction of XLA's need not have."""
    y = parts[0]
    for part in range(1, len(parts)):
        y = y + parts[part]
    return y


def dequantize(weight: KernelWeight) -> jax.Array:
    """W * global_scale / 128 in the weight's dtype, exactly: [N, K], padded to whole row tiles and quads. ImportError
    as in `matmul`."""
    tiles, quads, _ = weight.data.shape
    out = jax.ShapeDtypeStruct((tiles * ROWS, quads * COLS), weight.dtype)
    return call(nvfp4_dequantize, (weight.data,), out, dequantize_grid(weight), dequantize_constants(weight))
