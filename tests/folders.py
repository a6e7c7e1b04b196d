"""Tiny Qwen2 folders for tests, written with the safetensors library itself; edits of adapters' folders."""

import json

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

HF = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
V4 = {"rope_theta": 1000.0, "torch_dtype": "bfloat16"}
V5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "dtype": "bfloat16"}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.float8_e4m3fn",
            },
        }
    },
}


def random_arrays(dtype=ml_dtypes.bfloat16, tied=True, seed=0):
    """Every tensor of the network that `HF` describes, written out by name."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape, scale=0.3).astype(dtype)

    arrays = {"model.embed_tokens.weight": normal(24, 32), "model.norm.weight": 1 + normal(32)}
    if not tied:
        arrays["lm_head.weight"] = normal(24, 32)
    for i in range(2):
        prefix = f"model.layers.{i}."
        arrays |= {
            prefix + "input_layernorm.weight": 1 + normal(32),
            prefix + "post_attention_layernorm.weight": 1 + normal(32),
            prefix + "self_attn.q_proj.weight": normal(32, 32),
            prefix + "self_attn.q_proj.bias": normal(32),
            prefix + "self_attn.k_proj.weight": normal(16, 32),
            prefix + "self_attn.k_proj.bias": normal(16),
            prefix + "self_attn.v_proj.weight": normal(16, 32),
            prefix + "self_attn.v_proj.bias": normal(16),
            prefix + "self_attn.o_proj.weight": normal(32, 32),
            prefix + "mlp.gate_proj.weight": normal(48, 32),
            prefix + "mlp.up_proj.weight": normal(48, 32),
            prefix + "mlp.down_proj.weight": normal(32, 48),
        }
    return {name: array.astype(dtype) for name, array in arrays.items()}


def packed_arrays(tied=True):
    """`random_arrays` with packed projections in the place of the plain ones: random bytes, whatever those held."""
    arrays = random_arrays(tied=tied)
    packed = {name: array for name, array in arrays.items() if "proj.weight" not in name}
    rng = np.random.default_rng(3)
    for name, array in arrays.items():
        if "proj.weight" in name:
            N, K = array.shape
            packed[f"{name}_packed"] = rng.integers(0, 256, (N, K // 2), np.uint8)
            packed[f"{name}_scale"] = rng.integers(1, 0x7F, (N, K // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
            packed[f"{name}_global_scale"] = rng.uniform(100, 900, 1).astype(np.float32)
    return packed


def write_file(path, arrays):
    safetensors.numpy.save_file(arrays, path, {"format": "pt"})


def write_folder(folder, arrays, hf=V5, tied=True, shards=1):
    """A model folder; with `shards` > 1 the tensors are dealt to files named by an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF | {"tie_word_embeddings": tied} | hf))
    if shards == 1:
        write_file(folder / "model.safetensors", arrays)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(arrays)[shard::shards]
        write_file(folder / file, {name: arrays[name] for name in names})
        weight_map |= {name: file for name in names}
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tokenizer(folder, words=20, eos="<eos>", pad="<pad>", more=()):
    """A word-level tokenizer "w0 w1 ..." with ids 0.., then pad and EOS; `more` goes into tokenizer_config.json."""
    tokens = [f"w{i}" for i in range(words)] + [token for token in (pad, eos) if token]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (pad, eos) if token])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": eos, "pad_token": pad, **dict(more)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def assert_equal(a, b):
    """Same trees, dtypes and bytes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def contents(folder):
    """The bytes of each file of a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def edit_options(**changes):
    """A function that changes options of an adapter's folder."""

    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_arrays(change):
    """A function that has the tensors of an adapter's folder changed, a dictionary by names."""

    def edit(folder):
        path = folder / "adapter_model.safetensors"
        arrays = safetensors.numpy.load_file(path)
        change(arrays)
        safetensors.numpy.save_file(arrays, path)

    return edit
