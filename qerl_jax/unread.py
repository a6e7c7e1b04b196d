"""Output that nobody reads any more, a pipe whose reader has ended or a terminal that was closed, or that cannot be
written for another reason, in a program that goes on all the same."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO)  # what a write to such a pipe and to such a terminal fails with


@contextlib.contextmanager
def going_on_unread(told: str = "", *, is_log: bool = False) -> Iterator[None]:
    """While it lasts, printing on standard output or standard error is no error once the reader has gone: the text is
    lost, and from then on that stream goes nowhere, as with `>/dev/null`. Other failures to write stay errors.

    Args:
      told: said once on standard error when standard output is lost.
      is_log: what is printed also stands elsewhere, so that no failure to write it is an error.
    """
    with (
        contextlib.redirect_stderr(cast(TextIO, _Stream(sys.stderr, is_log))) as stderr,
        contextlib.redirect_stdout(cast(TextIO, _Stream(sys.stdout, is_log, told))) as stdout,
    ):
        try:
            yield
        finally:
            stdout.flush()
            stderr.flush()


class _Stream:
    """`stream`, but for the system's errors of writing to where nobody reads; of a log, for all errors of writing."""

    def __init__(self, stream: TextIO, is_log: bool, told: str = "") -> None:
        self._stream, self._is_log, self._told = stream, is_log, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not self._is_log and error.errno not in _GONE:
            raise error
        # The file descriptor itself, so that what the buffer still holds can be written, and other writers go on too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._told:
            print(self._told, file=sys.stderr)
