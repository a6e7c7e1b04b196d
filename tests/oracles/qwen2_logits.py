"""What transformers and PEFT compute for two tiny random Qwen2 networks, stored for the tests; and the check that PEFT
reads the adapters that this library writes. Runs in an environment of its own, which this library does not need:

    python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
    oracle/bin/python tests/oracles/qwen2_logits.py                # writes qwen2_*/ and qwen2_logits.npz beside it
    oracle/bin/python tests/oracles/qwen2_logits.py check MODEL ADAPTER LOGITS.npz

`check` loads two folders with transformers and PEFT and compares with the arrays `input_ids` and `logits` of the file.

    qwen2_tied     float32 file, version-5 config.json; adapter: LoRA on all seven linears
    qwen2_untied   bfloat16 file, version-4 config.json; adapter: rank-stabilised LoRA and trained norms
Per network N of these, qwen2_logits.npz holds, computed in float32:
    N/right_ids, N/right_mask [3, 9]     tokens padded on the right
    N/right_logits [3, 9, V]             positions count from 0
    N/left_ids, N/left_mask [3, 9]       the same tokens padded on the left
    N/left_logits [3, 9, V]              positions count real tokens
    N/greedy [3, 16]                     continuations of the left-padded rows
    N/adapter_logits [3, 9, V]           right_ids with the adapter
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

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
)


def random_model(tied: bool, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Weights large enough that attention is far from uniform; biases not zero, norm scales not one."""
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    config = Qwen2Config(**SHAPE, tie_word_embeddings=tied, rope_parameters=rope, bos_token_id=None, eos_token_id=None)
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.25)
            parameter.copy_((1 + value if "norm" in name else value).to(dtype))
    return model


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


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float().numpy()


def as_version_4(folder: Path) -> None:
    """The config.json that transformers 4 wrote."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write() -> None:
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    for name, tied in (("qwen2_tied", True), ("qwen2_untied", False)):
        dtype = torch.float32 if tied else torch.bfloat16
        model = random_model(tied, dtype)
        # Through the file and back, so that the logits are those of the stored weights, in float32.
        model.to(dtype).save_pretrained(HERE / name)
        model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()
        right, left = (rows(torch.Generator().manual_seed(1), side) for side in (False, True))
        arrays[f"{name}/right_ids"], arrays[f"{name}/right_mask"] = (x.numpy().astype(np.int32) for x in right)
        arrays[f"{name}/left_ids"], arrays[f"{name}/left_mask"] = (x.numpy().astype(np.int32) for x in left)
        arrays[f"{name}/right_logits"] = logits(model, *right)
        arrays[f"{name}/left_logits"] = logits(model, *left)
        out = model.generate(left[0], attention_mask=left[1], max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
        arrays[f"{name}/greedy"] = out[:, SLOTS:].numpy().astype(np.int32)
        options = {} if tied else {"use_rslora": True, "modules_to_save": NORMS}
        lora = LoraConfig(r=4, lora_alpha=6, target_modules=LINEARS, task_type="CAUSAL_LM", **options)
        model.name_or_path = name
        adapted = get_peft_model(model, lora).eval()
        for config in adapted.peft_config.values():
            config.base_model_name_or_path = name
        randomise_adapter(adapted)
        adapted.save_pretrained(HERE / f"{name}_adapter")
        (HERE / f"{name}_adapter" / "README.md").unlink(missing_ok=True)
        arrays[f"{name}/adapter_logits"] = logits(adapted, *right)
        if not tied:
            as_version_4(HERE / name)
    np.savez_compressed(HERE / "qwen2_logits.npz", **arrays)


def check(model_folder: Path, adapter_folder: Path, expected: Path) -> None:
    stored = np.load(expected)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(model, adapter_folder).eval()
    ids = torch.from_numpy(stored["input_ids"]).long()
    found = logits(adapted, ids, torch.ones_like(ids))
    with adapted.disable_adapter():
        off = logits(adapted, ids, torch.ones_like(ids))
    difference = float(np.abs(found - stored["logits"]).max())
    print(f"largest difference of logits {difference:.2e}; the adapter moves them by {np.abs(found - off).max():.2f}")
    assert difference < 1e-4


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="*", help="nothing, or: check MODEL ADAPTER LOGITS.npz")
    words = parser.parse_args().command
    if words[:1] == ["check"]:
        check(*(Path(word) for word in words[1:]))
    else:
        write()
