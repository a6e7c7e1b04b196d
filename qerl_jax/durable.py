"""Paths, folders that are made, and files and folders that appear on disk whole or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qerl_jax.errors import UserError


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """Names `path` in an OSError that names no file, as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


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
      UserError: see `refuse_no_folder`.
    """
    refuse_no_folder(path)
    path.mkdir(parents=True, exist_ok=True)


def refuse_no_folder(path: Path) -> None:
    """Refuses a path where no folder is or can be made.

    Raises:
      UserError: it, or what it lies in, is a file, or a symbolic link that leads nowhere.
    """
    there = next((name for name in (path, *path.parents) if os.path.lexists(name)), None)
    if there is not None and not os.path.isdir(there):
        kind = "file" if there.exists() else f"symbolic link to {there.readlink()}, which does not exist"
        raise UserError(f"{there} is a {kind}; expected a folder")


def not_writable(path: Path) -> Path | None:
    """What keeps a file or folder from being written at a path: it, or the nearest folder that it would lie in, if that
    may not be written to."""
    there = next(name for name in (path, *path.absolute().parents) if name.exists())
    return None if os.access(there, os.W_OK) else there


def named(folder: Path) -> Path:
    """A folder by a path that ends in its name, as those of `.` and `..` do not."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def with_home(path: str | os.PathLike[str]) -> Path:
    """A path in which a `~` at the beginning is the home folder, or `~name` that of another user."""
    return Path(os.path.expanduser(path))  # which leaves ~ and a name that nobody has as they are


def where_it_leads(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder to write; for a symbolic link that of its target, which need not exist yet."""
    path = with_home(path)
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


@contextlib.contextmanager
def locked(lock: Path, refusal: str) -> Iterator[None]:
    """Holds the file `lock`, which no other process gets meanwhile. It is removed at the end, unless another file lies
    there by then. A process that dies in whatever way leaves a file that keeps nobody out.

    Raises:
      UserError: `refusal`, where another process has it; or the file system has no locks.
    """
    while True:
        # For writing, since a network file system gives no exclusive lock otherwise, nor one of a folder.
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(refusal) from None
            except OSError as error:  # as of Lustre mounted without flock
                raise UserError(
                    f"{lock}: cannot be locked ({error.strerror}), and without a lock two processes might write there "
                    "at once; choose a folder on another file system, or mount this one with locks"
                ) from error
            if not _lies_at(handle, lock):
                continue  # whoever had it has just removed it
            try:
                yield
            finally:
                if _lies_at(handle, lock):
                    lock.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


@contextlib.contextmanager
def staying(folder: Path, refusal: str) -> Iterator[Callable[[], None]]:
    """Yields a check that `folder` still lies at its path: if it was moved, writing by that path would make a new
    folder, or go into another one. It is held open, so that no folder made later is taken for it.

    Raises:
      UserError: by the check, `refusal`, where nothing or another folder lies at its path.
    """
    handle = os.open(folder, os.O_RDONLY)

    def check() -> None:
        if not _lies_at(handle, folder):
            raise UserError(refusal)

    try:
        yield check
    finally:
        os.close(handle)


def _lies_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def whole_folder(
    path: str | os.PathLike[str], names: Sequence[str] | Callable[[Path], Sequence[str]]
) -> Iterator[Path]:
    """Yields an empty folder beside `path` to write to; at the end it is flushed and takes `path`'s place.

    A folder of the same kind that stands there is replaced: for an instant between two renames `path` is absent, never
    half. If anything raises, `path` is as it was; after a kill at that instant the next write to it puts it back first.

    Args:
      path: the folder to appear; of a symbolic link, where it leads.
      names: the files that such a folder may hold, or what tells them of the one that is there; the first is one that
        all of them have. A folder without it, or with any other file, is of another kind and not replaced, unless it is
        empty.

    Raises:
      UserError: `path` is a file or lies in one, or is a folder with other content.
    """
    path = where_it_leads(path)
    _refuse_other_content(path, names)
    make_folder(path.parent)
    lock, temp, old = (path.with_name(f".{kind}-{path.name}") for kind in ("lock", "tmp", "old"))
    refusal = f"{path}: another process is writing it; wait for it or choose another name"
    with locked(lock, refusal), writing(path):
        try:
            if old.exists() and not path.exists():
                os.rename(old, path)  # a process died between the two renames below
            _refuse_other_content(path, names)  # which it may have got meanwhile
            for leftover in (old, temp):
                if leftover.exists():
                    shutil.rmtree(leftover)
            temp.mkdir()
            yield temp
            flush_tree(temp)
            if path.exists():
                os.rename(path, old)
            os.rename(temp, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.rename(old, path)
            shutil.rmtree(temp, ignore_errors=True)
            raise
        flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)  # or by the next one that writes here


def _refuse_other_content(path: Path, allowed: Sequence[str] | Callable[[Path], Sequence[str]]) -> None:
    names = allowed(path) if callable(allowed) else allowed
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; expected a folder, or a name that is free")
    there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    foreign = sorted(there - set(names) if there.intersection(names[:1]) else there)
    if foreign:
        raise UserError(f"{path} holds {foreign[0]}, which would be lost by replacing the folder; choose another name")


@contextlib.contextmanager
def whole_file(path: Path, shared: bool = False) -> Iterator[Path]:
    """Yields the name of an empty file beside `path` to write; at the end it is flushed and takes `path`'s place. A
    kill leaves the old file or the new one; if anything raises, `path` is as it was and nothing lies beside it.

    Args:
      path: the file.
      shared: whether other processes may write it meanwhile: of two the later to end counts. What a killed one has
        written beside `path` is then left, else the next one that writes here removes it.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}" if shared else f".tmp-{path.name}")
    with writing(path):
        try:
            # Made anew: what lies there may be of a killed process, or in a shared folder a link to another file.
            temporary.unlink(missing_ok=True)
            temporary.touch(exist_ok=False)
            yield temporary
            flush(temporary)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # or by the next one that writes here
                temporary.unlink()
            raise
        flush(path.parent)  # or a power failure might bring the old file back


def write_whole(path: Path, text: str) -> None:
    """Replaces the file `path` as a whole, see `whole_file`."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
