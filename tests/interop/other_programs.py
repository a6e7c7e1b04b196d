"""transformers, PEFT and compressed-tensors at work on folders, as a program of its own: no line of this library runs
here, and its environment (requirements.txt) is not this library's.

    .venv-interop/bin/python tests/interop/other_programs.py write JOBS.json
        JOBS is {"output": folder, "networks": {NAME: {"config": object, "tokenizer": folder}}}. For each, a random
        network: output/NAME written by transformers in bfloat16, with tokenizer and generation configuration;
        NAME-KIND for each kind of ADAPTERS and NAMED by PEFT; NAME-nvfp4 and NAME-mxfp4 by compressed-tensors. Beside
        each of them its logits of IDS, .npy, also NAME-nvfp4-lora.npy of both together, and NAME.json, what `words`
        finds.
    .venv-interop/bin/python tests/interop/other_programs.py read JOBS.json
        JOBS is a list of {"model": folder, "adapter": folder or null, "dtype": "float32" or "auto", "out": path}; a
        model that is null is the one that the adapter names. out.npy gets the logits of IDS, and out.json what `words`
        finds in the adapter's folder, or else the model's.

Packed weights are unpacked by compressed-tensors, which rounds them to bfloat16. In float32 it does so as they are
loaded (`dequantize=True`). Left packed, transformers' default, they are unpacked at the first call, and only a network
in bfloat16 can use them: that is "auto".
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.quantization_config import CompressedTensorsConfig

IDS = torch.arange(3, 33).reshape(2, 15)
TEXTS = ["What is 12345 + 678?", "  spaces \n\n and \ttabs ", "é, naïve, 数学, 🙂", "<|endoftext|><|end_of_text|>x"]
CHAT = [{"role": "user", "content": "What is 7 + 5?"}]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
}
# Other ways to say which modules have a pair.
NAMED = {
    "pattern": {"target_modules": r"model\.layers\.\d+\.(?:self_attn|mlp)\.(?:(?:k_proj|o_proj|up_proj))"},
    "paths": {"target_modules": ["self_attn.q_proj", "gate_proj", "up_proj", "c_attn"], "exclude_modules": ["up_proj"]},
    "all": {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
}
PACKED = {"nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"), "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized")}


@torch.no_grad()
def logits(model: torch.nn.Module) -> np.ndarray:
    return model.eval()(input_ids=IDS).logits.float().numpy()


def words(folder: Path) -> dict:
    """What tokenizer and generation configuration say."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    eos = generation.eos_token_id
    return {
        "texts": {text: tokenizer(text)["input_ids"] for text in TEXTS},
        "chat": tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False),
        "eos": eos if isinstance(eos, list) else [eos],
        "pad": generation.pad_token_id,
    }


def load(folder: Path) -> torch.nn.Module:
    packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def read(jobs: list[dict]) -> None:
    for job in jobs:
        print(job, flush=True)  # the last one is what could not be read
        folder = Path(job["adapter"] or job["model"])
        if job["model"] is None:
            model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        elif job["adapter"]:
            model = PeftModel.from_pretrained(load(Path(job["model"])), folder)
        else:
            model = load(folder) if job["dtype"] == "float32" else AutoModelForCausalLM.from_pretrained(folder)
        np.save(job["out"] + ".npy", logits(model))
        Path(job["out"] + ".json").write_text(json.dumps(words(folder)))


def random_network(config: dict) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = 0.25 * torch.randn_like(parameter)
            parameter.copy_(1 + value if "norm" in name else value)
    return model


def adapted(model: torch.nn.Module, options: dict) -> torch.nn.Module:
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
    model = get_peft_model(model, LoraConfig(**defaults | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write_adapter(output: Path, name: str, kind: str, options: dict) -> None:
    model = adapted(load(output / name), options)
    model.save_pretrained(output / f"{name}-{kind}")
    np.save(output / f"{name}-{kind}.npy", logits(model))


def compress(model: torch.nn.Module, output: Path, preset: str, packing: str) -> None:
    """Writes `model` with its linear layers in 4 bits, in NVFP4 each with a global scale of its own."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=packing)
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            weight, whole = module.weight.data, None
            if hasattr(module, "weight_global_scale"):
                whole = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
                module.weight_global_scale.data = whole
            blocks = weight.unflatten(-1, (-1, scheme.weights.group_size))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=whole)
            module.weight_scale.data = scale
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=packing)
    compressor.compress_model(model)
    model.save_pretrained(output)
    compressor.update_config(output)


def write(output: Path, networks: dict[str, dict]) -> None:
    torch.manual_seed(0)
    for name, network in networks.items():
        model = random_network(network["config"])
        model.generation_config = GenerationConfig.from_pretrained(network["tokenizer"])
        model.save_pretrained(output / name)
        AutoTokenizer.from_pretrained(network["tokenizer"]).save_pretrained(output / name)
        (output / f"{name}.json").write_text(json.dumps(words(output / name)))
        np.save(output / f"{name}.npy", logits(load(output / name)))
        for kind, options in ADAPTERS.items():
            write_adapter(output, name, kind, options)
        for kind, (preset, packing) in PACKED.items():
            compress(load(output / name), output / f"{name}-{kind}", preset, packing)
            np.save(output / f"{name}-{kind}.npy", logits(load(output / f"{name}-{kind}")))
        model = PeftModel.from_pretrained(load(output / f"{name}-nvfp4"), output / f"{name}-lora")
        np.save(output / f"{name}-nvfp4-lora.npy", logits(model))
    # Behind everything else, so that one more of them changes no random number of the others.
    for name in networks:
        for kind, options in NAMED.items():
            write_adapter(output, name, kind, options)


if __name__ == "__main__":
    torch.set_num_threads(1)  # such small networks only wait for other threads
    jobs = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "write":
        write(Path(jobs["output"]), jobs["networks"])
    else:
        read(jobs)
