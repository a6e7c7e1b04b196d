"""NVFP4 against the arrays that compressed-tensors 0.20.0 wrote (tests/oracles/nvfp4_oracle.npz)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.formats import NVFP4Weight, dequantize, quantize_nvfp4

ORACLE = np.load(Path(__file__).parent / "oracles" / "nvfp4_oracle.npz")
CASES = sorted({key.rsplit(".", 1)[0] for key in ORACLE.files})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("jit", [False, True])
def test_bytes_equal_compressed_tensors(case, jit):
    dtype = jnp.bfloat16 if case.endswith("bf16") else jnp.float32
    quantize = jax.jit(quantize_nvfp4) if jit else quantize_nvfp4
    weight = quantize(jnp.asarray(ORACLE[case + ".w"], dtype))
    np.testing.assert_array_equal(np.asarray(weight.global_scale), ORACLE[case + ".global_scale"][0])
    np.testing.assert_array_equal(np.asarray(weight.scale).view(np.uint8), ORACLE[case + ".scale_u8"])
    np.testing.assert_array_equal(np.asarray(weight.packed), ORACLE[case + ".packed"])
    back = dequantize(weight, jnp.float32)
    np.testing.assert_array_equal(np.asarray(back), ORACLE[case + ".dequant_f32"])
    bf16 = np.asarray(dequantize(weight, jnp.bfloat16)).view(np.uint16)
    np.testing.assert_array_equal(bf16, ORACLE[case + ".dequant_bf16_u16"])


def test_all_twelve_cases_are_there():
    assert len(CASES) == 12


def test_shared_global_scale_is_kept():
    w = jnp.linspace(-1, 1, 64).reshape(2, 32)
    weight = quantize_nvfp4(w, jnp.float32(1000.0))
    assert float(weight.global_scale) == 1000.0
    assert float(jnp.abs(dequantize(weight, jnp.float32) - w).max()) < 0.2


def test_what_a_shared_scale_makes_too_large_saturates():
    weight = quantize_nvfp4(jnp.full((1, 16), -6.0), jnp.float32(1000.0))  # asks for a block scale of 1000
    np.testing.assert_array_equal(weight.scale.astype(jnp.float32), [[448.0]])
    np.testing.assert_allclose(dequantize(weight, jnp.float32), np.full((1, 16), -6 * 448 / 1000), rtol=1e-6)


def test_packed_weight_is_a_pytree_with_a_shape():
    weight = quantize_nvfp4(jnp.ones((4, 32)))
    assert isinstance(weight, NVFP4Weight) and weight.shape == (4, 32)
    assert [leaf.dtype for leaf in jax.tree.leaves(weight)] == [jnp.uint8, jnp.float8_e4m3fn, jnp.float32]


@pytest.mark.parametrize("bad", [jnp.ones((4, 24)), jnp.ones(32), jnp.ones((2, 16), jnp.float16)])
def test_unsupported_input_is_refused(bad):
    with pytest.raises(ValueError, match="NVFP4 takes"):
        quantize_nvfp4(bad)
