"""transformers, PEFT and compressed-tensors at work on folders, as a program of its own: no line of this library runs
here, and its environment (requirements.txt) is not this library's.

    .venv-interop/bin/python tests/interop/other_programs.py read JOBS.json
        JOBS is a list of {"model": folder, "adapter": folder or null, "out": file}; each `out` gets the logits of IDS.
    .venv-interop/bin/python tests/interop/other_programs.py write OUTPUT NAME=FOLDER ...
        For each FOLDER's config.json, a random network: OUTPUT/NAME written by transformers, _lora, _rslora and _norms
        by PEFT, _nvfp4 by compressed-tensors, and beside each of them its logits of IDS, .npy.

All compute in float32. The linear layers of a packed folder are unpacked by compressed-tensors (`dequantize=True`),
which rounds them to bfloat16.
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
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

IDS = torch.arange(3, 33).reshape(2, 15)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
}


@torch.no_grad()
def logits(model: torch.nn.Module) -> np.ndarray:
    return model.eval()(input_ids=IDS).logits.numpy()


def load(folder: Path) -> torch.nn.Module:
    packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).float()


def read(jobs: list[dict]) -> None:
    for job in jobs:
        model = load(Path(job["model"]))
        if job["adapter"]:
            model = PeftModel.from_pretrained(model, job["adapter"])
        np.save(job["out"], logits(model))


def random_network(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = 0.25 * torch.randn_like(parameter)
            parameter.copy_(1 + value if "norm" in name else value)
    return model


def compress(model: torch.nn.Module, output: Path) -> None:
    """Writes `model` with its linear layers in NVFP4, each with a global scale of its own."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format="nvfp4-pack-quantized")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_global_scale"):
            weight = module.weight.data
            whole = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
            blocks = weight.unflatten(-1, (-1, 16))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=whole)
            module.weight_global_scale.data, module.weight_scale.data = whole, scale
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="nvfp4-pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(output)
    compressor.update_config(output)


def write(output: Path, sources: dict[str, Path]) -> None:
    torch.manual_seed(0)
    for name, source in sources.items():
        model = random_network(source)
        model.save_pretrained(output / name)
        np.save(output / f"{name}.npy", logits(model))
        for kind, options in ADAPTERS.items():
            lora = LoraConfig(
                **{"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM"} | options
            )
            adapted = get_peft_model(load(output / name), lora)
            with torch.no_grad():
                for parameter_name, parameter in adapted.named_parameters():
                    if "lora_" in parameter_name or "modules_to_save" in parameter_name:
                        parameter.add_(0.2 * torch.randn_like(parameter))
            adapted.save_pretrained(output / f"{name}_{kind}")
            np.save(output / f"{name}_{kind}.npy", logits(adapted))
        compress(model, output / f"{name}_nvfp4")
        np.save(output / f"{name}_nvfp4.npy", logits(load(output / f"{name}_nvfp4")))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(json.loads(Path(sys.argv[2]).read_text()))
    else:
        write(Path(sys.argv[2]), {name: Path(folder) for name, folder in (word.split("=") for word in sys.argv[3:])})
