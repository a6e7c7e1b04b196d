"""Files from elsewhere, before anything in them is believed: what they are, how long, and whether they are JSON."""

import collections
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl_jax.errors import UserError, shown

_MAX_JSON = 200_000_000  # the largest tokenizer.json is a fifth of it


def file_size(path: Path) -> int:
    """Bytes of an ordinary file. Reading from a pipe or a device might never end.

    Raises:
      UserError: there is none, or something else stands there.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():  # as in a copy of a snapshot in the Hub's cache, whose files are links
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, where nothing is; copy what links lead to (`cp -rL`)"
            ) from None
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        found = "folder" if stat.S_ISDIR(status.st_mode) else "pipe, socket or device"
        raise UserError(f"{path}: cannot be read (expected a file, found a {found})")
    return status.st_size


def file_sha256(path: Path) -> str:
    """The hexadecimal digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_fingerprint(files: Iterable[Path]) -> str:
    """A digest of the names and contents of those of the files that are there."""
    found = {}
    for path in files:
        if path.exists():
            found[path.name] = file_sha256(path)
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      UserError: the file is missing, unreadable, or holds something else.
    """
    size = file_size(path)
    if size > _MAX_JSON:
        raise UserError(f"{path}: expected a JSON file of at most {_MAX_JSON} bytes, found {size}")
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8, in which no object has a name twice.

    Raises:
      ValueError: it is something else; the message is one line and says what.
    """
    try:
        return json_value(text.decode(), object_pairs_hook=unique_names)
    except ValueError as error:
        raise ValueError(shown(error)) from None


def json_value(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text, by `json.loads` with these hooks.

    Raises:
      ValueError: it is none (a JSONDecodeError), it has more digits or brackets in a row than Python reads, or a hook
        raised it.
    """
    try:
        return json.loads(text, parse_int=_whole, **hooks)
    except RecursionError:
        raise ValueError("lists or objects in one another, deeper than can be read") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        digits, most = len(text.removeprefix("-")), sys.get_int_max_str_digits()
        raise ValueError(f"{shown(text, 20)} is a whole number of {digits} digits; allowed: at most {most}") from None


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as `json.loads`'s object_pairs_hook; raises ValueError where a name occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r} occurs twice")
    return found
