"""A tiny random network for tests: 2 layers, grouped queries, biases and norms not zero. And a GPU by its memory."""

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_adapter, init_model, quantize

CONFIG = ModelConfig("qwen2", 61, 32, 64, 2, 4, 2, 8, 1e-6, 10000.0, True, True, 128)


def tiny_model(seed=0, dtype=jnp.float32, weight_format="nvfp4", std=0.3, layers=2):
    key = jax.random.key(seed)
    model = init_model(key, dataclasses.replace(CONFIG, num_hidden_layers=layers), dtype, std)
    layers = tuple(
        layer.replace(
            q_bias=0.3 * jax.random.normal(jax.random.fold_in(key, 10 + i), layer.q_bias.shape, dtype),
            input_norm=1 + 0.3 * jax.random.normal(jax.random.fold_in(key, 20 + i), layer.input_norm.shape),
        )
        for i, layer in enumerate(model.base.layers)
    )
    return quantize(model.replace(base=model.base.replace(layers=layers)), weight_format)


def tiny_adapter(model, seed=1, scale=0.1, **kwargs):
    """A LoRA adapter whose B is not zero."""
    adapter = init_adapter(jax.random.key(seed), model, lora_r=4, lora_alpha=8, **kwargs)
    noise = iter(jax.random.split(jax.random.key(seed + 100), 1000))
    return jax.tree.map(lambda leaf: leaf + scale * jax.random.normal(next(noise), leaf.shape), adapter)


class Device:
    """A GPU by its memory alone."""

    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return {"bytes_limit": self.limit}
