"""Ctrl-C, a scheduler's SIGTERM and a closed terminal's SIGHUP, as a flag that a loop reads where it can stop without
loss."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP: the state was saved; the message says how to continue."""


@contextlib.contextmanager
def interrupt_flag() -> Iterator[list[int]]:
    """A list that becomes non-empty on the first Ctrl-C, SIGTERM or SIGHUP.

    Updates donate their input, so stopping inside one would lose the state. A second Ctrl-C or SIGTERM stops at once.
    SIGHUP does not count as one of the two: when a terminal is closed, the shell and the system may both send it, and a
    SIGTERM behind it, as at a logout. What is ignored stays ignored: SIGHUP under nohup, Ctrl-C in what a script has
    started with &. Outside the main thread, where Python delivers no signals, the list stays empty.
    """
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        if pressed and signum == signal.SIGHUP:
            return
        if pressed and pressed[-1] != signal.SIGHUP:
            raise KeyboardInterrupt("stopped at once: the run goes on from its last checkpoint, if it has one")
        pressed.append(signum)
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        print(f"\n{name}: saving after this rollout, or once all is compiled (again to stop at once)", file=sys.stderr)

    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    heard = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handler) for signum in heard}
    try:
        yield pressed
    finally:
        for signum, handled in previous.items():
            signal.signal(signum, handled)
