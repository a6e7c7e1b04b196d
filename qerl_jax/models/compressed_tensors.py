"""NVFP4 weights as compressed-tensors (llm-compressor, vLLM) stores them in a model folder: `nvfp4-pack-quantized`.

Beside the name of the plain weight there are `_packed`, `_scale` and `_global_scale`; their bytes are those of
`qerl_jax.formats.nvfp4`. The global scale is read, never recomputed: q/k/v share one, and gate/up.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.formats import NVFP4Weight
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
    return NVFP4Weight(jnp.array(packed, copy=True), jnp.array(scale, copy=True), jnp.float32(whole))
