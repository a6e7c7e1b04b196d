"""The finished layers of a quantization that is under way, so that an interrupted one goes on where it stood.

    .quantize-NAME-DIGEST/        beside the folder NAME that is to be made; DIGEST of the settings and the source
      settings.json               what DIGEST stands for
      layer-00000.safetensors     the layer's tensors as the folder will hold them
      layer-00000.json            its rows of the report, and the SHA-256 of these and of the file above; written last

A layer counts as finished when its two files are as they were written. Everything else that a layer hands to the next
is computed again.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.durable import locked, make_folder, whole_file, write_whole
from qerl_jax.input_files import file_sha256, json_value
from qerl_jax.models.safetensors import read_safetensors, write_safetensors

_PREFIX = ".quantize-"


def work_folders(destination: Path) -> list[Path]:
    """The work folders that interrupted commands have left for `destination`, whatever their settings."""
    name = re.compile(re.escape(f"{_PREFIX}{destination.name}-") + "[0-9a-f]{12}")
    if not destination.parent.is_dir():
        return []
    return sorted(path for path in destination.parent.iterdir() if name.fullmatch(path.name))


def alone(destination: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other processes from making `destination` meanwhile, with whatever settings.

    Raises:
      UserError: another one does.
    """
    make_folder(destination.parent)
    lock = destination.with_name(f"{_PREFIX}{destination.name}.lock")
    return locked(lock, f"{destination}: another process is making it; wait for it or choose another name")


def _digest(report: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(report).encode()).hexdigest()


class WorkFolder:
    """The layers that a work folder has."""

    def __init__(self, destination: Path, settings: Mapping[str, Any]) -> None:
        """The folder of one destination and one set of settings, made if there is none yet."""
        text = json.dumps(settings, indent=2, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.path = destination.with_name(f"{_PREFIX}{destination.name}-{digest}")
        make_folder(self.path)
        write_whole(self.path / "settings.json", text + "\n")

    def write(self, layer: int, tensors: Mapping[str, np.ndarray], report: Mapping[str, Any]) -> None:
        """Keeps a layer's tensors and its part of the report."""
        weights, record = self._files(layer)
        specs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
        with whole_file(weights) as temporary:
            write_safetensors(temporary, specs, tensors.__getitem__)
        kept = {"sha256": file_sha256(weights), "report_sha256": _digest(report), "report": report}
        write_whole(record, json.dumps(kept) + "\n")

    def report(self, layer: int) -> dict[str, Any] | None:
        """The layer's part of the report, None where the layer is not finished."""
        weights, record = self._files(layer)
        if not record.is_file():
            return None
        try:
            kept = json_value(record.read_bytes())
            sha256, report_sha256, report = kept["sha256"], kept["report_sha256"], dict(kept["report"])
        except (ValueError, KeyError, TypeError):  # no record of ours
            return None
        is_whole = _digest(report) == report_sha256 and weights.is_file() and file_sha256(weights) == sha256
        return report if is_whole else None

    def tensors(self, layer: int) -> dict[str, np.ndarray]:
        """A finished layer's tensors, read from the file as they are used."""
        return read_safetensors(self._files(layer)[0])

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.path)

    def _files(self, layer: int) -> tuple[Path, Path]:
        return self.path / f"layer-{layer:05d}.safetensors", self.path / f"layer-{layer:05d}.json"
