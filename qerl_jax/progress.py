"""A line on stderr that says how far something long has come: redrawn on a terminal, in a log a new one now and
then."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from qerl_jax.live_line import duration, redraw

_QUIET = 2.0  # seconds; what is over by then says nothing
_EVERY = {True: 0.2, False: 10.0}  # seconds between two lines, on a terminal and elsewhere


class Progress:
    """Counts bytes and tensors of a known total. As a context manager it ends the line; use it from one thread.

    Args:
      title: what is going on.
      items: tensors that there are.
      total_bytes: how large they are together.
      stream: None is stderr.
    """

    def __init__(self, title: str, items: int, total_bytes: int, stream: TextIO | None = None) -> None:
        self._title, self._items, self._bytes = title, items, total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._begin = time.monotonic()
        self._next = self._begin + _QUIET
        self._done_items = self._done_bytes = 0
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def advance(self, nbytes: int) -> None:
        """Counts a tensor that is done, and shows it if it is time to."""
        self._done_bytes += nbytes
        self._done_items += 1
        if time.monotonic() >= self._next:
            self._show()
            self._next = time.monotonic() + _EVERY[self._terminal]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Where nothing was shown there is no line to end; where something was, its last state is the final one.
        if self._shown:
            self._show()
            if self._terminal:
                self._stream.write("\n")
                self._stream.flush()

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = self._done_bytes / seconds
        left = (self._bytes - self._done_bytes) / rate if rate else 0.0
        line = (
            f"{self._title}: {self._done_items}/{self._items} tensors, {self._done_bytes / 1e9:.2f}/"
            f"{self._bytes / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, {duration(seconds)} gone, {duration(left)} left"
        )
        if self._terminal:
            redraw(self._stream, line)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        self._shown = True
