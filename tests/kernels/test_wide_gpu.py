"""The wide kernel's numbers on a CUDA device, with fresh seeds each run: `python -m pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import dequantized, poison, random_weight

from pallas_kernels import fp4_matmul, fp4_matmul_dx, repack, wide
from pallas_kernels.wide_plan import WideConfig, make_plan

pytestmark = pytest.mark.gpu

CONFIGS = [
    WideConfig(128, 1, 1, 6, 3),
    WideConfig(256, 2, 1, 4, 2),
    WideConfig(256, 2, 1, 4, 2, tail=True),
    WideConfig(160, 2, 2, 4, 2),
    WideConfig(256, 1, 3, 4, 2),
    WideConfig(128, 4, 1, 6, 3),
]


def _product(dx, x, weight, gs, config, out_dtype=jnp.float32):
    poison(x.shape[0], weight.k if dx else weight.n)
    f = wide.matmul_dx if dx else wide.matmul
    return np.asarray(f(x, weight, gs, config, out_dtype), np.float64)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dx", [False, True])
@pytest.mark.parametrize("m, k, n", [(300, 1024, 1000), (65, 1296, 1512), (1, 2048, 3584)])
def test_within_1e_5(rng, config, dx, m, k, n):
    weight, gs = random_weight(rng, n, k), np.float32(10 ** rng.uniform(-2, 5))
    x = jnp.asarray(rng.standard_normal((m, n if dx else k)), jnp.bfloat16)
    w, x64 = dequantized(weight, gs).T if not dx else dequantized(weight, gs), np.asarray(x, np.float64)
    true, size = x64 @ w, np.abs(x64) @ np.abs(w)
    assert (np.abs(_product(dx, x, weight, gs, config) - true) <= 1e-5 * size).all()
    rounded = _product(dx, x, weight, gs, config, jnp.bfloat16)
    assert (np.abs(rounded - true) <= 2**-8 * np.abs(true) + 1e-5 * size).all()


@pytest.mark.parametrize("dx", [False, True])
def test_full_waves_and_a_tail(rng, dx):
    # 148 pairs of tiles on 66 pairs of CTAs: two full waves, 16 pairs left; the last tile of outputs is a part of one
    m, r, d, gs = 40, 37888 - 112, 512, np.float32(2688)
    n, k = (d, r) if dx else (r, d)
    weight, config = random_weight(rng, n, k), WideConfig(256, 2, 1, 4, 2, tail=True)
    assert make_plan(m, d, (r,), dx, config).tail_items == 16
    x = jnp.asarray(rng.standard_normal((m, d)), jnp.bfloat16)
    w, x64 = dequantized(weight, gs) if dx else dequantized(weight, gs).T, np.asarray(x, np.float64)
    got = _product(dx, x, weight, gs, config)
    assert (np.abs(got - x64 @ w) <= 1e-5 * (np.abs(x64) @ np.abs(w))).all()


@pytest.mark.parametrize("dx", [False, True])
def test_repeatable_and_rows_independent_of_m(rng, dx):
    k, n, gs = 2048, 3584, np.float32(2688)
    weight = random_weight(rng, n, k)
    x = jnp.asarray(rng.standard_normal((700, n if dx else k)), jnp.bfloat16)
    full = _product(dx, x, weight, gs, WideConfig(256, 2, 1, 4, 2))
    for _ in range(3):
        assert np.array_equal(full, _product(dx, x, weight, gs, WideConfig(256, 2, 1, 4, 2)))
    for m, config in ((70, CONFIGS[0]), (257, CONFIGS[1]), (700, CONFIGS[5])):  # any configuration without a split
        assert np.array_equal(full[:m], _product(dx, x[:m], weight, gs, config))


@pytest.mark.parametrize("case", ["all codes and scales", "zeros", "positive", "large global", "small global"])
@pytest.mark.parametrize("m", [256, 2048])
def test_adversarial_inputs_no_worse_than_cublas(rng, case, m):
    n, k, gs = 2048, 8192, np.float32(1.0)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = (np.arange(n * k // 16) % 0x7F).astype(np.uint8).reshape(n, k // 16)
    x = rng.standard_normal((m, k))
    if case == "zeros":
        packed[: n // 2], scale[n // 2 :] = 0, 0
    elif case == "positive":
        packed, x = packed & 0x77, np.abs(x)
    elif case == "large global":
        gs = np.float32(2.0**100)
    elif case == "small global":
        gs = np.float32(2.0**-100)
    weight, x = repack(jnp.asarray(packed), jnp.asarray(scale)), jnp.asarray(x, jnp.bfloat16)
    rows = np.sort(rng.choice(n, 64, replace=False))
    exact = dequantized(weight, np.float32(1.0))  # exact in bfloat16: at most 6 significant bits
    x64 = np.asarray(x, np.float64)
    true, size = x64 @ exact[rows].T, np.abs(x64) @ np.abs(exact[rows]).T + 1e-300
    mine = _product(False, x, weight, gs, WideConfig(256, 2, 1, 4, 2))[:, rows] * np.float64(gs)
    mine = np.abs(mine - true) / size
    theirs = jnp.dot(x, jnp.asarray(exact, jnp.bfloat16).T, preferred_element_type=jnp.float32)
    theirs = np.abs(np.asarray(theirs, np.float64)[:, rows] - true) / size
    print(f"{case}, M = {m}: {mine.max():.2e}, cuBLAS {theirs.max():.2e}")
    assert np.isfinite(mine).all() and mine.max() <= 1e-5
    assert mine.max() <= max(1.25 * theirs.max(), 3 * 2.0**-24)


def test_list_bias_and_grad(rng):
    m, k, ns, gs = 200, 1024, (512, 136, 128), np.float32(2e3)
    weights = [random_weight(rng, n, k, 0x20, 0x50) for n in ns]
    scales = [jnp.float32(s) for s in (1e3, 2e3, 4e3)]
    biases = [jnp.asarray(rng.standard_normal(n), jnp.bfloat16) for n in ns]
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    ys = jax.jit(lambda x: fp4_matmul(x, weights, scales, bias=biases, backend="wide"))(x)
    dense = [dequantized(w, s) for w, s in zip(weights, scales, strict=True)]
    for y, w, b in zip(ys, dense, biases, strict=True):
        true = np.asarray(x, np.float64) @ w.T + np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), true, rtol=2**-7, atol=2e-3 * np.abs(true).max())
    dys = [jnp.asarray(rng.standard_normal((m, n)), jnp.bfloat16) for n in ns]
    _, pull = jax.vjp(lambda x: fp4_matmul(x, weights, scales, backend="wide"), x)
    true = sum(np.asarray(dy, np.float64) @ w for dy, w in zip(dys, dense, strict=True))
    got = np.asarray(pull(tuple(dys))[0], np.float64)
    np.testing.assert_allclose(got, true, rtol=2**-6, atol=4e-3 * np.abs(true).max())
    one = np.asarray(jax.jit(lambda dy: fp4_matmul_dx(dy, weights[0], gs))(dys[0]), np.float64)
    true = np.asarray(dys[0], np.float64) @ dequantized(weights[0], gs)
    np.testing.assert_allclose(one, true, rtol=2**-7, atol=2e-3 * np.abs(true).max())
