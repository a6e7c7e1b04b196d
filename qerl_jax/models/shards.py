"""A model's tensors as safetensors files of limited size, with the index that names them."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from qerl_jax.models.safetensors import write_safetensors
from qerl_jax.models.source import INDEX, WEIGHTS, write_json

SHARD_BYTES = 5_000_000_000  # what transformers 4 and llm-compressor write
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class Stored(NamedTuple):
    """A tensor that is about to be written: what it will be, and the call that makes it."""

    spec: jax.ShapeDtypeStruct
    make: Callable[[], jax.Array | np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * np.dtype(self.spec.dtype).itemsize


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files that `folder` holds, if there is such a folder."""
    names = os.listdir(folder) if folder.is_dir() else []
    return [name for name in names if name in (WEIGHTS, INDEX) or _SHARD.fullmatch(name)]


def write_shards(folder: Path, tensors: Mapping[str, Stored], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `tensors` in their order to model.safetensors, or to several files and an index when they are larger than
    `shard_bytes` together (a single tensor may be). One tensor is made at a time."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        specs = {name: tensors[name].spec for name in names}
        write_safetensors(folder / file, specs, lambda name: np.asarray(tensors[name].make()), {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
