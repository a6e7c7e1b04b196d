"""What a run writes down while it goes: metrics.jsonl, completions.jsonl, and in services (`qerl_jax.services`).

A line of a JSONL file is one JSON object, written by a single system call to a file opened for appending, so that a
kill leaves whole lines and at most one torn one at the end. NaN and infinities are written as null, which JSON has.
Each row holds `rollout`, so that a resumed run can cut both files back to where its checkpoint stands.
"""

import contextlib
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from qerl_jax.durable import flush, make_folder, whole_file, writing
from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import json_value
from qerl_jax.option_names import Service
from qerl_jax.run_files import COMPLETIONS, METRICS, ROWS
from qerl_jax.services import Reporter

_COUNTED = {METRICS: "step", COMPLETIONS: "rollout"}  # a row has its number; every number has a row or several
_CONTROLS = re.compile(r"[\x7f-\x9f]")

_log = logging.getLogger(__name__)


def are_shares(values: Iterable[float]) -> bool:
    """Whether values of `accuracy` or `format` can be shown as percentages: all are from 0 to 1, or missing (NaN). A
    user's own function of that name may give other numbers."""
    return all(math.isnan(value) or 0 <= value <= 1 for value in values)


def json_line(row: Mapping[str, Any]) -> str:
    """One line of a JSONL file. Array scalars become numbers, arrays lists; NaN and infinities become null. Control
    characters are escapes, those from DEL to U+009F too, which JSON allows as they are and terminals obey."""
    text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, one for each line; a torn last line is left out.

    Raises:
      UserError: the file is missing, or a line that is not torn is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line, row in _parsed(file):
                if row is not None:
                    yield row
                elif line.endswith(b"\n"):
                    found = shown(line.decode(errors="replace").strip()) or "an empty line"
                    expected = "expected a JSON object; correct or remove the line"
                    raise UserError(f"{path}, line {number}: found {found}; {expected}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def updates_logged(run_dir: Path) -> int:
    """How many rows of metrics.jsonl are of updates; 0 where there is no such file."""
    path = run_dir / METRICS
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(row is not None and "loss" in row for _, _, row in _parsed(file))


def truncate_after(run_dir: Path, rollout: int) -> dict[str, set[int]]:
    """Cuts metrics.jsonl and completions.jsonl back to the rows with row["rollout"] < rollout.

    The first rollout to be made again is `rollout`. A torn last line goes too; a damaged line further up is reported
    and moved to a file beside it. Where all that goes lies behind what stays, as a run leaves it, it is cut off, which
    takes no room on a disk that may be full. Else the file is replaced whole: a kill leaves the old or the new one.

    Returns:
      The steps of the rows left in metrics.jsonl, and the rollouts of those in completions.jsonl, by the files' names.
    """
    left: dict[str, set[int]] = {name: set() for name in ROWS}
    for name, numbers in left.items():
        path = run_dir / name
        if not path.exists():
            continue
        gone: set[int] = set()  # numbers of lines
        read = kept = end = 0  # bytes: of all lines so far, of those that stay, and up to the last of these
        with path.open("rb") as source:
            for place, line, row in _parsed(source):
                read += len(line)
                if row is None or not isinstance(row.get("rollout"), int):
                    gone.add(place)
                    if line.endswith(b"\n"):
                        _set_aside(path, place, line)
                elif row["rollout"] >= rollout:
                    gone.add(place)
                else:
                    kept, end = kept + len(line), read
                    # an evaluation's row has the step of the update before it
                    if (name == COMPLETIONS or "loss" in row) and isinstance(number := row.get(_COUNTED[name]), int):
                        numbers.add(number)
        if kept == end:
            os.truncate(path, end)
            flush(path)
        else:
            with whole_file(path) as temporary, path.open("rb") as source, temporary.open("wb") as target:
                target.writelines(line for place, line in enumerate(source, start=1) if place not in gone)
    return left


def _set_aside(path: Path, place: int, line: bytes) -> None:
    kept = path.with_name(f"{path.name}.damaged")
    with kept.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    _log.warning("%s, line %d: not a JSON object with `rollout`; moved to %s", path, place, kept)


def warn_of_missing_rows(run_dir: Path, left: Mapping[str, set[int]], steps: int, rollouts: int) -> None:
    """Warns of rows that a run that goes on should have, and that are missing.

    Args:
      run_dir: its folder.
      left: what `truncate_after` found.
      steps: how many steps should have rows in metrics.jsonl.
      rollouts: how many rollouts should have rows in completions.jsonl; 0 where completions are not logged.
    """
    for name, made in ((METRICS, range(1, steps + 1)), (COMPLETIONS, range(rollouts))):
        missing = set(made) - left[name]
        if missing:
            _log.warning(
                "%s: the rows of %s %s are missing: they were lost or removed since%s; the run goes on without them "
                "(to have them, stop it and put them back, before the others)",
                run_dir / name,
                _COUNTED[name] if len(missing) == 1 else f"{_COUNTED[name]}s",
                _spans(missing),
                ", or run.log_completions was false" if name == COMPLETIONS else "",
            )


def _spans(numbers: set[int]) -> str:
    """Ascending, `1 to 4, 7`."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    spans = zip(firsts, lasts, strict=True)
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


class MetricsWriter:
    """Appends to the run's JSONL files, and to the services asked for.

    Args:
      run_dir: the run folder; made if missing.
      report_to: the services.
      step: optimizer steps already done; TensorBoard hides what an earlier process has written beyond them.
      options: the run's, for W&B.

    Raises:
      UserError: the folder is a file or lies in one, or a service's package is not installed or failed, then or later.
    """

    def __init__(
        self,
        run_dir: Path,
        report_to: Sequence[Service] = (),
        step: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        make_folder(run_dir)
        with contextlib.ExitStack() as opened:
            self._services = [
                opened.enter_context(contextlib.closing(Reporter(name, run_dir, step, options or {})))
                for name in report_to
            ]
            self._metrics, self._completions = (
                opened.enter_context((run_dir / name).open("ab", buffering=0)) for name in ROWS
            )
            self._opened = opened.pop_all()

    def log(self, *rows: Mapping[str, Any]) -> None:
        """Writes rows, each of `step` (1-based, after the update), `rollout` (0-based) and the metrics; an evaluation's
        are those of the newest update, before training step 0 and rollout -1. All rows are in metrics.jsonl before a
        service gets the first, and may fail."""
        for row in rows:
            _write(self._metrics, json_line(row))
        for row in map(_plain, rows) if self._services else ():
            numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
            for service in self._services:
                service.log(numbers, int(row["step"]))

    def log_completions(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows of completions.jsonl, each with its `rollout`."""
        _write(self._completions, "".join(map(json_line, rows)))

    def sync(self) -> None:
        """Forces what was written to the disk; call it before saving the checkpoint that counts on it."""
        for file in (self._metrics, self._completions):
            with writing(file.name):
                os.fsync(file)

    def close(self) -> None:
        """Closes the files and services; nothing is written afterwards."""
        with self._opened:
            self.sync()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UserError as unsent:
            if error is None:
                raise
            _log.warning("%s", unsent)  # what stopped the run says more


def _write(file: io.FileIO, text: str) -> None:
    data = text.encode()
    with writing(file.name):
        while data:  # a regular file takes all at once but on a full disk, which the next call then reports
            data = data[file.write(data) :]


def _parsed(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """(line number, line, its object, or None where it is torn or no object)."""
    for number, line in enumerate(lines, start=1):
        try:
            row = json_value(line.decode()) if line.endswith(b"\n") else None  # or it would guess the encoding
        except ValueError:
            row = None
        yield number, line, row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and JAX arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
