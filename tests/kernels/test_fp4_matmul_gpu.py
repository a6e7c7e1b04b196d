"""The kernels' numbers on a CUDA device, with fresh seeds each run: `python -m pytest -m gpu tests/kernels`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead, start_call, start_stream
from random_weights import poison, random_matrix

from pallas_kernels import KernelWeight, dequantize_kernel, fp4_matmul, fp4_matmul_dx, layout, variants
from pallas_kernels.stream_plan import StreamConfig

pytestmark = pytest.mark.gpu

SHAPES = [(3584, 4608), (18944, 3584), (896, 1152), (1024, 40), (80, 33)]
WGMMA = [
    (StreamConfig(1, 4, 1, 1, 2, 2, True), 1024, 4096),
    (StreamConfig(1, 4, 2, 2, 3, 3, True), 768, 640),
    (StreamConfig(2, 8, 1, 1, 2, 2, True), 1024, 1024),
    (StreamConfig(2, 8, 1, 1, 2, 2, True, promote=0), 1024, 1024),
]


@pytest.fixture(scope="module")
def products(rng):
    """Of a shape [K, N]: x [64, K], W, x W^T and |x| |W|^T in float64, made once for all that test it."""

    @functools.cache
    def of(k, n):
        matrix = random_matrix(rng, n, k, 10 ** rng.uniform(-2, 5))
        x = jnp.asarray(rng.standard_normal((64, k), np.float32), jnp.bfloat16)
        dense, x64 = matrix.dense, np.asarray(x, np.float64)
        return x, matrix._replace(values=np.empty(0)), x64 @ dense.T, np.abs(x64) @ np.abs(dense).T

    return of


def _sums(program, x, matrix):
    """The kernel's sums before the last rounding, into a poisoned output."""
    poison(len(x), matrix.weight.n)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % layout.COLS)))
    return np.asarray(program(x, matrix.weight.data, np.full(1, matrix.global_scale))[0], np.float64)


def _start(programs, m, k, n):
    start_stream(programs, m, k, (n,))
    start_call(programs, m, k, n)


@ahead(_start)
@pytest.mark.parametrize("m", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("k, n", SHAPES)
def test_decode_kernel_within_1e_5(programs, products, m, k, n):
    x, matrix, true, size = products(k, n)
    x, true, size = x[:m], true[:m], size[:m]
    error = np.abs(_sums(programs.get(start_stream(programs, m, k, (n,))), x, matrix) - true)
    assert (error <= 1e-5 * size).all()
    call = programs.get(start_call(programs, m, k, n))
    y = np.asarray(call(x, matrix.weight.data, matrix.global_scale), np.float64)
    np.testing.assert_allclose(y, true, rtol=2**-8, atol=2e-5 * size.max())


@ahead(lambda programs, m, config, k, n: start_stream(programs, m, k, (n,), config))
@pytest.mark.parametrize("m", [8, 20, 32, 64])
@pytest.mark.parametrize("config, k, n", WGMMA)
def test_wgmma_within_1e_5(programs, products, m, config, k, n):
    x, matrix, true, size = products(k, n)
    error = np.abs(_sums(programs.get(start_stream(programs, m, k, (n,), config)), x[:m], matrix) - true[:m])
    assert (error <= 1e-5 * size[:m]).all()


def test_dequantize_kernel_is_exact(rng):
    matrix = random_matrix(rng, 80, 1100 // 16 * 16, 1)
    got = dequantize_kernel.dequantize(matrix.weight.data)[:80, : matrix.weight.k].astype(jnp.float32) * 128
    assert np.array_equal(np.asarray(got), matrix.values)


REPEATED = (16, 3584, 4608)


def _start_repeated(programs):
    m, k, n = REPEATED
    return {
        rows: start_stream(programs, rows, k, (n,), variants.config_for(m, k, (n,))) for rows in (1, 2, 5, 8, 13, m)
    }


@ahead(_start_repeated)
def test_repeatable_and_independent_of_m(programs, products):
    m, k, n = REPEATED
    x, matrix, _, _ = products(k, n)
    keys = _start_repeated(programs)
    full = _sums(programs.get(keys.pop(m)), x[:m], matrix)
    for _ in range(5):
        assert np.array_equal(full, _sums(programs.get(start_stream(programs, m, k, (n,))), x[:m], matrix))
    for rows, key in keys.items():
        assert np.array_equal(full[:rows], _sums(programs.get(key), x[:rows], matrix))


def test_list_bias_vmap_grad_and_loop(rng):
    ks, ns = 1024, (512, 128, 128)
    matrices = [random_matrix(rng, n, ks, gs, 0x20, 0x50) for n, gs in zip(ns, (1e3, 2e3, 4e3), strict=True)]
    weights, scales = [w.weight for w in matrices], [w.global_scale for w in matrices]
    biases = [jnp.asarray(rng.standard_normal(n), jnp.bfloat16) for n in ns]
    x = jnp.asarray(rng.standard_normal((4, ks)), jnp.bfloat16)
    ys = jax.jit(lambda x: fp4_matmul(x, weights, scales, bias=biases))(x)
    for y, w, b in zip(ys, matrices, biases, strict=True):
        true = np.asarray(x, np.float64) @ w.dense.T + np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), true, rtol=2**-7, atol=2e-3 * np.abs(true).max())
    batch = jax.jit(jax.vmap(lambda x: fp4_matmul(x, weights, scales, bias=biases)[1]))(x.reshape(2, 2, ks))
    assert np.array_equal(np.asarray(batch).reshape(4, -1), np.asarray(ys[1]))
    matrix = random_matrix(rng, 512, 512, 2e3, 0x20, 0x50)
    square, gs = matrix.weight, matrix.global_scale
    loop = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: fp4_matmul(x, w, gs), x))
    x = x[:, :512]
    want = x
    once = jax.jit(fp4_matmul)
    for _ in range(3):
        want = once(want, square, gs)
    assert np.array_equal(np.asarray(loop(x, square)), np.asarray(want))
    dy = jnp.asarray(rng.standard_normal((4, 512)), jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda x: (fp4_matmul(x, square, gs) * dy).sum().astype(jnp.float32)))(x)
    true = np.asarray(dy, np.float64) @ matrix.dense
    np.testing.assert_allclose(np.asarray(grad, np.float64), true, rtol=2**-6, atol=4e-3 * np.abs(true).max())


@pytest.mark.parametrize("m", [128, 1024])
def test_many_rows_and_dx(rng, m):
    k, n = 1024, 768
    matrix = random_matrix(rng, n, k, 2688)
    weight, gs, w = matrix.weight, matrix.global_scale, matrix.dense
    for f, rows, dense in ((fp4_matmul, k, w.T), (fp4_matmul_dx, n, w)):
        x = jnp.asarray(rng.standard_normal((m, rows)), jnp.bfloat16)
        x64 = np.asarray(x, np.float64)
        y = np.asarray(jax.jit(lambda x, w, s, f=f: f(x, w, s))(x, weight, gs), np.float64)
        bound = 2**-8 * np.abs(x64 @ dense) + 1e-5 * (np.abs(x64) @ np.abs(dense))
        assert (np.abs(y - x64 @ dense) <= bound).all()


def test_the_weight_is_read_in_place(rng):
    weight = random_matrix(rng, 512, 1024, 1).weight
    x = jnp.ones((8, 1024), jnp.bfloat16)
    compiled = jax.jit(lambda x, w: fp4_matmul(x, w, jnp.float32(1.0))).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.data.nbytes // 4
    assert isinstance(weight, KernelWeight)
