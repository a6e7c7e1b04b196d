"""A program's kernels as programs of their own."""

import re

import jax
import jax.numpy as jnp
import pytest
from ahead import packed, shape

from pallas_kernels import KernelWeight, compiling_for, fp4_matmul
from pallas_kernels.mosaic_kernels import alone, mosaic_kernels


def lowered(*ms):
    """A program of products of so many rows."""

    def f(xs, data, scale):
        weight = KernelWeight(data, 32, 256)
        return [fp4_matmul(x, weight, scale, backend="mosaic") for x in xs]

    xs = [shape((m, 256), jnp.bfloat16) for m in ms]
    with compiling_for(90):
        return jax.jit(f).trace(xs, packed(32, 256), shape((), jnp.float32)).lower(lowering_platforms=("cuda",))


def test_each_kernel_is_found_once_whatever_program_has_it():
    assert mosaic_kernels(jax.jit(jnp.sin).lower(1.0)) == {}
    two, [(name, told)] = mosaic_kernels(lowered(1, 8, 1, 8)), mosaic_kernels(lowered(8)).items()
    assert len(two) == 2 and two[name] == told
    dumped = re.findall(r"nvfp4_decode_matmul_[0-9a-f]{8}", str(two))
    assert len(dumped) == len(set(dumped))  # neither's dump replaces the other's; JAX 0.12 has no names here


def test_a_kernel_alone_is_what_its_program_has():
    [(name, told)] = mosaic_kernels(lowered(8)).items()
    program = alone(name, told)
    assert mosaic_kernels(program) == {name: told}
    assert program.as_text().startswith(f"module @jit_{name} ")


@pytest.mark.parametrize("m", [32, 64, 300])
def test_kernels_with_wgmma_call_nothing(m, calls):
    program = lowered(m).as_text()
    assert "wgmma" in program and not calls(program)
