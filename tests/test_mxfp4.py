"""MXFP4 against the bytes that compressed-tensors 0.20.0 wrote (mxfp4_oracle.npz and mxfp4_nf4_cases.npz)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.formats import MXFP4Weight, dequantize, quantize_mxfp4

ORACLES = Path(__file__).parent / "oracles"
ORACLE = np.load(ORACLES / "mxfp4_oracle.npz")
MORE = np.load(ORACLES / "mxfp4_nf4_cases.npz")
CASES = sorted(key.removesuffix(".w") for key in MORE.files if key.endswith(".w"))


def test_bytes_equal_compressed_tensors():
    weight = quantize_mxfp4(jnp.asarray(ORACLE["w"]))
    np.testing.assert_array_equal(weight.packed, ORACLE["compressed_tensors.packed"])
    np.testing.assert_array_equal(weight.scale, ORACLE["compressed_tensors.scale"])
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), ORACLE["compressed_tensors.dequant"])
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), ORACLE["gpt_oss.dequant"][0].T)
    np.testing.assert_array_equal(weight.scale, ORACLE["torchao_EVEN.scale"])


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_edge_cases(case):
    dtype = jnp.bfloat16 if case.endswith("bf16") else jnp.float32
    w = jnp.asarray(MORE[f"{case}.w"], dtype)
    weight = jax.vmap(quantize_mxfp4)(w[None])
    np.testing.assert_array_equal(weight.scale[0], MORE[f"mxfp4.{case}.scale"])
    np.testing.assert_array_equal(weight.packed[0], MORE[f"mxfp4.{case}.packed"])


def test_a_weight_by_hand():
    w = jnp.zeros((2, 32)).at[0, :4].set(jnp.array([3.5, -0.75, 0.25, 6.0])).at[1, 31].set(7.0)
    weight = quantize_mxfp4(w)
    # 6 = 1.5 * 2^2 has exponent 2 - 2; 7 = 1.75 * 2^2 carries to 1, and 7 / 2 is a tie, rounded to the even code of 4.
    np.testing.assert_array_equal(weight.scale, [[127], [128]])
    np.testing.assert_array_equal(weight.packed[0, :2], [6 | (2 + 8) << 4, 0 | 7 << 4])
    np.testing.assert_array_equal(dequantize(weight, jnp.float32)[0, :4], [4.0, -1.0, 0.0, 6.0])
    assert float(dequantize(weight, jnp.float32)[1, 31]) == 8.0


@pytest.mark.parametrize("exponent", range(-125, 125, 10))
def test_every_scale_decodes_exactly(exponent):
    w = jnp.full((1, 32), np.float32(2.0**exponent))
    np.testing.assert_array_equal(dequantize(quantize_mxfp4(w), jnp.float32), w)


def test_the_smallest_scale_is_not_flushed_to_zero():
    """2^-127 is subnormal, 4 * 2^-127 is not."""
    weight = MXFP4Weight(jnp.full((1, 16), 6 | 6 << 4, jnp.uint8), jnp.zeros((1, 1), jnp.uint8))
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), np.full((1, 32), np.float32(2.0**-125)))


@pytest.mark.parametrize("bad", [jnp.ones((4, 48)), jnp.ones(32), jnp.ones((2, 32), jnp.float16)])
def test_unsupported_input_is_refused(bad):
    with pytest.raises(ValueError, match="MXFP4 takes"):
        quantize_mxfp4(bad)
