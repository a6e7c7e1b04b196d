"""How a model folder stores its packed linear layers: what the readers of each program's folders have in common."""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qerl_jax.errors import UserError, shown
from qerl_jax.formats import Weight
from qerl_jax.models.dtypes import DTYPES
from qerl_jax.models.source import Tensors

_log = logging.getLogger(__name__)

KV_SCALES = (".k_scale", ".v_scale")  # of a cache in FP8 or FP4, which a configuration may no longer ask for
FP8: dict[str, tuple[object, ...]] = {"num_bits": (8,), "type": ("float",)}  # of a `kv_cache_scheme`
TAKE_PLAIN = "take the plain model that this one was made from"
_LARGEST_SCALE = 1e30  # beyond, and below its inverse, weights and what is divided by leave float32's range


class Slot(NamedTuple):
    """One tensor of the network: its shape in the file and the dtypes it may have there."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = DTYPES


class Packing(NamedTuple):
    """A folder's way of storing linear layers.

    weight_format: the word for what the packed ones become, one of `qerl_jax.formats.FORMATS`.
    is_plain: whether the weight of a name ("model.layers.0.mlp.up_proj.weight") is stored unpacked.
    parts: what stands for a packed weight [N, K], by the ends of names, behind the name of the plain weight.
    read: the packed weight of a name ("....up_proj.weight") on the device; UserError for values that cannot be.
    unread: endings of tensors that say nothing about the weights.
    """

    weight_format: str
    is_plain: Callable[[str], bool]
    parts: Callable[[int, int], dict[str, Slot]]
    read: Callable[[Tensors, str], Weight]
    unread: tuple[str, ...] = ()


def check_options(found: object, expected: Mapping[str, tuple[object, ...]], where: str, hint: str = "") -> None:
    """Compares the values of some keys of an object in a JSON file with those allowed; a missing key counts as null.

    Raises:
      UserError: naming `where`, the key, what was found and what is supported; `hint` ends the message.
    """
    for key, allowed in expected.items():
        actual = found.get(key) if isinstance(found, dict) else found
        if not any(type(actual) is type(value) and actual == value for value in allowed):
            found_there = shown(repr(actual))
            supported = " or ".join(map(repr, allowed))
            raise UserError(f"{where} {key} is {found_there}; supported is {supported}{hint and f'; {hint}'}")


def names_list(value: object, where: str) -> list[str]:
    """A list of module names or patterns from a JSON file; null is an empty one.

    Raises:
      UserError: it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{where} is {shown(repr(value))}; expected a list of module names")
    return value


def e4m3_scales(tensors: Tensors, name: str) -> np.ndarray:
    """The E4M3 block scales `name`.

    Raises:
      UserError: one has a sign or is NaN.
    """
    where, scale = tensors[name]
    # Kernels decode a scale by shifting its bits, which holds for 0x00-0x7E: no sign, no NaN.
    bad = np.argwhere(scale.view(np.uint8) > 0x7E)
    if bad.size:
        raise UserError(
            f"{where}: tensor {name}: expected scales that are neither negative nor NaN; found {len(bad)} "
            f"others, the first {float(scale[tuple(bad[0])])} at {bad[0].tolist()}"
        )
    return scale


def positive_scale(tensors: Tensors, name: str) -> np.float32:
    """The one number of the tensor `name`.

    Raises:
      UserError: it is zero, negative or NaN, or so small or large that weights would be.
    """
    where, array = tensors[name]
    whole = np.float32(array.reshape(())[()])
    if not 1 / _LARGEST_SCALE <= whole <= _LARGEST_SCALE:
        allowed = f"expected a positive number, from {1 / _LARGEST_SCALE:g} to {_LARGEST_SCALE:g}"
        raise UserError(f"{where}: tensor {name}: {allowed}, found {whole}")
    return whole


@functools.cache  # a command opens a folder several times
def warn_of_activations(where: Path) -> None:
    """Says that activations stay in 16 bits: the folder asks for FP4, of which the weights know nothing."""
    _log.warning(
        "%s asks for activations in FP4; they stay in 16 bits here, and the scales stored for them are not read", where
    )


@functools.cache
def warn_of_kv_cache(where: Path, asked: str = "FP8") -> None:
    """Says that the cache of keys and values is not kept as the folder asks; the weights know nothing of it."""
    _log.warning(
        "%s asks for keys and values in %s; here they are kept in the model's dtype unless "
        "generation.kv_cache_dtype says otherwise, and the scales stored for them are not read",
        where,
        asked,
    )
