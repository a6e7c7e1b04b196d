"""How far a run has come, on one line of a terminal."""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from qerl_jax.metrics import are_shares


class LiveLine:
    """One line on a terminal, rewritten after each step; elsewhere a plain line of the first, the last and each tenth.

    Args:
      total_steps: T.
      stream: where to write; standard output by default.
      clock: seconds. The time left is the steps left at the pace of the last 10 rollouts; the rows of one rollout,
        which may be several, are expected together at its end.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None, clock: Any = time.monotonic):
        self._total, self._clock = total_steps, clock
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
            redraw(self._stream, self._line)
        elif self._first or step % 10 == 0 or step == self._total:
            self._stream.write(self._line + "\n")
            self._stream.flush()
        self._first = False

    def note(self, text: str) -> None:
        """Prints a line above the live one."""
        self._stream.write(f"\r\033[K{text}\n" if self._rewrites else f"{text}\n")
        self._stream.flush()
        if self._rewrites and self._line:
            redraw(self._stream, self._line)

    def close(self) -> None:
        """Leaves the last state of the line standing."""
        if self._rewrites and self._line:
            self._stream.write("\n")
            self._stream.flush()
        self._line = ""

    def _text(self, row: Mapping[str, Any], step: int) -> str:
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
        for label, key, form in _SHOWN:
            value = row.get(key)
            if value is not None:
                value = float(value)
                if form.endswith("%") and not are_shares([value]):
                    form = ".3f"
                parts.append(f"{label}{format(value, form)}")
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


def redraw(stream: TextIO, line: str) -> None:
    """Puts `line` in the place of the last one of a terminal, cut where it would go on in another."""
    stream.write(f"\r\033[K{line[: max(1, _columns(stream) - 1)]}")
    stream.flush()


def _columns(stream: TextIO) -> int:
    """The width of a terminal, which need not be that of standard output, where `shutil` looks: that may be a file."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # no terminal of the system's
        columns = 0
    return shutil.get_terminal_size((columns or 80, 24)).columns


def duration(seconds: float) -> str:
    """`42s`, `3m05s` or `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
