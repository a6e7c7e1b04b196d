"""Block scales by least error: against every choice tried one by one, and where the usual scale is already best."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.formats import dequantize, global_scale, quantize_nvfp4
from qerl_jax.formats.e2m1 import decode_e2m1, encode_e2m1
from qerl_jax.quantization.block_scales import FACTORS, nearest_values, search_block_scales

W = jnp.asarray(np.random.default_rng(0).normal(size=(5, 48)), jnp.float32)
POWER = jnp.asarray(np.exp(np.random.default_rng(1).normal(size=48)), jnp.float32)
WHOLE = global_scale(jnp.abs(W).max(), jnp.dtype(jnp.float32))


def errors(values):
    return np.asarray((jnp.square(values - W) * POWER).reshape(5, 3, 16).sum(-1))


def test_the_usual_scale_gives_the_values_of_the_formats_quantizer():
    expected = dequantize(quantize_nvfp4(W, WHOLE), jnp.float32)
    np.testing.assert_allclose(nearest_values(W, WHOLE), expected, rtol=1e-6)
    zeros = jnp.zeros((2, 16))
    assert np.array_equal(nearest_values(zeros, jnp.float32(1)), zeros)


def test_each_block_has_the_least_error_of_all_factors():
    found = errors(dequantize(jax.jit(search_block_scales)(W, WHOLE, POWER), jnp.float32))
    tried = []
    for factor in FACTORS:
        largest = np.abs(np.asarray(W)).reshape(5, 3, 16).max(-1)
        scale = jnp.asarray(np.minimum(largest * factor / 6 * float(WHOLE), 448), jnp.float8_e4m3fn)
        step = np.repeat(np.asarray(scale.astype(jnp.float32) / WHOLE), 16, axis=1)
        tried.append(errors(decode_e2m1(encode_e2m1(W / step)) * step))
    np.testing.assert_allclose(found, np.min(tried, axis=0), rtol=1e-4)
    assert (found < tried[0] * 0.999).mean() > 0.5, "the usual scale was best nearly everywhere"


def test_weights_on_the_levels_keep_the_usual_scale():
    levels = jnp.asarray([[6, 4, -3, 2, 1.5, 1, -0.5, 0] * 2, [3, 2, -1.5, 1, 0.5, 0.5, -3, 0] * 2], jnp.float32)
    whole = jnp.float32(448)
    packed = search_block_scales(levels, whole, jnp.ones(16))
    assert np.array_equal(dequantize(packed, jnp.float32), levels)
    assert np.array_equal(packed.scale.astype(jnp.float32), [[448], [224]])
