"""The portable NVFP4 kernels in Triton, for GPUs without the Mosaic ones (Ampere, Ada, Blackwell; also Hopper).

They read the same KernelWeight bytes. In `nvfp4_matmul` a program takes some row tiles of 16 outputs, up to 64 rows of
x and a part of K, which it walks in quads of 256 columns. A lane's 16 bytes of a unit hold just the weights that
mma.m16n8k16 wants of it, so the tile that they are reshaped to needs no exchange between lanes: Triton finds that
itself where K's order in a unit is [step, block of 16, 4 columns], in which x comes too (`in_step_order`). Sums of the
parts of K are float32 and are added by XLA, in order, with what follows the product.

Importing this module needs triton; its calls need jax_triton, which imports only beside a CUDA-enabled JAX.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .layout import COLS, EPILOGUE_FACTOR, QUAD_WORDS, ROWS, KernelWeight
from .triton_decode import decoding_constants, weights_of_unit
from .triton_plan import TILES, TritonPlan, make_plan
from .triton_versions import missing
from .variants import multiprocessors


@triton.jit
def nvfp4_matmul(
    x_ptr,
    data_ptr,
    sums_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    QUADS: tl.constexpr,
    ALL_TILES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    FLOAT16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """sums [SPLIT, M, N] float32 of x [M, 256 QUADS] in step order by W * global_scale / 128, of each part of K."""
    SHARE: tl.constexpr = (QUADS + SPLIT - 1) // SPLIT
    part = tl.program_id(1)
    tile = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), ALL_TILES - 1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_ptr = data_ptr + tile[:, None].to(tl.int64) * (QUADS * 576)
    row_ptr = x_ptr + rows[None, :].to(tl.int64) * (QUADS * 256) + tl.arange(0, 64)[:, None]
    acc = tl.zeros([TILES * 16, BLOCK_M], tl.float32)
    for index in tl.range(0, SHARE, num_stages=STAGES):
        known = (rows[None, :] < M) & (part * SHARE + index < QUADS)
        quad = tl.minimum(part * SHARE + index, QUADS - 1)  # a part's that are not there: the last one's, times zero
        for unit in tl.static_range(4):
            w = weights_of_unit(tile_ptr + quad * 576, unit, TILES, PAIRS, SCALE, FLOAT16, WIDE)
            w = tl.reshape(tl.permute(w, [0, 6, 1, 3, 2, 5, 4]), [TILES * 16, 64])
            x = tl.load(row_ptr + quad * 256 + unit * 64, mask=known, other=0.0)
            if WIDE:
                acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(w, x, acc)
    outputs = tl.program_id(0) * TILES * 16 + tl.arange(0, TILES * 16)[:, None]
    at = (part * M + rows[None, :]).to(tl.int64) * N + outputs
    tl.store(sums_ptr + at, acc, mask=(rows[None, :] < M) & (outputs < N))


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


def matmul_constants(m: int, weight: KernelWeight, plan: TritonPlan, wide: bool = False) -> dict[str, object]:
    """Compile-time arguments of `nvfp4_matmul`."""
    tiles, quads, _ = weight.data.shape
    sizes = {"M": m, "N": weight.n, "QUADS": quads, "ALL_TILES": tiles, "TILES": plan.tiles, "BLOCK_M": plan.block_m}
    return sizes | {"SPLIT": plan.split, "STAGES": plan.stages} | decoding_constants(weight.dtype, wide)


def matmul_grid(m: int, weight: KernelWeight, plan: TritonPlan) -> tuple[int, int, int]:
    """Programs along the outputs, the parts of K, and the rows."""
    return -(-weight.data.shape[0] // plan.tiles), plan.split, -(-m // plan.block_m)


def dequantize_constants(weight: KernelWeight, wide: bool = False) -> dict[str, object]:
    """Compile-time arguments of `nvfp4_dequantize`."""
    tiles, quads, _ = weight.data.shape
    return {"QUADS": quads, "ALL_TILES": tiles, "TILES": TILES} | decoding_constants(weight.dtype, wide)


def dequantize_grid(weight: KernelWeight) -> tuple[int, int]:
    """Programs along the outputs and along K."""
    return -(-weight.data.shape[0] // TILES), weight.data.shape[1]


def in_step_order(x_MK: jax.Array) -> jax.Array:
    """x with the columns of each unit as the kernel reads them, padded to whole quads."""
    m, k = x_MK.shape
    x = jnp.pad(x_MK, ((0, 0), (0, -k % COLS)))
    return x.reshape(m, -1, 4, 4, 4).swapaxes(2, 3).reshape(x.shape)


def matmul(x_MK: jax.Array, weight: KernelWeight, global_scale: jax.Array, plan: TritonPlan | None = None) -> jax.Array:
    """x W^T [M, N] in float32; x is cast to the weight's dtype. ImportError where jax-triton and triton do not fit."""
    m, k = x_MK.shape
    tiles, quads, words = weight.data.shape
    if k != weight.k or words != QUAD_WORDS:
        raise ValueError(f"x has K = {k}, the weight {weight.shape} expects K = {weight.k}")
    plan = plan or make_plan(m, tiles, quads, multiprocessors())
    sums = _call(
        nvfp4_matmul,
        (in_step_order(x_MK.astype(weight.dtype)), weight.data),
        jax.ShapeDtypeStruct((plan.split, m, weight.n), jnp.float32),
        matmul_grid(m, weight, plan),
        matmul_constants(m, weight, plan),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    y = sums[0]
    for part in range(1, plan.split):  # in order, which a reduction of XLA's need not have
        y = y + sums[part]
    return y * (EPILOGUE_FACTOR / jnp.asarray(global_scale, jnp.float32).reshape(()))


def dequantize(weight: KernelWeight) -> jax.Array:
    """W * global_scale / 128 in the weight's dtype, exactly: [N, K], padded to whole row tiles and quads. ImportError
    as in `matmul`."""
    tiles, quads, _ = weight.data.shape
    out = jax.ShapeDtypeStruct((tiles * ROWS, quads * COLS), weight.dtype)
    return _call(nvfp4_dequantize, (weight.data,), out, dequantize_grid(weight), dequantize_constants(weight))


def _call(kernel, operands, out, grid, constants, **options) -> jax.Array:
    if lacks := missing():
        raise ImportError(f"the Triton kernels cannot run: {lacks}")
    import jax_triton  # only where JAX has CUDA

    return jax_triton.triton_call(*operands, kernel=kernel, out_shape=out, grid=grid, **options, **constants)
