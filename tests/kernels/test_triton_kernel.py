"""The Triton kernel: compiled for the GPUs it is for without one, and its numbers in Triton's interpreter."""

import importlib
import os
import secrets
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KernelWeight
from pallas_kernels.triton_plan import BLOCKS_M, WARPS, TritonPlan, make_plan

pytest.importorskip("triton")

INTERPRETED = """
import sys, numpy as np, jax.numpy as jnp, ml_dtypes
from pallas_kernels import layout, repack
from pallas_kernels.triton_kernel import (
    dequantize_constants, dequantize_grid, in_step_order, matmul_constants, matmul_grid, nvfp4_dequantize, nvfp4_matmul
)
from pallas_kernels.triton_plan import TritonPlan, make_plan

class Array:
    # what the interpreter asks of a tensor, over NumPy memory
    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype
    def data_ptr(self): return self.array.ctypes.data
    def untyped_storage(self): return self
    def cpu(self): return self
    def new_empty(self, *_, **__): return Array(self.array, self.dtype)
    def set_(self, *_): return self
    def copy_(self, _): return self
    def storage_offset(self): return 0
    def size(self): return self.array.shape
    def stride(self): return (1,)

rng = np.random.default_rng(int(sys.argv[1]))
# the planned sizes; K in parts of which the last has fewer quads; rows and outputs that fill no program
for dtype, m, n, k, plan in (
    ("bfloat16", 5, 72, 512, None),
    ("float16", 70, 40, 512, None),
    ("bfloat16", 17, 160, 1280, TritonPlan(4, 2, 2, 4, 16)),
):
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8)
    w = repack(jnp.asarray(packed), jnp.asarray(scale), dtype)
    plan = plan or make_plan(m, *w.data.shape[:2], 132)
    x = rng.standard_normal((m, k)).astype(dtype)
    sums = np.full((plan.split, m, n), np.nan, np.float32)
    operands = Array(np.array(in_step_order(jnp.asarray(x))), dtype), Array(np.array(w.data), "uint32")
    nvfp4_matmul[matmul_grid(m, w, plan)](*operands, Array(sums, "float32"), **matmul_constants(m, w, plan, True))
    out = np.full((w.data.shape[0] * 16, w.data.shape[1] * 256), np.nan, np.float32)
    nvfp4_dequantize[dequantize_grid(w)](operands[1], Array(out, "float32"), **dequantize_constants(w, True))
    dense, x = np.asarray(layout.dequantize(w, 1.0, jnp.float32), np.float64), x.astype(np.float64)
    error = np.abs(sums.sum(0, dtype=np.float64) * layout.EPILOGUE_FACTOR - x @ dense.T)
    assert (error <= 1e-5 * (np.abs(x) @ np.abs(dense).T)).all()
    assert np.array_equal(out[:n, :k] * layout.EPILOGUE_FACTOR, dense)
    assert not np.any(out[n:]) and not np.any(out[:, k:])
    print("right", dtype, m, n, k)
"""


def test_numbers_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    seed = secrets.randbits(32)
    command = [sys.executable, "-c", INTERPRETED, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    assert done.stdout.splitlines() == [
        "right bfloat16 5 72 512", "right float16 70 40 512", "right bfloat16 17 160 1280"
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", [80, 90])
def test_lowers_through_jax_triton_without_a_gpu(architecture, monkeypatch):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    calls = pytest.importorskip("jaxlib.gpu_triton")
    if not hasattr(calls, "TritonKernel"):
        pytest.skip("JAX has no CUDA plugin here")
    monkeypatch.setattr(calls, "get_compute_capability", lambda device: architecture)
    matmul = importlib.import_module("pallas_kernels.triton_kernel").matmul
    weight = KernelWeight(jax.ShapeDtypeStruct((32, 2, 576), jnp.uint32), 512, 512)
    traced = jax.jit(lambda x, w: matmul(x, w, 1.0)).trace(jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), weight)
    assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()


GPUS = 80, 86, 89, 90, 100, 120
SOME = 80, 90, 100  # with more rows or float16: Triton makes two forms of a program, up to 90 and from 100 on
COMPILED = [(8, "bfloat16", GPUS), (8, "float16", SOME), (16, "bfloat16", SOME), (64, "bfloat16", SOME)]


@pytest.mark.parametrize("m, dtype, architecture", [(*case, gpu) for *case, gpus in COMPILED for gpu in gpus])
def test_compiles_without_a_gpu(m, dtype, architecture, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # jax-triton 0.3 sets it to nothing
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = importlib.import_module("pallas_kernels.triton_kernel")
    weight = KernelWeight(jax.ShapeDtypeStruct((224, 14, 576), jnp.uint32), 3584, 3584, dtype)
    plan = make_plan(m, *weight.data.shape[:2], 132)
    constants = kernel.matmul_constants(m, weight, plan)
    signature = {"x_ptr": "*bf16" if dtype == "bfloat16" else "*fp16", "data_ptr": "*u32", "sums_ptr": "*fp32"}
    source = triton.compiler.ASTSource(
        fn=kernel.nvfp4_matmul,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert "mma.sync" in compiled.asm["ptx"]
    # decoded weights go from a lane's registers into the product: no exchange between lanes, none through memory
    assert "shfl" not in compiled.asm["ptx"]
    assert compiled.asm["ttgir"].count("ttg.convert_layout") <= 1  # the sums', before they are stored
    assert not [line for line in compiled.asm["ttgir"].splitlines() if "ttg.local_alloc %" in line]
    assert compiled.metadata.shared <= 48 * 1024


def test_plans():
    gate = dict(tiles=1184, quads=14, multiprocessors=132)
    assert [make_plan(m, **gate).block_m for m in (1, 8, 9, 16, 33, 64, 65, 128)] == [8, 8, 16, 16, 64, 64, 64, 64]
    assert make_plan(1, **gate) == make_plan(8, **gate) == TritonPlan(4, 4, 3, 2, 8)
    for m in BLOCKS_M:
        for tiles in (2, 32, 224, 2368):
            for quads in (1, 2, 14, 108):
                for multiprocessors in (20, 108, 132, 170):
                    plan = make_plan(m, tiles, quads, multiprocessors)
                    warps = -(-tiles // plan.tiles) * plan.split * plan.warps
                    assert plan.split == 1 or (2 * plan.split <= quads and warps <= WARPS * multiprocessors)
