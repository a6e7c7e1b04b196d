"""Which kernels a device runs, what is chosen there, and what the program says of it."""

import pytest

from pallas_kernels import compiling_for, describe, has_kernels, lora_inside, variants
from pallas_kernels.variants import MAX_TRITON_ROWS

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
        assert not lora_inside(8, *SHAPE, (32,))  # adapters are products of their own


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
    ({"jax-triton": "0.3.1", "triton": "3.6.0"}, None),
    ({"triton": "3.6.0"}, "jax-triton is not installed"),
    ({"jax-triton": "0.3.1"}, "triton is not installed"),
    ({"jax-triton": "0.4.1", "triton": "3.6.0"}, "jax-triton 0.4.1 needs triton 3.7 or newer, found 3.6.0"),
])  # fmt: skip
def test_what_triton_lacks(installed, lacks, monkeypatch):
    from pallas_kernels import triton_versions

    def version(package):
        if package not in installed:
            raise triton_versions.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(triton_versions, "version", version)
    said = triton_versions.missing.__wrapped__()
    assert said is lacks if lacks is None else said.startswith(lacks)
