"""The kernels' float16 programs on a CUDA device: the same numbers as bfloat16's, to three more bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead
from random_weights import poison, random_matrix
from test_attention_gpu import GROUPS, NORMED, TOGETHER, HeadNorms, _case, _expected, decode_attention

from benchmarks.fp4_block import EPS, SHAPES, random_layer
from pallas_kernels import (
    KernelWeight,
    between_attentions,
    between_attentions_reference,
    dequantize_kernel,
    fp4_matmul,
    fp4_matmul_dx,
    layout,
)
from pallas_kernels.attention_plan import AttentionConfig

pytestmark = pytest.mark.gpu

F16 = "float16"
K, NS, RANKS = 1280, (640, 136), (32, 16)
ROWS = [1, 8, 16, 17, 64, 128, 256, 1000]


def _product(x, data, scales, *loras):
    """In float32, of two weights with adapters and biases."""
    weights = [KernelWeight(words, n, K, F16) for words, n in zip(data, NS, strict=True)]
    biases = [jnp.arange(n, dtype=jnp.float32) for n in NS]
    return fp4_matmul(x, weights, list(scales), lora=list(loras), bias=biases, out_dtype=jnp.float32)


def _start_product(programs, m):
    key, shape = ("float16", m), jax.ShapeDtypeStruct
    data = [shape((-(-n // 16), K // 256, layout.QUAD_WORDS), jnp.uint32) for n in NS]
    loras = [(shape((r, K), F16), shape((n, r), F16), shape((), jnp.float32)) for n, r in zip(NS, RANKS, strict=True)]
    programs.start(key, _product, shape((m, K), F16), data, [shape((), jnp.float32)] * 2, *loras)
    return key


@ahead(_start_product)
@pytest.mark.parametrize("m", ROWS)
def test_products_with_adapters(rng, programs, m):
    matrices = [random_matrix(rng, n, K, 10 ** rng.uniform(2, 4), dtype=F16) for n in NS]
    x = jnp.asarray(rng.standard_normal((m, K)), F16)
    loras = [
        (jnp.asarray(rng.standard_normal((r, K)) * K**-0.5, F16), jnp.asarray(rng.standard_normal((n, r)), F16), 0.5)
        for n, r in zip(NS, RANKS, strict=True)
    ]
    poison(m, sum(NS))
    data, scales = [matrix.weight.data for matrix in matrices], [matrix.global_scale for matrix in matrices]
    ys = programs.get(_start_product(programs, m))(x, data, scales, *loras)
    x64 = np.asarray(x, np.float64)
    for y, matrix, (a, b, scaling) in zip(ys, matrices, loras, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        hidden = scaling * x64 @ a.T  # rounded to float16 between the products
        true = x64 @ matrix.dense.T + hidden @ b.T + np.arange(len(b))
        bound = (
            1e-5 * (np.abs(x64) @ np.abs(matrix.dense).T + np.arange(len(b))) + 2.0**-11 * np.abs(hidden) @ np.abs(b).T
        )
        assert (np.abs(np.asarray(y, np.float64) - true) <= bound).all()


@pytest.mark.parametrize("m", [40, 1000])
def test_dx(rng, m):
    matrix = random_matrix(rng, 640, K, 300, dtype=F16)
    dy = jnp.asarray(rng.standard_normal((m, 640)), F16)
    dx = np.asarray(jax.jit(fp4_matmul_dx)(dy, matrix.weight, matrix.global_scale), np.float64)
    dy = np.asarray(dy, np.float64)
    size = np.abs(dy) @ np.abs(matrix.dense)
    np.testing.assert_allclose(dx, dy @ matrix.dense, rtol=2**-11, atol=1e-5 * size.max())


def test_dequantization_is_exact(rng):
    matrix = random_matrix(rng, 640, K, 1.0, dtype=F16)
    w = np.asarray(dequantize_kernel.dequantize(matrix.weight.data, F16), np.float64)
    np.testing.assert_array_equal(w[:640, :K] * layout.EPILOGUE_FACTOR, matrix.values)


@functools.cache
def _layer(rank):
    return random_layer(jax.random.key(0), SHAPES["7B"], rank, F16)


def _between(f, x, residual, layer, norms):
    return jax.tree.leaves(f(x, residual, layer, norms, EPS))


def _start_between(programs, rank, m):
    """The layer by its kernels, and its reference."""
    keys, shape = [("float16 layer", rank, m, kind) for kind in ("kernels", "reference")], jax.ShapeDtypeStruct
    layer, norms = jax.eval_shape(lambda: random_layer(jax.random.key(0), SHAPES["7B"], rank, F16))
    operands = shape((m, layer.o.weight.k), F16), shape((m, layer.o.weight.n), jnp.float32), layer, norms
    for key, f in zip(keys, (between_attentions, between_attentions_reference), strict=True):
        programs.start(key, functools.partial(_between, f), *operands)
    return keys


@ahead(lambda programs, rank, m, size: _start_between(programs, rank, m))
@pytest.mark.parametrize("rank, m, size", [
    (32, 1, 1), (32, 8, 1), (0, 3, 1), (32, 16, 1), (32, 32, 1), (32, 64, 1), (0, 128, 1), (32, 256, 1),
    (32, 8, 200), (32, 16, 200), (32, 32, 200), (32, 64, 200), (0, 128, 200), (32, 256, 200),
])  # fmt: skip
def test_between_attentions(rng, programs, rank, m, size):
    """`size` is that of gate and up; at 200 their product and then the residual stream are beyond float16's range."""
    layer, norms = _layer(rank)
    norms = size * norms[0], norms[1]
    x = jnp.asarray(rng.standard_normal((m, layer.o.weight.k)), F16)
    residual = jnp.asarray(rng.standard_normal((m, layer.o.weight.n)), jnp.float32)
    made, true = (programs.get(key)(x, residual, layer, norms) for key in _start_between(programs, rank, m))
    assert (np.abs(true[0]).max() > 65504) == (size > 1)
    for a, b in zip(made, true, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # an eighth of what bfloat16's may differ by (test_block_gpu.py), and its last bit
        assert (np.abs(a - b) < 0.005 * np.sqrt((b**2).mean()) + 2**-10 * np.abs(b)).all()
        assert np.sqrt(((a - b) ** 2).mean()) < 0.00075 * np.sqrt((b**2).mean())


E4M3, HALF = jnp.float8_e4m3fn, jnp.float16


@pytest.mark.parametrize("sizes, config, normed, kept", [
    (NORMED, AttentionConfig(1, 1), True, (HALF, HALF)),
    (NORMED, AttentionConfig(2, 2, 4, 4), False, (HALF, E4M3)),
    (NORMED, AttentionConfig(1, 4), True, (E4M3, E4M3)),
    (GROUPS, TOGETHER[0], False, (HALF, HALF)),
])  # fmt: skip
def test_attention(rng, sizes, config, normed, kept):
    case = _case(rng, *sizes, HALF, kept=kept)
    norms = [HeadNorms(*(jnp.asarray(rng.uniform(0.5, 2, sizes[3]), jnp.float32) for _ in range(2)), 1e-6)] * normed
    out, own_k, own_v = decode_attention(*case, *norms, config=config)
    expected, expected_k, expected_v = (np.asarray(x, np.float32) for x in _expected(*case, *norms))
    np.testing.assert_array_equal(np.asarray(own_v, np.float32), expected_v)
    step = 0.002 if kept[0] == HALF else 0.13  # where a rotated number lies between two, either may be taken
    np.testing.assert_allclose(np.asarray(own_k, np.float32), expected_k, rtol=step, atol=0.002)
    limit = 0.004 if kept[0] == HALF else 0.03
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=limit, rtol=limit)
