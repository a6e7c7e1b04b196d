"""An adapter folded into its base: the same function, rounded once, in memory and on disk."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import assert_equal
from tiny import tiny_adapter, tiny_model

from qerl_jax.errors import UserError
from qerl_jax.formats import dequantize
from qerl_jax.models.init import for_kernels
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS
from qerl_jax.models.saving import merge_adapter, save_merged, save_model
from qerl_jax.models.transformer import logits

TOKENS = jnp.array([[5, 9, 11, 20, 3, 1], [7, 8, 2, 2, 40, 6]])


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_the_merged_network_computes_what_base_and_adapter_do(weight_format):
    model = tiny_model(weight_format=weight_format)
    adapter = tiny_adapter(model, train_norms=True)
    expected = logits(model, TOKENS, adapter=adapter)
    merged = merge_adapter(model, adapter)
    np.testing.assert_allclose(logits(merged, TOKENS), expected, rtol=1e-4, atol=2e-5 * float(jnp.abs(expected).max()))
    assert float(jnp.abs(expected - logits(model, TOKENS)).max()) > 0.1
    assert all(isinstance(getattr(layer, name), jax.Array) for layer in merged.base.layers for name in PROJECTIONS)
    assert np.array_equal(merged.base.layers[1].input_norm, adapter.norms.input[1])


def test_the_sum_is_rounded_once():
    model = tiny_model(dtype=jnp.bfloat16)
    adapter = tiny_adapter(model, target_modules=("k_proj", "down_proj"))
    merged = merge_adapter(model, adapter)
    for old, new, pairs in zip(model.base.layers, merged.base.layers, adapter.lora, strict=True):
        for name in PROJECTIONS:
            exact = np.asarray(dequantize(getattr(old, name), jnp.float32), np.float64)
            if name in pairs:
                exact = exact + 2.0 * np.asarray(pairs[name].b, np.float64) @ np.asarray(pairs[name].a, np.float64)
            found = getattr(new, name)
            assert found.dtype == jnp.bfloat16
            # float32's own rounding tips a tie now and then.
            same = np.asarray(found) == exact.astype(np.float32).astype(ml_dtypes.bfloat16)
            assert same.mean() > 0.995, name
            np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-30)


def test_the_product_is_of_full_precision_on_every_device():
    model = tiny_model()
    with jax.default_matmul_precision("default"):
        program = jax.jit(merge_adapter).lower(model, tiny_adapter(model)).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_projections_without_a_pair_and_norms_that_are_not_trained_stay():
    model = tiny_model()
    merged = merge_adapter(model, tiny_adapter(model, target_modules=("q_proj",)))
    for old, new in zip(model.base.layers, merged.base.layers, strict=True):
        assert np.array_equal(new.up_proj, dequantize(old.up_proj, jnp.float32))
        assert not np.array_equal(new.q_proj, dequantize(old.q_proj, jnp.float32))
        assert_equal((new.input_norm, new.q_bias), (old.input_norm, old.q_bias))
    assert_equal(merged.base.embed, model.base.embed)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_holds_the_merged_network(tmp_path, dtype, kernels):
    model = tiny_model(dtype=jnp.dtype(dtype))
    adapter = tiny_adapter(model, train_norms=True)
    expected = merge_adapter(model, adapter)
    save_merged(for_kernels(model) if kernels else model, adapter, tmp_path / "a")
    save_model(expected, tmp_path / "b")
    assert_equal(load_model(tmp_path / "a"), load_model(tmp_path / "b"))
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_a_dtype_for_the_folder_rounds_the_float32_sum(tmp_path):
    model = tiny_model()
    adapter = tiny_adapter(model)
    save_merged(model, adapter, tmp_path / "a", dtype=jnp.bfloat16)
    with pytest.raises(UserError, match="dtype is 'bflot16'; allowed: float32, bfloat16, float16"):
        save_merged(model, adapter, tmp_path / "b", dtype="bflot16")
    found = load_model(tmp_path / "a")
    exact = merge_adapter(model, adapter)
    assert found.base.embed.dtype == jnp.bfloat16
    assert np.array_equal(found.base.layers[0].q_proj, exact.base.layers[0].q_proj.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_trained_norm_scales_stay_as_they_are_in_any_dtype(tmp_path, dtype):
    model = tiny_model(dtype=jnp.bfloat16)
    adapter = tiny_adapter(model, train_norms=True)
    save_merged(model, adapter, tmp_path, dtype=dtype)
    for scale, layer in zip(adapter.norms.input, load_model(tmp_path).base.layers, strict=True):
        assert np.array_equal(layer.input_norm, scale) and layer.q_proj.dtype == jnp.bfloat16


def test_sums_that_are_not_finite_are_not_written(tmp_path):
    model = tiny_model()
    pairs = jax.tree.map(lambda leaf: 1e25 * leaf, tiny_adapter(model))
    with pytest.raises(
        UserError, match=r"tensor model\.layers\.0\.\S+ has numbers that are not finite, or that bfloat16"
    ):
        save_merged(model, pairs, tmp_path / "a", dtype="bfloat16")
    assert not (tmp_path / "a").exists()


def test_an_adapter_of_another_depth_is_refused(tmp_path):
    model = tiny_model()
    shallow = tiny_adapter(model).replace(lora=tiny_adapter(model).lora[:1])
    with pytest.raises(ValueError, match="the adapter has 1 layers, the model 2"):
        merge_adapter(model, shallow)
    with pytest.raises(ValueError, match="the adapter has 1 layers, the model 2"):
        save_merged(model, shallow, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_adapters_stacked_by_vmap_are_merged_each_alone(tmp_path):
    model = tiny_model()
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), tiny_adapter(model))
    with pytest.raises(ValueError, match="of adapters stacked by vmap take each alone"):
        merge_adapter(model, stacked)
    with pytest.raises(ValueError, match="of adapters stacked by vmap take each alone"):
        save_merged(model, stacked, tmp_path / "merged")
