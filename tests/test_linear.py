import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from qerl_jax.formats import dequantize, quantize_nvfp4
from qerl_jax.models.linear import linear
from qerl_jax.models.params import LoRA

KEYS = jax.random.split(jax.random.key(0), 6)
X = jax.random.normal(KEYS[0], (3, 5, 32))
W = jax.random.normal(KEYS[1], (24, 32))
LORA = LoRA(jax.random.normal(KEYS[2], (4, 32)), jax.random.normal(KEYS[3], (24, 4)), 0.5)
BIAS = jax.random.normal(KEYS[4], (24,))


def dense(x, w, lora, bias):
    return x @ w.T + bias + 0.5 * (x @ lora.a.T) @ lora.b.T


def test_value():
    packed = quantize_nvfp4(W)
    expected = dense(X, dequantize(packed, jnp.float32), LORA, BIAS)
    np.testing.assert_allclose(linear(X, packed, LORA, BIAS), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(linear(X, packed), X @ dequantize(packed, jnp.float32).T, rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_through_the_dequantized_weight():
    packed = quantize_nvfp4(W)
    cotangent = jax.random.normal(KEYS[5], (3, 5, 24))
    ours = jax.grad(lambda x, lora: jnp.vdot(linear(x, packed, lora, BIAS), cotangent), argnums=(0, 1))(X, LORA)
    theirs = jax.grad(
        lambda x, lora: jnp.vdot(dense(x, dequantize(packed, jnp.float32), lora, BIAS), cotangent), argnums=(0, 1)
    )(X, LORA)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_equal_finite_differences():
    with jax.enable_x64(True):
        packed = quantize_nvfp4(W)
        x, lora, bias = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (X, LORA, BIAS))
        check_grads(
            lambda x, lora: jnp.sin(linear(x, packed, lora, bias)).sum(), (x, lora), order=1, modes=("rev",), rtol=1e-6
        )


def test_the_weight_gets_no_gradient():
    grad = jax.grad(lambda w: linear(X, w).sum())(W)
    assert np.all(np.asarray(grad) == 0)


def test_rows_do_not_depend_on_their_number():
    packed = quantize_nvfp4(W)
    run = jax.jit(linear)
    alone = run(X[0, :1], packed, LORA)
    beside = run(X[0], packed, LORA)[:1]
    np.testing.assert_array_equal(alone, beside)


def test_bfloat16_in_bfloat16_out_and_float32_adapter():
    packed = quantize_nvfp4(W.astype(jnp.bfloat16))
    y = linear(X.astype(jnp.bfloat16), packed, LORA, BIAS)
    assert y.dtype == jnp.bfloat16
    grads = jax.grad(lambda lora: linear(X.astype(jnp.bfloat16), packed, lora).astype(jnp.float32).sum())(LORA)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"x has 16 inputs, the weight \[24, 32\] takes 32"):
        linear(X[..., :16], quantize_nvfp4(W))
