"""config.json of the networks that people load: read, counted, written, and refused where they ask for more."""

import math

import pytest

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.loading import tensor_table

# The makers' published files without the keys that say nothing about the network.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA32 = LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True}


def sizes(hidden, inner, layers, heads, keys, **more):
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        **more,
    }


def qwen2(*numbers, vocab=152064, window=131072, full=70, tied=False):
    more = {"vocab_size": vocab, "sliding_window": window, "max_window_layers": full, "tie_word_embeddings": tied}
    return QWEN2 | sizes(*numbers, **more)


def qwen3(*numbers, tied=False):
    return QWEN3 | sizes(*numbers, max_window_layers=numbers[2], tie_word_embeddings=tied)


SMALL = {"vocab": 151936, "window": 32768, "tied": True}
PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": (qwen2(896, 4864, 24, 14, 2, full=21, **SMALL), 494_032_768),
    "Qwen2.5-1.5B-Instruct": (qwen2(1536, 8960, 28, 12, 2, full=21, **SMALL), 1_543_714_304),
    "Qwen2.5-3B-Instruct": (qwen2(2048, 11008, 36, 16, 2, **SMALL), 3_085_938_688),
    "Qwen2.5-7B-Instruct": (qwen2(3584, 18944, 28, 28, 4, full=28), 7_615_616_512),
    "Qwen2.5-14B-Instruct": (qwen2(5120, 13824, 48, 40, 8), 14_770_033_664),
    "Qwen2.5-32B-Instruct": (qwen2(5120, 27648, 64, 40, 8), 32_763_876_352),
    "Qwen2.5-72B-Instruct": (qwen2(8192, 29568, 80, 64, 8), 72_706_203_648),
    # The published figures of the two smallest, 751,632,384 and 2,031,739,904, count the tied embedding twice.
    "Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, 8, tied=True), 751_632_384 - 151936 * 1024),
    "Qwen3-1.7B": (qwen3(2048, 6144, 28, 16, 8, tied=True), 2_031_739_904 - 151936 * 2048),
    "Qwen3-4B": (qwen3(2560, 9728, 36, 32, 8, tied=True), 4_022_468_096),
    "Qwen3-8B": (qwen3(4096, 12288, 36, 32, 8), 8_190_735_360),
    "Qwen3-14B": (qwen3(5120, 17408, 40, 40, 8), 14_768_307_200),
    "Qwen3-32B": (qwen3(5120, 25600, 64, 64, 8), 32_762_123_264),
    "Llama-3.1-8B-Instruct": (LLAMA | sizes(4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3.1-70B-Instruct": (LLAMA | sizes(8192, 28672, 80, 64, 8), 70_553_706_496),
    "Llama-3.2-1B-Instruct": (LLAMA32 | sizes(2048, 8192, 16, 32, 8, head_dim=64), 1_235_814_400),
    "Llama-3.2-3B-Instruct": (LLAMA32 | sizes(3072, 8192, 28, 24, 8, head_dim=128), 3_212_749_824),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    hf, count = PUBLISHED[name]
    config = ModelConfig.from_hf(hf)
    assert sum(math.prod(slot.shape) for slot in tensor_table(config).values()) == count
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert (config.rope_scaling is not None) == name.startswith("Llama")
