"""Output that cannot be written any more, since its reader has gone, a pipe's or a closed terminal's, or its disk is
full, in a program that goes on all the same."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def going_on_unread(told: str = "") -> Iterator[None]:
    """While it lasts, no failure to print on standard output or standard error is an error: the text is lost, and from
    then on that stream goes nowhere, as with `>/dev/null`; one that was closed before does from the beginning. For what
    is a log, or stands elsewhere too.

    Args:
      told: said once on standard error when standard output is lost.
    """
    open_closed_streams()
    with (
        contextlib.redirect_stderr(cast(TextIO, _Stream(sys.stderr))) as stderr,
        contextlib.redirect_stdout(cast(TextIO, _Stream(sys.stdout, told))) as stdout,
    ):
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()


def open_closed_streams() -> None:
    """Opens standard streams that are closed (`qerl train >&-`) onto nothing. The next file that is opened would take
    their number, and get what C++ and reward functions write to them."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (as long as the process lives)


class _Stream:
    """`stream`, but for the system's errors of writing."""

    def __init__(self, stream: TextIO, told: str = "") -> None:
        self._stream, self._told = stream, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        # The file descriptor itself, so that what the buffer still holds can be written, and other writers go on too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._told:
            print(self._told, file=sys.stderr)
