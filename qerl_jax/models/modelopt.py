"""Packed weights as NVIDIA's modelopt stores them: NVFP4 with a second scale that multiplies.

    ....weight          uint8 [N, K/2]            codes, in the order of compressed-tensors
    ....weight_scale    float8_e4m3fn [N, K/16]   block scales
    ....weight_scale_2  float32 []                w = code * (weight_scale * weight_scale_2)
    ....input_scale     float32 []                for activations in FP4; says nothing about the weights, so not read
    ....k_scale, ....v_scale                      for keys and values in FP8, as most folders of NVIDIA ask; neither

hf_quant_config.json says how the folder was made; since 0.29 config.json repeats it as `quantization_config`, where the
first such releases named the program as `quant_library`, and the cache by a word.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from qerl_jax.errors import UserError, shown
from qerl_jax.formats import NVFP4Weight
from qerl_jax.models.mapped import to_device
from qerl_jax.models.packing import (
    FP8,
    KV_SCALES,
    TAKE_PLAIN,
    Packing,
    Slot,
    check_options,
    e4m3_scales,
    names_list,
    positive_scale,
    warn_of_activations,
    warn_of_kv_cache,
)
from qerl_jax.models.source import Tensors

QUANT_CONFIG = "hf_quant_config.json"
# "NVFP4" has activations in FP4 too. NVFP4_AWQ and NVFP4_SVD change the layers' inputs; they are other functions.
_WEIGHTS_ONLY, _WITH_ACTIVATIONS = "W4A16_NVFP4", "NVFP4"
_OPTIONS: dict[str, tuple[object, ...]] = {"quant_algo": (_WEIGHTS_ONLY, _WITH_ACTIVATIONS), "group_size": (16, None)}
_CACHES = (None, "FP8", "NVFP4")  # both have the same two scales


def modelopt_packing(quantization: dict[str, Any], where: Path) -> Packing:
    """How linear layers are stored.

    Args:
      quantization: hf_quant_config.json, whose `quantization` excludes `exclude_modules`, or config.json's
        `quantization_config`, which has the same list as `ignore`. Either may be as the other is.
      where: the file, for messages.

    Raises:
      UserError: quantized in a way that is not supported; names the key, what was found and what is supported.
    """
    inner = quantization.get("quantization", quantization)
    if not isinstance(inner, dict):
        raise UserError(f"{where}: quantization is {shown(repr(inner))}; expected an object")
    check_options(inner, _OPTIONS, f"{where}:", TAKE_PLAIN)
    excluded = [
        pattern for key in ("exclude_modules", "ignore") for pattern in names_list(inner.get(key), f"{where}: {key}")
    ]
    if inner["quant_algo"] == _WITH_ACTIVATIONS:
        warn_of_activations(where)
    if (cache := _cache(inner, where)) is not None:
        warn_of_kv_cache(where, cache)
    return Packing("nvfp4", _matcher(excluded), _parts, _read, (".input_scale", *KV_SCALES))


def _cache(inner: dict[str, Any], where: Path) -> str | None:
    """The format of keys and values; None where they are left alone."""
    scheme = inner.get("kv_cache_scheme")  # config.json's word for it
    if isinstance(scheme, dict):
        check_options(scheme, FP8, f"{where}: kv_cache_scheme")
        return "FP8"
    key = "kv_cache_quant_algo" if scheme is None else "kv_cache_scheme"
    check_options(inner, {key: _CACHES}, f"{where}:")
    return inner.get(key)


def _parts(N: int, K: int) -> dict[str, Slot]:
    return {
        "": Slot((N, K // 2), ("uint8",)),
        "_scale": Slot((N, K // 16), ("float8_e4m3fn",)),
        "_scale_2": Slot((), ("float32",)),
    }


def _read(tensors: Tensors, name: str) -> NVFP4Weight:
    scale, whole = e4m3_scales(tensors, f"{name}_scale"), positive_scale(tensors, f"{name}_scale_2")
    packed = tensors[name][1]
    return NVFP4Weight(to_device(packed), to_device(scale), jnp.float32(whole), scale_multiplies=True)


def _matcher(patterns: list[str]) -> Callable[[str], bool]:
    """Whether a weight's name begins with a module of `patterns`, in which * stands for anything.

    What is between two stars is looked for once, behind what was found before it: the first place is as good as any
    later one, and a pattern of many stars takes no longer for it.
    """

    def expression(pattern: str) -> re.Pattern[str]:
        first, *others = map(re.escape, (pattern + ".").split("*"))
        return re.compile(first + "".join(f"(?>.*?{text})" for text in others))

    expressions = [expression(pattern) for pattern in patterns]
    return lambda name: any(expression.match(name) for expression in expressions)
