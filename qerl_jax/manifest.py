"""The manifest of a checkpoint: progress, and digests that show whether its bytes are those that were saved.

    manifest.json      progress, dtype + shape + sha256 of every leaf, static fields (such as the scaling of a LoRA
                       pair), length + sha256 of every file, versions
    manifest.sha256    digest of manifest.json; `sha256sum -c manifest.sha256` checks it

Orbax alone restores flipped bits without a word (12 of 30 single-bit flips gave other arrays), hence the digests: of
the files, so that damage is found wherever it sits, and of the leaves, so that what orbax reads is what was saved.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import __version__
from qerl_jax.errors import UserError
from qerl_jax.input_files import file_sha256

Progress = dict[str, Any]

_MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
_LIBRARIES = ("jax", "numpy", "orbax-checkpoint")


class Damaged(Exception):
    """A checkpoint's bytes are not those that were saved; the message says where."""


def prng_of(leaf: Any) -> str | None:
    """The algorithm of a typed PRNG key, None for other arrays."""
    return str(jax.random.key_impl(leaf)) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else None


def static_fields(tree: Any, prefix: str = "") -> dict[str, bool | int | float | str | None]:
    """The fields of `flax.struct` nodes that are no leaves (pytree_node=False), by their places in the tree.

    Values that JSON does not hold as they are, such as functions, are left out.
    """
    found: dict[str, bool | int | float | str | None] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_has_static_fields):
        if not _has_static_fields(node):
            continue
        for field in dataclasses.fields(node):
            place = jax.tree_util.keystr((*path, jax.tree_util.GetAttrKey(field.name)), simple=True, separator=".")
            value = getattr(node, field.name)
            if not _is_static(field):
                found |= static_fields(value, f"{prefix}{place}.")
            elif value is None or isinstance(value, bool | int | float | str):
                found[prefix + place] = value
    return found


def _has_static_fields(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and any(map(_is_static, dataclasses.fields(node)))


def _is_static(field: dataclasses.Field[Any]) -> bool:
    return not field.metadata.get("pytree_node", True)


def write_manifest(
    folder: Path,
    step: int,
    progress: Mapping[str, Any],
    leaves: dict[str, Any],
    host: dict[str, np.ndarray],
    static: dict[str, Any],
) -> None:
    """Writes both files, of all that lies in `folder`.

    Args:
      folder: the checkpoint's.
      step: its step.
      progress: JSON values that it is to hold.
      leaves: the tree's, by their places.
      host: their arrays, as they are stored.
      static: the tree's `static_fields`.
    """
    with ThreadPoolExecutor() as pool:
        leaf_digests = pool.map(_digest_array, host.values())
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file_digests = pool.map(file_sha256, files)
        manifest = {
            "step": step,
            "progress": progress,
            "leaves": {
                name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "sha256": digest, "prng": prng_of(leaf)}
                for (name, leaf), digest in zip(leaves.items(), leaf_digests, strict=True)
            },
            "static": static,
            "files": {
                path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in zip(files, file_digests, strict=True)
            },
            "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES} | {"qerl-jax": __version__},
        }
    text = json.dumps(manifest, indent=1).encode()
    (folder / _MANIFEST).write_bytes(text)
    (folder / _DIGEST).write_bytes(_digest_line(text))


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest, after its own digest and every file's length and digest have been verified."""
    try:
        text = (folder / _MANIFEST).read_bytes()
        if (folder / _DIGEST).read_bytes() != _digest_line(text):
            raise Damaged(f"{_MANIFEST} does not match {_DIGEST}")
        manifest = json.loads(text)
        if manifest["step"] != step:
            raise Damaged(f"{_MANIFEST} is of step {manifest['step']}")
        files = {name: folder / name for name in manifest["files"]}
        for name, path in files.items():
            expected, found = manifest["files"][name]["bytes"], path.stat().st_size
            if found != expected:
                raise Damaged(f"{name} has {found} bytes; expected {expected}")
        with ThreadPoolExecutor() as pool:
            for name, digest in zip(files, pool.map(file_sha256, files.values()), strict=True):
                if digest != manifest["files"][name]["sha256"]:
                    raise Damaged(f"{name} has another sha256 than when it was written")
    except OSError as error:
        raise Damaged(f"{error.filename or ''} cannot be read ({error.strerror})") from error
    return manifest


def match_target(folder: Path, manifest: dict[str, Any], leaves: dict[str, Any], static: dict[str, Any]) -> None:
    """Raises UserError for the first leaf, or static field known of both, that differs between checkpoint and target.

    Args:
      folder: the checkpoint's.
      manifest: its manifest; older ones hold no static fields.
      leaves: the target's.
      static: the target's `static_fields`.
    """
    expected = {f"leaf {name}": f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}
    found = {f"leaf {name}": f"{leaf['dtype']}{leaf['shape']}" for name, leaf in manifest["leaves"].items()}
    known = manifest.get("static", {})
    for name in static.keys() & known.keys():
        expected[f"static {name}"], found[f"static {name}"] = static[name], known[name]
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            leaf = name.removeprefix("leaf ")
            inner = next((other for other in manifest["leaves"] if other.endswith(f".{leaf}")), None)
            if name not in found and inner is not None:
                raise UserError(
                    f"{folder}: {name}: found no such leaf, but {inner}: expected the whole tree that was saved (of a "
                    "run: `qerl_jax.rl.saved.Saved`, whose `train` is the TrainState)"
                )
            raise UserError(
                f"{folder}: {name}: expected {expected.get(name, 'no such leaf')}, found "
                f"{found.get(name, 'no such leaf')}. The checkpoint is of another set-up (rank, alpha, use_rslora, "
                "target modules, trained norms, optimizer or base); continue it with the one that wrote it, or start "
                "a new run."
            )


def verify_leaves(host: dict[str, np.ndarray], leaves: dict[str, Any]) -> None:
    """Raises Damaged for the first array that is not the leaf that was saved."""
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(host, pool.map(_digest_array, host.values()), strict=True):
            if digest != leaves[name]["sha256"]:
                raise Damaged(f"leaf {name} has another sha256 than when it was saved")


def _digest_array(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def _digest_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {_MANIFEST}\n".encode()
