"""NVFP4 weights as compressed-tensors (llm-compressor, vLLM) stores them in a model folder: `nvfp4-pack-quantized`.

Beside the name of the plain weight there are `_packed`, `_scale` and `_global_scale`; their bytes are those of
`qerl_jax.formats.nvfp4`. The global scale is read, never recomputed: q/k/v share one, and gate/up.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.formats import KernelNVFP4, NVFP4Weight, Weight, canonical
from qerl_jax.models.mapped import to_device
from qerl_jax.models.shards import Stored
from qerl_jax.models.source import Tensors

_SUPPORTED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
}
_GROUP: dict[str, Any] = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
_WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}


def is_packed(quantization: Any, where: Path) -> bool:
    """Whether the projections are stored as NVFP4, by config.json's `quantization_config` (None: they are plain).

    Raises:
      UserError: quantized in another way; names the key, what was found and what is supported.
    """
    if quantization is None:
        return False

    def compare(found: Any, expected: dict[str, Any], place: str) -> None:
        for key, value in expected.items():
            actual = found.get(key) if isinstance(found, dict) else found
            if actual != value:
                raise UserError(f"{where}: {place} {key} is {actual!r}; supported is {value!r}")

    compare(quantization, _SUPPORTED, "quantization_config")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UserError(f"{where}: quantization_config config_groups is {groups!r}; supported is one group")
    [(name, group)] = groups.items()
    compare(group, _GROUP, f"quantization_config {name}")
    compare(group.get("weights"), _WEIGHTS, f"quantization_config {name} weights")
    return True


def packed_slots(N: int, K: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Suffix of the plain name -> (shape, allowed dtypes) of what stands for a weight [N, K]."""
    return {
        "_packed": ((N, K // 2), ("uint8",)),
        "_scale": ((N, K // 16), ("float8_e4m3fn",)),
        "_global_scale": ((1,), ("float32",)),
    }


def packed_weight(tensors: Tensors, name: str) -> NVFP4Weight:
    """The stored weight `name` on the device.

    Raises:
      UserError: a block scale with a sign or NaN, or a global scale that is not a positive number.
    """
    where, scale = tensors[f"{name}_scale"]
    # Kernels decode a scale by shifting its bits, which holds for 0x00-0x7E: no sign, no NaN.
    bad = np.argwhere(scale.view(np.uint8) > 0x7E)
    if bad.size:
        raise UserError(
            f"{where}: tensor {name}_scale: expected scales that are neither negative nor NaN; found {len(bad)} "
            f"others, the first {float(scale[tuple(bad[0])])} at {bad[0].tolist()}"
        )
    where, [whole] = tensors[f"{name}_global_scale"]
    if not (np.isfinite(whole) and whole > 0):
        raise UserError(f"{where}: tensor {name}_global_scale: expected a positive number, found {whole}")
    packed = tensors[f"{name}_packed"][1]
    return NVFP4Weight(to_device(packed), to_device(scale), jnp.float32(whole))


def quantization_config(ignore: Iterable[str] = ("lm_head",)) -> dict[str, Any]:
    """config.json's `quantization_config` of a folder whose linear layers are NVFP4, as llm-compressor spells it.

    Args:
      ignore: names of the linear modules that are plain.
    """
    weights = _WEIGHTS | {
        "actorder": None,
        "block_structure": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": None,
    }
    return {
        "config_groups": {"group_0": _GROUP | {"format": _SUPPORTED["format"], "weights": weights}},
        "format": _SUPPORTED["format"],
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": _SUPPORTED["quant_method"],
        "quantization_status": _SUPPORTED["quantization_status"],
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


def to_store(name: str, weight: Weight) -> dict[str, Stored]:
    """What stands for the packed weight `name` ([N, K], "....weight") in a folder; arrays are made when asked for.

    Raises:
      UserError: a weight of another format.
    """
    if not isinstance(weight, NVFP4Weight | KernelNVFP4):
        raise UserError(
            f"{name}: a compressed-tensors folder is written of NVFP4 weights; found {type(weight).__name__}"
        )

    def stored(suffix: str, of: Callable[[NVFP4Weight], jax.Array]) -> Stored:
        shape, [dtype] = packed_slots(*weight.shape)[suffix]
        return Stored(
            jax.ShapeDtypeStruct(shape, dtype),
            lambda: of(canonical(weight) if isinstance(weight, KernelNVFP4) else weight),
        )

    return {
        f"{name}_packed": stored("_packed", lambda w: w.packed),
        f"{name}_scale": stored("_scale", lambda w: w.scale),
        f"{name}_global_scale": stored("_global_scale", lambda w: w.global_scale.reshape(1)),
    }


def stored_tensors(name: str, weight: Weight) -> dict[str, np.ndarray]:
    """`to_store`, made: the arrays by their names in the folder, byte for byte those of the weight."""
    return {stored: np.asarray(tensor.make()) for stored, tensor in to_store(name, weight).items()}
