import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import has_kernels
from qerl_jax.formats import KernelNVFP4, canonical, dequantize, quantize_nvfp4, repacked
from qerl_jax.models.linear import linear, linears
from qerl_jax.models.params import LoRA

KEYS = jax.random.split(jax.random.key(0), 6)
X = jax.random.normal(KEYS[0], (3, 5, 32))
W = jax.random.normal(KEYS[1], (24, 32))
LORA = LoRA(jax.random.normal(KEYS[2], (4, 32)), jax.random.normal(KEYS[3], (24, 4)), 0.5)
# The GPU kernels multiply in bfloat16; elsewhere their float32 reference stands in.
KERNEL_TOLERANCE = 2e-2 if has_kernels() else 1e-5
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


def test_whole_numbers_are_refused():
    """The weight would be cast to them."""
    with pytest.raises(TypeError, match="x is int32; expected a float dtype"):
        linear(jnp.ones((2, 32), jnp.int32), quantize_nvfp4(W))


@pytest.mark.parametrize("stored", [quantize_nvfp4, lambda w: w], ids=["packed", "plain"])
def test_adapters_and_biases_of_other_shapes_are_refused(stored):
    """They would be broadcast."""
    lora = LoRA(jnp.ones((4, 32)), jnp.ones((24, 4)), 2.0)
    for wrong in (
        lora.replace(b=jnp.ones((1, 4))),
        lora.replace(a=jnp.ones((3, 32))),
        lora.replace(a=jnp.ones((4, 16))),
    ):
        with pytest.raises(
            ValueError, match=r"lora has A .* and B .*; the weight \[24, 32\] takes \[R, 32\] and \[24, R\]"
        ):
            linear(X, stored(W), lora=wrong)
    for bias in (jnp.ones(1), jnp.ones((2, 24)), jnp.ones(32)):
        with pytest.raises(ValueError, match=r"bias is .*; the weight \[24, 32\] takes \[24\]"):
            linear(X, stored(W), bias=bias)


def test_the_kernels_layout_holds_the_same_bytes_and_gives_the_same_values_and_gradients():
    packed = quantize_nvfp4(W)
    for original, back in zip(jax.tree.leaves(packed), jax.tree.leaves(canonical(repacked(packed))), strict=True):
        np.testing.assert_array_equal(np.asarray(original), np.asarray(back))

    def value(x, lora, weight):
        return jnp.sin(linear(x, weight, lora, BIAS)).sum()

    plain = jax.value_and_grad(value, argnums=(0, 1))(X, LORA, packed)
    kernel = jax.value_and_grad(value, argnums=(0, 1))(X, LORA, repacked(packed))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=KERNEL_TOLERANCE, atol=KERNEL_TOLERANCE * float(jnp.abs(a).max()))


def test_several_weights_of_one_input():
    weights = [quantize_nvfp4(W), quantize_nvfp4(2 * W[:16])]
    for kind in (weights, [repacked(w) for w in weights]):
        first, second = linears(X, kind, [LORA, None], [None, jnp.ones(16)])
        for ours, apart in (
            (first, linear(X, weights[0], LORA)),
            (second, linear(X, weights[1], None, jnp.ones(16))),
        ):
            np.testing.assert_allclose(ours, apart, atol=KERNEL_TOLERANCE * float(jnp.abs(apart).max()))


def test_packed_and_plain_weights_of_one_input_are_as_each_alone():
    x, weights = X.astype(jnp.bfloat16), [repacked(quantize_nvfp4(W)), 2 * W[:16].astype(jnp.bfloat16)]
    for unrounded in (False, True):
        both = linears(x, weights, [LORA, None], [BIAS, None], unrounded=unrounded)
        for y, weight, lora, bias in zip(both, weights, [LORA, None], [BIAS, None], strict=True):
            [alone] = linears(x, [weight], [lora], [bias], unrounded=unrounded)
            np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (lambda w: w, lambda w: w),
        (quantize_nvfp4, lambda w: dequantize(w, jnp.bfloat16)),
        (lambda w: repacked(quantize_nvfp4(w)), lambda w: dequantize(w, jnp.float32)),
    ],
)
def test_unrounded_results_are_the_sums_with_the_gradients_of_rounded_ones(stored, read):
    """bfloat16 products, 2e-3 off once they are rounded; LoRA's first product is rounded in any case."""
    half = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    weight, x = stored(half(W)), half(X)
    cotangent = half(jax.random.normal(KEYS[5], (3, 5, 24)))

    def loss(x, lora, unrounded):
        [y] = linears(x, [weight], [lora], [BIAS], unrounded=unrounded)
        return jnp.vdot(y.astype(jnp.float32), cotangent), y

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, y), ours = gradient(x, LORA, True)
    (_, rounded), theirs = gradient(x, LORA, False)
    assert (y.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    if isinstance(weight, KernelNVFP4):
        np.testing.assert_array_equal(rounded, y.astype(jnp.bfloat16), "rounded more than once")

    x, w, a, b = (np.asarray(leaf, np.float64) for leaf in (x, read(weight), half(LORA.a), half(LORA.b)))
    expected = x @ w.T + np.asarray(BIAS) + 0.5 * np.asarray(half(x @ a.T), np.float64) @ b.T
    error = [np.linalg.norm(np.asarray(found, np.float64) - expected) for found in (y, rounded)]
    assert error[0] < 3e-4 * np.linalg.norm(expected) < error[1]
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(*(np.asarray(leaf, np.float32) for leaf in (one, other)), rtol=2e-2, atol=2e-2)
