"""`gated_mlp` where `fp4_mlp` takes it: beside the same without kernels, and what is lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_kernel import dots, kernels, lowered

from pallas_kernels import compiling_for, fp4_matmul, variants
from qerl_jax.formats import dequantize, quantize_nvfp4, repacked
from qerl_jax.models import linear
from qerl_jax.models.params import LoRA

PATTERNS = [(1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 0, 0)]  # which of gate, up and down have an adapter


def _normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _shapes(inputs, inner, outputs):
    return (inner, inputs), (inner, inputs), (outputs, inner)


def _weights(shapes):
    matrices = [_normal(i, *shape, dtype=jnp.bfloat16) / shape[1] ** 0.5 for i, shape in enumerate(shapes)]
    return [repacked(quantize_nvfp4(matrix)) for matrix in matrices]


def _pairs(shapes, has):
    pairs = [(_normal(20 + i, 4, k), 0.3 * _normal(30 + i, n, 4)) for i, (n, k) in enumerate(shapes)]
    return [pair if one else None for pair, one in zip(pairs, has, strict=True)]


def _loras(pairs):
    return [pair and LoRA(*pair, 0.5) for pair in pairs]


@pytest.mark.parametrize("has", PATTERNS)
def test_values_and_gradients_beside_those_without_kernels(monkeypatch, has):
    """With gradient checkpointing, and under vmap."""
    shapes = _shapes(64, 96, 48)
    weights, pairs, biases = _weights(shapes), _pairs(shapes, has), [_normal(9, 96), None, _normal(10, 48)]
    x, dy = _normal(3, 2, 3, 64), _normal(4, 2, 3, 48)

    def results(takes):
        monkeypatch.setattr(linear, "_kernel_takes", lambda *_: takes)
        mlp = jax.checkpoint(lambda x, pairs: linear.gated_mlp(x, weights, _loras(pairs), biases))
        both = jax.value_and_grad(lambda x, pairs: (mlp(x, pairs) * dy).sum(), (0, 1))
        return both(x, pairs), jax.vmap(both, (0, None))(jnp.stack([x, -x]), pairs)

    for with_, without in zip(*map(jax.tree.leaves, (results(True), results(False))), strict=True):
        np.testing.assert_allclose(with_, without, rtol=2e-4, atol=2e-5 * np.abs(without).max())


@pytest.mark.parametrize("has", PATTERNS[::3])
@pytest.mark.parametrize("way", ["kernels", "products of packed weights", "plain weights"])
@pytest.mark.parametrize("size", [0.1, 1.0, 400.0])
def test_float16_holds_what_is_beyond_its_range_between_the_products(monkeypatch, size, way, has):
    """Values and gradients where gate and up are about `size`, so silu(gate) * up up to a million."""
    shapes, times = _shapes(64, 96, 48), (size, size, 1.0)
    matrices = [
        t * _normal(i, *shape) / shape[1] ** 0.5 for i, (t, shape) in enumerate(zip(times, shapes, strict=True))
    ]
    packed = [repacked(quantize_nvfp4(matrix), jnp.float16) for matrix in matrices]
    exact = [dequantize(weight, jnp.float32) for weight in packed]
    pairs = [pair and (t * pair[0] / 8, pair[1]) for t, pair in zip(times, _pairs(shapes, has), strict=True)]
    bias, x, dy = _normal(9, 48), _normal(3, 5, 64, dtype=jnp.float16), _normal(4, 5, 48, dtype=jnp.float16)
    dy /= max(1, size)
    monkeypatch.setattr(linear, "_kernel_takes", lambda *_: way == "kernels")
    weights = [w.astype(jnp.float16) for w in exact] if way == "plain weights" else packed

    def ours(x, pairs, weights, dy):
        return (linear.gated_mlp(x, weights, _loras(pairs), [None, None, bias]) * dy.astype(jnp.float32)).sum()

    def dense(x, pairs, exact, dy):
        def product(x, i):
            return x @ exact[i].T + (0.5 * (x @ pairs[i][0].T) @ pairs[i][1].T if pairs[i] else 0)

        inner = jax.nn.silu(product(x, 0)) * product(x, 1)
        return ((product(inner, 2) + bias) * dy.astype(jnp.float32)).sum(), jnp.abs(inner).max()

    got = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, pairs, weights, dy)
    true = jax.jit(jax.value_and_grad(dense, (0, 1), has_aux=True))
    (value, largest), gradients = true(x.astype(jnp.float32), pairs, exact, dy)
    assert (65504 < largest < 1e6) == (size == 400)
    for g, t in zip(jax.tree.leaves(got), jax.tree.leaves((value, gradients)), strict=True):
        # where silu bends, at gates near 0 among those of 400, one's rounding is felt
        assert np.linalg.norm(np.float32(g) - t) < 1e-2 * np.linalg.norm(t)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bias_of_another_shape_is_refused(dtype):
    weights = [jnp.ones(shape, dtype) for shape in _shapes(64, 96, 48)]
    with pytest.raises(ValueError, match=r"bias is \[1\]; the weight \[48, 96\] takes \[48\]"):
        linear.gated_mlp(jnp.ones((2, 64), dtype), weights, [None] * 3, [None, None, jnp.ones(1)])


@pytest.mark.parametrize("has", PATTERNS)
def test_many_rows_are_two_kernels_with_swiglu_inside_whatever_has_an_adapter(has):
    shapes = _shapes(512, 768, 512)
    of = _weights(shapes), _loras(_pairs(shapes, has))
    module = lowered(lambda x, *of: linear.gated_mlp(x, *of, [None] * 3), _normal(0, 300, 512, dtype=jnp.bfloat16), *of)
    assert kernels(module) == 2
    assert "stablehlo.exponential" not in module and "stablehlo.logistic" not in module
    assert dots(module) == 0  # CTAs without a tile make x A^T


def test_triton_rounds_gate_and_up_as_without_kernels(monkeypatch):
    """For a sampler and a learner, of whose rows only a few go to it."""
    shapes, products = _shapes(64, 96, 48), []

    def product(x, weights, *more, **options):
        products.append(len(weights))
        return fp4_matmul(x, weights, *more, backend="reference", **options)

    monkeypatch.setattr(variants, "missing", lambda: None)
    monkeypatch.setattr(linear, "fp4_matmul", product)
    monkeypatch.setattr(linear, "fp4_mlp", None)
    with compiling_for(80):
        linear.gated_mlp(jnp.ones((2, 64), jnp.bfloat16), _weights(shapes), [None] * 3, [None] * 3)
    assert products == [2, 1]
