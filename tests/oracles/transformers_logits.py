"""What transformers and PEFT compute for tiny random networks of each family, stored for the tests; and the check that
they read the models and adapters that this library writes. Runs in an environment of its own, which this library does
not need:

    python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
    oracle/bin/python tests/oracles/transformers_logits.py       # writes the folders and transformers_logits.npz here

    python tests/oracles/write_families.py FOLDER                         # this library writes models and adapters,
    oracle/bin/python tests/oracles/transformers_logits.py check FOLDER   # transformers and PEFT read them

Per network N of `NETWORKS` there is a model folder N and an adapter folder N_adapter; transformers_logits.npz holds,
computed in float32:
    N/right_ids, N/right_mask [3, 9]     tokens padded on the right
    N/right_logits [3, 9, V]             positions count from 0
    N/left_ids, N/left_mask [3, 9]       the same tokens padded on the left
    N/left_logits [3, 9, V]              positions count real tokens
    N/greedy [3, 16]                     continuations of the left-padded rows
    N/adapter_logits [3, 9, V]           right_ids with the adapter
    N/loss, N/gradient/TENSOR            with the adapter: the mean of -log p(next token) over the pairs of neighbours
                                         in right_ids that are both real, and its gradient by each tensor of the adapter
Per entry R of `ROPES`: rope/R/config (the JSON text of its config.json), rope/R/frequencies [E / 2], rope/R/factor.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
LENGTHS, SLOTS, NEW, PAD = (9, 4, 6), 9, 16, 0
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]
SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=None,
)
DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}
# Scalings whose original length is shorter than the rows, so that they act.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
TRAINED_NORMS = {"use_rslora": True, "modules_to_save": NORMS}
# name: (configuration, dtype of the file, spelling of config.json, largest shard, options of the adapter)
NETWORKS = {
    "qwen2_tied": (Qwen2Config(**SHAPE, tie_word_embeddings=True, rope_parameters=DEFAULT), "float32", 5, None, {}),
    "qwen2_untied": (Qwen2Config(**SHAPE, rope_parameters=DEFAULT), "bfloat16", 4, None, TRAINED_NORMS),
    "qwen3_sharded": (
        Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters=DEFAULT),
        "bfloat16",
        4,
        "20KB",
        TRAINED_NORMS,
    ),
    "qwen3_yarn": (
        Qwen3Config(**SHAPE, head_dim=16, attention_bias=True, rope_parameters=YARN),
        "float32",
        5,
        None,
        {},
    ),
    "llama3": (LlamaConfig(**SHAPE, rope_parameters=LLAMA3), "bfloat16", 4, None, TRAINED_NORMS),
    "llama_biased": (
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LINEAR),
        "float32",
        5,
        "60KB",
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
}
PUBLISHED_LLAMA3 = LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
PUBLISHED_YARN = YARN | {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768}
# name: (head_dim, rope parameters)
ROPES = {
    "qwen2.5": (128, {"rope_type": "default", "rope_theta": 1000000.0}),
    "qwen2.5-yarn": (128, PUBLISHED_YARN),
    "llama-3.1": (128, PUBLISHED_LLAMA3),
    "llama-3.2-1b": (64, PUBLISHED_LLAMA3 | {"factor": 32.0}),
    "linear": (80, LINEAR),
    "yarn-all": (
        96,
        PUBLISHED_YARN
        | {"factor": 2.5, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
    ),
}


def random_model(config: object, dtype: torch.dtype) -> torch.nn.Module:
    """Weights large enough that attention is far from uniform; biases not zero, norm scales not one."""
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.25)
            parameter.copy_((1 + value if "norm" in name else value).to(dtype))
    return model.to(dtype)


def randomise_adapter(model: PeftModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def rows(generator: torch.Generator, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.full((len(LENGTHS), SLOTS), PAD), torch.zeros((len(LENGTHS), SLOTS), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        where = slice(SLOTS - length, SLOTS) if left else slice(0, length)
        ids[row, where] = torch.randint(1, SHAPE["vocab_size"], (length,), generator=generator)
        mask[row, where] = 1
    return ids, mask


def logits(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float()


def gradients(model: PeftModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, np.ndarray]:
    """Loss and gradients under the names that the adapter's file has for its tensors."""
    logps = logits(model, ids, mask)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    real = mask[:, 1:].bool()  # padding is on the right
    loss = -logps[real].mean()
    loss.backward()
    found = {"loss": loss.detach().numpy()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.replace(".modules_to_save.default", "").replace(".default", "")
            found[f"gradient/{name}"] = parameter.grad.numpy()
    return found


def as_version_4(folder: Path) -> None:
    """The config.json that transformers 4 wrote."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_network(name: str) -> dict[str, np.ndarray]:
    config, dtype, spelling, shard, options = NETWORKS[name]
    folder, adapter_folder = HERE / name, HERE / f"{name}_adapter"
    shutil.rmtree(folder, ignore_errors=True)
    # Through the file and back, so that the logits are those of the stored weights, in float32.
    stored = random_model(config, getattr(torch, dtype))
    stored.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if spelling == 4:
        as_version_4(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right, left = (rows(torch.Generator().manual_seed(1), side) for side in (False, True))
    with torch.no_grad():
        arrays = {"right_logits": logits(model, *right).numpy(), "left_logits": logits(model, *left).numpy()}
    arrays["right_ids"], arrays["right_mask"] = (x.numpy().astype(np.int32) for x in right)
    arrays["left_ids"], arrays["left_mask"] = (x.numpy().astype(np.int32) for x in left)
    out = model.generate(left[0], attention_mask=left[1], max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
    arrays["greedy"] = out[:, SLOTS:].numpy().astype(np.int32)
    lora = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **{"target_modules": LINEARS, **options})
    model.name_or_path = name
    adapted = get_peft_model(model, lora).eval()
    for entry in adapted.peft_config.values():
        entry.base_model_name_or_path = name
    randomise_adapter(adapted)
    adapted.save_pretrained(adapter_folder)
    (adapter_folder / "README.md").unlink(missing_ok=True)
    with torch.no_grad():
        arrays["adapter_logits"] = logits(adapted, *right).numpy()
    arrays |= gradients(adapted, *right)
    return {f"{name}/{key}": array for key, array in arrays.items()}


def write() -> None:
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    for name in NETWORKS:
        arrays |= write_network(name)
    for name, (head_dim, parameters) in ROPES.items():
        config = LlamaConfig(**SHAPE | {"max_position_embeddings": 131072}, head_dim=head_dim)
        config.rope_parameters = dict(parameters)
        rotary = LlamaRotaryEmbedding(config)
        arrays[f"rope/{name}/config"] = np.array(json.dumps(config.to_dict() | {"rope_parameters": parameters}))
        arrays[f"rope/{name}/frequencies"] = rotary.inv_freq.numpy()
        arrays[f"rope/{name}/factor"] = np.array(rotary.attention_scaling)
    np.savez_compressed(HERE / "transformers_logits.npz", **arrays)


def check(folder: Path) -> None:
    for expected in sorted(folder.glob("*.npz")):
        stored = np.load(expected)
        model = AutoModelForCausalLM.from_pretrained(str(stored["model"]), dtype=torch.float32).eval()
        adapted = PeftModel.from_pretrained(model, expected.with_suffix("")).eval()
        [config] = adapted.peft_config.values()
        ids = torch.from_numpy(stored["input_ids"]).long()
        with torch.no_grad():
            found = logits(adapted, ids, torch.ones_like(ids)).numpy()
            with adapted.disable_adapter():
                off = logits(adapted, ids, torch.ones_like(ids)).numpy()
        largest = np.abs(stored["logits"]).max()
        relative, moved = np.abs(found - stored["logits"]).max() / largest, np.abs(found - off).max() / largest
        print(
            f"{expected.stem}: difference {relative:.1e} of the largest logit, {moved:.2f} without the adapter; "
            f"r {config.r}, alpha {config.lora_alpha}, use_rslora {config.use_rslora}, "
            f"{len(config.target_modules)} modules, modules_to_save {config.modules_to_save}"
        )
        assert relative < 2e-5 < 0.05 < moved


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="*", help="nothing, or: check FOLDER")
    words = parser.parse_args().command
    if words[:1] == ["check"]:
        check(Path(words[1]))
    else:
        write()
