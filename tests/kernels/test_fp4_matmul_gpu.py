"""The kernels' numbers on a CUDA device, with fresh seeds each run: `python -m pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import dequantized, poison, random_weight

from benchmarks import fp4_error
from benchmarks.compiling import Programs
from pallas_kernels import (
    KernelWeight,
    dequantize_kernel,
    fp4_matmul,
    fp4_matmul_dx,
    layout,
    repack,
    stream_kernel,
    variants,
)
from pallas_kernels.stream_plan import StreamConfig

pytestmark = pytest.mark.gpu

SHAPES = [(3584, 4608), (18944, 3584), (896, 1152), (1024, 40), (80, 33)]


def _kernel_f32(x, weight, gs, config=None):
    """The kernel's sums before the last rounding, into a poisoned output."""
    m, k = x.shape
    config = config or variants.config_for(m, k, (weight.n,))
    kernel = stream_kernel.build(m, k, (weight.n,), config, wide_out=True)
    x = jnp.pad(x, ((0, 0), (0, -k % layout.COLS)))
    poison(m, weight.n)
    return np.asarray(kernel(x, weight.data, stream_kernel.number(gs))[0], np.float64)


@pytest.mark.parametrize("m", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("k, n", SHAPES)
def test_decode_kernel_within_1e_5(rng, m, k, n):
    weight, gs = random_weight(rng, n, k), np.float32(10 ** rng.uniform(-2, 5))
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    w, x64 = dequantized(weight, gs), np.asarray(x, np.float64)
    error = np.abs(_kernel_f32(x, weight, gs) - x64 @ w.T)
    assert (error <= 1e-5 * (np.abs(x64) @ np.abs(w).T)).all()
    y = np.asarray(fp4_matmul(x, weight, gs), np.float64)
    np.testing.assert_allclose(y, x64 @ w.T, rtol=2**-8, atol=2e-5 * (np.abs(x64) @ np.abs(w).T).max())


@pytest.mark.parametrize("case", ["all codes and scales", "zeros", "positive", "large global", "small global"])
def test_adversarial_inputs_no_worse_than_cublas(rng, case):
    m, n, k, gs = 16, 256, 8192, np.float32(1.0)
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
    exact = dequantized(weight, np.float32(1.0))  # exact in bfloat16: at most 6 significant bits
    x64 = np.asarray(x, np.float64)
    true, size = x64 @ exact.T, np.abs(x64) @ np.abs(exact).T + 1e-300
    mine = np.abs(_kernel_f32(x, weight, gs) * np.float64(gs) - true) / size
    theirs = jnp.dot(x, jnp.asarray(exact, jnp.bfloat16).T, preferred_element_type=jnp.float32)
    theirs = np.abs(np.asarray(theirs, np.float64) - true) / size
    assert np.isfinite(mine).all() and mine.max() <= 1e-5
    assert mine.max() <= max(1.25 * theirs.max(), 3 * 2.0**-24)


@pytest.mark.parametrize("k, n", fp4_error.SHAPES)
def test_the_tables_configurations_err_no_more_than_cublas(rng, k, n):
    def configs_of(m, k, n):
        return [variants.config_for(m, k, (n,))]

    rows, programs = (8, 16, 32, 64), Programs()
    fp4_error.start(programs, k, n, rows, configs_of)
    measured = fp4_error.measure(programs, k, n, rows, configs_of, rng, timed=False)
    assert [row["m"] for row in measured] == [*rows]
    assert all(row["ratio"] <= 1.25 for row in measured), measured


@pytest.mark.parametrize("m, k, ns, ranks", [
    (8, 1024, (512, 128, 128), (32, 32, 32)),
    (3, 3584, (3584, 512, 512), (32, 0, 16)),
    (8, 3584, (3584,), (32,)),
    (1, 3584, (18944, 18944), (32, 32)),
    (8, 18944, (3584,), (32,)),
    (16, 3584, (3584,), (128,)),
    (9, 18944, (3584,), (8,)),
    (24, 2048, (1024, 128), (64, 16)),
    (64, 3584, (3584,), (32,)),
    (33, 1280, (40, 33), (32, 24)),
])  # fmt: skip
def test_lora_in_the_kernel(rng, m, k, ns, ranks):
    weights, gs = [random_weight(rng, n, k, 0x10, 0x50) for n in ns], np.float32(2688)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    loras = [
        None if not r else (
            jnp.asarray(rng.standard_normal((r, k)) / k**0.5, jnp.bfloat16),
            jnp.asarray(rng.standard_normal((n, r)), jnp.bfloat16),
            jnp.float32(0.7),
        )
        for r, n in zip(ranks, ns, strict=True)
    ]  # fmt: skip
    scales = [stream_kernel.number(gs)] * len(ns)
    padded, operands = stream_kernel.lora_operands(loras, ((0, 0), (0, 0)))
    config = variants.config_for(m, k, ns, padded)
    assert variants.takes_lora(m, k, ns, config, padded)
    kernel = stream_kernel.build(m, k, ns, config, wide_out=True, ranks=padded)
    first = None
    for _ in range(4):
        poison = [jnp.full((m, n), jnp.nan, jnp.float32) for n in ns]
        jax.block_until_ready(poison)
        del poison
        ys = [np.asarray(y, np.float64) for y in kernel(x, *[w.data for w in weights], *scales, *operands)]
        first = first or ys
        assert all(np.array_equal(y, f) for y, f in zip(ys, first, strict=True))
    x64 = np.asarray(x, np.float64)
    for y, w, lora in zip(first, weights, loras, strict=True):
        dense = dequantized(w, gs)
        true, bound = x64 @ dense.T, 1e-5 * (np.abs(x64) @ np.abs(dense).T)
        if lora is not None:
            a, b, s = (np.asarray(v, np.float64) for v in lora)
            hidden = s * (x64 @ a.T)
            true, bound = true + hidden @ b.T, bound + 2.0**-8 * (np.abs(hidden) @ np.abs(b).T)
        assert (np.abs(y - true) <= bound).all()
    if m > 1:
        fewer = stream_kernel.build(m - 1, k, ns, config, wide_out=True, ranks=padded)
        again = fewer(x[: m - 1], *[w.data for w in weights], *scales, *operands)
        assert all(np.array_equal(np.asarray(y, np.float64), f[: m - 1]) for y, f in zip(again, first, strict=True))


def test_lora_gradient_loop_and_vmap(rng):
    k, r = 512, 16
    weight, gs = random_weight(rng, k, k, 0x20, 0x50), jnp.float32(2e3)
    a = jnp.asarray(rng.standard_normal((r, k)) / k**0.5, jnp.bfloat16)
    b = jnp.asarray(rng.standard_normal((k, r)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((8, k)), jnp.bfloat16)

    def f(x, w, a, b):
        return fp4_matmul(x, w, gs, lora=(a, b, 0.1))

    loop = jax.jit(lambda x, w, a, b: jax.lax.fori_loop(0, 5, lambda _, x: f(x, w, a, b), x))
    want = x
    for _ in range(5):
        want = jax.jit(f)(want, weight, a, b)
    assert np.array_equal(np.asarray(loop(x, weight, a, b)), np.asarray(want))
    batch = jax.vmap(f, (0, None, None, None))(x.reshape(2, 4, k), weight, a, b)
    assert np.array_equal(np.asarray(batch).reshape(8, k), np.asarray(f(x, weight, a, b)))
    dy = jnp.asarray(rng.standard_normal((8, k)), jnp.bfloat16)
    grads = jax.grad(lambda x, a, b: (f(x, weight, a, b) * dy).sum().astype(jnp.float32), (0, 1, 2))(x, a, b)
    x64, a64, b64, dy64 = (np.asarray(v, np.float64) for v in (x, a, b, dy))
    true = (
        dy64 @ (dequantized(weight, np.float32(2e3)) + 0.1 * b64 @ a64),
        0.1 * (dy64 @ b64).T @ x64,
        0.1 * dy64.T @ (x64 @ a64.T),
    )
    for g, t in zip(grads, true, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), t, rtol=2**-6, atol=6e-3 * np.abs(t).max())


@pytest.mark.parametrize("m", [8, 20, 32, 64])
@pytest.mark.parametrize("config, k, n", [
    (StreamConfig(1, 4, 1, 1, 2, 2, True), 1024, 4096),
    (StreamConfig(1, 4, 2, 2, 3, 3, True), 768, 640),
    (StreamConfig(2, 8, 1, 1, 2, 2, True), 1024, 1024),
])  # fmt: skip
def test_wgmma_within_1e_5(rng, m, config, k, n):
    weight, gs = random_weight(rng, n, k), np.float32(300)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    w, x64 = dequantized(weight, gs), np.asarray(x, np.float64)
    error = np.abs(_kernel_f32(x, weight, gs, config) - x64 @ w.T)
    assert (error <= 1e-5 * (np.abs(x64) @ np.abs(w).T)).all()


@pytest.mark.parametrize("m", [3, 40, 100])
def test_triton_kernel(rng, m):
    pytest.importorskip("jax_triton")
    k, n, gs = 768, 200, np.float32(300)
    weight = random_weight(rng, n, k)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    w, x64 = dequantized(weight, gs), np.asarray(x, np.float64)
    y = np.asarray(fp4_matmul(x, weight, gs, backend="triton"), np.float64)
    bound = 2**-8 * np.abs(x64 @ w.T) + 1e-5 * (np.abs(x64) @ np.abs(w).T)
    assert (np.abs(y - x64 @ w.T) <= bound).all()


def test_dequantize_kernel_is_exact(rng):
    weight = random_weight(rng, 80, 1100 // 16 * 16)
    got = dequantize_kernel.dequantize(weight.data)[: weight.n, : weight.k].astype(jnp.float32) * 128
    assert np.array_equal(np.asarray(got), np.asarray(layout.dequantize(weight, 1.0, jnp.float32)))


def test_repeatable_and_independent_of_m(rng):
    k, n = 3584, 4608
    weight, gs = random_weight(rng, n, k), np.float32(2688)
    x = jnp.asarray(rng.standard_normal((16, k)), jnp.bfloat16)
    config = variants.config_for(16, k, (n,))
    full = _kernel_f32(x, weight, gs, config)
    for _ in range(5):
        assert np.array_equal(full, _kernel_f32(x, weight, gs, config))
    for m in (1, 2, 5, 8, 13):
        assert np.array_equal(full[:m], _kernel_f32(x[:m], weight, gs, config))


def test_list_bias_vmap_grad_and_loop(rng):
    ks, ns = 1024, (512, 128, 128)
    weights = [random_weight(rng, n, ks, 0x20, 0x50) for n in ns]
    scales = [jnp.float32(s) for s in (1e3, 2e3, 4e3)]
    biases = [jnp.asarray(rng.standard_normal(n), jnp.bfloat16) for n in ns]
    x = jnp.asarray(rng.standard_normal((4, ks)), jnp.bfloat16)
    ys = jax.jit(lambda x: fp4_matmul(x, weights, scales, bias=biases))(x)
    for y, w, s, b in zip(ys, weights, scales, biases, strict=True):
        true = np.asarray(x, np.float64) @ dequantized(w, s).T + np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), true, rtol=2**-7, atol=2e-3 * np.abs(true).max())
    batch = jax.vmap(lambda x: fp4_matmul(x, weights, scales, bias=biases)[1])(x.reshape(2, 2, ks))
    assert np.array_equal(np.asarray(batch).reshape(4, -1), np.asarray(ys[1]))
    square = random_weight(rng, 512, 512, 0x20, 0x50)
    loop = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: fp4_matmul(x, w, jnp.float32(2e3)), x))
    x = x[:, :512]
    want = x
    for _ in range(3):
        want = fp4_matmul(want, square, jnp.float32(2e3))
    assert np.array_equal(np.asarray(loop(x, square)), np.asarray(want))
    dy = jnp.asarray(rng.standard_normal((4, 512)), jnp.bfloat16)
    grad = jax.grad(lambda x: (fp4_matmul(x, square, jnp.float32(2e3)) * dy).sum().astype(jnp.float32))(x)
    true = np.asarray(dy, np.float64) @ dequantized(square, np.float32(2e3))
    np.testing.assert_allclose(np.asarray(grad, np.float64), true, rtol=2**-6, atol=4e-3 * np.abs(true).max())


@pytest.mark.parametrize("m", [1, 8, 64])
def test_lora_in_a_compiled_loop(rng, m):
    """Two calls a turn, 300 turns: the counters between CTAs, a constant of the program, are zero after each."""
    k, ns, turns = 3584, (3584, 512, 512), 300
    weights = [random_weight(rng, n, k, 0x10, 0x50) for n in ns]
    last = random_weight(rng, k, ns[0], 0x10, 0x50)
    scales = [jnp.float32(2688.0)] * 3

    def pair(n, k):
        a, b = rng.standard_normal((32, k)) / k**0.5, rng.standard_normal((n, 32))
        return jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), 0.7

    def both(x, weights, last, loras, lora):
        q, _, v = fp4_matmul(x, weights, scales, lora=loras)
        return fp4_matmul(q, last, scales[0], lora=lora), v

    @jax.jit
    def wrong_turns(xs, expected, *operands):
        def turn(i, wrong):
            now = both(xs[i % 4], *operands)  # another x each time, so that nothing leaves the loop
            same = [jnp.array_equal(y, e[i % 4]) for y, e in zip(now, expected, strict=True)]
            return wrong + ~jnp.stack(same).all()

        return jax.lax.fori_loop(0, turns, turn, 0)

    operands = (weights, last, [pair(n, k) for n in ns], pair(k, ns[0]))
    xs = jnp.asarray(rng.standard_normal((4, m, k)), jnp.bfloat16)
    expected = [jnp.stack(ys) for ys in zip(*(both(x, *operands) for x in xs), strict=True)]
    plain = [
        fp4_matmul(xs[0], w, s, lora=lora, backend="dequantize")
        for w, s, lora in zip(weights, scales, operands[2], strict=True)
    ]
    np.testing.assert_allclose(
        np.asarray(expected[1][0], np.float64), np.asarray(plain[2], np.float64), rtol=2**-6, atol=0.05
    )
    assert int(wrong_turns(xs, expected, *operands)) == 0


@pytest.mark.parametrize("m", [128, 1024])
def test_many_rows_and_dx(rng, m):
    k, n, gs = 1024, 768, np.float32(2688)
    weight = random_weight(rng, n, k)
    w = dequantized(weight, gs)
    for f, rows, dense in ((fp4_matmul, k, w.T), (fp4_matmul_dx, n, w)):
        x = jnp.asarray(rng.standard_normal((m, rows)), jnp.bfloat16)
        x64 = np.asarray(x, np.float64)
        y = np.asarray(jax.jit(lambda x, w, s, f=f: f(x, w, s))(x, weight, gs), np.float64)
        bound = 2**-8 * np.abs(x64 @ dense) + 1e-5 * (np.abs(x64) @ np.abs(dense))
        assert (np.abs(y - x64 @ dense) <= bound).all()


def test_the_weight_is_read_in_place(rng):
    weight = random_weight(rng, 512, 1024)
    x = jnp.ones((8, 1024), jnp.bfloat16)
    compiled = jax.jit(lambda x, w: fp4_matmul(x, w, jnp.float32(1.0))).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.data.nbytes // 4
    assert isinstance(weight, KernelWeight)
