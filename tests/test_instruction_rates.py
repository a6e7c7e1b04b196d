"""The benchmark of instructions without a GPU: what its programs hold, and that they lower for Hopper."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

from benchmarks import instruction_rates as rates
from pallas_kernels import compiling_for


@pytest.mark.parametrize("kind, instruction, number", [
    ("lop3", "lop3.b32 r", 48), ("mma", "mma.sync", 16), ("mma+lop3", "mma.sync", 16), ("mma+lop3", "lop3.b32 r", 48),
])  # fmt: skip
def test_a_turn_of_the_loop(kind, instruction, number):
    assert rates.body(kind).count(instruction) == number


def test_products_with_others_beside_them():
    turn = rates.products(64, "lop3", 20)
    assert turn.count("m64n64k16") == 4 and turn.count("lop3.b32 r") == 20
    assert turn.count("commit_group") == turn.count("wait_group") == 1
    size = rates.BESIDE["decode"]
    assert len(rates.products(32, "decode", 2).split(";\n")) == 4 + 1 + 2 * size + 1


def test_cases_are_divided_by_what_a_scheduler_runs(monkeypatch):
    found = {tuple(row.values()): divisor for row, _, divisor in rates.cases(["mma+lop3"], [64], [16])}
    assert found["mma+lop3", 16] == 3072 * 4
    assert found["wgmma64", 128, "lop3", 48, 16] == found["wgmma64", 128, "decode", 60, 16] == 128 * 4
    assert not list(rates.cases([], [256], [12]))  # whose sums the registers do not hold
    times = jnp.stack([jnp.full(512, 24576, jnp.uint32), jnp.zeros(512, jnp.uint32)], 1).at[7, 0].set(24577)
    assert rates.longest(lambda operands: times) == 24577


@pytest.mark.parametrize("kind", ["imad_wide", "cvt_e4m3x2", "mma+lop3", "wgmma64", "wgmma256"])
def test_lowers_for_hopper(kind):
    columns = int(kind[5:]) if kind.startswith("wgmma") else 0
    turn = rates.products(columns, "decode", 4) if columns else rates.body(kind)
    with compiling_for(90):
        run = rates.build(rates.program(turn, 8, columns), 8)
        exported = export.export(run, platforms=["cuda"])(jax.ShapeDtypeStruct((4,), jnp.uint32))
    assert exported.mlir_module().count("stablehlo.custom_call @mosaic_gpu") == 1
