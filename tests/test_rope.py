"""Rotary embeddings: values by hand, every spelling of their parameters, and what is refused.

The frequencies of published networks are compared with transformers' in test_families.py.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.errors import UserError
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.rope import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    read_rope,
    rope_frequencies,
    rope_to_hf,
    rotated,
    rotation,
)

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NETWORK = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_a_pair_turns_by_position_times_frequency():
    """E = 4, theta = 100: pair (0, 2) has frequency 1, pair (1, 3) has 0.1."""
    x = jnp.asarray([1.0, 10.0, 2.0, 20.0]).reshape(1, 1, 1, 4)
    found = rotated(x, *rotation(jnp.asarray([[3]]), 4, 100.0))[0, 0, 0]
    c, s, slow_c, slow_s = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
    expected = [1 * c - 2 * s, 10 * slow_c - 20 * slow_s, 2 * c + 1 * s, 20 * slow_c + 10 * slow_s]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_scalings_by_hand():
    linear, factor = rope_frequencies(4, 100.0, LinearScaling(4.0))
    np.testing.assert_allclose(linear, [0.25, 0.025], rtol=1e-6)
    assert factor == 1
    # Wavelengths 6.28, 62.8: with length 20, below 20 / 4 kept, above 20 / 1 divided, 6.28 between.
    kept = (20 / (2 * math.pi) - 1) / (4 - 1)
    llama3, factor = rope_frequencies(4, 100.0, Llama3Scaling(8.0, 1.0, 4.0, 20))
    np.testing.assert_allclose(llama3, [kept + (1 - kept) / 8, 0.1 / 8], rtol=1e-6)
    assert factor == 1
    # 32 turns in 200 positions lie before pair 0, one turn before pair 2: the ramp from kept to divided goes between.
    yarn, factor = rope_frequencies(4, 100.0, YarnScaling(4.0, 200))
    np.testing.assert_allclose(yarn, [1, 0.1 * (0.5 + 0.5 / 4)], rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # Where both ends of the ramp are one place, not quite pair 1, it is a step.
    step, _ = rope_frequencies(4, 100.0, YarnScaling(4.0, 60, beta_fast=1.0, truncate=False))
    np.testing.assert_allclose(step, [1, 0.1 / 4], rtol=1e-6)
    assert rope_frequencies(4, 100.0, YarnScaling(4.0, 200, attention_factor=2.0))[1] == 2
    assert rope_frequencies(4, 100.0, YarnScaling(0.5, 200))[1] == 1


def test_yarn_lengthens_what_it_turns():
    x = jnp.ones((1, 1, 1, 4))
    turns = (rotation(jnp.asarray([[5]]), 4, 100.0, YarnScaling(1.0, 200, attention_factor=f)) for f in (1.0, 1.5))
    short, long = (rotated(x, *turn) for turn in turns)
    np.testing.assert_allclose(long, 1.5 * short, rtol=1e-6)


@pytest.mark.parametrize(
    ("hf", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, 1e4, LinearScaling(2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1e4, YarnScaling(4.0, 4096)),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "attention_factor": None}},
            1e4,
            YarnScaling(4.0, 4096),
        ),
        (
            {"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            1e4,
            YarnScaling(4.0, 64),
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
            1e4,
            YarnScaling(4.0, 64),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "truncate": False}},
            1e4,
            YarnScaling(2.0, 4096, beta_fast=16.0, truncate=False),
        ),
    ],
)
def test_every_spelling_is_read_and_written(hf, theta, scaling):
    assert read_rope(hf, "config.json", 4096) == (theta, scaling)
    written = rope_to_hf(theta, scaling)
    newer = {"rope_parameters": written["rope_parameters"]}
    older = {key: value for key, value in written.items() if key not in newer}
    for part in (written, newer, older):  # transformers 5 reads the one, 4 the other
        assert read_rope(part, "config.json", 4096) == (theta, scaling)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"rope_type is 'dynamic'; supported: 'default', 'linear'",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2]}}, "rope_type is 'mrope'; supported"),
        ({"rope_scaling": [1]}, r"rope parameters are \[1\]; expected a mapping"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear': factor is missing"),
        (
            {"rope_scaling": {"type": "linear", "factor": 5e-324}},
            "factor is 5e-324; expected a number from 1e-06 to 1e",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, r"factor is 1e\+308; expected a number from 1e-06 to 1e"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e308}}, r"beta_fast is 1e\+308; expected"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; expected a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor is -2.0; expected a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf; expected a positive number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3': low_freq_factor is missing"),
        (
            {"rope_scaling": LLAMA3 | {"type": "llama3", "original_max_position_embeddings": 1.5}},
            "original_max_position_embeddings is 1.5; expected a positive integer",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}},
            r"rope parameter mscale \(0.7\) is not supported for rope_type 'yarn'; allowed: rope_theta, factor",
        ),
        (  # as DeepSeek-R1-0528-Qwen3-8B is published
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}},
            r"attn_factor \(0.878.*\) is not supported .*; transformers ignores attn_factor, vLLM multiplies",
        ),
        ({"rope_parameters": {"factor": 4.0}}, "rope parameter factor .* not supported for rope_type 'default'"),
        (
            {"rope_scaling": LLAMA3 | {"type": "llama3", "low_freq_factor": 4.0}},
            "high_freq_factor is 4.0; expected more than low_freq_factor, 4.0",
        ),
        ({"rope_theta": 1}, "rope_theta is 1.0; expected more than 1"),
        ({"rope_theta": 0}, "rope_theta is 0; expected a positive number"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6'; expected a positive number"),
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_theta is 7.0 and 1000000.0 in two places; expected the same, or one",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "rope_theta": 7.0},
            r"rope_theta is 7.0 and 1000000.0 in two places",
        ),
        (
            {
                "rope_theta": 7.0,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "rope_parameters": {"type": "yarn", "factor": 4.0, "rope_theta": 1e6},
            },
            r"rope_theta is 7.0 and 1000000.0 in two places",
        ),
        (
            {"rope_scaling": {"type": "default", "rope_theta": 7.0}, "rope_parameters": {"rope_theta": [1]}},
            r"rope_theta is \[1\] and 7.0 in two places",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1; heads that rotate in part"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            "rope_scaling is .*, but rope_parameters .*; expected the same, or one",
        ),
    ],
)
def test_parameters_that_are_refused(hf, message):
    with pytest.raises(UserError, match=f"^config.json: .*{message}"):
        read_rope(hf, "config.json", 4096)


@pytest.mark.parametrize(
    ("change", "positions"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 64),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, 64),
        # As Qwen2.5's model card has it added to a config.json whose max_position_embeddings stay.
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}, 64),
        ({"rope_scaling": {"type": "yarn", "factor": 1.5}}, 96),
    ],
)
def test_positions_that_a_network_has(change, positions):
    assert ModelConfig.from_hf(NETWORK | change).positions == positions


SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("change", "slides"),
    [
        ({}, True),
        ({"max_window_layers": 0}, True),
        ({"max_window_layers": 2}, False),  # layers from the third on: there are two
        ({"max_window_layers": None}, False),  # 28
        ({"sliding_window": 63}, True),
        ({"sliding_window": 64}, False),  # as many as there are positions
        ({"sliding_window": None}, False),
        ({"use_sliding_window": False}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"layer_types": ["full_attention", "full_attention"]}, False),
        ({"model_type": "llama"}, False),  # knows no such option
    ],
)
def test_sliding_windows_are_refused_where_they_act(change, slides):
    hf = NETWORK | SLIDING | change
    if not slides:
        assert ModelConfig.from_hf(hf).num_hidden_layers == 2
        return
    with pytest.raises(UserError, match=r"use_sliding_window is true for layers .* is not supported"):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("change", "biases", "head_dim"),
    [
        ({"model_type": "qwen2"}, ("q_proj", "k_proj", "v_proj"), 8),
        ({"model_type": "qwen2", "head_dim": 16}, ("q_proj", "k_proj", "v_proj"), 16),
        ({"model_type": "qwen3"}, (), 128),
        ({"model_type": "qwen3", "attention_bias": True}, ("q_proj", "k_proj", "v_proj", "o_proj"), 128),
        ({"model_type": "llama", "head_dim": None}, (), 8),
        ({"model_type": "llama", "mlp_bias": True}, ("gate_proj", "up_proj", "down_proj"), 8),
    ],
)
def test_what_a_family_has(change, biases, head_dim):
    config = ModelConfig.from_hf(NETWORK | change)
    assert (config.biases, config.head_dim) == (biases, head_dim)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_a_network_that_sees_what_is_behind():
    """transformers 5 has no causal mask where config.json says so, as in embedding models of Qwen2's kind."""
    assert ModelConfig.from_hf(NETWORK | {"is_causal": True}) == ModelConfig.from_hf(NETWORK)
    with pytest.raises(UserError, match="is_causal is false, as in embedding models"):
        ModelConfig.from_hf(NETWORK | {"is_causal": False})


def test_a_bias_that_is_no_switch():
    with pytest.raises(UserError, match="attention_bias is 'yes'; expected true or false"):
        ModelConfig.from_hf(NETWORK | {"attention_bias": "yes"})
