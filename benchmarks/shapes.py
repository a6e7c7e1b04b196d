"""The shapes of models that people train, and random weights in them: what the benchmarks of speed and memory use."""

import jax
import jax.numpy as jnp

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.dtypes import DtypeOption, settled_dtype
from qerl_jax.models.init import for_kernels, init_adapter, init_layer, init_model, quantize_layer
from qerl_jax.models.params import Adapter, Base, Layer, Model

MODELS = {
    "tiny": ModelConfig("qwen2", 512, 64, 128, 2, 4, 2, 16, 1e-6, 1e6, True, True, 4096),
    "quickstart": ModelConfig("qwen2", 464, 192, 512, 2, 6, 2, 32, 1e-6, 1e4, True, True, 128),
    "qwen2.5-1.5b": ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e6, True, True, 32768),
    "qwen2.5-3b": ModelConfig("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, 1e-6, 1e6, True, True, 32768),
    "qwen2.5-7b": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 1e-6, 1e6, False, True, 32768),
    "qwen2.5-14b": ModelConfig("qwen2", 152064, 5120, 13824, 48, 40, 8, 128, 1e-5, 1e6, False, True, 32768),
    "qwen2.5-32b": ModelConfig("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 1e-5, 1e6, False, True, 32768),
    "qwen3-1.7b": ModelConfig("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 1e-6, 1e6, True, False, 40960),
    "qwen3-4b": ModelConfig("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 1e-6, 1e6, True, False, 40960),
    "qwen3-8b": ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 1e-6, 1e6, False, False, 40960),
    "qwen3-14b": ModelConfig("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, 1e-6, 1e6, False, False, 40960),
}
STD = 0.02  # of random weights


def compute_dtype(name: DtypeOption = "auto") -> jnp.dtype:
    """What models are computed in; `auto` is what suits the default device."""
    return jnp.dtype(settled_dtype(name))


def random_model(config: ModelConfig, dtype: jnp.dtype, weight_format: str = "nvfp4", kernels: bool = False) -> Model:
    """Random weights, each layer packed as soon as it is drawn, so that the 16-bit model never exists; with `kernels`
    in the order that the GPU kernels read.

    N(0, 0.02^2), but o and down over sqrt(2 layers), as GPT-2 begins, and, where it is not also the output matrix, an
    embedding of unit size: a residual stream to which each layer adds a little. With the same deviation everywhere a
    network of 28 layers makes six times as much of a small change (`benchmarks.roundings`), and trained ones make even
    less of it (`benchmarks.agreement`).
    """
    few = ModelConfig(**{**vars(config), "num_hidden_layers": 0})
    outer = init_model(jax.random.key(0), few, dtype).base
    embed = outer.embed if config.tie_word_embeddings else outer.embed / STD
    depth = (2 * config.num_hidden_layers) ** -0.5

    @jax.jit
    def draw(key: jax.Array) -> Layer:
        layer = init_layer(key, config, dtype, STD)
        layer = layer.replace(o_proj=layer.o_proj * depth, down_proj=layer.down_proj * depth)
        return quantize_layer(layer, weight_format)

    layers = tuple(draw(jax.random.key(1 + i)) for i in range(config.num_hidden_layers))
    model = Model(Base(embed, layers, outer.final_norm, outer.lm_head), config)
    return for_kernels(model, consume=True) if kernels else model


def random_adapter(model: Model, rank: int) -> Adapter:
    """LoRA on all linears, with a B that is not zero; float32."""
    adapter = init_adapter(jax.random.key(1), model, rank, 2.0 * rank)
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(adapter))))
    return jax.tree.map(lambda leaf: leaf + 0.01 * jax.random.normal(next(keys), leaf.shape), adapter)
