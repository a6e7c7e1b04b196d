"""Which kernels a device runs, what is chosen there, and what the program says of it."""

import types

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_model

from pallas_kernels import (
    compiling_for,
    describe,
    has_kernels,
    joins_gate_and_up,
    lora_inside,
    takes_decode_attention,
    variants,
)
from pallas_kernels.stream_plan import RESIDENT
from pallas_kernels.variants import MAX_TRITON_RANK, MAX_TRITON_ROWS
from qerl_jax.models.attention import by_cudnn
from qerl_jax.models.init import for_kernels
from qerl_jax.policy import kernels_said

SHAPE = 3584, (4608,)


def say(monkeypatch, lacks):
    monkeypatch.setattr(variants, "missing", lambda: lacks)


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_gpus_from_ampere_on_run_triton_where_it_is_installed(capability, monkeypatch):
    say(monkeypatch, None)
    with compiling_for(capability):
        assert has_kernels()
        assert describe().startswith(f"NVFP4 kernels: Triton (sm_{capability}) up to {MAX_TRITON_ROWS} rows")
        assert [variants.choose(m, *SHAPE) for m in (1, MAX_TRITON_ROWS)] == ["triton"] * 2
        assert variants.choose(MAX_TRITON_ROWS + 1, *SHAPE) == "dequantize-triton"
        assert variants.choose_dx(8, *SHAPE) == "dequantize-triton"
        # Up to as many rows adapters are in the kernel, but of large ranks, and SwiGLU never is.
        assert lora_inside(MAX_TRITON_ROWS, *SHAPE, (MAX_TRITON_RANK,)) and not joins_gate_and_up()
        assert not lora_inside(MAX_TRITON_ROWS + 1, *SHAPE, (32,))
        assert not lora_inside(8, *SHAPE, (MAX_TRITON_RANK + 1,))
        half, narrow = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
        assert takes_decode_attention(half, 28, 4, 128, half, half)
        assert takes_decode_attention(half, 28, 4, 128, half, narrow) is (capability >= 89)
        assert not takes_decode_attention(half, 28, 4, 96, half, half)
        assert not takes_decode_attention(jnp.dtype(jnp.float32), 28, 4, 128, half, half)


@pytest.mark.parametrize("capability", [9.0, 9, "90"])
def test_a_capability_that_is_not_times_ten_is_refused(capability):
    """Code for Hopper would dequantize, in silence."""
    with pytest.raises(ValueError, match="expected the compute capability times ten, such as 90 for Hopper"):
        compiling_for(capability).__enter__()


@pytest.mark.parametrize("capability, lacks, said", [
    (80, "jax-triton is not installed", "none, dequantize + dot (sm_80; jax-triton is not installed)"),
    (75, None, "none, dequantize + dot (sm_75)"),
    (0, None, "reference path (no CUDA device)"),
])  # fmt: skip
def test_those_without_kernels(capability, lacks, said, monkeypatch):
    say(monkeypatch, lacks)
    with compiling_for(capability):
        assert not has_kernels() and describe() == f"NVFP4 kernels: {said}"
        kind = "dequantize" if capability else "reference"
        assert variants.choose(8, *SHAPE) == variants.choose_dx(8, *SHAPE) == kind


def test_hopper_has_its_own_whether_triton_is_there_or_not(monkeypatch):
    for lacks in (None, "triton is not installed"):
        say(monkeypatch, lacks)
        with compiling_for(90):
            assert has_kernels() and "Mosaic GPU (sm_90)" in describe()
            assert variants.choose(8, *SHAPE) == variants.config_for(8, *SHAPE)


@pytest.mark.parametrize("installed, lacks", [
    ({"jax-triton": "0.4.1", "triton": "3.7.1"}, None),
    ({"triton": "3.7.1"}, "jax-triton is not installed"),
    ({"jax-triton": "0.4.1"}, "triton is not installed"),
    ({"jax-triton": "0.4.1", "triton": "3.6.0"}, "jax-triton cannot be used: jax-triton 0.4.1 needs triton 3.7 or "),
    ({"jax-triton": "0.3.1", "triton": "3.6.0"}, "jax-triton cannot be used: jax-triton 0.3.1 is too old"),
    ({"jax-triton": "0.4.1", "triton": "3.7rc1"}, None),
    ({"jax-triton": "0.4.1", "triton": "3.7"}, "jax-triton cannot be used: no module of CUDA"),
    ({"jax-triton": "0.4.1", "triton": "3.7.0"}, "jax-triton cannot be used: JAX has no CUDA plugin"),
])  # fmt: skip
def test_what_triton_lacks(installed, lacks, monkeypatch):
    from pallas_kernels import triton_versions

    def version(package):
        if package not in {**installed, "jax": None}:
            raise triton_versions.PackageNotFoundError(package)
        return installed.get(package, "0.11.2")

    def import_module(name):
        assert name in ("jax_triton", "jaxlib.gpu_triton")
        if lacks and lacks.endswith("of CUDA"):
            raise ImportError("no module of CUDA")
        return types.SimpleNamespace(**({} if lacks and lacks.endswith("plugin") else {"TritonKernel": None}))

    monkeypatch.setattr(triton_versions, "version", version)
    monkeypatch.setattr(triton_versions.importlib, "import_module", import_module)
    said = triton_versions.missing.__wrapped__()
    assert said is lacks if lacks is None else said.startswith(lacks)


@pytest.mark.parametrize("choose", [variants.choose, variants.choose_dx])
def test_an_unknown_backend(choose):
    with pytest.raises(ValueError, match=r"backend must be None or one of \('mosaic', .*got 'typo'"):
        choose(8, *SHAPE, "typo")


def test_multiprocessors_are_those_of_the_device_that_is_compiled_for(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(core_count=108, compute_capability="8.0")])
    assert variants.multiprocessors() == 108 and not variants.has_room_for_a_wave()
    with compiling_for(90):
        assert variants.multiprocessors() == RESIDENT[1] and variants.has_room_for_a_wave()


@pytest.mark.parametrize("platform, of_device, known, by_cudnn_there", [
    ("cuda 13000", "8.0", 80, True),
    ("cuda 13000", "12.1", 121, True),
    ("cuda 13000", "7.5", 75, False),  # whose cuDNN has no such attention
    ("rocm 70000", "gfx942", 0, False),
])  # fmt: skip
def test_the_capability_of_a_gpu_and_its_attention(platform, of_device, known, by_cudnn_there, monkeypatch):
    client = types.SimpleNamespace(platform_version=f"PJRT C API\n{platform}")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(client=client, compute_capability=of_device)])
    assert variants.capability() == known
    assert by_cudnn(jnp.dtype(jnp.bfloat16)) is by_cudnn_there and not by_cudnn(jnp.dtype(jnp.float32))
    assert (variants.kernel_family() == "reference") is (known == 0)


def test_what_a_run_says_of_them(monkeypatch):
    model = tiny_model(dtype=jnp.bfloat16)
    assert kernels_said(model) is None  # no GPU
    say(monkeypatch, "jax-triton is not installed")
    with compiling_for(80):
        assert kernels_said(model) == "NVFP4 kernels: none, dequantize + dot (sm_80; jax-triton is not installed)"
        assert kernels_said(tiny_model(weight_format="bf16")) is None
    with compiling_for(90):
        assert kernels_said(for_kernels(model)) == describe()
        said = kernels_said(tiny_model(dtype=jnp.float32))
    assert said.endswith("dequantize + dot (they multiply in bfloat16 or float16, the model in float32)")
