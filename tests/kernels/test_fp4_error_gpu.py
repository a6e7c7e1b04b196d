"""The kernels' errors beside cuBLAS's on a CUDA device: `python -m pytest -m gpu tests/kernels`."""

import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead, start_stream
from random_weights import CASES, adversarial, poison

from benchmarks import fp4_error
from pallas_kernels import wide_variants

pytestmark = pytest.mark.gpu

ROWS, WIDE_ROWS = (8, 16, 32, 64), wide_variants.RANGES


def _start(programs, case):
    return start_stream(programs, 16, 8192, (256,))


@ahead(_start)
@pytest.mark.parametrize("case", CASES)
def test_adversarial_inputs_no_worse_than_cublas(rng, programs, case):
    x, matrix = adversarial(rng, case, 16, 256, 8192)
    exact, x64 = matrix.values, np.asarray(x, np.float64)  # exact in bfloat16: at most 6 significant bits
    true, size = x64 @ exact.T, np.abs(x64) @ np.abs(exact).T + 1e-300
    poison(*true.shape)
    scale = matrix.global_scale
    (mine,) = programs.get(_start(programs, case))(x, matrix.weight.data, np.full(1, scale))
    mine = np.abs(np.asarray(mine, np.float64) * np.float64(scale) - true) / size
    theirs = jnp.dot(x, jnp.asarray(exact, jnp.bfloat16).T, preferred_element_type=jnp.float32)
    theirs = np.abs(np.asarray(theirs, np.float64) - true) / size
    assert np.isfinite(mine).all() and mine.max() <= 1e-5
    assert mine.max() <= max(fp4_error.LIMIT * theirs.max(), fp4_error.SMALLEST)


def too_much(rows):
    return [row for row in rows if row["ratio"] > fp4_error.LIMIT]


@ahead(lambda programs, k, n: fp4_error.start(programs, k, n, ROWS, fp4_error.of_the_table))
@pytest.mark.parametrize("k, n", fp4_error.SHAPES)
def test_the_tables_configurations_err_no_more_than_cublas(rng, programs, k, n):
    fp4_error.start(programs, k, n, ROWS, fp4_error.of_the_table)
    rows = fp4_error.measure(programs, k, n, ROWS, fp4_error.of_the_table, rng, timed=False)
    assert sorted({row["m"] for row in rows}) == [*ROWS]
    assert not too_much(rows)


@ahead(lambda programs, k, n: fp4_error.start(programs, k, n, WIDE_ROWS, fp4_error.of_the_table))
@pytest.mark.parametrize("k, n", fp4_error.SHAPES)
def test_many_rows_err_no_more_than_cublas(rng, programs, k, n):
    fp4_error.start(programs, k, n, WIDE_ROWS, fp4_error.of_the_table)
    rows = fp4_error.measure(programs, k, n, WIDE_ROWS, fp4_error.of_the_table, rng, timed=False)
    for row in rows:
        print(f"{k} x {n}, M = {row['m']}: {row['ratio']:.2f} of cuBLAS's error")
    assert [row["m"] for row in rows] == [*WIDE_ROWS]
    assert not too_much(rows)
