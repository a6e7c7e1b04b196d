"""The wide kernel's program run in NumPy (see wide_emulator.py): products, dx, biases, LoRA, and how CTAs share."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import wide_emulator
from emulated_products import Overwritten, Products
from random_weights import random_matrix

from pallas_kernels import inputs_kernel, range_scale, repack, wide, wide_plan, wide_spare
from pallas_kernels.fragment_order import in_unit_order
from pallas_kernels.inputs_plan import make_inputs_plan
from pallas_kernels.operands import padded_rank
from pallas_kernels.wide_plan import PLAIN, Handover, WideConfig, make_plan

SCALES = [np.float32(2688.0), np.float32(900.0), np.float32(1700.0)]


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    monkeypatch.setattr(wide_plan, "RESIDENT", {1: 3, 2: 2, 4: 1})


@pytest.fixture
def plain_inputs(monkeypatch):
    """x A^T without the kernel that makes it on a GPU."""

    def build(m, k, ranks, source, dtype):
        return functools.partial(inputs_kernel.reference, make_inputs_plan(m, k, ranks, source), 0.0, dtype=dtype)

    monkeypatch.setattr(inputs_kernel, "build", build)


def _matrix(rng, n, k, dtype="bfloat16", scale=SCALES[0]):
    return random_matrix(rng, n, k, scale, 0x10, 0x50, dtype)


def _words(matrix):
    """As the kernel takes them, row tile by row tile."""
    return np.asarray(matrix.weight.data).reshape(matrix.weight.data.shape[0], -1)


@pytest.mark.parametrize("promote, totals_rows, sum_of_ones", [
    (0, 128, 2.0**24),
    (16, 128, 2.0**24 + 16),
    (16, 0, 2.0**24 + 16),
])  # fmt: skip
def test_a_promoted_chain_does_not_see_the_sums_before_it(monkeypatch, promote, totals_rows, sum_of_ones):
    """2^24, and a chain of 16 steps that each add 1, which float32 sums of 2^24 do not take."""
    monkeypatch.setattr(wide_plan, "TOTALS_ROWS", totals_rows)
    one = np.uint8(0x02)  # e2m1
    packed, x = np.zeros((128, 256), np.uint8), np.ones((8, 512), ml_dtypes.bfloat16)
    packed[:, 0], x[:, 0] = one, 2.0**24
    packed[:, 128::8] = one
    weight = repack(jnp.asarray(packed), jnp.full((128, 32), 0x38, jnp.uint8))
    plan = make_plan(8, 512, (128,), False, WideConfig(32, 1, 1, 3, 2, promote=promote))
    (y,) = wide_emulator.run(plan, [x, weight.data.reshape(8, -1), np.ones(1, np.float32)], False)
    np.testing.assert_array_equal(y, np.full((8, 128), sum_of_ones, np.float32))


@pytest.mark.parametrize("config, m, k, n, ranks, bias", [
    (WideConfig(32, 1, 1, 3, 2), 40, 512, (136,), (), True),
    (WideConfig(32, 2, 1, 3, 2), 30, 512, (256, 128), (), False),
    (WideConfig(32, 1, 1, 3, 2), 40, 512, (136,), (32,), True),  # two items a CTA, rows and outputs beyond the end
    (WideConfig(32, 2, 1, 3, 2), 30, 256, (128, 264), (32, 48), False),  # CTAs of two weights share; two slots of ranks
    # each tile by its own weight's ranks: a slot of ranks has another's behind them; clusters of one weight, D split
    (WideConfig(32, 1, 1, 3, 2), 40, 512, (136, 128, 64), (32, 32, 32), True),
    (WideConfig(32, 2, 2, 3, 2), 20, 512, (256, 200), (80, 80), False),
    (WideConfig(64, 1, 2, 3, 2), 20, 768, (128,), (16,), True),  # parts meet in the middle of a quad
    (WideConfig(32, 1, 1, 3, 2, promote=8), 9, 384, (128,), (), False),  # K ends in the middle of a quad
    (WideConfig(32, 1, 1, 3, 2, promote=24), 9, 640, (128,), (), False),  # a chain of three blocks and one of two
    # D is split: in the only wave, by parts of unequal rows; after a whole wave; between pairs that share
    (WideConfig(160, 1, 3, 3, 2), 150, 1024, (128,), (), True),
    (WideConfig(32, 1, 3, 3, 2), 40, 768, (136,), (32,), True),
    (WideConfig(32, 1, 6, 3, 2), 20, 768, (128,), (16,), True),  # two of six parts add up no rows
    (WideConfig(32, 2, 2, 3, 2), 32, 512, (128, 128), (16, 16), False),
    (WideConfig(32, 2, 4, 3, 2, promote=16), 20, 1024, (256, 264), (), True),  # by 4, of which there are 2
    (WideConfig(32, 1, 1, 3, 2, promote=32), 20, 768, (136,), (), True),  # a chain of two blocks and one of one
    (WideConfig(32, 2, 1, 3, 2, promote=16), 20, 512, (128, 128), (32, 48), False),
    (WideConfig(160, 1, 1, 3, 2, promote=16), 20, 768, (128, 128), (0, 16), True),  # totals in memory, two items a CTA
])  # fmt: skip
def test_products(monkeypatch, plain_inputs, config, m, k, n, ranks, bias):
    if config.split > 4:
        monkeypatch.setattr(wide_plan, "RESIDENT", {config.share: config.split})
    ys, true, bounds = products(config, m, k, n, ranks, bias)
    assert_near(ys, true, bounds)


@pytest.mark.parametrize("config, m, k, n, ranks, bias", [
    (WideConfig(32, 1, 1, 3, 2), 40, 512, 136, (), True),  # rows and outputs beyond the end, two items a CTA
    (WideConfig(32, 2, 1, 3, 2), 30, 256, 192, (32, 48), False),  # a cluster of three tiles: one CTA has none
    (WideConfig(32, 1, 1, 3, 2), 20, 256, 64, (0, 16), True),
    (WideConfig(64, 1, 3, 3, 2), 40, 768, 64, (16, 16), True),  # D is split, by parts of 24, 16 and 24 rows
    (WideConfig(64, 2, 2, 3, 2, promote=16), 64, 512, 128, (), False),
])  # fmt: skip
def test_swiglu(plain_inputs, config, m, k, n, ranks, bias):
    (y,), (gate, up), (of_gate, of_up) = products(config, m, k, (n, n), ranks, bias, swiglu=True)
    share = 1 / (1 + np.exp(-gate))
    slope = np.abs(share * (1 + gate * (1 - share)))  # of silu
    bound = 1.1 * (slope * np.abs(up) * of_gate + np.abs(gate * share) * of_up) + of_gate * of_up + 1e-6 * np.abs(y)
    assert y.shape == (m, n) and (np.abs(y - gate * share * up) <= bound).all()
    of = config, m, k, (n, n), ranks, bias
    (again, *kept), *_ = products(*of, swiglu=True, keeps=True)
    np.testing.assert_array_equal(again, y)
    assert_near(kept, (gate, up), (of_gate + 1e-6 * np.abs(gate), of_up + 1e-6 * np.abs(up)))


def test_swiglu_in_float16s_range(plain_inputs):
    of = WideConfig(32, 1, 1, 3, 2), 20, 512, (128, 128), (16, 16), False
    (y,), (gate, up), _ = products(*of, swiglu=True, dtype="float16")
    true = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(y / range_scale("float16"), true, atol=5e-3 * np.abs(true).max())


@pytest.mark.parametrize("config, m, k, n, rank, resident", [
    (WideConfig(32, 1, 1, 3, 2), 40, 272, 136, 32, 3),  # rows, outputs and inputs beyond the end
    (WideConfig(64, 1, 1, 3, 2), 140, 272, 128, 0, 3),  # a tile of 32 rows behind two of 64
    (WideConfig(32, 2, 2, 3, 2), 20, 256, 512, 75, 2),  # D is split
    (WideConfig(64, 2, 1, 3, 2, promote=16), 20, 512, 256, 16, 2),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dx_through_swiglu(monkeypatch, config, m, k, n, rank, resident, dtype):
    monkeypatch.setattr(wide_plan, "RESIDENT", {config.share: resident})
    rng, ulp = np.random.default_rng(k + m), {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    dy, matrix = (0.1 * rng.standard_normal((m, n))).astype(dtype), _matrix(rng, n, k, dtype)
    dh, a = rng.standard_normal((m, rank)).astype(np.float32), rng.standard_normal((rank, k)).astype(dtype)
    gate, up = ((3 * rng.standard_normal((m, k))).astype(dtype) for _ in range(2))
    ranks = (padded_rank(rank),) if rank else ()
    plan = make_plan(m, n, (k,), True, config, ranks, swiglu=True)
    assert plan.parts == config.split
    lora = wide._dx_lora_operands(jnp.asarray(dh), jnp.asarray(a), SCALES[0], *ranks, dtype) if rank else []
    d_gate, d_up = wide_emulator.run(plan, [dy, *lora, _words(matrix), SCALES[0][None], gate, up], False)
    w, dy, dh, a, gate, up = (v.astype(np.float64) for v in (matrix.dense, dy, dh, a, gate, up))
    d, bound = dy @ w + dh @ a, 2e-6 * (np.abs(dy) @ np.abs(w)) + ulp * (np.abs(dh) @ np.abs(a))  # dh is rounded
    share = 1 / (1 + np.exp(-gate))
    slope = share * (1 + gate * (1 - share))  # of silu
    for got, factor in ((d_gate, up * slope), (d_up, gate * share)):
        assert (np.abs(got - d * factor) <= np.abs(factor) * bound + 1e-5 * np.abs(d) * (1 + np.abs(up))).all()


@pytest.mark.parametrize("config, m, k, n, ranks, resident, seed", [
    (WideConfig(32, 1, 1, 3, 2), 20, 512, (136,), (32,), 8, 0),
    (WideConfig(64, 1, 2, 3, 2, promote=16), 50, 768, (128,), (16,), 5, 1),  # K in 24 steps for 3 CTAs of 6 parts
    (WideConfig(32, 1, 1, 3, 2), 40, 512, (136, 128), (48, 16), 9, 2),  # two tiles of rows: four units of one part
    (WideConfig(32, 2, 1, 4, 3), 30, 256, (128, 264), (32, 48), 4, 3),  # CTAs of two weights share; two slots of ranks
    (WideConfig(32, 2, 2, 3, 2), 32, 512, (128, 128), (0, 16), 3, 4),
    (WideConfig(32, 1, 1, 3, 2), 20, 1024, (136,), (32,), 3, 6),  # one CTA, which holds a third of its columns
    (WideConfig(32, 1, 1, 3, 2), 20, 1056, (128,), (208,), 3, 7),  # two tiles of ranks a warp, the last one behind them
    (WideConfig(32, 1, 1, 4, 3, promote=8), 9, 160, (128, 128), (80, 64), 16, 5),  # less K than runs, uneven ranks
    (WideConfig(32, 1, 2, 3, 2), 40, 512, (200, 128), (80, 80), 14, 8),  # each tile by its own weight's ranks
])  # fmt: skip
def test_x_at_by_ctas_without_a_tile(monkeypatch, config, m, k, n, ranks, resident, seed):
    monkeypatch.setattr(wide_plan, "RESIDENT", {config.share: resident})
    monkeypatch.setattr(wide_spare, "AT_ONCE", 2)
    calls, true, bounds = products(config, m, k, n, ranks, True, makes_h=True, seed=seed, calls=2)
    for y, again, y_true, bound in zip(*calls, true, bounds, strict=True):
        assert (np.abs(y - y_true) <= bound).all()
        np.testing.assert_array_equal(y, again)


@pytest.mark.parametrize("name", ["wait_for_at_least", "fence", "fence_async"])
def test_what_ctas_without_a_tile_wait_for_is_needed(monkeypatch, name):
    monkeypatch.setattr(wide_plan, "RESIDENT", {1: 8})
    real = wide_emulator._make_memory

    def without(machine):
        mem = real(machine)
        setattr(mem, name, lambda *_: None)
        return mem

    monkeypatch.setattr(wide_emulator, "_make_memory", without)

    def wrong(seed):
        of = WideConfig(32, 1, 1, 2, 2), 20, 512, (136,), (32,), True
        try:
            (y,), (true,), (bound,) = products(*of, makes_h=True, seed=seed)
        except wide_emulator.Unordered:
            return True
        return not (np.abs(y - true) <= bound).all()  # not a number, where memory has not been written

    assert any(wrong(seed) for seed in range(4))


@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("config", [WideConfig(64, 1, 1, 3, 2), WideConfig(256, 2, 1, 3, 2)])
def test_what_products_read_is_left_alone_until_they_are_waited_for(monkeypatch, config, registers):
    """With one group more under way than the kernel allows, codes would be written to `registers`, or, were there
    enough of these, x to slots that products still read."""
    wait, decoding = Products.wait, Products.decoding
    monkeypatch.setattr(Products, "wait", lambda self, pending: wait(self, pending + 1))
    monkeypatch.setattr(Products, "decoding", decoding if registers else lambda self, f: f)
    with pytest.raises(Overwritten):
        products(config, 300, 1024, (128, 128), (16, 0), False, seed=3)


def test_x_at_by_ctas_without_a_tile_with_swiglu(monkeypatch):
    monkeypatch.setattr(wide_plan, "RESIDENT", {1: 12})
    (y,), (gate, up), (of_gate, of_up) = products(
        WideConfig(64, 1, 2, 3, 2), 40, 512, (64, 64), (16, 16), False, swiglu=True, makes_h=True
    )
    bound = 1.5 * (np.abs(up) * of_gate + np.abs(gate) * of_up) + of_gate * of_up + 1e-6 * np.abs(y)
    assert (np.abs(y - gate / (1 + np.exp(-gate)) * up) <= bound).all()


@pytest.mark.parametrize("config, m, k, n, ranks", [
    (WideConfig(32, 1, 1, 3, 2), 40, 448, (136,), ()),
    (WideConfig(32, 2, 1, 3, 2, promote=8), 30, 320, (128, 264), (32, 48)),
])  # fmt: skip
def test_x_in_unit_order(plain_inputs, config, m, k, n, ranks):
    ys, true, bounds = products(config, m, k, n, ranks, True, handover=Handover(units=True))
    assert_near(ys, true, bounds)


@pytest.mark.parametrize("config, m, k, n, ranks, resident", [
    (WideConfig(64, 1, 2, 3, 2, promote=16), 50, 704, (128,), (16,), 5),
    (WideConfig(32, 1, 1, 4, 3), 9, 320, (128, 128), (80, 64), 16),  # parts of a unit are different CTAs'
])  # fmt: skip
def test_x_in_unit_order_by_a_by_ctas_without_a_tile(monkeypatch, config, m, k, n, ranks, resident):
    monkeypatch.setattr(wide_plan, "RESIDENT", {config.share: resident})
    ys, true, bounds = products(config, m, k, n, ranks, True, makes_h=True, handover=Handover(units=True))
    assert_near(ys, true, bounds)


def test_swiglu_gives_unit_order():
    of = WideConfig(32, 1, 1, 3, 2), 40, 512, (192, 192), (), True
    (plain,), *_ = products(*of, swiglu=True, wide_out=False)
    (ordered,), *_ = products(*of, swiglu=True, handover=Handover(gives_units=True), wide_out=False)
    np.testing.assert_array_equal(ordered, in_unit_order(plain))


@pytest.mark.parametrize("config, m, k, n, ranks, gives_units", [
    (WideConfig(32, 1, 1, 3, 2), 40, 512, 192, (), True),  # rows and outputs beyond the end
    (WideConfig(64, 1, 2, 3, 2, promote=16), 50, 768, 128, (16,), False),
    (WideConfig(160, 1, 3, 3, 2), 150, 1024, 128, (), True),  # parts of more rows than go out together
    (WideConfig(32, 2, 2, 3, 2), 32, 512, 256, (32,), True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_outputs_join_the_residual_stream(plain_inputs, config, m, k, n, ranks, gives_units, dtype):
    rng = np.random.default_rng(1)
    residual, scale = (300 * rng.standard_normal(s).astype(np.float32) for s in ((m, n), n))
    of = {"handover": Handover(joins=True, gives_units=gives_units), "handed": (residual, scale), "dtype": dtype}
    (flow, x, squares), (true,), (bound,) = products(config, m, k, (n,), ranks, True, **of)
    assert (np.abs(flow - residual - true) <= bound + 1e-7 * np.abs(true + residual)).all()
    assert np.abs(flow * scale).max() > 65504
    of_norm = (flow * scale * range_scale(dtype)).astype(dtype)
    np.testing.assert_array_equal(x, in_unit_order(of_norm) if gives_units else of_norm)
    parts = (flow.astype(np.float64) ** 2).reshape(m, n // 64, 64).sum(-1)
    np.testing.assert_allclose(squares[:, :m].T, parts, rtol=1e-6)


@pytest.mark.parametrize("config, m, k, n, ranks, makes_h", [
    (WideConfig(32, 1, 1, 3, 2), 40, 1344, (136,), (), False),  # 21 slices, two groups of rows
    (WideConfig(32, 1, 3, 3, 2), 100, 768, (136, 64), (32, 16), False),
    (WideConfig(64, 1, 2, 3, 2, promote=16), 50, 704, (128,), (16,), True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_x_of_a_norm_that_is_to_be_divided(monkeypatch, plain_inputs, config, m, k, n, ranks, makes_h, dtype):
    """Rows of sizes far apart, as if `squares` had been those of a stream twice as large."""
    if makes_h:
        monkeypatch.setattr(wide_plan, "RESIDENT", {1: 5})
    eps, sizes = 1e-2, np.float32(2.0) ** (np.arange(m) % 7)
    squares = np.full((k // 64, -(-m // 32) * 32), np.nan, np.float32)
    squares[:, :m] = np.random.default_rng(2).uniform(0.5, 1.5, (k // 64, m)) * sizes**2
    inverse = 1 / np.sqrt(squares[:, :m].astype(np.float64).sum(0) / k + eps)[:, None] / range_scale(dtype)
    way = Handover(normed=True, units=makes_h)
    of = {"makes_h": makes_h, "handover": way, "eps": eps, "handed": (squares,), "dtype": dtype}
    ys, true, bounds = products(config, m, k, n, ranks, False, **of)
    for y, y_true, bound in zip(ys, true, bounds, strict=True):
        assert (np.abs(y - y_true * inverse) <= bound * inverse * 1.5).all()


@pytest.mark.parametrize("config, m, k, n, ranks, makes_h, handover", [
    (WideConfig(32, 1, 1, 3, 2), 20, 512, (136,), (32,), False, PLAIN),
    (WideConfig(64, 1, 2, 3, 2, promote=16), 50, 704, (128,), (16,), True, Handover(units=True)),
])  # fmt: skip
def test_float16(monkeypatch, plain_inputs, config, m, k, n, ranks, makes_h, handover):
    if makes_h:
        monkeypatch.setattr(wide_plan, "RESIDENT", {1: 5})
    of = {"makes_h": makes_h, "handover": handover, "dtype": "float16"}
    (y,), (true,), (bound,) = products(config, m, k, n, ranks, True, **of)
    assert (np.abs(y - true) <= bound).all()


def test_x_that_is_kept_in_float16s_range(plain_inputs):
    of = WideConfig(32, 1, 1, 3, 2), 20, 512, (136,), (32,), False
    (y,), (true,), (bound,) = products(*of, handover=Handover(scaled=True), dtype="float16")
    assert (np.abs(range_scale("float16") * y - true) <= bound).all()


@pytest.mark.parametrize("config, m, k, n, ranks, resident", [
    (WideConfig(64, 1, 1, 3, 2), 140, 256, (136,), (16,), 3),  # who had one unit less of 64 rows begins those of 32
    (WideConfig(64, 1, 2, 3, 2), 80, 512, (136,), (), 3),  # two of 64 rows, one of 32, and one that two share
    (WideConfig(64, 2, 2, 3, 2, promote=16), 80, 512, (128, 136), (16, 32), 8),  # all are shared by two
    (WideConfig(160, 1, 1, 3, 2, promote=16), 180, 512, (128,), (), 3),  # totals in memory
    (WideConfig(96, 1, 3, 3, 2, promote=16), 150, 384, (128,), (), 6),  # 64 rows behind 96, in parts of 24, 16, 24
    (WideConfig(64, 1, 8, 3, 2), 80, 1024, (128,), (16,), 16),  # of eight parts four add up no rows of the last 32
])  # fmt: skip
def test_a_last_tile_of_fewer_rows(monkeypatch, plain_inputs, config, m, k, n, ranks, resident):
    monkeypatch.setattr(wide_plan, "RESIDENT", {config.share: resident})
    runs = make_plan(m, k, n, False, config).runs
    assert len({run.rows for run in runs}) == 2
    ys, true, bounds = products(config, m, k, n, ranks, False)
    assert_near(ys, true, bounds)


def assert_near(ys, true, bounds):
    for y, y_true, bound in zip(ys, true, bounds, strict=True):
        assert (np.abs(y - y_true) <= bound).all()


def products(
    config,
    m,
    k,
    n,
    ranks,
    bias,
    swiglu=False,
    makes_h=False,
    handover=PLAIN,
    handed=(),
    dtype="bfloat16",
    keeps=False,
    **more,
):
    """What the program gives for random operands, and of each weight the true product and a bound of its error."""
    rng, ulp = np.random.default_rng(k + m), {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    x = (rng.standard_normal((m, k)) * (0.02 if swiglu else 1)).astype(dtype)  # gates of size 1
    scales = SCALES[: len(n)]
    matrices = [_matrix(rng, n_i, k, dtype, scale) for n_i, scale in zip(n, scales, strict=True)]
    loras = []
    for n_i, rank in zip(n, ranks, strict=False):
        a = rng.standard_normal((rank, k)).astype(dtype)
        loras.append((a, rng.standard_normal((n_i, rank)).astype(dtype), 0.5) if rank else None)
    biases = [rng.standard_normal(n_i).astype(np.float32) for n_i in n] if bias else []
    lora = wide._lora_operands(jnp.asarray(x), [s[None] for s in scales], loras, makes_h)
    operands = [in_unit_order(x) if handover.units else x, *lora, *map(_words, matrices)]
    operands += [np.array([s]) for s in scales] + biases + list(handed)
    plan = make_plan(m, k, n, False, config, ranks, swiglu, makes_h, handover, keeps=keeps)
    ys = wide_emulator.run(plan, operands, bias, **more)
    all_true, bounds = [], []
    for i, matrix in enumerate(matrices):
        w, x64 = matrix.dense, x.astype(np.float64)
        true, bound = x64 @ w.T, 2e-6 * (np.abs(x64) @ np.abs(w).T)
        if loras and loras[i] is not None:
            a, b, scaling = loras[i]
            hidden = scaling * x64 @ a.astype(np.float64).T  # rounded to 16 bits between the products
            true, bound = (
                true + hidden @ b.astype(np.float64).T,
                bound + ulp * (np.abs(hidden) @ np.abs(b.T.astype(np.float64))),
            )
        all_true.append(true + (biases[i] if bias else 0))
        bounds.append(bound)
    return ys, all_true, bounds


@pytest.mark.parametrize("config, m, k, n, rank", [
    (WideConfig(32, 1, 1, 3, 2), 40, 272, 136, 0),  # rows, outputs and inputs beyond the end
    (WideConfig(32, 2, 2, 3, 2), 20, 256, 512, 0),
    (WideConfig(64, 1, 3, 3, 2, promote=16), 20, 128, 1024, 0),  # one part has two chains, of a block of inputs each
    (WideConfig(32, 1, 1, 3, 2), 40, 272, 136, 32),
    (WideConfig(32, 2, 2, 3, 2), 20, 256, 512, 75),  # padded to 80, two slots, which only the first part adds
    (WideConfig(64, 1, 3, 3, 2, promote=16), 20, 128, 1024, 16),
    (WideConfig(64, 1, 1, 3, 2), 80, 272, 136, 16),  # a tile of 32 rows behind one of 64
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dx(config, m, k, n, rank, dtype):
    rng, ulp = np.random.default_rng(k + m), {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    dy, matrix = rng.standard_normal((m, n)).astype(dtype), _matrix(rng, n, k, dtype)
    dh, a = rng.standard_normal((m, rank)).astype(np.float32), rng.standard_normal((rank, k)).astype(dtype)
    ranks = (padded_rank(rank),) if rank else ()
    plan = make_plan(m, n, (k,), True, config, ranks)
    assert plan.parts == config.split
    lora = wide._dx_lora_operands(jnp.asarray(dh), jnp.asarray(a), SCALES[0], *ranks, dtype) if rank else []
    (dx,) = wide_emulator.run(plan, [dy, *lora, _words(matrix), SCALES[0][None]], False)
    w, dy, dh, a = (v.astype(np.float64) for v in (matrix.dense, dy, dh, a))
    bound = 2e-6 * (np.abs(dy) @ np.abs(w)) + ulp * (np.abs(dh) @ np.abs(a))  # dh is rounded
    assert (np.abs(dx - dy @ w - dh @ a) <= bound).all()


@pytest.mark.parametrize("config, k, n", [
    (WideConfig(32, 1, 1, 3, 2), 256, (136, 256, 40)),  # the first weight's last block is eight inputs of 128
    (WideConfig(64, 2, 1, 3, 2, promote=8), 256, (256, 384)),
    (WideConfig(160, 1, 1, 3, 2, promote=8), 256, (256, 128)),  # totals in memory
    (WideConfig(64, 1, 3, 3, 2), 128, (128, 384, 128)),  # parts that begin or end amid a weight
    (WideConfig(160, 1, 2, 3, 2, promote=8), 128, (384, 640)),
    (WideConfig(160, 1, 3, 3, 2, promote=8), 128, (256, 128, 256)),
])  # fmt: skip
@pytest.mark.parametrize("rank", [0, 32])
def test_dx_of_several_weights_is_one_product(config, k, n, rank):
    m, rng = 40, np.random.default_rng(sum(n))
    scales = np.float32([2688.0, 900.0, 5e6])[: len(n)]
    matrices = [_matrix(rng, n_i, k, scale=scale) for n_i, scale in zip(n, scales, strict=True)]
    dys = [rng.standard_normal((m, n_i)).astype("bfloat16") for n_i in n]
    dh, a = rng.standard_normal((m, rank)).astype(np.float32), rng.standard_normal((rank, k)).astype("bfloat16")
    ranks = (rank,) if rank else ()
    plan = make_plan(m, sum(n), (k,), True, config, ranks, inputs=n)
    assert plan.parts == config.split
    lora = wide._dx_lora_operands(jnp.asarray(dh), jnp.asarray(a), scales[0], *ranks, "bfloat16") if rank else []
    operands = [*dys, *lora, *map(_words, matrices), *scales[:, None]]
    (dx,) = wide_emulator.run(plan, operands, False)
    dh, a = dh.astype(np.float64), a.astype(np.float64)
    true, bound = dh @ a, 2.0**-8 * (np.abs(dh) @ np.abs(a))  # dh is rounded
    for dy, matrix in zip(dys, matrices, strict=True):
        dy, dense = dy.astype(np.float64), matrix.dense.astype(np.float64)
        true, bound = true + dy @ dense, bound + 2e-6 * (np.abs(dy) @ np.abs(dense))
    assert (np.abs(dx - true) <= bound).all()


@pytest.mark.parametrize("seed, share, split", [(0, 2, 2), (1, 2, 2), (2, 1, 4)])
def test_split_sums_do_not_depend_on_who_comes_first_and_counters_serve_again(monkeypatch, seed, share, split):
    """Other orders of the warps, and calls that find what the last one left (the emulator looks at the counters)."""
    monkeypatch.setattr(wide_plan, "RESIDENT", {1: 4, 2: 2})
    rng, n = np.random.default_rng(1), 128 * share
    x, matrix = rng.standard_normal((20, 1024)).astype(ml_dtypes.bfloat16), _matrix(rng, n, 1024)
    operands = [x, _words(matrix), SCALES[0][None]]

    def product(split, **more):
        plan = make_plan(20, 1024, (n,), False, WideConfig(64, share, split, 3, 2))
        assert plan.parts == split
        return wide_emulator.run(plan, operands, False, **more)

    first, second = product(split, seed=seed, calls=2)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[0], product(split, seed=100)[0])
    np.testing.assert_allclose(first[0], product(1)[0], rtol=0, atol=1e-5 * np.abs(first[0]).max())
