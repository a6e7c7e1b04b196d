"""Files of rows: one JSON object a line; of a data set each with a `prompt`."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl_jax.errors import UserError, nearest, shown
from qerl_jax.input_files import file_size, json_value, unique_names

_DEEPEST = 64  # lists and objects in one another


def line_of(path: Path, number: int) -> str:
    """A line, as the start of a message about it."""
    return f"{path}, line {number}"


def read_bytes(path: Path) -> bytes:
    """The file's contents; a UserError says that there is none to be read, or something else stands there."""
    file_size(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def read_rows(path: Path, data: bytes) -> dict[int, dict[str, Any]]:
    """The rows of a file of these contents, by the numbers of their lines; their prompts may be anything.

    Raises:
      UserError: there are none, or a line is not a JSON object with a `prompt` that can be copied and written.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, row in read_lines(path, data):
        if isinstance(row, UserError):
            raise row
        rows[number] = row
    return rows


def read_lines(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
    """As `read_rows`, line by line: a number, and the row or why there is none.

    Raises:
      UserError: there are no lines, but for empty ones.
    """
    for number, line in numbered_lines(path, data):
        try:
            row = read_row(path, number, line)
            _check_columns(row, line_of(path, number))
            yield number, row
        except UserError as error:
            yield number, error


def numbered_lines(path: Path, data: bytes) -> list[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers; a UserError says that there are none."""
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: has no rows; expected one JSON object a line")
    return lines


def read_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object in a line, whatever its columns; a UserError says that it is none."""
    where = line_of(path, number)
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = json_value(text, parse_constant=_no_json, parse_float=_finite, object_pairs_hook=unique_names)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); expected one JSON object a line"
        ) from error
    except ValueError as error:  # NaN, thousands of digits, or of brackets, a name that is there twice
        raise UserError(f"{where}: cannot be read as JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: found a {type(row).__name__}; expected one JSON object a line")
    return row


def _check_columns(row: dict[str, Any], where: str) -> None:
    if "prompt" not in row:
        found = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where}: there is no column 'prompt'{nearest('prompt', row)}; found {shown(found)}")
    for part, value in _parts(row):
        if isinstance(value, list | dict) and len(part) > _DEEPEST:
            raise UserError(f"{where}: column {part[0]!r} is nested more than {_DEEPEST} deep")
    _check_text(row, where)


def _no_json(name: str) -> Any:
    """Of NaN and the infinities, which Python reads and writes, and of which no log could be written."""
    raise ValueError(f"{name} is no JSON; null is")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{shown(text, 20)} is beyond the numbers that a float has")
    return value


def _parts(row: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Columns and all that is in them, by where it stands: `("tests", "[]", ".input")` say."""
    found: list[tuple[tuple[str, ...], Any]] = [((name,), value) for name, value in row.items()]
    for path, value in found:  # which grow meanwhile
        yield path, value
        if isinstance(value, list):
            found += [((*path, "[]"), item) for item in value]
        elif isinstance(value, dict):
            found += [((*path, f".{key}"), item) for key, item in value.items()]


def _check_text(row: dict[str, Any], where: str) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {error.object[error.start]!r} is half of a surrogate pair, and no text") from None
