"""The wide kernel's numbers on a CUDA device, with fresh seeds each run: `python -m pytest -m gpu tests/kernels`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead, packed, start_wide
from random_weights import CASES, adversarial, poison, random_matrix, swiglu

from benchmarks import fp4_error
from benchmarks.fp4_matmul import CUBLAS
from pallas_kernels import KernelWeight, fp4_matmul, fp4_matmul_dx, variants, wide
from pallas_kernels.operands import padded_rank
from pallas_kernels.wide_plan import WideConfig, make_plan

pytestmark = pytest.mark.gpu

CONFIGS = [
    WideConfig(128, 1, 1, 4, 6),
    WideConfig(256, 2, 1, 4, 4),
    WideConfig(256, 2, 4, 4, 4),
    WideConfig(160, 2, 2, 4, 4),
    WideConfig(256, 1, 3, 4, 4),
    WideConfig(128, 4, 1, 4, 6),
    WideConfig(128, 2, 3, 4, 6, promote=16),
    WideConfig(256, 1, 2, 4, 4, promote=32),
    WideConfig(32, 1, 4, 6, 6, promote=16),
    WideConfig(64, 1, 3, 6, 6, promote=16),
]


SHAPES = [(300, 1024, 1000), (65, 1296, 1512), (1, 2048, 3584)]  # 1296 ends in the first half of a quad
MAIN = CONFIGS[1]
IN_REGISTERS, IN_MEMORY = WideConfig(128, 2, 1, 4, 6, promote=32), WideConfig(256, 2, 1, 4, 4, promote=32)


@pytest.fixture(scope="module")
def products(rng):
    """Of a shape: x or dy, W, their product and that of their magnitudes in float64, made once for all that test it."""

    @functools.cache
    def of(dx, m, k, n):
        matrix = random_matrix(rng, n, k, 10 ** rng.uniform(-2, 5))
        x = jnp.asarray(rng.standard_normal((m, n if dx else k)), jnp.bfloat16)
        w, x64 = matrix.dense if dx else matrix.dense.T, np.asarray(x, np.float64)
        return x, matrix, x64 @ w, np.abs(x64) @ np.abs(w)

    return of


def _product(programs, dx, x, matrix, config, dtype=jnp.float32):
    n, k = matrix.weight.shape
    program = programs.get(start_wide(programs, dx, len(x), k, n, config, dtype))
    poison(len(x), k if dx else n)
    return np.asarray(program(x, matrix.weight.data, matrix.global_scale), np.float64)


def _start(programs, dx, m, k, n, config):
    for dtype in (jnp.float32, jnp.bfloat16):
        start_wide(programs, dx, m, k, n, config, dtype)


@ahead(_start)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dx", [False, True])
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_within_1e_5(programs, products, config, dx, m, k, n):
    x, matrix, true, size = products(dx, m, k, n)
    assert (np.abs(_product(programs, dx, x, matrix, config) - true) <= 1e-5 * size).all()
    rounded = _product(programs, dx, x, matrix, config, jnp.bfloat16)
    assert (np.abs(rounded - true) <= 2**-8 * np.abs(true) + 1e-5 * size).all()


def _packed_dx(config, k, ns):
    """dx of several weights, their packed data and global scales."""

    def dx(dys, data, scales):
        weights = [KernelWeight(one, n, k) for one, n in zip(data, ns, strict=True)]
        return wide.matmul_dx(dys, weights, scales, config, jnp.float32)

    return dx


def _start_several(programs, config, m, k, ns):
    shape = jax.ShapeDtypeStruct
    operands = [shape((m, n), jnp.bfloat16) for n in ns], [packed(n, k) for n in ns], [shape((), jnp.float32)] * len(ns)
    programs.start(("several", config, m, k, ns), _packed_dx(config, k, ns), *operands)


@ahead(_start_several)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("m, k, ns", [(300, 1008, (1296, 512, 136)), (65, 1520, (3584, 2048))])
def test_dx_of_several_weights_within_1e_5(rng, programs, config, m, k, ns):
    matrices = [random_matrix(rng, n, k, 10 ** rng.uniform(-2, 5)) for n in ns]
    dys = [jnp.asarray(rng.standard_normal((m, n)), jnp.bfloat16) for n in ns]
    _start_several(programs, config, m, k, ns)
    program = programs.get(("several", config, m, k, ns))
    operands = dys, [one.weight.data for one in matrices], [one.global_scale for one in matrices]
    poison(m, k)
    found = program(*operands)
    assert all(bool((program(*operands) == found).all()) for _ in range(20))
    each = [(np.asarray(dy, np.float64), one.dense) for dy, one in zip(dys, matrices, strict=True)]
    true, size = (sum(f(dy) @ f(w) for dy, w in each) for f in (np.asarray, np.abs))
    assert (np.abs(np.asarray(found, np.float64) - true) <= 1e-5 * size).all()


# 148 pairs of tiles on 66 pairs of CTAs: two full waves, 16 pairs left, by 4; the last tile of outputs is a part of one
TAIL_M, TAIL_REDUCED, TAIL_OUTPUTS, TAIL_CONFIG = 40, 1024, 37888 - 112, CONFIGS[2]


def _start_tail(programs, dx):
    n, k = (TAIL_REDUCED, TAIL_OUTPUTS) if dx else (TAIL_OUTPUTS, TAIL_REDUCED)
    return start_wide(programs, dx, TAIL_M, k, n, TAIL_CONFIG)


@ahead(_start_tail)
@pytest.mark.parametrize("dx", [False, True])
def test_full_waves_and_a_tail(rng, programs, dx):
    plan = make_plan(TAIL_M, TAIL_REDUCED, (TAIL_OUTPUTS,), dx, TAIL_CONFIG)
    assert (plan.split_items, plan.parts) == (16, 4)
    matrix = random_matrix(rng, *((TAIL_REDUCED, TAIL_OUTPUTS) if dx else (TAIL_OUTPUTS, TAIL_REDUCED)), 2688)
    x = jnp.asarray(rng.standard_normal((TAIL_M, TAIL_REDUCED)), jnp.bfloat16)
    w, x64 = matrix.dense if dx else matrix.dense.T, np.asarray(x, np.float64)
    got = _product(programs, dx, x, matrix, TAIL_CONFIG)
    assert (np.abs(got - x64 @ w) <= 1e-5 * (np.abs(x64) @ np.abs(w))).all()
    for _ in range(50):  # the counters serve again, and nobody's place in the order of additions changes
        assert np.array_equal(got, _product(programs, dx, x, matrix, TAIL_CONFIG))


FIRST_CALLS = [(m, WideConfig(256, 1, 2, 4, 4, promote=promote)) for m in range(150, 250, 10) for promote in (16, 32)]


def _start_first_calls(programs):
    for m, config in FIRST_CALLS:
        start_wide(programs, False, m, 2048, 3584, config)


@ahead(_start_first_calls)
def test_first_calls_with_totals_in_memory(rng, programs):
    """First calls, whose CTAs and warps are far apart in time."""
    matrix = random_matrix(rng, 3584, 2048, 2688)
    x = jnp.asarray(rng.standard_normal((250, 2048)), jnp.bfloat16)
    x64 = np.asarray(x, np.float64)
    true, size = x64 @ matrix.dense.T, np.abs(x64) @ np.abs(matrix.dense).T
    for m, config in FIRST_CALLS:
        got = _product(programs, False, x[:m], matrix, config)
        assert (np.abs(got - true[:m]) <= 1e-5 * size[:m]).all(), (m, config)


FEWER = ((70, CONFIGS[0]), (257, CONFIGS[1]), (700, CONFIGS[5]))  # any configuration without a split


def _start_fewer(programs, dx):
    for m, config in ((700, MAIN), *FEWER):
        start_wide(programs, dx, m, 2048, 3584, config)


@ahead(_start_fewer)
@pytest.mark.parametrize("dx", [False, True])
def test_repeatable_and_rows_independent_of_m(rng, programs, dx):
    k, n = 2048, 3584
    matrix = random_matrix(rng, n, k, 2688)
    x = jnp.asarray(rng.standard_normal((700, n if dx else k)), jnp.bfloat16)
    full = _product(programs, dx, x, matrix, MAIN)
    for _ in range(3):
        assert np.array_equal(full, _product(programs, dx, x, matrix, MAIN))
    for m, config in FEWER:
        assert np.array_equal(full[:m], _product(programs, dx, x[:m], matrix, config))


@pytest.fixture(scope="module")
def hard(rng):
    """Of a case: 2048 rows of x, W, and the outputs that are compared."""

    @functools.cache
    def of(case):
        x, matrix = adversarial(rng, case, 2048, 2048, 8192)
        columns = np.sort(rng.choice(2048, 64, replace=False))
        return x, matrix, columns, jnp.asarray(matrix.values, jnp.bfloat16)

    return of


def _start_hard(programs, case, m, config):
    start_wide(programs, False, m, 8192, 2048, config)
    x, w = (jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16) for rows in (m, 2048))
    programs.start(("plain", m), fp4_error.plain_product, x, w, options=CUBLAS)


# With 2048 rows cuBLAS has a tile for every multiprocessor; with 256 it splits K, and chains of 512 steps err more.
@ahead(_start_hard)
@pytest.mark.parametrize("m, config", [(2048, MAIN), (256, IN_REGISTERS), (256, IN_MEMORY)])
@pytest.mark.parametrize("case", CASES)
def test_adversarial_inputs_no_worse_than_cublas(programs, hard, case, m, config):
    x, matrix, columns, dense = hard(case)
    # the values are exact in bfloat16: at most 6 significant bits
    exact, x, x64 = matrix.values[columns].astype(np.float64), x[:m], np.asarray(x[:m], np.float64)
    true, size = x64 @ exact.T, np.abs(x64) @ np.abs(exact).T + 1e-300
    mine = _product(programs, False, x, matrix, config)[:, columns] * np.float64(matrix.global_scale)
    mine = np.abs(mine - true) / size
    _start_hard(programs, case, m, config)
    theirs = programs.get(("plain", m))(x, dense)
    theirs = np.abs(np.asarray(theirs, np.float64)[:, columns] - true) / size
    print(f"{case}, M = {m}: {mine.max():.2e}, cuBLAS {theirs.max():.2e}")
    assert np.isfinite(mine).all()
    assert mine.max() <= max(fp4_error.LIMIT * theirs.max(), fp4_error.SMALLEST)


def test_list_bias_and_grad(rng):
    m, k, ns, scales = 200, 1024, (512, 136, 128), np.float32([1e3, 2e3, 4e3])
    matrices = [random_matrix(rng, n, k, gs, 0x20, 0x50) for n, gs in zip(ns, scales, strict=True)]
    weights, dense = [w.weight for w in matrices], [w.dense for w in matrices]
    biases = [jnp.asarray(rng.standard_normal(n), jnp.bfloat16) for n in ns]
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    ys = jax.jit(lambda x: fp4_matmul(x, weights, list(scales), bias=biases, backend="wide"))(x)
    for y, w, b in zip(ys, dense, biases, strict=True):
        true = np.asarray(x, np.float64) @ w.T + np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(y, np.float64), true, rtol=2**-7, atol=2e-3 * np.abs(true).max())
    dys = [jnp.asarray(rng.standard_normal((m, n)), jnp.bfloat16) for n in ns]
    pull = jax.jit(lambda x, dys: jax.vjp(lambda x: fp4_matmul(x, weights, list(scales), backend="wide"), x)[1](dys))
    true = sum(np.asarray(dy, np.float64) @ w for dy, w in zip(dys, dense, strict=True))
    got = np.asarray(pull(x, tuple(dys))[0], np.float64)
    np.testing.assert_allclose(got, true, rtol=2**-6, atol=4e-3 * np.abs(true).max())
    one = np.asarray(jax.jit(lambda dy: fp4_matmul_dx(dy, weights[0], scales[0]))(dys[0]), np.float64)
    true = np.asarray(dys[0], np.float64) @ dense[0]
    np.testing.assert_allclose(one, true, rtol=2**-7, atol=2e-3 * np.abs(true).max())


@pytest.mark.parametrize("m, k, ns, ranks", [
    (65, 3584, (3584, 512, 512), (32, 32, 32)),
    (256, 3584, (1024, 1024), (32, 0)),
    (700, 1024, (512, 136), (128, 16)),
    (256, 18944, (3584,), (32,)),
    (2048, 1024, (37888 - 112,), (8,)),
    (2112, 3584, (3584, 512, 512), (64, 32, 64)),  # three slots of h, and tiles one after the other
    (200, 3584, (3584,), (32,)),  # two tiles of rows, x A^T by CTAs that have no tile
    # the same at few rows
    (40, 5120, (5120,), (32,)),
    (17, 4096, (4096, 1024, 1024), (16, 32, 0)),
    (64, 12288, (4096,), (32,)),  # four of them
    (33, 3584, (3584, 512, 512), (128, 128, 128)),
    (17, 8192, (2048,), (32,)),  # seven parts of a tile, of which three add up no rows
    (64, 9728, (2560,), (16,)),  # six, the last block of a part in the middle of a quad
    (200, 6144, (2048,), (32,)),
    (100, 2560, (9728, 9728), (0, 32)),  # the last wave by five
])  # fmt: skip
def test_lora_in_the_wide_kernel(rng, m, k, ns, ranks):
    matrices = [random_matrix(rng, n, k, 10 ** rng.uniform(0, 4)) for n in ns]
    weights, scales = [matrix.weight for matrix in matrices], [matrix.global_scale for matrix in matrices]
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)

    def normal(*shape, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), jnp.bfloat16)

    loras = [(normal(r, k, size=k**-0.5), normal(n, r), 0.7) if r else None for n, r in zip(ns, ranks, strict=True)]
    backend = "wide" if m > 64 else None  # by default, with adapters
    with variants.compiling_for(90):
        assert isinstance(variants.choose(m, k, ns, backend, tuple(map(padded_rank, ranks))), WideConfig)
    product = jax.jit(lambda x: fp4_matmul(x, weights, scales, lora=loras, backend=backend))
    poison(m, sum(ns))
    ys = product(x)
    assert all(bool((a == b).all()) for _ in range(50) for a, b in zip(product(x), ys, strict=True))
    x64 = np.asarray(x, np.float64)
    for y, matrix, lora in zip(ys, matrices, loras, strict=True):
        dense = matrix.dense
        true, bound = x64 @ dense.T, 1e-5 * (np.abs(x64) @ np.abs(dense).T)
        if lora is not None:
            a, b = (np.asarray(v, np.float64) for v in lora[:2])
            hidden = lora[2] * x64 @ a.T  # rounded to bfloat16 between the products
            true, bound = true + hidden @ b.T, bound + 2.0**-8 * (np.abs(hidden) @ np.abs(b).T)
        assert (np.abs(np.asarray(y, np.float64) - true) <= bound + 2.0**-8 * np.abs(true)).all()


@pytest.mark.parametrize("m, k, ns, ranks", [
    (200, 3584, (3584, 512, 512), (32, 0, 16)),
    (2112, 3584, (1024, 1024), (32, 32)),
    (2112, 3584, (3584, 512, 512), (32, 32, 32)),  # fragments of A are loaded while others are multiplied
    (700, 1024, (512, 136), (0, 128)),
    (256, 18944, (3584,), (8,)),
])  # fmt: skip
def test_gradients_with_adapters(rng, m, k, ns, ranks):
    matrices = [random_matrix(rng, n, k, 10 ** rng.uniform(0, 4)) for n in ns]
    weights, scales = [matrix.weight for matrix in matrices], [matrix.global_scale for matrix in matrices]

    def normal(*shape, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), jnp.bfloat16)

    pairs = [(normal(r, k, size=k**-0.5), normal(n, r)) if r else None for n, r in zip(ns, ranks, strict=True)]

    def call(x, pairs):
        loras = [pair and (*pair, 0.7) for pair in pairs]
        return fp4_matmul(x, weights, scales, lora=loras, backend="wide")

    pull = jax.jit(lambda x, pairs, dys: jax.vjp(call, x, pairs)[1](dys))
    x, dys = normal(m, k), tuple(normal(m, n) for n in ns)
    poison(m, k)
    dx, d_pairs = pull(x, pairs, dys)
    assert all(bool((dx == again).all()) for again in (pull(x, pairs, dys)[0] for _ in range(20)))
    x64, true, bound = np.asarray(x, np.float64), np.zeros((m, k)), np.zeros((m, k))
    for dy, matrix, pair, d_pair in zip(dys, matrices, pairs, d_pairs, strict=True):
        dy, dense = np.asarray(dy, np.float64), matrix.dense
        true, bound = true + dy @ dense, bound + 1e-5 * (np.abs(dy) @ np.abs(dense))
        if pair is None:
            continue
        a, b = (np.asarray(v, np.float64) for v in pair)
        dh = 0.7 * dy @ b  # rounded to bfloat16 between the products
        true, bound = true + dh @ a, bound + 2.0**-8 * (np.abs(dh) @ np.abs(a))
        for d, d_true in zip(d_pair, (dh.T @ x64, 0.7 * dy.T @ (x64 @ a.T)), strict=True):
            assert np.abs(np.asarray(d, np.float64) - d_true).max() <= 1e-2 * np.abs(d_true).max()
    assert (np.abs(np.asarray(dx, np.float64) - true) <= bound + 2.0**-8 * np.abs(true)).all()


@pytest.mark.parametrize("m, k, n, config, biased", [
    (100, 1152, 1000, WideConfig(128, 2, 1, 4, 6), True),  # the last tile is partly beyond the end
    (256, 3584, 1792, WideConfig(256, 1, 4, 4, 4), False),  # 28 tiles by four parts
    (64, 3584, 640, WideConfig(64, 1, 3, 6, 6, promote=24), True),  # parts of 24, 16 and 24 rows
    (32, 3072, 384, WideConfig(32, 1, 8, 6, 6, promote=16), True),  # eight parts, of which four have no rows
])  # fmt: skip
def test_swiglu(rng, m, k, n, config, biased):
    both = [random_matrix(rng, n, k, scale, 0x10, 0x50) for scale in (200, 700)]
    x = jnp.asarray(rng.standard_normal((m, k)) / k**0.5, jnp.bfloat16)
    biases = [jnp.asarray(rng.standard_normal(n), jnp.float32) for _ in both] if biased else []
    data, scales = [w.weight.data for w in both], [jnp.full(1, w.global_scale, jnp.float32) for w in both]
    product = jax.jit(lambda x: wide.multiply(x, [], data, scales, biases, (n, n), (), config, jnp.float32, True)[0])
    poison(m, n)
    y, x64 = np.asarray(product(x), np.float64), np.asarray(x, np.float64)
    more = [np.asarray(bias, np.float64) for bias in biases] or [0.0, 0.0]
    trues = [x64 @ w.dense.T + bias for w, bias in zip(both, more, strict=True)]
    bounds = [1e-5 * (np.abs(x64) @ np.abs(w.dense).T + np.abs(bias)) for w, bias in zip(both, more, strict=True)]
    true, bound = swiglu(trues, bounds)
    assert (np.abs(y - true) <= bound).all()
    assert all(bool((product(x) == y).all()) for _ in range(20))
