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
    then on that stream goes nowhere, as with `>/dev/null`. For what is a log, or stands elsewhere too.

    Args:
      told: said once on standard error when standard output is lost.
    """
    with (
        contextlib.redirect_stderr(cast(TextIO, _Stream(sys.stderr))) as stderr,
        contextlib.redirect_stdout(cast(TextIO, _Stream(sys.stdout, told))) as stdout,
    ):
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()


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
