"""`gated_mlp` where `fp4_mlp` takes it: beside the same without kernels, and what is lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_kernel import dots, kernels, lowered

from qerl_jax.formats import quantize_nvfp4, repacked
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


@pytest.mark.parametrize("has", PATTERNS)
def test_many_rows_are_two_kernels_with_swiglu_inside_whatever_has_an_adapter(has):
    shapes = _shapes(512, 768, 512)
    of = _weights(shapes), _loras(_pairs(shapes, has))
    module = lowered(lambda x, *of: linear.gated_mlp(x, *of, [None] * 3), _normal(0, 300, 512, dtype=jnp.bfloat16), *of)
    assert kernels(module) == 2
    assert "stablehlo.exponential" not in module and "stablehlo.logistic" not in module
    assert dots(module) == 0  # CTAs without a tile make x A^T
