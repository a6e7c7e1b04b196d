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


@pytest.mark.parametrize("config, m, k, n, ranks, bias", [
    (WideConfig(32, 1, 1, 3, 2), 40, 512, (136,), (), True),
    (WideConfig(32, 2, 1, 3, 2), 30, 512, (256, 128), (), False),
    (WideConfig(32, 1, 1, 3, 2), 40, 512, (136,), (32,), True),  # two items a CTA, rows and outputs beyond the end
    (WideConfig(32, 2, 1, 3, 2), 30, 256, (128, 264), (32, 48), False),  # CTAs of two weights share; two slots of ranks
    (WideConfig(64, 1, 2, 3, 2), 20, 768, (128, 128), (0, 16), True),  # K is split, one weight is without
    (WideConfig(32, 2, 1, 3, 2, tail=True), 32, 512, (128, 256), (16, 16), False),
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
