"""The Triton kernel: compiled for sm_80 and sm_90 without a GPU, and its numbers in Triton's interpreter."""

import importlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KernelWeight

pytest.importorskip("triton")

INTERPRETED = """
import numpy as np, jax.numpy as jnp, ml_dtypes
from pallas_kernels import layout, repack
from pallas_kernels.triton_kernel import TILES, block_m, nvfp4_matmul

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

rng = np.random.default_rng()
for m, n, k in ((5, 72, 512), (17, 160, 256)):
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8)
    w = repack(jnp.asarray(packed), jnp.asarray(scale))
    tiles, quads, _ = w.data.shape
    x = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    y = np.full((m, n), np.nan, ml_dtypes.bfloat16)
    data, factor = np.array(w.data), np.array([0.25], np.float32)
    nvfp4_matmul[(-(-tiles // TILES), -(-m // block_m(m)))](
        Array(x, "bfloat16"), Array(data, "uint32"), Array(factor, "float32"), Array(y, "bfloat16"),
        m, n, quads, tiles, TILES, block_m(m), True,
    )
    dense = np.asarray(layout.dequantize(w, 4.0, jnp.float32), np.float64)
    x, y = x.astype(np.float64), y.astype(np.float64)
    # the interpreter truncates to bfloat16, hence 2^-7
    bound = 2.0**-7 * np.abs(x @ dense.T) + 1e-5 * (np.abs(x) @ np.abs(dense).T)
    assert (np.abs(y - x @ dense.T) <= bound).all()
    print("right", m, n, k)
"""


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


def test_numbers_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["right 5 72 512", "right 17 160 256"]


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("block_m", [16, 64])
def test_compiles_without_a_gpu(architecture, block_m, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # jax-triton 0.3 sets it to nothing
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = importlib.import_module("pallas_kernels.triton_kernel")
    constants = {"M": block_m, "N": 512, "QUADS": 4, "ALL_TILES": 32, "TILES": kernel.TILES, "BLOCK_M": block_m}
    constants["WIDE"] = False
    signature = {"x_ptr": "*bf16", "data_ptr": "*u32", "factor_ptr": "*fp32", "y_ptr": "*bf16"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel.nvfp4_matmul, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    assert "mma" in compiled.asm["ptx"]
