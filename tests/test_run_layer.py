"""One layer alone: the same as in the whole network, and what it shows of its projections' inputs."""

import jax.numpy as jnp
import numpy as np
from tiny import tiny_model

from qerl_jax.models.params import projection_shape
from qerl_jax.models.transformer import forward, rms_norm, run_layer

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (3, 7)), jnp.int32)


def test_layers_run_one_by_one_equal_the_network():
    model = tiny_model()
    x_BTD = model.base.embed[TOKENS]
    for layer in model.base.layers:
        x_BTD = run_layer(model.config, layer, x_BTD)
    whole, _ = forward(model, None, TOKENS)
    np.testing.assert_allclose(rms_norm(x_BTD, model.base.final_norm, 1e-6), whole, rtol=1e-6, atol=1e-6)


def test_each_group_of_projections_shows_its_input_once():
    model = tiny_model(weight_format="bf16")
    layer, x_BTD, seen = model.base.layers[0], model.base.embed[TOKENS], []
    out = run_layer(model.config, layer, x_BTD, lambda name, x: seen.append((name, x)))
    assert [name for name, _ in seen] == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    inputs = dict(seen)
    for name, x in seen:
        assert x.shape == (3, 7, projection_shape(model.config, name)[1])
    np.testing.assert_allclose(inputs["q_proj"], rms_norm(x_BTD, layer.input_norm, 1e-6), rtol=1e-6)
    attention = inputs["o_proj"] @ layer.o_proj.T
    mlp = inputs["down_proj"] @ layer.down_proj.T
    np.testing.assert_allclose(out, x_BTD + attention + mlp, rtol=1e-5, atol=1e-5)
