"""What a run writes down while it goes: metrics.jsonl, completions.jsonl, TensorBoard and W&B, and one live line.

A line of a JSONL file is one JSON object, written by a single system call to a file opened for appending, so that a
kill leaves whole lines and at most one torn one at the end. NaN and infinities are written as null, which JSON has.
Each row holds `rollout`, so that a resumed run can cut both files back to where its checkpoint stands.
"""

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from qerl_jax.durable import flush, make_folder, write_whole, writing
from qerl_jax.errors import UserError, shown
from qerl_jax.models.files import json_value
from qerl_jax.option_names import Service

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
ROWS = METRICS, COMPLETIONS
TENSORBOARD = "tensorboard"
WANDB_RUN_ID = "wandb_run_id"  # a file: the same run goes on after a resume

_log = logging.getLogger(__name__)


def json_line(row: Mapping[str, Any]) -> str:
    """One line of a JSONL file. Array scalars become numbers, arrays lists; NaN and infinities become null."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a JSONL file, one for each line; a torn last line is left out.

    Raises:
      UserError: the file is missing, or a line before the last one is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            lines = file.readlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    rows = []
    for number, line, row in _parsed(lines):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            found = shown(line.decode(errors="replace").strip()) or "an empty line"
            raise UserError(f"{path}, line {number}: found {found}; expected a JSON object; correct or remove the line")
    return rows


def truncate_after(run_dir: Path, rollout: int) -> None:
    """Cuts metrics.jsonl and completions.jsonl back to the rows with row["rollout"] < rollout.

    The first rollout to be made again is `rollout`. A torn last line goes too; a damaged line further up is reported
    and dropped. Each file is replaced whole, so a kill meanwhile leaves the old or the new one.
    """
    for name in ROWS:
        path = run_dir / name
        if not path.exists():
            continue
        temporary = path.with_name(f".{name}.tmp")
        with writing(path), path.open("rb") as source, temporary.open("wb") as target:
            for number, line, row in _parsed(source):
                if row is None or not isinstance(row.get("rollout"), int):
                    if line.endswith(b"\n"):
                        _log.warning("%s, line %d: not a JSON object with `rollout`; dropped", path, number)
                elif row["rollout"] < rollout:
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
        flush(run_dir)  # or a power failure might bring the old file back, without rows that are yet to be added


def check_services(report_to: Sequence[Service]) -> None:
    """Refuses services whose packages are not installed, without importing one.

    Raises:
      UserError: naming the first, and how to install it.
    """
    for name in report_to:
        spec = importlib.util.find_spec(package := _SERVICES[name].package)
        if spec is None or spec.origin is None:  # a mere folder, such as the `wandb` that W&B makes, is found too
            raise _missing(name, package)


class MetricsWriter:
    """Appends to the run's JSONL files, and to the services asked for.

    Args:
      run_dir: the run folder; made if missing.
      report_to: the services.
      step: optimizer steps already done; TensorBoard hides what an earlier process has written beyond them.

    Raises:
      UserError: the folder is a file or lies in one, or a service's package is not installed.
    """

    def __init__(self, run_dir: Path, report_to: Sequence[Service] = (), step: int = 0) -> None:
        make_folder(run_dir)
        with contextlib.ExitStack() as opened:
            self._services = [
                opened.enter_context(contextlib.closing(_SERVICES[name](run_dir, step))) for name in report_to
            ]
            self._metrics, self._completions = (
                opened.enter_context((run_dir / name).open("ab", buffering=0)) for name in ROWS
            )
            self._opened = opened.pop_all()

    def log(self, row: Mapping[str, Any]) -> None:
        """Writes one row: `step` (1-based, after the update), `rollout` (0-based) and the metrics."""
        for key in ("step", "rollout"):
            if key not in row:
                raise ValueError(f"a metrics row needs {key!r}, got {sorted(row)}")
        plain = _plain(row)
        _write(self._metrics, json_line(plain))
        numbers = {key: value for key, value in plain.items() if isinstance(value, int | float)}
        for service in self._services:
            service.log(numbers, int(plain["step"]))

    def log_completions(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows of completions.jsonl, each with its `rollout`."""
        lines = []
        for row in rows:
            if "rollout" not in row:
                raise ValueError(f"a completions row needs 'rollout', got {sorted(row)}")
            lines.append(json_line(row))
        _write(self._completions, "".join(lines))

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
        self.close()


class LiveLine:
    """One line on a terminal, rewritten after each step; elsewhere a plain line every `every` steps.

    Args:
      total_steps: T.
      every: steps between plain lines where `stream` is no terminal (the first and the last are always shown).
      stream: where to write; standard output by default.
      clock: seconds. The time left is the steps left at the pace of the last 10 rollouts; the rows of one rollout,
        which may be several, are expected together at its end.
    """

    def __init__(self, total_steps: int, every: int = 10, stream: TextIO | None = None, clock: Any = time.monotonic):
        self._total, self._every, self._clock = total_steps, every, clock
        self._stream = sys.stdout if stream is None else stream
        self._rewrites = self._stream.isatty()
        self._ticks: list[tuple[float, int]] = []  # when the rows of a rollout came, and the steps before them
        self._rollout: Any = None
        self._line = ""
        self._first = True

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows the metrics row of a step that has just ended."""
        step = int(row["step"])
        rollout = row.get("rollout", step)
        if rollout != self._rollout:
            self._rollout = rollout
            self._ticks = [*self._ticks[-10:], (self._clock(), step - 1)]
        self._line = self._text(row, step)
        if self._rewrites:
            self._draw()
        elif self._first or step % self._every == 0 or step == self._total:
            self._stream.write(self._line + "\n")
            self._stream.flush()
        self._first = False

    def note(self, text: str) -> None:
        """Prints a line above the live one."""
        self._stream.write(f"\r\033[K{text}\n" if self._rewrites else f"{text}\n")
        self._stream.flush()
        if self._rewrites and self._line:
            self._draw()

    def close(self) -> None:
        """Leaves the last state of the line standing."""
        if self._rewrites and self._line:
            self._stream.write("\n")
            self._stream.flush()
        self._line = ""

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns
        self._stream.write(f"\r\033[K{self._line[: max(1, width - 1)]}")
        self._stream.flush()

    def _text(self, row: Mapping[str, Any], step: int) -> str:
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        for label, key, form in _SHOWN:
            value = row.get(key)
            if value is not None:
                parts.append(f"{label}{format(float(value), form)}")
        if "perf/throughput" in row:
            parts.append(f"{float(row['perf/throughput']):,.0f} tokens/s")
        (began, first), (now, last) = self._ticks[0], self._ticks[-1]
        if last > first:
            parts.append(f"{duration((now - began) / (last - first) * (self._total - step))} left")
        return "  ".join(parts)


_SHOWN = (
    ("reward ", "reward", ".3f"),
    ("accuracy ", "rewards/accuracy/mean", ".1%"),
    ("entropy ", "entropy", ".3f"),
    ("sigma ", "aqn/sigma", ".1e"),
)


def duration(seconds: float) -> str:
    """`42s`, `3m05s` or `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class _TensorBoard:
    package = "tensorboardX"

    def __init__(self, run_dir: Path, step: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", self.package) from None
        folder = run_dir / TENSORBOARD
        again = any(folder.glob("*tfevents*"))
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if again else None)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    package = "wandb"

    def __init__(self, run_dir: Path, step: int) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", self.package) from None
        kept = run_dir / WANDB_RUN_ID
        if not kept.exists():
            write_whole(kept, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project="qerl-jax", name=run_dir.name, id=kept.read_text(), resume="allow", dir=str(run_dir)
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


_SERVICES: dict[Service, type[_TensorBoard] | type[_WeightsAndBiases]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}


def _missing(extra: str, package: str) -> UserError:
    return UserError(
        f"run.report_to names {extra}, whose package {package} is not installed; "
        f"pip install 'qerl-jax[{extra}]', or leave it out"
    )


def _write(file: io.FileIO, text: str) -> None:
    data = text.encode()
    with writing(file.name):
        while data:  # a regular file takes all at once but on a full disk, which the next call then reports
            data = data[file.write(data) :]


def _parsed(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """(line number, line, its object, or None where it is torn or no object)."""
    for number, line in enumerate(lines, start=1):
        try:
            row = json_value(line) if line.endswith(b"\n") else None
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
