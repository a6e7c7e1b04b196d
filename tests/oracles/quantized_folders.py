"""Quantized folders as the programs write them, and the weights that these programs read out of them. Each runs in an
environment of its own, none of which this library needs:

    for name in a b c; do python3.11 -m venv $name; done
    a/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    b/bin/pip install torch==2.13.0 transformers==4.57.6 compressed-tensors==0.11.0
    c/bin/pip install torch==2.13.0 transformers==5.23.0 nvidia-modelopt==0.47.0 requests accelerate
    a/bin/python tests/oracles/quantized_folders.py llmcompressor        # its compressed-tensors is 0.19.0
    b/bin/python tests/oracles/quantized_folders.py compressed_tensors
    c/bin/python tests/oracles/quantized_folders.py modelopt

The source is qwen2_untied (bfloat16, two layers, intermediate size 48). Written beside this file, into quantized/:
    llmcompressor_nvfp4         weights only; q/k/v and gate/up share a global scale
    llmcompressor_nvfp4_w4a4    activations too, `input_global_scale`; o_proj left alone by a pattern, layer 1's gate
                                and up_proj by name
    llmcompressor_mxfp4         down_proj, whose 48 inputs are no multiple of 32, left alone by a pattern
    compressed_tensors_0.11     what that release writes; every linear has its own global scale
    modelopt_nvfp4              activations too, `input_scale`
    modelopt_w4a16              weights only; all of layer 0 and layer 1's o_proj left alone
and NAME.npz with, per folder:
    ids [2, 9]; logits [2, 9, V] in float32, from
    NAME OF A LINEAR [N, K]     the weight as the program unpacks it, in float32; plain ones are not listed
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
SOURCE, OUTPUT = HERE / "qwen2_untied", HERE / "quantized"
IDS = torch.arange(3, 21).reshape(2, 9)
Unpack = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def source(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(SOURCE, torch_dtype=dtype).eval()


@torch.no_grad()
def record(name: str, packed: str, unpack: Unpack) -> None:
    """Writes NAME.npz: the unpacked weights, and the logits of a float32 network that has them."""
    stored = load_file(OUTPUT / name / "model.safetensors")
    model = source(torch.float32)
    arrays = {}
    for linear, module in model.named_modules():
        parts = {key.removeprefix(linear + "."): value for key, value in stored.items() if key.startswith(linear + ".")}
        if isinstance(module, torch.nn.Linear) and parts[packed if packed in parts else "weight"].dtype == torch.uint8:
            weight = unpack(parts)
            module.weight.copy_(weight)
            arrays[linear] = weight.numpy()
    arrays |= {"ids": IDS.numpy().astype(np.int32), "logits": model(input_ids=IDS).logits.numpy()}
    np.savez_compressed(OUTPUT / f"{name}.npz", **arrays)
    (OUTPUT / name / "recipe.yaml").unlink(missing_ok=True)
    print(name, len(arrays) - 2, "packed linears")


def by_compressed_tensors(mxfp4: bool = False) -> Unpack:
    """Its own unpacking and dequantization, in float32 (its `decompress` always rounds to bfloat16)."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    try:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    except ImportError:  # 0.11
        from compressed_tensors.compressors.quantized_compressors.nvfp4_quantized import unpack_fp4_from_uint8

    arguments = preset_name_to_scheme("MXFP4A16" if mxfp4 else "NVFP4A16", ["Linear"]).weights

    def unpack(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        if mxfp4:
            from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

            wide = MXFP4PackedCompressor._decompress_scale(scale, torch.float32)
        else:
            wide = scale.float()
        whole = parts.get("weight_global_scale")
        return dequantize(codes, wide, args=arguments, global_scale=whole, dtype=torch.float32)

    return unpack


def llmcompressor() -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    data = Dataset.from_dict({"input_ids": IDS.tolist(), "attention_mask": torch.ones_like(IDS).tolist()})
    for name, scheme, ignore in (
        ("llmcompressor_nvfp4", "NVFP4A16", []),
        (
            "llmcompressor_nvfp4_w4a4",
            "NVFP4",
            ["re:.*o_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"],
        ),
        ("llmcompressor_mxfp4", "MXFP4A16", ["re:.*down_proj$"]),
    ):
        model = source()
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", *ignore])
        oneshot(model=model, recipe=recipe, **({"dataset": data} if scheme == "NVFP4" else {}))
        model.save_pretrained(OUTPUT / name, save_compressed=True)
        record(name, "weight_packed", by_compressed_tensors(mxfp4="MXFP4" in scheme))


def compressed_tensors() -> None:
    import compressed_tensors as program
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    assert program.__version__ == "0.11.0", program.__version__
    name, model = "compressed_tensors_0.11", source()
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_global_scale"):
                weight = module.weight
                whole = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
                blocks = weight.unflatten(-1, (-1, 16))
                scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=whole)
                module.weight_global_scale.copy_(whole)
                module.weight_scale.data = scale
                module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="nvfp4-pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(OUTPUT / name)
    compressor.update_config(OUTPUT / name)
    record(name, "weight_packed", by_compressed_tensors())


def modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def unpack(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        packed = parts["weight"]
        tensor = NVFP4QTensor(torch.Size((packed.shape[0], 2 * packed.shape[1])), torch.float32, packed)
        return tensor.dequantize(
            scale=parts["weight_scale"], double_scale=parts["weight_scale_2"], block_sizes={-1: 16}
        )

    for name, config, alone in (
        ("modelopt_nvfp4", mtq.NVFP4_DEFAULT_CFG, None),
        ("modelopt_w4a16", mtq.W4A16_NVFP4_CFG, ("model.layers.0.", "model.layers.1.self_attn.o_proj")),
    ):
        model = mtq.quantize(source(), config, lambda model: model(IDS))
        if alone:
            mtq.disable_quantizer(model, lambda quantizer, alone=alone: quantizer.startswith(alone))
        export_hf_checkpoint(model, export_dir=OUTPUT / name)
        record(name, "weight", unpack)


if __name__ == "__main__":
    torch.manual_seed(0)
    {"llmcompressor": llmcompressor, "compressed_tensors": compressed_tensors, "modelopt": modelopt}[sys.argv[1]]()
