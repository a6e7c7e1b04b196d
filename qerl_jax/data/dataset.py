"""Data sets: rows with a prompt and further columns, and the order in which a run reads them.

    arithmetic          generated word problems (`qerl_jax.data.arithmetic`), by split
    path/to/rows.jsonl  one JSON object a line with a `prompt`: a text, or a list of {"role": ..., "content": ...}

The order is a function of (seed, cursor): nothing but the cursor has to be saved to go on with the very next prompt.
"""

import copy
import functools
import hashlib
import operator
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qerl_jax.data import ROW_FILES, arithmetic
from qerl_jax.data.hashing import fold
from qerl_jax.data.prompts import check_prompt
from qerl_jax.data.row_files import line_of, read_bytes, read_lines, read_rows
from qerl_jax.durable import with_home
from qerl_jax.errors import UserError, is_whole, nearest

# Rows of the generated data set; a run of more prompts goes through them again, as with any other data set.
_ARITHMETIC_ROWS = {"pretrain": 65536, "train": 16384, "eval": 4096}
_TYPES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
# Where rows are in another form: Parquet, CSV, a folder of the Hub's package or a name on the Hub.
_WRITTEN = "such as `Dataset.to_json('rows.jsonl')` of the package datasets writes"
# Of each column: its type, and the first line that has one.
_Types = dict[str, tuple[str, int]]


class Dataset(Protocol):
    """Rows by number. A row is a new dictionary: `prompt` (text or messages) and the other columns."""

    @property
    def fingerprint(self) -> str:
        """Digest of the contents: a run that goes on with another data set is refused by it."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """Where the row stands, as the start of a message about it."""
        ...


class ArithmeticDataset:
    """Word problems with columns `answer` (text) and `operands`."""

    def __init__(self, split: str, size: int, seed: int = 0) -> None:
        """Generates `size` problems of a split; whether their operands belong to that split alone is asserted."""
        problems = arithmetic.generate(seed, split, np.arange(size))
        arithmetic.check_split(problems.operands, split)
        self._prompts = arithmetic.texts(arithmetic.prompt_pieces(problems))
        self._answers = [str(answer) for answer in problems.answers.tolist()]
        self._operands = problems.operands.tolist()

    @property
    def fingerprint(self) -> str:
        contents = "\n".join((*self._prompts, *self._answers))
        return hashlib.sha256(contents.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _one(index)
        return {"prompt": self._prompts[index], "answer": self._answers[index], "operands": self._operands[index]}

    def where(self, index: int) -> str:
        return f"arithmetic, row {index} (counted from 0)"


class JsonlDataset:
    """A local JSONL file, checked line by line; a row is what its line says."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
          UserError: the file is missing or has no rows, a line is not a JSON object with a usable prompt, or a column
            mixes types.
        """
        data = read_bytes(path)
        self.fingerprint = hashlib.sha256(data).hexdigest()
        lines = read_rows(path, data)
        types: _Types = {}
        for line, row in lines.items():
            _check(row["prompt"], line_of(path, line))
            _check_types(row, types, line, line_of(path, line))
        self._path, self._lines, self._rows = path, list(lines), list(lines.values())
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = copy.deepcopy(dict.fromkeys(self._columns) | self._rows[_one(index)])
        row["prompt"] = _without_nulls(row["prompt"])
        return row

    def where(self, index: int) -> str:
        return line_of(self._path, self._lines[index])


def _one(index: Any) -> int:
    """A row's index as an int. A slice is refused: it would give lists of columns to callers that expect rows."""
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"a data set's row is asked for by {index!r:.60}; allowed: its number; [data[i] for i in range(...)] gives "
            "several"
        ) from None


def _without_nulls(prompt: Any) -> Any:
    """A prompt's messages without keys that have no value, which are as good as absent; anything else as it is."""
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _check_types(row: dict[str, Any], types: _Types, number: int, where: str) -> None:
    """Refuses a column that has another type than in earlier rows: reward functions get the columns of several rows at
    once, and prompts and completions that are all texts or all messages. Nothing here reads what is inside lists and
    objects, such as the arguments of tests, so that may differ from row to row."""
    for name, value in row.items():
        if value is None:
            continue
        found = _TYPES[type(value)]
        before, line = types.setdefault(name, (found, number))
        if found != before:
            null = "" if name == "prompt" else ", or null"
            raise UserError(
                f"{where}: column {name!r} is {found}, but {before} in line {line}; expected one type in all rows{null}"
            )


def _check(prompt: Any, where: str) -> None:
    try:
        check_prompt(prompt)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def from_anywhere(name_or_path: str) -> str:
    """The name of the same data set that holds in any working folder."""
    return os.path.abspath(name_or_path) if Path(name_or_path).suffix in ROW_FILES else name_or_path


def load_dataset(name_or_path: str, split: str = "train", *, seed: int = 0, size: int | None = None) -> Dataset:
    """Opens a data set.

    Args:
      name_or_path: `arithmetic`, or a .jsonl or .ndjson file (which has no splits: all its rows are taken).
      split: `train`, `eval` or `pretrain` of a generated data set.
      seed: of a generated data set; another seed gives other problems of the same split.
      size: rows of a generated data set, None for its usual number.

    Raises:
      UserError: an unknown name or split, a size below 1, a missing or empty file, a folder or a file of another
        ending, or an unreadable line, by number.
    """
    if size is not None and not (is_whole(size) and size >= 1):
        raise UserError(f"size is {size!r}; allowed: a whole number >= 1, or None for the usual number of rows")
    if name_or_path == "arithmetic":
        if split not in _ARITHMETIC_ROWS:
            hint = nearest(split, _ARITHMETIC_ROWS)
            raise UserError(f"data set 'arithmetic': no split {split!r}{hint}; allowed: {', '.join(_ARITHMETIC_ROWS)}")
        return ArithmeticDataset(split, _ARITHMETIC_ROWS[split] if size is None else size, seed)
    return JsonlDataset(_row_file(name_or_path))


def load_prompts(name_or_path: str) -> list[Any]:
    """The prompts of a .jsonl or .ndjson file, whatever they are: the caller refuses them one by one (`check_prompt`).

    In the place of a line that cannot be read or has no prompt stands the UserError that says so, with its number.

    Raises:
      UserError: there is no such file, it has no rows, or no line has a prompt; then it is the first line's error.
    """
    path = _row_file(name_or_path)
    rows = [row for _, row in read_lines(path, read_bytes(path))]
    errors = [row for row in rows if isinstance(row, UserError)]
    if len(errors) == len(rows):
        raise errors[0]
    return [row if isinstance(row, UserError) else _without_nulls(row["prompt"]) for row in rows]


def _row_file(name_or_path: str) -> Path:
    """The file of rows that the name stands for; a UserError says why it stands for none."""
    path = with_home(name_or_path)
    rows = " or ".join(ROW_FILES)
    if name_or_path and os.path.isdir(path):
        raise UserError(f"data set {name_or_path!r} is a folder; expected a {rows} file, {_WRITTEN}")
    if path.suffix in ROW_FILES:
        if os.path.lexists(path):
            return path
        raise UserError(f"data set {name_or_path!r}: there is no file {path.absolute()}")
    if name_or_path and os.path.exists(path):
        ending = f"its name ends in {path.suffix}" if path.suffix else "its name has no ending"
        raise UserError(
            f"data set {name_or_path!r}: {ending}; expected a {rows} file, which has a JSON object in each line, "
            f"{_WRITTEN}"
        )
    raise UserError(
        f"data set {name_or_path!r} is unknown{nearest(name_or_path, ['arithmetic'])}; allowed: arithmetic, or a local "
        f"{rows} file, {_WRITTEN}"
    )


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order [n] in which the rows are read in an epoch; a new one each epoch."""
    return np.argsort(fold(seed, epoch, np.arange(n)), kind="stable")


def prompt_indices(seed: int, cursor: int, count: int, n: int, *, shuffle: bool = True) -> list[tuple[int, int]]:
    """The next `count` prompts of a run that has read `cursor` prompts, from a data set of `n` rows.

    Returns:
      (place, row) pairs. The place is the running number cursor, cursor + 1, ..., a prompt's identity for the random
      number generator; the row is the data set's. Epoch e holds the places e * n to e * n + n - 1, each row once.
    """
    pairs = []
    for place in range(cursor, cursor + count):
        epoch, offset = divmod(place, n)
        pairs.append((place, int(_permutation(seed, epoch, n)[offset]) if shuffle else offset))
    return pairs
