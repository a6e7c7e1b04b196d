"""`fp4_mlp`: values and gradients beside the dense network's, also under vmap, and what is lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from random_weights import random_matrix

from pallas_kernels import compiling_for, fp4_mlp, layout, range_scale
from pallas_kernels.wide_plan import WideConfig

SCALES = [jnp.float32(s) for s in (100.0, 70.0, 3000.0)]
K, F, N = 64, 96, 48


def _weight(seed, n, k):
    return random_matrix(np.random.default_rng(seed), n, k, 1.0, 0x10, 0x30).weight


def _x(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


WEIGHTS = [_weight(0, F, K), _weight(1, F, K), _weight(2, N, F)]
X, DY = 0.1 * _x(3, 5, K), _x(4, 5, N)
PAIRS = [(_x(5, 4, K), _x(6, F, 4)), None, (_x(7, 20, F), 0.1 * _x(8, N, 20))]
BIASES = [_x(9, F), None, _x(10, N)]


def _y(x, pairs, out_dtype=None):
    loras = [pair and (*pair, 0.5) for pair in pairs]
    return fp4_mlp(x, WEIGHTS, SCALES, lora=loras, bias=BIASES, out_dtype=out_dtype)


def _dense_y(x, pairs):
    def linear(x, i):
        y = x @ layout.dequantize(WEIGHTS[i], SCALES[i], jnp.float32).T
        y += 0.5 * (x @ pairs[i][0].T) @ pairs[i][1].T if pairs[i] else 0
        return y if BIASES[i] is None else y + BIASES[i]

    return linear(jax.nn.silu(linear(x, 0)) * linear(x, 1), 2)


def _assert_near(got, want):
    for g, t in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, t, rtol=2e-4, atol=2e-5 * np.abs(t).max())


def test_values_and_gradients_are_those_of_the_dense_network():
    """Also under vmap: over x, over x and adapters, and over adapters alone."""
    of_both = [jax.value_and_grad(lambda x, pairs, f=f: (f(x, pairs) * DY).sum(), (0, 1)) for f in (_y, _dense_y)]
    _assert_near(*(jax.jit(f)(X, PAIRS) for f in of_both))
    xs, many = jnp.stack([X, 2 * X]), jax.tree.map(lambda v: jnp.stack([v, 3 * v]), PAIRS)
    for axes, operands in (((0, None), (xs, PAIRS)), ((0, 0), (xs, many)), ((None, 0), (X, many))):
        _assert_near(*(jax.jit(jax.vmap(f, axes))(*operands) for f in of_both))


def test_gate_and_up_are_not_rounded_before_they_are_joined():
    """In 16 bits a gate of 257 and one of 256 are the same."""
    one, three = np.uint8(0x22), 0x38  # codes of 1, a scale of 1
    ones = layout.repack(jnp.full((16, 16), one, jnp.uint8), jnp.full((16, 2), three, jnp.uint8))
    x = jnp.zeros((1, 32), jnp.bfloat16).at[0, :2].set(jnp.array([256.0, 1.0], jnp.bfloat16))
    back = layout.repack(jnp.full((16, 8), one, jnp.uint8), jnp.full((16, 1), three, jnp.uint8))
    y = fp4_mlp(x, [ones, ones, back], [jnp.float32(1.0)] * 3, out_dtype=jnp.float32)
    np.testing.assert_array_equal(y, np.full((1, 16), 16 * float(jnp.bfloat16(257.0 * 257.0)), np.float32))


@pytest.mark.parametrize("of_x, of_weights", [("float32", "float16"), ("float16", "bfloat16")])
def test_what_is_between_the_products_has_the_scale_of_the_weights_dtype(monkeypatch, of_x, of_weights):
    """Which kernels multiply in, whatever x's."""

    def by_kernel(x, weights, scales, biases, config, out_dtype, loras, swiglu=False, keeps=False):
        ys = [x.astype(jnp.float32) @ dense_of(weight, scale).T for weight, scale in zip(weights, scales, strict=True)]
        joined = jax.nn.silu(ys[0]) * ys[-1] * range_scale(weights[0].dtype)
        return [y.astype(out_dtype) for y in (([joined, *ys] if keeps else [joined]) if swiglu else ys)]

    def dense_of(weight, scale):
        return layout.dequantize(weight, scale, jnp.float32)

    monkeypatch.setattr("pallas_kernels.variants.choose", lambda *_: WideConfig())
    monkeypatch.setattr("pallas_kernels.wide.matmul_all", by_kernel)
    x, rng = X.astype(of_x), np.random.default_rng(0)
    weights = [random_matrix(rng, *s, 1.0, 0x10, 0x30, of_weights).weight for s in ((F, K), (F, K), (N, F))]
    gate, up, down = map(dense_of, weights, SCALES)
    true = (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mlp(x):
        return fp4_mlp(x, weights, SCALES, out_dtype=jnp.float32)

    for y in (mlp(x), jax.vjp(mlp, x)[0]):
        np.testing.assert_allclose(y, true, atol=5e-3 * np.abs(true).max())


def test_no_rows():
    assert _y(X[:0], PAIRS).shape == (0, N)
    dx, _ = jax.grad(lambda x, pairs: _y(x, pairs).sum(), (0, 1))(X[:0], PAIRS)
    assert dx.shape == (0, K)


@pytest.mark.parametrize("weights, message", [
    ([_weight(0, F, K), _weight(1, F, K), _weight(2, N, K)], r"\[F, K\], \[F, K\] and \[N, F\] of one dtype, got"),
    ([_weight(0, F, K), _weight(1, N, K), _weight(2, N, F)], "gate, up and down must be"),
    ([_weight(0, F, F), _weight(1, F, F), _weight(2, N, F)], "x has K = 64"),
])  # fmt: skip
def test_what_is_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        fp4_mlp(X, weights, SCALES)
    with pytest.raises(ValueError, match="bias must have one entry for each of the 3 weights, got 2"):
        fp4_mlp(X, WEIGHTS, SCALES, bias=BIASES[:2])
    with pytest.raises(ValueError, match="gate, up and down, got 2"):
        fp4_mlp(X, WEIGHTS[:2], SCALES[:2])
    with pytest.raises(ValueError, match="fp4_mlp under vmap takes a batch of x and of LoRA only"):
        jax.vmap(lambda bias: fp4_mlp(X, WEIGHTS, SCALES, bias=[bias, None, None]))(jnp.zeros((2, F)))


def _lowered(f, rows):
    k, intermediate, n = 512, 768, 256
    shapes = [(intermediate, k), (intermediate, k), (n, intermediate)]
    weights = [
        layout.KernelWeight(jax.ShapeDtypeStruct((-(-o // 16), -(-i // 256), layout.QUAD_WORDS), jnp.uint32), o, i)
        for o, i in shapes
    ]
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    pairs = [(shape((16, i)), shape((o, 16))) for o, i in shapes]

    def y(x, pairs, weights):
        loras = [(*pair, 0.5) for pair in pairs]
        return fp4_mlp(x, weights, SCALES, lora=loras, out_dtype=jnp.float32)

    with compiling_for(90):
        f = functools.partial(f, y)
        operands = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16), pairs, weights
        return export.export(jax.jit(f), platforms=["cuda"])(*operands).mlir_module()


def _gradients(y, x, pairs, weights):
    return jax.grad(lambda x, pairs: y(x, pairs, weights).sum(), (0, 1))(x, pairs)


def test_swiglu_is_a_part_of_the_wide_kernel():
    """Forward of the product by gate and up, backward of that by down; nothing is left of it outside. (Gradients of a
    sum do not need the product by down.)"""
    for f, kernels in ((lambda y, *operands: y(*operands), 2), (_gradients, 3)):
        module = _lowered(f, 300)
        assert module.count("stablehlo.custom_call @mosaic_gpu") == kernels
        assert not any(word in module for word in ("stablehlo.logistic", "stablehlo.exponential", "300x1536"))
    few = _lowered(_gradients, 16)
    assert "stablehlo.logistic" in few or "stablehlo.exponential" in few, "few rows go through another kernel"
