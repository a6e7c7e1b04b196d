"""The residual stream of a bfloat16 network: layers add to it unrounded, so that sampler and learner agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CONFIG

from qerl_jax.models.init import init_model
from qerl_jax.models.transformer import attend_causally, block, embedded, run_layer
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rollout.batch import Prompts
from qerl_jax.rollout.generate import generate
from qerl_jax.rollout.sampling import SamplingSettings

LAYERS = 12
N, P, C, G = 2, 12, 24, 4
TOKENS = jax.random.randint(jax.random.key(1), (N, P), 0, CONFIG.vocab_size)


@functools.cache
def model():
    """Embeddings of size 1, to which the layers add a fifth: rounded to bfloat16, the stream loses part of that."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    made = init_model(jax.random.key(0), config, jnp.bfloat16, std=0.06)
    return made.replace(base=made.base.replace(embed=16 * made.base.embed, lm_head=6 * made.base.lm_head))


def in_float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def test_the_stream_is_the_float32_networks_to_two_thousandths():
    """0.8 thousandths of its length off, the roundings inside the layers; with every sum rounded 7.7."""

    @functools.partial(jax.jit, static_argnums=0)
    def after(dtype, layer, x_BTD):
        attend = attend_causally(CONFIG, jnp.broadcast_to(jnp.arange(P), (N, P)), None)
        return block(CONFIG, dtype, attend, layer, {}, (layer.input_norm, layer.post_attention_norm), x_BTD)[0]

    begin_BTD = x_BTD = expected_BTD = embedded(model(), TOKENS)
    for layer in model().base.layers:
        x_BTD, expected_BTD = after("bfloat16", layer, x_BTD), after("float32", in_float32(layer), expected_BTD)
    assert x_BTD.dtype == jnp.float32
    length = jnp.linalg.norm(expected_BTD)
    assert jnp.linalg.norm(expected_BTD - begin_BTD) > 0.1 * length
    assert jnp.linalg.norm(x_BTD - expected_BTD) < 2e-3 * length


def test_a_layer_alone_takes_and_gives_the_compute_dtype():
    x_BTD = model().base.embed[TOKENS]
    assert run_layer(CONFIG, model().base.layers[0], x_BTD).dtype == x_BTD.dtype == jnp.bfloat16


def test_recorded_log_probabilities_are_the_learners():
    """0.0014 nats apart on average; with every sum rounded 0.0046. Logits have a standard deviation of 2."""
    settings = SamplingSettings(C, (), 0)
    prompts = Prompts(TOKENS, jnp.full(N, P), jnp.arange(N))
    out = jax.jit(generate, static_argnums=(4, 5))(model(), None, prompts, jax.random.key(2), settings, G)
    row = np.arange(N * G) // G
    of_rows = TOKENS[row], prompts.lengths[row], out.tokens, out.lengths
    logps, _ = jax.jit(completion_logps)(model(), None, *of_rows, 1.0)
    assert jnp.abs(logps - out.logps).mean() < 2.5e-3
