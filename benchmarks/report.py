"""Where a benchmark can run and ran, and the file that its results are written to."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.variants import capability
from qerl_jax.durable import write_whole


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each."""
    return {package: importlib.metadata.version(package) for package in packages}


def of_device() -> dict[str, str]:
    """What the results of a benchmark of kernels begin with."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def require_gpu(hopper: bool = True) -> None:
    """Ends the program in one line where there is no NVIDIA GPU, or, for kernels in Mosaic GPU, none of Hopper."""
    if capability() != 90 if hopper else not capability():
        wanted = "a Hopper GPU (H100, H200)" if hopper else "an NVIDIA GPU"
        found = jax.devices()[0].device_kind
        raise SystemExit(f"this benchmark times kernels on {wanted}; JAX's device here is {found}")


def write(path: str | Path | None, result: Mapping[str, Any]) -> None:
    """Writes the results as JSON, where a file is named."""
    if path is not None:
        write_text(path, json.dumps(result, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file as a whole, so that an interruption or a full disk leaves the one before, and the folders that it
    lies in. What is no file of its own, such as /dev/stdout, is written to where it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text)
    else:
        write_whole(path, text)
