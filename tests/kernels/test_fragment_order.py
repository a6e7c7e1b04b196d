"""x in the order of the streaming kernel's wgmma variant: plain JAX, and the kernel's program run in NumPy."""

import functools

import emulator
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

from pallas_kernels import fragment_order


def test_the_order_is_that_of_the_weight_fragments():
    x = np.arange(5 * 512, dtype=np.float32).reshape(5, 512)
    got = np.asarray(fragment_order.reference(jnp.asarray(x), 8)).reshape(2, 4, 4, 2, 8, 4, 2)
    for quad, unit, j, h, t, c in np.ndindex(2, 4, 4, 2, 4, 2):
        column = 256 * quad + 64 * unit + 16 * t + 4 * j + 2 * h + c
        assert np.array_equal(got[quad, unit, j, h, :5, t, c], x[:, column])
        assert not got[quad, unit, j, h, 5:, t, c].any()


def test_unit_order_is_that_of_a_row_and_can_be_undone():
    x = jnp.arange(3 * 512, dtype=jnp.float32).reshape(3, 512)
    ordered = fragment_order.in_unit_order(x)
    in_fragments = fragment_order.reference(x, 8).reshape(2, 4, 8, 8, 8)  # quad, unit, (j, h), row, (t, c)
    of_rows = in_fragments[:, :, :, :3].transpose(3, 0, 1, 2, 4).reshape(3, 512)
    np.testing.assert_array_equal(ordered, of_rows)
    np.testing.assert_array_equal(fragment_order.from_unit_order(ordered), x)


@pytest.mark.parametrize("m, rows, quads", [(8, 8, 2), (21, 24, 1), (64, 64, 3), (9, 16, 1)])
def test_the_kernel_moves_every_number_to_its_place(m, rows, quads):
    x = np.arange(m * quads * 256, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(m, -1)  # all different
    body = functools.partial(fragment_order._body, m, rows, quads)
    got = emulator.run_simple(
        body, x, np.full((quads, rows * 256), np.nan, x.dtype), fragment_order.ctas(rows, quads), fragment_order.WARPS
    )
    words = x.view(np.uint16)  # XLA may take subnormals for zeros
    repeated = np.pad(words, ((0, rows - m), (0, 0)), "edge")  # the last row, since there are none behind it to read
    np.testing.assert_array_equal(got.view(np.uint16), fragment_order.reference(jnp.asarray(repeated), rows))


def test_the_kernel_lowers_for_cuda_without_a_gpu():
    x = jax.ShapeDtypeStruct((33, 1024), jnp.bfloat16)
    module = export.export(fragment_order.build(33, 40, 4), platforms=["cuda"])(x).mlir_module()
    assert "mosaic_gpu" in module


@pytest.mark.gpu
@pytest.mark.parametrize("m, k", [(64, 18944), (33, 3584), (20, 512)])
def test_the_kernel_on_a_gpu(m, k):
    rows = -(-m // 8) * 8
    x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
    real = np.asarray(fragment_order.reference(jnp.ones((m, k)), rows)) == 1
    true = np.asarray(fragment_order.reference(x, rows))[real]
    got = jax.jit(lambda x: fragment_order.in_fragment_order(x, rows))(x)
    np.testing.assert_array_equal(np.asarray(got)[real], true)
