"""Folders that are made, and files and folders that appear on disk whole or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from qerl_jax.errors import UserError


def flush(path: Path) -> None:
    """fsync of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_tree(folder: Path) -> None:
    """fsync of a folder and everything in it."""
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def make_folder(path: Path) -> None:
    """Makes a folder and those that it lies in, where they are not there yet.

    Raises:
      UserError: one of them is a file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(name for name in (path, *path.parents) if os.path.lexists(name) and not name.is_dir())
        raise UserError(f"{file} is a file; expected a folder") from None


def named(folder: Path) -> Path:
    """A folder by a path that ends in its name, as those of `.` and `..` do not."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def where_it_leads(path: Path) -> Path:
    """The absolute path of a folder to write; of a symbolic link that of what it names, which may be yet to appear."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


@contextlib.contextmanager
def locked(folder: Path, refusal: str) -> Iterator[None]:
    """A folder that no other process gets meanwhile; the lock ends with the process, however it ends.

    Raises:
      UserError: `refusal`, where another process has it.
    """
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(refusal) from None
        yield


@contextlib.contextmanager
def whole_folder(path: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yields an empty folder beside `path` to write to; at the end it is flushed and takes `path`'s place.

    A folder of the same kind that stands there is replaced: for an instant between two renames `path` is absent, never
    half. If anything raises, `path` is as it was; after a kill at that instant the next write to it puts it back first.

    Args:
      path: the folder to appear; of a symbolic link, where it leads.
      names: the files that such a folder may hold, first the one that each of them has; a folder without that one, or
        with anything else, is of another kind and not replaced, unless it is empty.

    Raises:
      UserError: `path` is a file or lies in one, or is a folder with other content.
    """
    path = where_it_leads(path)
    _refuse_other_content(path, names)
    make_folder(path.parent)
    temp, old = (path.with_name(f".{kind}-{path.name}") for kind in ("tmp", "old"))
    with _owned(temp, f"{path}: another process is writing it; wait for it or choose another name"):
        try:
            if old.exists() and not path.exists():
                os.rename(old, path)  # a process died between the two renames below
            _refuse_other_content(path, names)  # which it may have got meanwhile
            for leftover in (old, *temp.iterdir()):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
            yield temp
            flush_tree(temp)
            if path.exists():
                os.rename(path, old)
            os.rename(temp, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.rename(old, path)
            shutil.rmtree(temp, ignore_errors=True)  # it may be in `path`'s place already
            raise
        flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _refuse_other_content(path: Path, names: Sequence[str]) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; expected a folder, or a name that is free")
    there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    foreign = sorted(there - set(names) if there.intersection(names[:1]) else there)
    if foreign:
        raise UserError(f"{path} holds {foreign[0]}, which would be lost by replacing the folder; choose another name")


@contextlib.contextmanager
def _owned(temp: Path, refusal: str) -> Iterator[None]:
    """Makes a folder, or takes over one that a killed process has left; no other process has it meanwhile. The lock is
    the folder's own, and so goes with it when it is renamed."""
    while True:
        temp.mkdir(exist_ok=True)
        try:
            handle = os.open(temp, os.O_RDONLY)
        except FileNotFoundError:  # whoever had it has just renamed it
            continue
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(refusal) from None
            if temp.exists() and os.path.samestat(os.fstat(handle), temp.stat()):
                yield
                return
        finally:
            os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Replaces the file `path` as a whole: a kill leaves the old one or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)
