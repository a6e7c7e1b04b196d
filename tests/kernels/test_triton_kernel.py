"""The Triton kernel: compiled for the GPUs it is for without one, and its numbers in Triton's interpreter."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_programs import compiled_for, run_interpreted

from pallas_kernels import KernelWeight, compiling_for, fp4_matmul, fp4_matmul_reference, repack
from pallas_kernels.triton_plan import PROGRAMS, WARPS, TritonPlan, make_plan
from pallas_kernels.variants import MAX_TRITON_RANK

pytest.importorskip("triton")

INTERPRETED = """
import sys, numpy as np, jax.numpy as jnp, ml_dtypes
from triton_programs import Array
from pallas_kernels import layout, repack
from pallas_kernels.triton_kernel import (
    dequantize_constants, dequantize_grid, matmul_constants, matmul_grid, nvfp4_dequantize, nvfp4_matmul
)
from pallas_kernels.triton_lora import hidden_constants, hidden_grid, lora_hidden, parts_of
from pallas_kernels.triton_plan import TritonPlan, make_plan

def each(arrays, dtype):
    return tuple(Array(array, dtype) for array in arrays)

rng = np.random.default_rng(int(sys.argv[1]))
# the planned sizes; K in parts of which the last has fewer quads, and that ends in its last one; rows and outputs that
# fill no program; three weights of which one has no adapter, and one a rank that is no power of two
for dtype, m, ns, k, ranks, plan in (
    ("bfloat16", 5, [72], 512, [0], None),
    ("float16", 70, [40], 512, [8], None),
    ("bfloat16", 17, [160, 33, 70], 1200, [16, 0, 48], TritonPlan(4, 2, 2, 4, 16)),
):
    weights = []
    for n in ns:
        packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        scale = rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8)
        weights.append(repack(jnp.asarray(packed), jnp.asarray(scale), dtype))
    quads = weights[0].data.shape[1]
    plan = plan or make_plan(m, [w.data.shape[0] for w in weights], quads, 132)
    x, *all_a = (rng.standard_normal((rows, k)).astype(dtype) for rows in (m, *ranks))
    x = np.pad(x, ((0, 0), (0, -k % 256)))
    scales, scalings = (np.float32(rng.uniform(1, 9, (len(ns), 1))) for _ in range(2))
    h = np.full((parts_of(k) if any(ranks) else 1, m, sum(ranks)), np.nan, np.float32)
    if any(ranks):
        lora_hidden[hidden_grid(m, k, ranks, plan.block_m)](
            Array(x, dtype), each(all_a, dtype), Array(h, "float32"),
            **hidden_constants(m, k, x.shape[1], ranks, plan.block_m, True),
        )
        if m > 64:
            h = h.sum(0, keepdims=True)
    bs = [(1e4 * rng.standard_normal((n, max(1, rank)))).astype(dtype) for n, rank in zip(ns, ranks)]
    grid = matmul_grid(m, weights, len(h), plan)
    sums = np.full((grid[1], m, sum(ns)), np.nan, np.float32)
    nvfp4_matmul[grid](
        Array(x, dtype), Array(h, "float32"), each([np.array(w.data) for w in weights], "uint32"),
        each(scales, "float32"), each(bs, dtype), each(scalings, "float32"), Array(sums, "float32"),
        **matmul_constants(m, weights, ranks, len(h), plan, True),
    )
    got, x = sums.sum(0, dtype=np.float64), x[:, :k].astype(np.float64)
    all_h = [x @ a.T.astype(np.float64) for a in all_a]
    whole = h.sum(0, dtype=np.float64)
    np.testing.assert_allclose(whole, np.concatenate(all_h, 1), rtol=1e-5, atol=1e-4)
    h = h.sum(0).astype(dtype).astype(np.float64)
    for w, rank, b, scale, scaling in zip(weights, ranks, bs, scales[:, 0], scalings[:, 0]):
        dense = np.asarray(layout.dequantize(w, scale, jnp.float32), np.float64)
        true, allowed = x @ dense.T, 1e-5 * np.abs(x) @ np.abs(dense).T
        if rank:  # the interpreter may round h to its neighbour
            b, own_h = b.T.astype(np.float64), h[:, :rank]
            true += scaling * (own_h @ b)
            allowed += scaling * 2.0 ** (-7 if dtype == "bfloat16" else -10) * (np.abs(own_h) @ np.abs(b))
        assert (np.abs(got[:, : w.n] - true) <= allowed).all(), (dtype, w.n)
        got, h = got[:, w.n :], h[:, rank:]
    w = weights[0]
    out = np.full((w.data.shape[0] * 16, w.data.shape[1] * 256), np.nan, np.float32)
    data = Array(np.array(w.data), "uint32")
    nvfp4_dequantize[dequantize_grid(w)](data, Array(out, "float32"), **dequantize_constants(w, True))
    dense = np.asarray(layout.dequantize(w, 1.0, jnp.float32), np.float64)
    assert np.array_equal(out[: w.n, :k] * layout.EPILOGUE_FACTOR, dense)
    assert not np.any(out[w.n :]) and not np.any(out[:, k:])
    print("right", dtype, m, *ns)
"""


def test_numbers_in_the_interpreter():
    said = run_interpreted(INTERPRETED)
    assert said == ["right bfloat16 5 72", "right float16 70 40", "right bfloat16 17 160 33 70"]


@pytest.mark.parametrize("rank", [MAX_TRITON_RANK, MAX_TRITON_RANK + 1])
def test_adapters_are_added_once_inside_or_outside(rank, monkeypatch):
    kernel = importlib.import_module("pallas_kernels.triton_kernel")

    def by_reference(x, weights, scales, loras):
        return [
            fp4_matmul_reference(x, weight, scale) + (0 if lora is None else lora[2] * (x @ lora[0].T) @ lora[1].T)
            for weight, scale, lora in zip(weights, scales, loras, strict=True)
        ]

    monkeypatch.setattr(kernel, "matmul", by_reference)
    rng = np.random.default_rng(rank)
    weights = [repack(rng.integers(0, 256, (n, 32), np.uint8), np.full((n, 4), 0x38, np.uint8)) for n in (16, 48)]
    x, a, b = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 64), (rank, 64), (48, rank)))
    got, true = (
        fp4_matmul(x, weights, [1.0, 2.0], lora=[None, (a, b, 0.5)], backend=by) for by in ("triton", "reference")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-2), got, true)


@pytest.mark.parametrize("architecture", [80, 90])
def test_lowers_through_jax_triton_without_a_gpu(architecture):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    if not hasattr(pytest.importorskip("jaxlib.gpu_triton"), "TritonKernel"):
        pytest.skip("JAX has no CUDA plugin here")
    matmul = importlib.import_module("pallas_kernels.triton_kernel").matmul
    weight = KernelWeight(jax.ShapeDtypeStruct((32, 2, 576), jnp.uint32), 512, 512)
    with compiling_for(architecture):
        traced = jax.jit(lambda x, w: matmul(x, [w], [1.0], [None])).trace(
            jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), weight
        )
        assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


GPUS = 80, 86, 89, 90, 100, 120
SOME = 80, 90, 100  # with more rows or float16: Triton makes two forms of a program, up to 90 and from 100 on
COMPILED = [(8, "bfloat16", GPUS), (8, "float16", SOME), (16, "bfloat16", SOME), (64, "bfloat16", SOME)]
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16"}


@pytest.mark.parametrize("m, dtype, architecture", [(*case, gpu) for *case, gpus in COMPILED for gpu in gpus])
def test_compiles_without_a_gpu(m, dtype, architecture):
    kernel = importlib.import_module("pallas_kernels.triton_kernel")
    weights = [
        KernelWeight(jax.ShapeDtypeStruct((n // 16, 14, 576), jnp.uint32), n, 3584, dtype) for n in (3584, 512, 512)
    ]
    plan, of = make_plan(m, [224, 32, 32], 14, 132), POINTERS[dtype]
    arguments = {"x_ptr": of, "h_ptr": "*fp32", "all_data": ("*u32",) * 3, "scales": ("*fp32",) * 3}
    arguments |= {"all_b": (of,) * 3, "scalings": ("*fp32",) * 3, "sums_ptr": "*fp32"}
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    for ranks, h_parts in (((0, 0, 0), 1), ((MAX_TRITON_RANK, 0, 32), 16 if m == 8 else 1)):
        constants = kernel.matmul_constants(m, weights, ranks, h_parts, plan)
        compiled = compiled_for(architecture, kernel.nvfp4_matmul, arguments, constants, **options)
        assert "mma.sync" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 48 * 1024
        # x comes by asynchronous copies of eight bytes or more, not number by number
        assert "ld.global.b16" not in compiled.asm["ptx"]
        if not any(ranks):
            # decoded weights go from a lane's registers into the product: no exchange between lanes or through memory
            assert "shfl" not in compiled.asm["ptx"]
            assert compiled.asm["ttgir"].count("ttg.convert_layout") <= 1  # the sums', before they are stored
            assert not [line for line in compiled.asm["ttgir"].splitlines() if "ttg.local_alloc %" in line]


@pytest.mark.parametrize("m, dtype, architecture", [(8, "bfloat16", 80), (64, "float16", 90), (8, "bfloat16", 120)])
def test_the_adapters_kernel_compiles_without_a_gpu(m, dtype, architecture):
    lora = importlib.import_module("pallas_kernels.triton_lora")
    of = POINTERS[dtype]
    constants = lora.hidden_constants(m, 3584, 3584, (32, 0, 48), m)
    arguments = {"x_ptr": of, "all_a": (of,) * 3, "out_ptr": "*fp32"}
    options = {"num_warps": 1, "num_stages": lora.STAGES}
    compiled = compiled_for(architecture, lora.lora_hidden, arguments, constants, **options)
    assert "mma.sync" in compiled.asm["ptx"] and "ld.global.b16" not in compiled.asm["ptx"]


def test_plans():
    gate = dict(tiles=[1184, 1184], quads=14, multiprocessors=132)
    assert [make_plan(m, **gate).block_m for m in (1, 8, 9, 16, 33, 64, 65, 128)] == [8, 8, 16, 16, 64, 64, 64, 64]
    assert make_plan(1, **gate) == make_plan(8, **gate) == TritonPlan(4, 2, 3, 2, 8)
    for m in PROGRAMS:
        for tiles in ([2], [32, 1], [224, 32, 32], [1184, 1184]):
            for quads in (1, 2, 14, 108):
                for multiprocessors in (20, 108, 132, 170):
                    plan = make_plan(m, tiles, quads, multiprocessors)
                    warps = sum(-(-count // plan.tiles) for count in tiles) * plan.split * plan.warps
                    assert plan.split == 1 or (2 * plan.split <= quads and warps <= WARPS * multiprocessors)
