"""Ctrl-C, and SIGTERM as schedulers send it, as a flag that a loop reads where it can stop without loss."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the state was saved; the message says how to continue."""


@contextlib.contextmanager
def interrupt_flag() -> Iterator[list[bool]]:
    """A list that becomes non-empty on the first Ctrl-C or SIGTERM; the second one stops at once. Updates donate their
    input, so stopping inside one would lose the state. Outside the main thread, where Python delivers no signals, it
    stays empty."""
    pressed: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt("stopped at once: the run goes on from its last checkpoint, if it has one")
        pressed.append(True)
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        print(f"\n{name}: saving after this rollout, or once all is compiled (again to stop at once)", file=sys.stderr)

    previous = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield pressed
    finally:
        for signum, handled in previous.items():
            signal.signal(signum, handled)
