"""Arrays on disk by orbax, and what it takes to rely on it: paths that it misreads, errors that it wraps, threads that
write on after one has failed."""

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from qerl_jax.errors import UserError

# Characters of a path that orbax reads as a pattern, tensorstore as a /, or both as the end of a URL's scheme.
_MISREAD = re.compile(r"[\[*?\\:]")
# How orbax tells of the system's error in a ValueError of its own.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
# Seconds for which the files of a failed save must stay away, and after which removing them is left to the next save.
_QUIET, _PATIENCE = 0.5, 10.0
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}  # errors of a removal that a second try meets again


def write_arrays(folder: Path, name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays, each with an element or more, into the new folder `name` of `folder`, which is made if missing.

    Raises:
      OSError, ValueError: the system refuses to write; see `system_error`.
      UserError: orbax cannot be told the folder.
    """
    with (
        _tracebacks_unlogged(),
        _well_named(folder.parent) as parent,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        checkpointer.save(parent / folder.name / name, args=ocp.args.PyTreeSave(dict(arrays)))


def read_arrays(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The arrays of these names from a folder that `write_arrays` wrote; orbax does not notice flipped bits.

    Raises:
      OSError, ValueError: the folder or a part of it is missing or cannot be read.
      UserError: orbax cannot be told the folder.
    """
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    args = ocp.args.PyTreeRestore(dict.fromkeys(restore_args, 0), restore_args=restore_args)
    with (
        _well_named(folder.parent) as parent,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        found: dict[str, np.ndarray] = checkpointer.restore(parent / folder.name, args=args)
    return found


def system_error(error: OSError | ValueError) -> int | None:
    """The number of the system's error that orbax met, which it may wrap in a ValueError; None for any other error."""
    if isinstance(error, OSError):
        return error.errno
    named = _OS_ERROR.search(str(error))
    return int(named[1]) if named else None


def remove_until_gone(folder: Path) -> None:
    """Removes a folder that may reappear meanwhile: orbax raises what the first of its threads raised, while others
    still write and make the folders that they miss. What the system refuses to remove is left."""
    refusals: set[int | None] = set()

    def note(function: Any, path: str, error: BaseException) -> None:
        refusals.add(getattr(error, "errno", None))

    began = seen = time.monotonic()
    while (now := time.monotonic()) - seen < _QUIET and now - began < _PATIENCE and refusals.isdisjoint(_FORBIDDEN):
        if os.path.exists(folder):  # a Path's own raises where its parent may not be entered
            shutil.rmtree(folder, onexc=note)
            seen = now
        time.sleep(0.02)


@contextlib.contextmanager
def _well_named(folder: Path) -> Iterator[Path]:
    """`folder` by a path that orbax reads as it is meant: its own or, if that has characters of `_MISREAD`, a link's.
    Below `runs/lr[1e-5]` orbax saved without a word what it could not read again."""
    if not _MISREAD.search(str(folder)):
        yield folder
        return
    misread = f"{folder}: orbax takes one of [ * ? \\ : in a path for a pattern"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        raise UserError(
            f"{misread}, and there is no folder for temporary files that can be written to, for a link; choose another "
            "folder, or set TMPDIR"
        ) from None
    if _MISREAD.search(temporary):
        raise UserError(
            f"{misread}, and would in that of a link in the folder for temporary files, {temporary}; choose another "
            "folder, or set TMPDIR to another one"
        )
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "folder"
        link.symlink_to(folder)
        yield link


@contextlib.contextmanager
def _tracebacks_unlogged() -> Iterator[None]:
    """Keeps orbax from logging a traceback for each thread that failed: it raises their error anyway."""

    def without(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger = logging.getLogger("absl")
    logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)
