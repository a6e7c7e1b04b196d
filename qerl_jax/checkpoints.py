"""Checkpoints of a pytree that survive a kill at any instant and never restore a damaged byte in silence.

    <directory>/step_00000040/
      arrays/            orbax: one array per leaf, named by its place in the tree ("adapter.lora.0.q_proj.a")
      manifest.json      progress, dtype + shape + sha256 of every leaf, length + sha256 of every file, versions
      manifest.sha256    digest of manifest.json; `sha256sum -c manifest.sha256` checks it

Orbax alone restores flipped bits without a word (12 of 30 single-bit flips gave other arrays), hence the digests: of
the files, so that damage is found wherever it sits, and of the leaves, so that what orbax reads is what was saved.

A save goes to `.tmp-step_00000040`, is flushed to disk, and becomes visible by one rename. Where that step exists
already, the old folder waits as `.old-step_00000040` until the new one is in place, and counts as long as it is not.
The arrays pass through host memory both ways, so a checkpoint does not depend on the backend that wrote it.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from qerl_jax.durable import flush, flush_tree
from qerl_jax.errors import UserError

__all__ = ["checkpoint_steps", "remove_partial", "restore_checkpoint", "save_checkpoint"]

Progress = dict[str, Any]

_ARRAYS, _MANIFEST, _DIGEST = "arrays", "manifest.json", "manifest.sha256"
_TEMP, _OLD = ".tmp-", ".old-"
_LIBRARIES = ("jax", "numpy", "orbax-checkpoint", "qerl-jax")
# What in a path orbax takes for a pattern, tensorstore for a /, or both for the scheme of a URL.
_MISREAD = re.compile(r"[\[*?\\:]")
# How orbax names the system's error in its own, a ValueError.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_logger = logging.getLogger(__name__)


class _Damaged(Exception):
    """A checkpoint's bytes are not those that were saved; the message says where."""


def checkpoint_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps of the complete checkpoints in `directory`, ascending; their bytes are not looked at."""
    return sorted(_folders(Path(directory)))


def remove_partial(directory: str | os.PathLike[str]) -> None:
    """Clears what killed saves left behind. For the one program that writes to `directory`, at its start."""
    for path in list(Path(directory).glob(f"{_OLD}step_*")):
        final = path.with_name(path.name.removeprefix(_OLD))
        os.rename(path, path.with_name(_TEMP + final.name + ".old") if final.exists() else final)
    for path in Path(directory).glob(f"{_TEMP}step_*"):
        shutil.rmtree(path)


def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    tree: Any,
    progress: Mapping[str, Any],
    save_total_limit: int | None = None,
) -> Path:
    """Writes `tree` and `progress` as checkpoint `step`; returns once they are on disk.

    Args:
      directory: where checkpoints live; made if missing. One program at a time may write to it.
      step: 0 or more; an existing checkpoint of this step is replaced.
      tree: pytree of jax or numpy arrays and typed PRNG keys; None and empty nodes are kept by the target's structure.
      progress: whatever else a resume needs; JSON values.
      save_total_limit: keep this many checkpoints up to `step` and delete older ones; None keeps all.

    Returns:
      The checkpoint's folder.

    Raises:
      TypeError: a leaf is not an array, or `progress` does not survive JSON.
      ValueError: a negative step, a limit below 1, or NaN or infinity in `progress`.
      UserError: the system refuses to write, as where the disk is full; older checkpoints are as they were.
    """
    step = operator.index(step)  # of a scalar array, as `TrainState.step` is
    if step < 0 or (save_total_limit is not None and save_total_limit < 1):
        raise ValueError(f"step must be >= 0 and save_total_limit >= 1; got {step} and {save_total_limit}")
    leaves = _leaves(tree)
    if json.loads(json.dumps(progress, allow_nan=False)) != progress:
        raise TypeError(f"progress must hold JSON values only (no tuples, no keys but strings); got {progress!r}")
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    final = directory / f"step_{step:08d}"
    temp = directory / (_TEMP + final.name)

    try:
        _write(temp, step, leaves, progress)
    except (OSError, ValueError) as error:
        named = _OS_ERROR.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(named[1]) if named else None
        if number is None:
            raise
        shutil.rmtree(temp, ignore_errors=True)
        raise UserError(
            f"{directory}: the checkpoint of step {step} could not be written ({os.strerror(number)}); older ones are "
            "as they were. Make room there, or allow writing, and continue: a run goes on from its newest checkpoint"
        ) from error

    old = directory / (_OLD + final.name)
    if final.exists():
        os.rename(final, old)
    os.rename(temp, final)
    flush(directory)
    remove_partial(directory)
    if save_total_limit is not None:
        older = [s for s in checkpoint_steps(directory) if s <= step][:-save_total_limit]
        for path in (directory / f"step_{s:08d}" for s in older):
            os.rename(path, path.with_name(_TEMP + path.name))  # half deleted, it must not look like a checkpoint
        remove_partial(directory)
    return final


def _write(temp: Path, step: int, leaves: dict[str, Any], progress: Mapping[str, Any]) -> None:
    """Writes all files of a checkpoint to the new folder `temp` and flushes them."""
    host = {name: _to_host(leaf) for name, leaf in leaves.items()}
    # Orbax refuses arrays without elements; the target alone says all there is to know about them.
    stored = {name: array for name, array in host.items() if array.size}
    if stored:
        with (
            _tracebacks_unlogged(),
            _well_named(temp.parent) as directory,
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            checkpointer.save(directory / temp.name / _ARRAYS, args=ocp.args.PyTreeSave(stored))
    else:
        temp.mkdir()
    with ThreadPoolExecutor() as pool:
        leaf_digests = pool.map(_digest_array, host.values())
        files = sorted(path for path in temp.rglob("*") if path.is_file())
        file_digests = pool.map(_digest_file, files)
        manifest = {
            "step": step,
            "progress": progress,
            "leaves": {
                name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "sha256": digest, "prng": _prng(leaf)}
                for (name, leaf), digest in zip(leaves.items(), leaf_digests, strict=True)
            },
            "files": {
                path.relative_to(temp).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
                for path, digest in zip(files, file_digests, strict=True)
            },
            "versions": {name: _version(name) for name in _LIBRARIES},
        }
    text = json.dumps(manifest, indent=1).encode()
    (temp / _MANIFEST).write_bytes(text)
    (temp / _DIGEST).write_bytes(_digest_line(text))
    flush_tree(temp)


@contextlib.contextmanager
def _well_named(folder: Path) -> Iterator[Path]:
    """`folder` by a path that means it to orbax too: where its own does not, a link to it. Below `runs/lr[1e-5]` orbax
    saved without a word what it could not read again."""
    if not _MISREAD.search(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "folder"
        link.symlink_to(folder)
        yield link


@contextlib.contextmanager
def _tracebacks_unlogged() -> Iterator[None]:
    """Keeps orbax, which raises what its threads raised, from logging it with a traceback for each of them before."""

    def without(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger = logging.getLogger("absl")
    logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)


def restore_checkpoint[Tree](
    directory: str | os.PathLike[str], target: Tree, step: int | None = None
) -> tuple[Tree, Progress, int] | None:
    """Reads the newest undamaged checkpoint; a damaged one is named in a warning and the one before it is used.

    Args:
      directory: where checkpoints live. Nothing in it is changed.
      target: a pytree like the saved one: arrays, PRNG keys or `jax.ShapeDtypeStruct`s, each giving its leaf's place,
        dtype, shape and device (numpy arrays stay numpy arrays).
      step: this checkpoint only; None takes the newest that is whole.

    Returns:
      (tree, progress, step), or None where there is no checkpoint at all.

    Raises:
      UserError: every checkpoint is damaged, `step` does not exist or is damaged, or a leaf of `target` is absent from
        the checkpoint or of another dtype or shape there.
    """
    folders = _folders(Path(directory).absolute())
    if step is None and not folders:
        return None
    if step is not None and step not in folders:
        raise UserError(f"{directory}: there is no checkpoint of step {step}; there are {sorted(folders)}")
    for candidate in sorted(folders, reverse=True) if step is None else [step]:
        folder = folders[candidate]
        try:
            manifest = _read_manifest(folder, candidate)
            _match(folder, manifest["leaves"], _leaves(target))
            host = _read_arrays(folder, manifest["leaves"])
        except _Damaged as damage:
            _logger.warning("checkpoint step %d is damaged and skipped: %s: %s", candidate, folder, damage)
            continue
        stored = manifest["leaves"]
        placed = [_to_device(host[name], leaf, stored[name]["prng"]) for name, leaf in _leaves(target).items()]
        return jax.tree.unflatten(jax.tree.structure(target), placed), manifest["progress"], candidate
    tried = f"checkpoint {step}" if step is not None else f"every checkpoint ({', '.join(map(str, sorted(folders)))})"
    raise UserError(f"{directory}: {tried} is damaged; the warnings above say where. Start again in another folder.")


def _folders(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step; one that is being replaced counts until its successor is in place."""
    found: dict[int, Path] = {}
    for prefix in ("", _OLD):
        for path in directory.glob(f"{prefix}step_*"):
            digits = path.name.removeprefix(prefix + "step_")
            if digits.isdecimal() and path.is_dir():
                found.setdefault(int(digits), path)
    return found


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their place in the tree."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape") or leaf.dtype == object:
            raise TypeError(f"leaf {name}: expected an array, found {type(leaf).__name__}; numbers belong in progress")
        if name in leaves:
            raise TypeError(f"two leaves of the tree are both named {name}")
        leaves[name] = leaf
    return leaves


def _prng(leaf: Any) -> str | None:
    """The algorithm of a typed PRNG key, None for other arrays."""
    return str(jax.random.key_impl(leaf)) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else None


def _to_host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _prng(leaf) else leaf)


def _to_device(array: np.ndarray, target: Any, prng: str | None) -> Any:
    """The array as `target`'s kind, on its device."""
    if isinstance(target, np.ndarray | np.generic):
        return array
    # An array that was free to move stays so: a committed one would make jit compile again.
    device = target.sharding if getattr(target, "committed", True) else None
    # A copy of the memory: on CPU jax may share numpy's otherwise, and the next step donates it.
    placed = jax.device_put(array, None if prng else device, may_alias=False)
    return jax.device_put(jax.random.wrap_key_data(placed, impl=prng), device) if prng else placed


def _read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest, after its own digest and every file's length and digest have been verified."""
    try:
        text = (folder / _MANIFEST).read_bytes()
        if (folder / _DIGEST).read_bytes() != _digest_line(text):
            raise _Damaged(f"{_MANIFEST} does not match {_DIGEST}")
        manifest = json.loads(text)
        if manifest["step"] != step:
            raise _Damaged(f"{_MANIFEST} is of step {manifest['step']}")
        files = {name: folder / name for name in manifest["files"]}
        for name, path in files.items():
            expected, found = manifest["files"][name]["bytes"], path.stat().st_size
            if found != expected:
                raise _Damaged(f"{name} has {found} bytes; expected {expected}")
        with ThreadPoolExecutor() as pool:
            for name, digest in zip(files, pool.map(_digest_file, files.values()), strict=True):
                if digest != manifest["files"][name]["sha256"]:
                    raise _Damaged(f"{name} has another sha256 than when it was written")
    except OSError as error:
        raise _Damaged(f"{error.filename or ''} cannot be read ({error.strerror})") from error
    return manifest


def _match(folder: Path, stored: dict[str, Any], target: dict[str, Any]) -> None:
    """Raises UserError for the first leaf that differs between checkpoint and target."""
    expected = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in target.items()}
    found = {name: f"{leaf['dtype']}{leaf['shape']}" for name, leaf in stored.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"{folder}: leaf {name}: expected {expected.get(name, 'no such leaf')}, found "
                f"{found.get(name, 'no such leaf')}. The checkpoint is of another set-up (rank, target modules, "
                "trained norms, optimizer or base); continue it with the one that wrote it, or start a new run."
            )


def _read_arrays(folder: Path, leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every leaf as a host array, its digest verified."""
    shapes = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    names = [name for name, shape in shapes.items() if 0 not in shape]
    host = {name: np.zeros(shapes[name], jnp.dtype(leaves[name]["dtype"])) for name in leaves if name not in names}
    if names:
        restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        args = ocp.args.PyTreeRestore({name: 0 for name in names}, restore_args=restore_args)
        with (
            _well_named(folder) as directory,
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            host |= checkpointer.restore(directory / _ARRAYS, args=args)
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(host, pool.map(_digest_array, host.values()), strict=True):
            if digest != leaves[name]["sha256"]:
                raise _Damaged(f"leaf {name} has another sha256 than when it was saved")
    return host


def _digest_array(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {_MANIFEST}\n".encode()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout
