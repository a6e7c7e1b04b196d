"""Quantizing a block of rows at a time: the same bytes, and temporaries that do not grow with the matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.formats import PACKED, global_scale, quantize_nvfp4, row_blocks
from qerl_jax.formats.row_blocks import in_row_blocks


@pytest.mark.parametrize(
    ("rows", "multiple", "blocks"), [(12, 1, [4] * 3), (10, 1, [4] * 3), (3, 1, [3]), (10, 2, [4] * 3)]
)
def test_every_row_is_computed_and_lands_in_its_place(monkeypatch, rows, multiple, blocks):
    monkeypatch.setattr(row_blocks, "ELEMENTS", 20)
    x = jnp.arange(rows * 5.0).reshape(rows, 5)
    seen = []

    def f(part):
        jax.debug.callback(lambda n: seen.append(int(n)), part.shape[0])
        flat = part.reshape(-1, 5 * multiple).sum(1)
        return {"double": 2 * part, "flat": flat}

    out = jax.jit(lambda x: in_row_blocks(f, x, multiple))(x)
    jax.effects_barrier()
    assert seen == blocks
    np.testing.assert_array_equal(out["double"], 2 * x)
    np.testing.assert_array_equal(out["flat"], x.reshape(-1, 5 * multiple).sum(1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_change_no_byte(monkeypatch, dtype):
    w = jax.random.normal(jax.random.key(0), (37, 64), dtype)
    shared = global_scale(jnp.abs(w).max(), dtype)
    rows = [quantize_nvfp4(w[i : i + 1], shared) for i in range(37)]
    monkeypatch.setattr(row_blocks, "ELEMENTS", 64 * 8)
    weight = quantize_nvfp4(w)
    np.testing.assert_array_equal(weight.packed, np.concatenate([row.packed for row in rows]))
    np.testing.assert_array_equal(np.asarray(weight.scale), np.concatenate([row.scale for row in rows]))
    assert weight.global_scale == shared


@pytest.mark.parametrize("name", [name for name in PACKED if name != "nvfp4"])
@pytest.mark.parametrize("shape", [(52, 96), (40, 320)])
def test_blocks_change_no_byte_of_the_other_formats(monkeypatch, name, shape):
    w = jax.random.normal(jax.random.key(1), shape)
    whole = PACKED[name].quantize(w, None)
    monkeypatch.setattr(row_blocks, "ELEMENTS", 96 * 8)
    # A shape of its own: the matrix above is compiled already.
    longer = PACKED[name].quantize(jnp.pad(w, ((0, 4), (0, 0))), None)
    np.testing.assert_array_equal(longer.packed[: shape[0]], whole.packed)
    if name != "nf4_double_quant":  # whose absmax depend on the mean of all
        scales = [jax.tree.leaves(weight)[1].reshape(-1) for weight in (longer, whole)]
        np.testing.assert_array_equal(scales[0][: scales[1].size], scales[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PACKED)
def test_temporaries_stay_small(name, dtype):
    w = jax.ShapeDtypeStruct((55296, 5120), dtype)  # the largest projection of a 32B model: 566 MB in bfloat16
    made = jax.jit(lambda w: PACKED[name].quantize(w, None)).lower(w).compile()
    # Double quantization works on 4.4 million absmax in float64.
    assert made.memory_analysis().temp_size_in_bytes < (150e6 if name == "nf4_double_quant" else 20e6)
