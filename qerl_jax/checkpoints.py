"""Checkpoints of a pytree that survive a kill at any instant and never restore a damaged byte in silence.

    <directory>/step_00000040/
      arrays/            orbax: one array per leaf, named by its place in the tree ("adapter.lora.0.q_proj.a")
      manifest.json      progress, and what the other files must be: see `manifest`
      manifest.sha256    digest of manifest.json; `sha256sum -c manifest.sha256` checks it

A save goes to `.tmp-step_00000040`, is flushed to disk, and becomes visible by one rename. Where that step exists
already, the old folder waits as `.old-step_00000040` until the new one is in place, and counts as long as it is not.
The arrays pass through host memory both ways, so a checkpoint does not depend on the backend that wrote it.
"""

import contextlib
import json
import logging
import operator
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.durable import flush, flush_tree, make_folder, refuse_no_folder, with_home
from qerl_jax.errors import UserError
from qerl_jax.manifest import (
    Damaged,
    Progress,
    match_target,
    prng_of,
    read_manifest,
    static_fields,
    verify_leaves,
    write_manifest,
)
from qerl_jax.orbax_arrays import read_arrays, remove_until_gone, system_error, write_arrays

_ARRAYS = "arrays"
_TEMP, _OLD = ".tmp-", ".old-"
_logger = logging.getLogger(__name__)


def checkpoint_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Steps of the complete checkpoints in `directory`, ascending; their bytes are not looked at.

    Raises:
      UserError: `directory` is a file or lies in one.
    """
    return sorted(_folders(with_home(directory)))


def remove_partial(directory: str | os.PathLike[str]) -> None:
    """Clears what killed saves left behind. For the one program that writes to `directory`, at its start. What cannot
    be removed is told, and left for the next save to remove.

    Raises:
      UserError: `directory` is a file or lies in one.
    """
    directory = with_home(directory)
    refuse_no_folder(directory)
    for path in list(directory.glob(f"{_OLD}step_*")):
        final = path.with_name(path.name.removeprefix(_OLD))
        os.rename(path, path.with_name(_TEMP + final.name + ".old") if final.exists() else final)
    for path in directory.glob(f"{_TEMP}step_*"):
        try:
            shutil.rmtree(path)
        except OSError as error:  # on NFS a folder stays as long as another program of this machine reads its files
            _logger.warning("%s, of no use any more, is left for the next save to remove: %s", path, error)


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
      UserError: `directory` is a file or lies in one, the system refuses to write, as where the disk is full, or orbax
        cannot be told the folder; older checkpoints are as they were.
    """
    step = operator.index(step)  # of a scalar array, as `TrainState.step` is
    if step < 0 or (save_total_limit is not None and save_total_limit < 1):
        raise ValueError(f"step must be >= 0 and save_total_limit >= 1; got {step} and {save_total_limit}")
    leaves = _leaves(tree)
    try:
        survives = json.loads(json.dumps(progress, allow_nan=False)) == progress
    except TypeError:
        survives = False
    if not survives:
        raise TypeError(
            f"progress must hold JSON values only (no tuples, no keys but strings): {_no_json(progress)}; make one of "
            "it by int(...), float(...) or bool(...), .tolist() of an array, list(...) of a tuple, str(...) of a key"
        )
    directory = with_home(directory).absolute()
    make_folder(directory)
    remove_partial(directory)
    final = directory / f"step_{step:08d}"
    temp = directory / (_TEMP + final.name)
    earlier = checkpoint_steps(directory)  # while the folder can be read

    try:
        _write(temp, step, leaves, static_fields(tree), progress)
    except (OSError, ValueError) as error:
        if (number := system_error(error)) is None:
            raise
        remove_until_gone(temp)
        failed = f"{directory}: the checkpoint of step {step} could not be written ({os.strerror(number)})"
        remedy = "Make room there, or allow writing, and"
        if not earlier:
            raise UserError(f"{failed}. {remedy} start again: there is no older one to go on from") from error
        raise UserError(
            f"{failed}; older ones are as they were. {remedy} continue: a run goes on from its newest checkpoint"
        ) from error

    old = directory / (_OLD + final.name)
    if final.exists():
        os.rename(final, old)
    os.rename(temp, final)
    flush(directory)
    if save_total_limit is not None:
        older = [s for s in checkpoint_steps(directory) if s <= step][:-save_total_limit]
        for path in (directory / f"step_{s:08d}" for s in older):
            os.rename(path, path.with_name(_TEMP + path.name))  # half deleted, it must not look like a checkpoint
    remove_partial(directory)
    return final


def _no_json(value: Any, place: str = "progress") -> str:
    """The first part of a value that JSON does not give back as it is, and where it stands; empty if there is none."""
    if isinstance(value, list):
        return next(filter(None, (_no_json(item, f"{place}[{i}]") for i, item in enumerate(value))), "")
    if isinstance(value, dict):
        keys = (f"{place} has the key {key!r:.60}" for key in value if not isinstance(key, str))
        return next(keys, "") or next(filter(None, (_no_json(value[key], f"{place}[{key!r}]") for key in value)), "")
    fine = value is None or isinstance(value, bool | int | float | str)
    return "" if fine else f"{place} is {value!r:.60} ({type(value).__name__})"


def _write(temp: Path, step: int, leaves: dict[str, Any], static: dict[str, Any], progress: Mapping[str, Any]) -> None:
    """Writes all files of a checkpoint to the new folder `temp` and flushes them."""
    host = {name: _to_host(leaf) for name, leaf in leaves.items()}
    # Orbax refuses arrays without elements; their shapes say all there is to know about them.
    stored = {name: array for name, array in host.items() if array.size}
    if stored:
        write_arrays(temp, _ARRAYS, stored)
    else:
        temp.mkdir()
    write_manifest(temp, step, progress, leaves, host, static)
    flush_tree(temp)


def restore_checkpoint[Tree](
    directory: str | os.PathLike[str], target: Tree, *, step: int | None = None
) -> tuple[Tree, Progress, int] | None:
    """Reads the newest undamaged checkpoint; a damaged one is named in a warning and the one before it is used. Another
    program may save and delete checkpoints meanwhile.

    Args:
      directory: where checkpoints live. Nothing in it is changed.
      target: a pytree like the saved one: arrays, PRNG keys or `jax.ShapeDtypeStruct`s, each giving its leaf's place,
        dtype, shape and device (numpy arrays stay numpy arrays). What is static in it stays as it is.
      step: this checkpoint only; None takes the newest that is whole.

    Returns:
      (tree, progress, step), or None where there is no checkpoint at all.

    Raises:
      UserError: `directory` is a file or lies in one, every checkpoint is damaged, `step` does not exist or is damaged,
        what is read is deleted and nothing newer has appeared, a leaf of `target` is absent from the checkpoint or of
        another dtype or shape there, or a static field of a `flax.struct` node, such as the scaling of a LoRA pair, had
        another value (checkpoints of earlier versions do not know it).
    """
    place = with_home(directory).absolute()
    candidates: Iterable[tuple[int, Path]] = _newest_first(place)
    if step is not None:
        folders = _folders(place)
        if step not in folders:
            raise UserError(f"{directory}: there is no checkpoint of step {step}; there are {sorted(folders)}")
        candidates = [(step, folders[step])]
    damaged, gone = [], []
    for candidate, folder in candidates:
        try:
            manifest, host = _read(folder, candidate, target)
        except Damaged as damage:
            if folder.is_dir():
                damaged.append(candidate)
                _logger.warning("checkpoint step %d is damaged and skipped: %s: %s", candidate, folder, damage)
            else:
                gone.append(candidate)
            continue
        stored = manifest["leaves"]
        placed = [_to_device(host[name], leaf, stored[name]["prng"]) for name, leaf in _leaves(target).items()]
        return jax.tree.unflatten(jax.tree.structure(target), placed), manifest["progress"], candidate
    if damaged:
        tried = f"every checkpoint ({', '.join(map(str, sorted(damaged)))})" if step is None else f"checkpoint {step}"
        raise UserError(
            f"{directory}: {tried} is damaged; the warnings above say where. Start again in another folder."
        )
    if gone:
        newer = ", and no newer one is there" if step is None else ""
        raise UserError(f"{directory}: checkpoint {gone[0]} was deleted while it was read{newer}")
    return None


def _read(folder: Path, step: int, target: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A checkpoint's manifest and arrays; raises Damaged also where the folder is deleted meanwhile."""
    manifest = read_manifest(folder, step)
    match_target(folder, manifest, _leaves(target), static_fields(target))
    try:
        leaves = manifest["leaves"]
        stored = [name for name, leaf in leaves.items() if 0 not in leaf["shape"]]
        host = {
            n: np.zeros(leaf["shape"], jnp.dtype(leaf["dtype"])) for n, leaf in leaves.items() if 0 in leaf["shape"]
        }
        if stored:
            host |= read_arrays(folder / _ARRAYS, stored)
        verify_leaves(host, leaves)
        return manifest, host
    except (OSError, ValueError) as error:  # orbax raises either, depending on what has gone already
        if folder.is_dir():
            raise
        raise Damaged("it was deleted while it was read") from error


def newest_progress(directory: str | os.PathLike[str]) -> tuple[Progress, int] | None:
    """What the newest undamaged checkpoint holds beside its arrays, and its step; None where there is none.

    Raises:
      UserError: `directory` is a file or lies in one.
    """
    for step, folder in _newest_first(with_home(directory)):
        with contextlib.suppress(Damaged):
            return read_manifest(folder, step)["progress"], step
    return None


def _newest_first(directory: Path) -> Iterator[tuple[int, Path]]:
    """Complete checkpoints, for a reader who stops at the first that is undamaged. If the one just tried has gone, as a
    run that goes on deletes old ones, those that have appeared since come next."""
    folders = _folders(directory)
    newest = max(folders, default=-1)
    while folders:
        step = max(folders)
        folder = folders.pop(step)
        yield step, folder
        if not folder.is_dir():
            folders |= {step: path for step, path in _folders(directory).items() if step > newest}
            newest = max((newest, *folders))


def _folders(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step; one that is being replaced counts until its successor is in place."""
    refuse_no_folder(directory)
    found: dict[int, Path] = {}
    there = list(directory.iterdir()) if directory.exists() else []  # raises where it cannot be read: it is not empty
    for prefix in ("", _OLD):
        for path in there:
            digits = path.name.removeprefix(prefix + "step_")
            if path.name == f"{prefix}step_{digits}" and digits.isdecimal() and path.is_dir():
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


def _to_host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if prng_of(leaf) else leaf)


def _to_device(array: np.ndarray, target: Any, prng: str | None) -> Any:
    """The array as `target`'s kind, on its device."""
    if isinstance(target, np.ndarray | np.generic):
        return array
    # An array that was free to move stays so: a committed one would make jit compile again.
    device = target.sharding if getattr(target, "committed", True) else None
    # jnp.array copies: on CPU device_put may share numpy's memory (with may_alias=False too), and a step donates it.
    placed = jax.device_put(jnp.array(array), None if prng else device)
    return jax.device_put(jax.random.wrap_key_data(placed, impl=prng), device) if prng else placed
