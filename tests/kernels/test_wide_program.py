"""The wide kernel's forward program run in NumPy (see wide_emulator.py): products, biases, LoRA, and how CTAs share."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import wide_emulator

from pallas_kernels import layout, repack, wide, wide_plan
from pallas_kernels.wide_plan import WideConfig, make_plan

SCALES = [np.float32(2688.0), np.float32(900.0)]


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    monkeypatch.setattr(wide_plan, "_RESIDENT", {1: 2, 2: 1, 3: 1, 4: 1})


def _weight(rng, n, k):
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return repack(jnp.asarray(packed), jnp.asarray(rng.integers(0x10, 0x50, (n, k // 16), dtype=np.uint8)))


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
    (WideConfig(64, 1, 2, 3, 2), 20, 768, (128, 128), (0, 16), True),  # K is split, one weight is without
    (WideConfig(32, 2, 1, 3, 2, tail=True), 32, 512, (128, 256), (16, 16), False),
    (WideConfig(32, 1, 1, 3, 2, promote=32), 20, 768, (136,), (), True),  # a chain of two blocks and one of one
    (WideConfig(32, 2, 1, 3, 2, promote=16), 20, 512, (128, 128), (32, 48), False),
    (WideConfig(160, 1, 1, 3, 2, promote=16), 20, 768, (128, 128), (0, 16), True),  # totals in memory, two items a CTA
])  # fmt: skip
def test_products(config, m, k, n, ranks, bias):
    rng = np.random.default_rng(k + m)
    x = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    weights, scales = [_weight(rng, n_i, k) for n_i in n], SCALES[: len(n)]
    loras = []
    for n_i, rank in zip(n, ranks, strict=False):
        a = rng.standard_normal((rank, k)).astype(ml_dtypes.bfloat16)
        loras.append((a, rng.standard_normal((n_i, rank)).astype(ml_dtypes.bfloat16), 0.5) if rank else None)
    biases = [rng.standard_normal(n_i).astype(np.float32) for n_i in n] if bias else []
    padded, lora = wide._lora_operands(jnp.asarray(x), scales, loras) if loras else ((), [])
    assert padded == ranks
    operands = [x, *lora, *(w.data.reshape(w.data.shape[0], -1) for w in weights)]
    operands += [np.array([s]) for s in scales] + biases
    ys = wide_emulator.run(make_plan(m, k, n, False, config, padded), operands, bias)
    for i, y in enumerate(ys):
        w, x64 = np.asarray(layout.dequantize(weights[i], scales[i], jnp.float32), np.float64), x.astype(np.float64)
        true, bound = x64 @ w.T, 2e-6 * (np.abs(x64) @ np.abs(w).T)
        if loras and loras[i] is not None:
            a, b, scaling = loras[i]
            hidden = scaling * x64 @ a.astype(np.float64).T  # rounded to bfloat16 between the products
            true, bound = (
                true + hidden @ b.astype(np.float64).T,
                bound + 2.0**-8 * (np.abs(hidden) @ np.abs(b.T.astype(np.float64))),
            )
        assert (np.abs(y - (true + (biases[i] if bias else 0))) <= bound).all()
