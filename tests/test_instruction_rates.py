"""The benchmark of instructions without a GPU: what its programs hold, and that they lower for Hopper."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

from benchmarks import instruction_rates as rates
from pallas_kernels import compiling_for


@pytest.mark.parametrize("kind, instruction, number", [
    ("lop3", "lop3.b32 r", 48), ("mma", "mma.sync", 16), ("mma+lop3", "mma.sync", 16), ("mma+lop3", "lop3.b32 r", 48),
    ("wgmma32+lop3", "n32k16", 8), ("wgmma64+lop3", "n64k16", 4), ("wgmma256+lop3", "n256k16", 1),
    ("wgmma64+lop3", "lop3.b32 r", 48),
])  # fmt: skip
def test_a_turn_of_the_loop(kind, instruction, number):
    assert rates.body(kind).count(instruction) == number


def test_cycles_are_those_of_one_scheduler(monkeypatch):
    # 16 warps, 4 on each scheduler, of 3072 instructions each: 24576 cycles are 2 for each of a scheduler's 12288
    times = jnp.stack([jnp.full(512, 24576, jnp.uint32), jnp.zeros(512, jnp.uint32)], 1)
    monkeypatch.setattr(rates, "build", lambda kind, warps: lambda operands: times)
    assert rates.count("mma+lop3") == 3072 and rates.cycles("mma+lop3", 16) == 2.0
    assert rates.count("wgmma64") == 256 and rates.cycles("wgmma64", 16) == 24.0


@pytest.mark.parametrize("kind", ["imad_wide", "cvt_e4m3x2", "mma+lop3", "wgmma64+lop3", "wgmma256_shared"])
def test_lowers_for_hopper(kind):
    with compiling_for(90):
        exported = export.export(rates.build(kind, 12), platforms=["cuda"])(jax.ShapeDtypeStruct((4,), jnp.uint32))
    assert exported.mlir_module().count("stablehlo.custom_call @mosaic_gpu") == 1
