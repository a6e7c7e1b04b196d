"""AWQ's search and its folding, on one layer at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import HF

from qerl_jax.formats import dequantize
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_layer, init_model
from qerl_jax.models.params import PROJECTIONS
from qerl_jax.models.transformer import logits, run_layer
from qerl_jax.quantization.awq import aqn_gain, candidates, representable, smooth
from qerl_jax.quantization.methods import (
    HELD_OUT,
    SEARCHED,
    in_clean_coordinates,
    quantize_one,
    round_to_nearest,
)
from qerl_jax.quantization.observation import GROUPS, Seen, nothing_seen, observe, relative_errors

# The layers of the tiny folders: one compiled program serves the tests of both.
CONFIG = ModelConfig.from_hf(HF)
# One key-value head for four query heads, and one for two.
HEADS = [1, 2]


def layer_in_bfloat16(heads=2, seed=0):
    """A layer whose biases and norms are not trivial, as a file holds it, with activations of unequal channels."""
    config = dataclasses.replace(CONFIG, num_key_value_heads=heads)
    rng = np.random.default_rng(seed)

    def leaf(array):
        return jnp.asarray(array + 0.2 * rng.normal(size=array.shape), jnp.bfloat16)

    layer = jax.tree.map(leaf, init_layer(jax.random.key(seed), config, jnp.float32, 0.1))
    channels = np.exp(rng.normal(size=32))
    x_BTD = jnp.asarray(rng.normal(size=(4, 9, 32)) * channels, jnp.float32)
    return config, layer, x_BTD


def wide(layer):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer)


def seen_of(config, layer, x_BTD, lengths):
    return observe(config, wide(layer), x_BTD, jnp.asarray(lengths, jnp.int32), nothing_seen(config))


def unquantized(layer, done):
    """The smoothed projections before they are rounded to 4 bits, float32 by name."""
    return {
        name: getattr(layer, name).astype(jnp.float32) * done.columns[group] / done.rows[name][:, None]
        for group, names in GROUPS.items()
        for name in names
    }


def test_candidates_by_hand():
    tried = candidates(np.array([4.0, 1.0, 0.0]), np.array([0.25, 1.0, 0.5]))
    assert len(tried) == 40
    plain = {(alpha, duo): scale for scale, alpha, duo in tried}
    np.testing.assert_allclose(plain[0.0, False], [1, 1, 1])
    # 4^0.5 and 1, divided by the root of their product; the dead channel keeps 1.
    np.testing.assert_allclose(plain[0.5, False], [2**0.5, 2**-0.5, 1])
    # 4^0.5 / 0.25^0.5 = 4 and 1.
    np.testing.assert_allclose(plain[0.5, True], [2, 0.5, 1])


def test_the_scale_of_a_channel_that_is_nearly_dead_is_bounded():
    for scale, *_ in candidates(np.array([4.0, 1.0, 1e-30]), np.array([0.25, 1.0, 0.5])):
        assert scale.max() / scale.min() <= 1024 * (1 + 1e-12)
        assert scale.max() * scale.min() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_scale_is_moved_to_where_the_quotient_is_a_number_of_the_vectors_type(dtype):
    rng = np.random.default_rng(1)
    vector = rng.normal(size=1000).astype(dtype)
    scale = np.exp(rng.normal(size=1000))
    vector[0], vector[1], scale[1] = 0, ml_dtypes.finfo(dtype).smallest_subnormal, 4
    moved = representable(scale, vector)
    quotient = vector.astype(np.float64) / moved
    np.testing.assert_allclose(quotient.astype(dtype).astype(np.float64), quotient, rtol=1e-7)
    assert moved[0] == np.float32(scale[0]) and moved[1] == 1
    np.testing.assert_allclose(moved[2:], scale[2:], rtol=2**-7)
    assert np.array_equal(representable(scale, None), scale.astype(np.float32))


@pytest.mark.parametrize("heads", HEADS)
def test_the_function_of_the_unquantized_layer_is_unchanged(heads):
    config, layer, x_BTD = layer_in_bfloat16(heads)
    done = smooth(config, layer, seen_of(config, layer, x_BTD, [9, 9, 9, 9]))
    assert all(np.ptp(columns) > 0.1 for columns in done.columns.values()), "no scale was at work"
    changed = wide(done.layer.replace(**unquantized(layer, done)))
    for field in ("input_norm", "post_attention_norm", "v_bias"):
        assert getattr(done.layer, field).dtype == jnp.bfloat16
        assert not np.array_equal(getattr(done.layer, field), getattr(layer, field)), field
    for field in ("q_bias", "k_bias"):
        assert np.array_equal(getattr(done.layer, field), getattr(layer, field)), field
    np.testing.assert_allclose(
        run_layer(config, changed, x_BTD), run_layer(config, wide(layer), x_BTD), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("heads", HEADS)
def test_the_packed_layer_computes_what_its_matrices_in_the_clean_coordinates_say(heads):
    config, layer, x_BTD = layer_in_bfloat16(heads)
    done = smooth(config, layer, seen_of(config, layer, x_BTD, [9, 9, 9, 9]))
    unpacked = {name: dequantize(getattr(done.layer, name), jnp.float32) for name in PROJECTIONS}
    found = run_layer(config, wide(done.layer.replace(**unpacked)), x_BTD)
    clean = {
        name: in_clean_coordinates(getattr(done.layer, name), done.rows[name], done.columns[group])
        for group, names in GROUPS.items()
        for name in names
    }
    expected = run_layer(config, wide(layer.replace(**clean)), x_BTD)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_q_k_v_and_gate_up_share_a_global_scale():
    config, layer, x_BTD = layer_in_bfloat16()
    packed = smooth(config, layer, seen_of(config, layer, x_BTD, [9, 9, 9, 9])).layer
    assert packed.q_proj.global_scale == packed.k_proj.global_scale == packed.v_proj.global_scale
    assert packed.gate_proj.global_scale == packed.up_proj.global_scale
    assert packed.o_proj.global_scale != packed.q_proj.global_scale


def test_errors_are_those_of_the_outputs_themselves_and_padding_does_not_count():
    config, layer, x_BTD = layer_in_bfloat16()
    lengths = [9, 4, 0, 1]
    seen = seen_of(config, layer, x_BTD, lengths)
    inputs = {}
    run_layer(config, wide(layer), x_BTD, inputs.__setitem__)
    packed = round_to_nearest(layer)
    for group, names in GROUPS.items():
        x_MK = np.concatenate([np.asarray(row[:n], np.float64) for row, n in zip(inputs[group], lengths, strict=True)])
        assert seen[group].tokens == 14
        np.testing.assert_allclose(seen[group].magnitude, np.abs(x_MK).sum(0), rtol=1e-5)
        for name in names:
            dense = dequantize(getattr(packed, name), jnp.float32)
            errors = relative_errors(getattr(layer, name), dense, {"text": seen[group].gram})
            w, v = np.asarray(getattr(layer, name), np.float64), np.asarray(dense, np.float64)
            assert errors["weight"] == pytest.approx(np.linalg.norm(w - v) / np.linalg.norm(w), rel=1e-4)
            expected = np.linalg.norm(x_MK @ (w - v).T) / np.linalg.norm(x_MK @ w.T)
            assert errors["text"] == pytest.approx(expected, rel=1e-3)


def test_awq_lowers_the_output_error_of_every_group_on_the_text_it_searched_on():
    config, layer, x_BTD = layer_in_bfloat16()
    seen = seen_of(config, layer, x_BTD, [9, 9, 9, 9])
    _, report = quantize_one("awq", config, layer, {SEARCHED: seen, HELD_OUT: seen})
    for group, names in GROUPS.items():
        rows = [report["projections"][name]["output_error_calibration"] for name in names]
        assert sum(row["awq"] ** 2 for row in rows) < sum(row["rtn"] ** 2 for row in rows), group
    assert report["scales"].keys() == GROUPS.keys()


def test_a_neuron_that_is_nearly_dead_leaves_the_other_rows_of_up():
    config, layer, x_BTD = layer_in_bfloat16()
    seen = seen_of(config, layer, x_BTD, [9, 9, 9, 9])
    live = jnp.ones(48).at[5].set(1e-18)
    old = seen["down_proj"]
    seen["down_proj"] = Seen(old.magnitude * live, old.gram * live * live[:, None], old.tokens)
    _, report = quantize_one("awq", config, layer, {SEARCHED: seen})
    error = report["projections"]["up_proj"]["output_error_calibration"]
    assert error["awq"] < error["rtn"]


def test_rounding_to_nearest_reports_no_other_method():
    config, layer, x_BTD = layer_in_bfloat16()
    packed, report = quantize_one("rtn", config, layer, {HELD_OUT: seen_of(config, layer, x_BTD, [9, 9, 9, 9])})
    assert report["projections"]["q_proj"].keys() == {"weight_error", "output_error_held_out"}
    assert report["projections"]["q_proj"]["weight_error"].keys() == {"rtn"}
    assert np.array_equal(packed.q_proj.packed, round_to_nearest(layer).q_proj.packed)


def test_the_gain_of_aqns_noise_by_hand():
    # Normalized activations have powers (8 / 2^2, 3 / 1) = (2, 3); scales 3 and 1: root of (9 * 2 + 1 * 3) / (2 + 3).
    seen = Seen(jnp.zeros(2), jnp.diag(jnp.array([8.0, 3.0])), jnp.float32(1))
    assert aqn_gain(np.array([2.0, -1.0]), np.array([3.0, 1.0]), seen) == pytest.approx((21 / 5) ** 0.5)


def test_logits_of_a_network_of_smoothed_layers_are_the_same():
    model = init_model(jax.random.key(2), CONFIG, std=0.2)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 24, (4, 9)), jnp.int32)
    x_BTD = model.base.embed[tokens]
    layers = []
    for layer in model.base.layers:
        done = smooth(CONFIG, layer, seen_of(CONFIG, layer, x_BTD, [9] * 4))
        layers.append(done.layer.replace(**unquantized(layer, done)))
        x_BTD = run_layer(CONFIG, layer, x_BTD)
    changed = model.replace(base=model.base.replace(layers=tuple(layers)))
    np.testing.assert_allclose(logits(changed, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
