"""Which program packed a model folder's linear layers, if any."""

import os
from pathlib import Path
from typing import Any

from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import read_json
from qerl_jax.models.compressed_tensors import compressed_tensors_packing
from qerl_jax.models.modelopt import QUANT_CONFIG, modelopt_packing
from qerl_jax.models.packing import TAKE_PLAIN, Packing
from qerl_jax.models.source import CONFIG, resolve
from qerl_jax.option_names import check_format

_READERS = {
    "compressed-tensors": compressed_tensors_packing,
    "modelopt": modelopt_packing,
    "modelopt_fp4": modelopt_packing,  # as vLLM and SGLang name its NVFP4
}


def packing_of(hf: dict[str, Any], folder: Path) -> Packing | None:
    """How the folder with the config.json `hf` stores its linear layers; None where they are plain.

    Raises:
      UserError: quantized in a way that is not supported; names file and key, what was found and what is supported.
    """
    quantization = hf.get("quantization_config")
    if quantization is not None:
        where = folder / CONFIG
        method = quantization
        if isinstance(quantization, dict):
            method = quantization.get("quant_method") or quantization.get("quant_library")
        if not isinstance(method, str) or method not in _READERS:
            known = " or ".join(map(repr, _READERS))
            raise UserError(
                f"{where}: quantization_config quant_method is {shown(repr(method))}; supported is {known}; "
                f"{TAKE_PLAIN}"
            )
        return _READERS[method](quantization, where)
    if (folder / QUANT_CONFIG).is_file():
        where = folder / QUANT_CONFIG
        return modelopt_packing(read_json(where), where)
    return None


def rounded_to(path: str | os.PathLike[str], weight_format: str | None) -> str:
    """The format whose values a model's linear weights have once they are loaded: for a packed folder its own, even if
    they are unpacked; "bf16" if no 4-bit format has rounded them, whatever their dtype.

    Args:
      path, weight_format: as for `load_model`.

    Raises:
      UserError: there is no such folder or format, or no folder that can be read.
    """
    check_format(weight_format)
    folder = resolve(path)
    packing = packing_of(read_json(folder / CONFIG), folder)
    return weight_format or "bf16" if packing is None else packing.weight_format
