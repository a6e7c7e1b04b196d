"""Packed weights as compressed-tensors (llm-compressor, vLLM) stores them: `nvfp4-pack-quantized`, read and
written, and `mxfp4-pack-quantized`, read.

Beside the name of the plain weight there are `_packed`, `_scale` and, for NVFP4, `_global_scale`; their bytes are those
of `qerl_jax.formats`. Scales are read, never recomputed: q/k/v may share a global scale or each have their own.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError, shown
from qerl_jax.formats import KernelNVFP4, MXFP4Weight, NVFP4Weight, Weight, canonical
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
from qerl_jax.models.shards import Stored
from qerl_jax.models.source import Tensors

_MOST_REPETITIONS = 5
_MOST_GROUPS = 6
_LINEAR = "Linear"
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_DTYPE_E4M3 = "torch.float8_e4m3fn"  # read also without "torch."
_E8M0_NAN = 255
# Keys of quantization_config that are read here, or that say nothing about the weights; any other must be unset.
_KNOWN = {
    "config_groups",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "quantization_status",
    "run_compressed",
    "version",
}
# "frozen" is what older releases wrote for the same files.
_STATUS = {"quant_method": ("compressed-tensors",), "quantization_status": ("compressed", "frozen")}
_GROUP_KEYS = {"weights", "targets", "input_activations", "output_activations", "format"}
_FP4: dict[str, tuple[object, ...]] = {"num_bits": (4,), "type": ("float",), "symmetric": (True,)}


class _Stored(NamedTuple):
    """One of the program's formats."""

    weight_format: str
    weights: dict[str, tuple[object, ...]]
    parts: Callable[[int, int], dict[str, Slot]]
    read: Callable[[Tensors, str], Weight]


def _nvfp4_parts(N: int, K: int) -> dict[str, Slot]:
    return {
        "_packed": Slot((N, K // 2), ("uint8",)),
        "_scale": Slot((N, K // 16), ("float8_e4m3fn",)),
        "_global_scale": Slot((1,), ("float32",)),
    }


def packed_weight(tensors: Tensors, name: str) -> NVFP4Weight:
    """The stored NVFP4 weight `name` on the device.

    Raises:
      UserError: a block scale with a sign or NaN, or a global scale that is not a positive number.
    """
    scale, whole = e4m3_scales(tensors, f"{name}_scale"), positive_scale(tensors, f"{name}_global_scale")
    packed = tensors[f"{name}_packed"][1]
    return NVFP4Weight(to_device(packed), to_device(scale), jnp.float32(whole))


def _mxfp4_parts(N: int, K: int) -> dict[str, Slot]:
    return {"_packed": Slot((N, K // 2), ("uint8",)), "_scale": Slot((N, K // 32), ("uint8",))}


def _read_mxfp4(tensors: Tensors, name: str) -> MXFP4Weight:
    where, scale = tensors[f"{name}_scale"]
    bad = np.argwhere(scale == _E8M0_NAN)
    if bad.size:
        raise UserError(
            f"{where}: tensor {name}_scale: expected exponents below {_E8M0_NAN}, which is NaN; found {len(bad)} of "
            f"it, the first at {bad[0].tolist()}"
        )
    return MXFP4Weight(to_device(tensors[f"{name}_packed"][1]), to_device(scale))


_FORMATS = {
    _NVFP4: _Stored(
        "nvfp4",
        _FP4
        | {
            "strategy": ("tensor_group",),
            "group_size": (16,),
            "dynamic": (False,),
            "scale_dtype": (_DTYPE_E4M3, _DTYPE_E4M3.removeprefix("torch."), None),
        },
        _nvfp4_parts,
        packed_weight,
    ),
    _MXFP4: _Stored(
        "mxfp4",
        _FP4
        | {
            "strategy": ("group",),
            "group_size": (32,),
            "dynamic": (False,),
            "scale_dtype": ("torch.uint8", "uint8", None),
        },
        _mxfp4_parts,
        _read_mxfp4,
    ),
}


def compressed_tensors_packing(quantization: dict[str, Any], where: Path) -> Packing:
    """How linear layers are stored, by config.json's `quantization_config`.

    Args:
      quantization: that object; `ignore` and `targets` may name modules, classes, or patterns after "re:".
      where: the file, for messages.

    Raises:
      UserError: quantized in a way that is not supported; names the key, what was found and what is supported.
    """
    place = f"{where}: quantization_config"
    check_options(quantization, _STATUS, place)
    _refuse_others(quantization, _KNOWN, place)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise UserError(f"{place} config_groups is {shown(repr(groups))}; expected an object of at least one group")
    # A group's own format stands above the folder's, which is "mixed-precision" where those of groups differ.
    formats = [str(group.get("format") or quantization.get("format")) for group in groups.values()]
    if any(found not in _FORMATS or found != formats[0] for found in formats):
        one = "; all groups must have the same" if len(groups) > 1 else ""
        raise UserError(
            f"{place} format is {shown(' and '.join(map(repr, formats)))}; supported is {' or '.join(_FORMATS)}{one}; "
            f"{TAKE_PLAIN}"
        )
    stored_as = _FORMATS[formats[0]]
    for name, group in groups.items():
        _check_group(group, stored_as, f"{place} {shown(name)}")
    if any(group.get("input_activations") for group in groups.values()):
        warn_of_activations(where)
    if (scheme := quantization.get("kv_cache_scheme")) is not None:
        check_options(scheme, FP8, f"{place} kv_cache_scheme")
        warn_of_kv_cache(where)
    targets = [t for name, g in groups.items() for t in names_list(g.get("targets"), f"{place} {shown(name)} targets")]
    targeted = _matcher(targets, f"{place} targets")
    ignored = _matcher(names_list(quantization.get("ignore"), f"{place} ignore"), f"{place} ignore")
    return Packing(
        stored_as.weight_format,
        lambda name: ignored(name.removesuffix(".weight")) or not targeted(name.removesuffix(".weight")),
        stored_as.parts,
        stored_as.read,
        (".input_global_scale", *KV_SCALES),
    )


def _refuse_others(found: dict[str, Any], known: set[str], place: str) -> None:
    for key, value in found.items():
        if key not in known and value and value != {"format": "dense"}:
            found_there = f"{shown(key)} ({shown(repr(value))})"
            raise UserError(f"{place} {found_there} is not supported; expected it to be absent or null; {TAKE_PLAIN}")


def _check_group(group: dict[str, Any], stored_as: _Stored, place: str) -> None:
    _refuse_others(group, _GROUP_KEYS, place)
    check_options(group.get("weights"), stored_as.weights, f"{place} weights", TAKE_PLAIN)
    if (activations := group.get("input_activations")) is not None:
        check_options(activations, _FP4, f"{place} input_activations")
    check_options(group, {"output_activations": (None,)}, place)


def _matcher(patterns: list[str], place: str) -> Callable[[str], bool]:
    """Whether a linear module's name is one of `patterns`, as compressed-tensors matches them."""
    exact = {pattern for pattern in patterns if not pattern.startswith("re:")}
    expressions = [_expression(pattern.removeprefix("re:"), place) for pattern in patterns if pattern.startswith("re:")]
    return lambda name: _LINEAR in exact or name in exact or any(e.match(name) for e in expressions)


def _expression(text: str, place: str) -> re.Pattern[str]:
    """A compiled pattern. It comes from a file: one that repeats a group, or repeats or chooses often, may take years
    to match."""
    # A ? behind an opening bracket is part of the group's kind.
    often = len(re.findall(r"[*+{]|(?<!\()\?", text)) > _MOST_REPETITIONS
    if re.search(r"\)[*+{]", text) or often or ("|" in text and text.count("(") > _MOST_GROUPS):
        raise UserError(
            f"{place} is {shown(repr(text))}; supported are regular expressions without repeated groups, with at most "
            f"{_MOST_REPETITIONS} repetitions, and with | at most {_MOST_GROUPS} groups"
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{place}: {shown(repr(text))} is not a regular expression ({shown(error)})") from None


def quantization_config(ignore: Iterable[str] = ("lm_head",)) -> dict[str, Any]:
    """config.json's `quantization_config` of a folder whose linear layers are NVFP4, as llm-compressor spells it.

    Args:
      ignore: names of the linear modules that are plain.
    """
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 16,
        "num_bits": 4,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": _DTYPE_E4M3,
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": _NVFP4,
        "input_activations": None,
        "output_activations": None,
        "targets": [_LINEAR],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": _NVFP4,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


def to_store(name: str, weight: Weight) -> dict[str, Stored]:
    """What stands for the packed weight `name` ([N, K], "....weight") in a folder; arrays are made when asked for.

    A weight whose second scale multiplies (modelopt's) is written with that scale's reciprocal, rounded to float32:
    its block steps are then at most one unit in the last place off.

    Raises:
      UserError: a weight of another format.
    """
    if not isinstance(weight, NVFP4Weight | KernelNVFP4):
        raise UserError(
            f"{name}: a compressed-tensors folder is written of NVFP4 weights; found {type(weight).__name__}"
        )

    def stored(suffix: str, of: Callable[[NVFP4Weight], jax.Array]) -> Stored:
        shape, [dtype] = _nvfp4_parts(*weight.shape)[suffix]
        return Stored(
            jax.ShapeDtypeStruct(shape, dtype),
            lambda: of(canonical(weight) if isinstance(weight, KernelNVFP4) else weight),
        )

    return {
        f"{name}_packed": stored("_packed", lambda w: w.packed),
        f"{name}_scale": stored("_scale", lambda w: w.scale),
        f"{name}_global_scale": stored("_global_scale", lambda w: w.divisor.reshape(1)),
    }
