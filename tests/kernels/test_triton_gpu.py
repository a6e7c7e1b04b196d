"""The Triton kernel's numbers on a CUDA device, and what GPUs compile that have no other kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import CASES, adversarial, normal, poison, random_matrix

from pallas_kernels import compiling_for, fp4_matmul, fp4_matmul_reference
from pallas_kernels.variants import MAX_TRITON_ROWS

pytestmark = pytest.mark.gpu

pytest.importorskip("jax_triton", exc_type=ImportError)

triton = jax.jit(functools.partial(fp4_matmul, backend="triton", out_dtype=jnp.float32))


def sums(x, matrix):
    poison(len(x), matrix.weight.n)
    return np.asarray(triton(x, matrix.weight, matrix.global_scale))


def within_1e_5(y, x, matrix):
    """Of |x| |W|^T, against the float64 product of the dequantized weights."""
    w, x64 = matrix.dense, np.asarray(x, np.float64)
    return bool((np.abs(y - x64 @ w.T) <= 1e-5 * (np.abs(x64) @ np.abs(w).T)).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 8, 13, 32, 64, 100])
@pytest.mark.parametrize("k, n", [(768, 200), (80, 33), (3584, 4608), (18944, 512)])
def test_within_1e_5_and_repeatable(rng, m, k, n, dtype):
    matrix = random_matrix(rng, n, k, 10 ** rng.uniform(-2, 5), dtype=dtype)
    x = normal(rng, m, k, dtype=dtype)
    y = sums(x, matrix)
    assert within_1e_5(y, x, matrix) and np.array_equal(y, sums(x, matrix))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("m", [8, 64])
def test_adversarial(rng, m, case):
    x, matrix = adversarial(rng, case, m, 320, 5120)
    assert within_1e_5(sums(x, matrix), x, matrix)


@pytest.mark.parametrize("most, fewer", [(8, (1, 3)), (16, (9, 12)), (32, (17,)), (64, (40,))])
def test_rows_do_not_depend_on_how_many_there_are(rng, most, fewer):
    matrix, x = random_matrix(rng, 4608, 3584, 7), normal(rng, most, 3584, dtype=jnp.bfloat16)
    full = sums(x, matrix)
    for m in fewer:
        assert np.array_equal(full[:m], sums(x[:m], matrix))


@pytest.mark.parametrize("m", [5, MAX_TRITON_ROWS, MAX_TRITON_ROWS + 1])
def test_what_other_gpus_compile(rng, m):
    """The product with an adapter and a bias, its gradients, and a batch of x."""
    k, n, rank = 1024, 640, 16
    matrix = random_matrix(rng, n, k, 300)
    x, a, b, bias = (normal(rng, *s, dtype=jnp.bfloat16) for s in ((m, k), (rank, k), (n, rank), (n,)))
    scale, dy = matrix.global_scale, normal(rng, m, n)

    def loss(multiply, x, a, b):
        return jnp.sum(dy * multiply(x, (a / k**0.5, b / rank**0.5, 0.5)).astype(jnp.float32))

    def ours(x, lora):
        return fp4_matmul(x, matrix.weight, scale, lora=lora, bias=bias)

    def plain(x, lora):
        x, a, b = x.astype(jnp.float32), *(v.astype(jnp.float32) for v in lora[:2])
        return fp4_matmul_reference(x, matrix.weight, scale) + lora[2] * (x @ a.T) @ b.T + bias.astype(jnp.float32)

    with compiling_for(80), jax.default_matmul_precision("highest"):
        program = jax.jit(jax.value_and_grad(functools.partial(loss, ours), (0, 1, 2))).lower(x, a, b).compile()
        batch = jax.jit(jax.vmap(lambda x: ours(x, None)))(x.reshape(m, 1, k))
    assert "triton_kernel_call" in program.as_text()
    value, gradients = program(x, a, b)
    with jax.default_matmul_precision("highest"):
        true, expected = jax.jit(jax.value_and_grad(functools.partial(loss, plain), (0, 1, 2)))(x, a, b)
        alone = jax.jit(lambda x: plain(x, (jnp.zeros((1, k)), jnp.zeros((n, 1)), 0.0)))(x)
    assert abs(value - true) <= 2**-7 * float(jnp.sum(jnp.abs(dy))) * float(jnp.abs(alone).max())
    for got, want in zip(gradients, expected, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
    batch, alone = np.asarray(batch[:, 0], np.float32), np.asarray(alone)
    np.testing.assert_allclose(batch, alone, rtol=2**-7, atol=1e-5 * np.abs(alone).max())
