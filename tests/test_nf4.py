"""NF4 against the bytes that bitsandbytes 0.50.2 wrote (nf4_oracle.npz, mxfp4_nf4_cases.npz in tests/oracles)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.formats import dequantize, quantize_nf4, quantize_nf4_double_quant
from qerl_jax.formats.nf4 import LEVELS, NESTED_LEVELS, NF4DoubleQuantWeight

ORACLES = Path(__file__).parent / "oracles"
ORACLE = np.load(ORACLES / "nf4_oracle.npz")
MORE = np.load(ORACLES / "mxfp4_nf4_cases.npz")
SHAPES = ("64x128", "128x192", "32x96")
CASES = sorted(key.removesuffix(".w") for key in MORE.files if key.endswith(".w"))


def test_levels():
    np.testing.assert_array_equal(LEVELS, ORACLE["64x128.plain.code"])
    np.testing.assert_array_equal(NESTED_LEVELS, ORACLE["64x128.dq.code2"])


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_equal_bitsandbytes(shape):
    weight = quantize_nf4(jnp.asarray(ORACLE[f"{shape}.plain.w"]))
    np.testing.assert_array_equal(weight.packed.reshape(-1, 1), ORACLE[f"{shape}.plain.packed"])
    np.testing.assert_array_equal(weight.absmax, ORACLE[f"{shape}.plain.absmax"])
    # Its own `dequantize_4bit` restarts blocks at each row on CPU, which is wrong for 96 inputs.
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), ORACLE[f"{shape}.plain.dequant_formula"])


@pytest.mark.parametrize("shape", SHAPES)
def test_double_quantized_bytes_equal_bitsandbytes(shape):
    weight = quantize_nf4_double_quant(jnp.asarray(ORACLE[f"{shape}.dq.w"]))
    np.testing.assert_array_equal(weight.packed.reshape(-1, 1), ORACLE[f"{shape}.dq.packed"])
    np.testing.assert_array_equal(weight.absmax, ORACLE[f"{shape}.dq.absmax"])
    np.testing.assert_array_equal(weight.nested_absmax, ORACLE[f"{shape}.dq.absmax2"])
    np.testing.assert_array_equal(weight.offset, ORACLE[f"{shape}.dq.offset"])
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), ORACLE[f"{shape}.dq.dequant_formula"])


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_edge_cases(case):
    dtype = jnp.bfloat16 if case.endswith("bf16") else jnp.float32
    w = jnp.asarray(MORE[f"{case}.w"], dtype)
    plain, double = quantize_nf4(w), jax.vmap(quantize_nf4_double_quant)(w[None])
    for packed in (plain.packed, double.packed):
        np.testing.assert_array_equal(packed.reshape(-1, 1), MORE[f"nf4.{case}.packed"])
    np.testing.assert_array_equal(plain.absmax, MORE[f"nf4.{case}.absmax"])
    # PyTorch sums in float32, so its mean is not always the nearest number.
    np.testing.assert_allclose(double.offset[0], MORE[f"nf4_double_quant.{case}.offset"], rtol=3e-7)
    if double.offset[0] == MORE[f"nf4_double_quant.{case}.offset"]:
        np.testing.assert_array_equal(double.absmax[0], MORE[f"nf4_double_quant.{case}.absmax"])
        np.testing.assert_array_equal(double.nested_absmax[0], MORE[f"nf4_double_quant.{case}.nested"])


def test_blocks_cross_rows():
    w = jnp.ones((4, 48)).at[1, 20].set(5.0)  # element 68 of the flattened weight: the second block
    weight = quantize_nf4(w)
    np.testing.assert_array_equal(weight.absmax, [1.0, 5.0, 1.0])
    back = dequantize(weight, jnp.float32).reshape(-1)
    np.testing.assert_array_equal(back[:64], 1.0)
    assert float(back[68]) == 5.0 and float(back[64]) == np.float32(5 * LEVELS[9])  # 1/5 is nearer 0.161 than 0.246


@pytest.mark.parametrize("quantized", [quantize_nf4, quantize_nf4_double_quant])
def test_a_straight_through_gradient(quantized):
    """`stop_gradient` hides the values, but JAX takes rules for them all the same."""
    w = jnp.asarray(ORACLE["64x128.dq.w"])

    def through(w):
        return w + jax.lax.stop_gradient(dequantize(quantized(w), jnp.float32) - w)

    values = dequantize(quantized(w), jnp.float32)
    for transform in (lambda f: f, jax.jit):
        gradient = transform(jax.grad(lambda w: (through(w) ** 2).sum()))(w)
        np.testing.assert_allclose(gradient, 2 * values, rtol=1e-5, atol=1e-6)


def test_absmax_of_equal_blocks():
    weight = quantize_nf4_double_quant(jnp.full((4, 64), 0.3))
    assert not np.any(weight.absmax) and float(weight.nested_absmax[0]) == 0
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), np.full((4, 64), np.float32(0.3)))


def test_each_operation_of_the_nested_absmax_is_rounded():
    """A product and a sum done as one give other last bits."""
    rng = np.random.default_rng(0)
    absmax = rng.integers(0, 256, 512).astype(np.uint8)
    nested, offset = rng.uniform(0.01, 0.1, 2).astype(np.float32), np.float32(0.0537)
    packed = jnp.full((512, 32), 15 << 4 | 15, jnp.uint8)
    weight = NF4DoubleQuantWeight(packed, jnp.asarray(absmax), jnp.asarray(nested), jnp.float32(offset))
    expected = NESTED_LEVELS[absmax] * np.repeat(nested, 256) + offset
    np.testing.assert_array_equal(jax.jit(dequantize, static_argnums=1)(weight, jnp.float32)[:, 0], expected)


@pytest.mark.parametrize("bad", [jnp.ones((4, 24)), jnp.ones((64, 3)), jnp.ones(64), jnp.ones((2, 64), jnp.float16)])
def test_unsupported_input_is_refused(bad):
    with pytest.raises(ValueError, match="NF4 takes"):
        quantize_nf4(bad)
