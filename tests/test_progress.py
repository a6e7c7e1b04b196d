"""What the line of progress says, when, and where."""

import io
import os
import pty
import sys
import termios

import pytest

from qerl_jax import progress
from qerl_jax.live_line import redraw
from qerl_jax.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def run(stream, clock, seconds):
    with Progress("loading m", 4, 8_000_000_000, stream=stream) as bar:
        for _ in range(4):
            clock[0] += seconds / 4
            bar.advance(2_000_000_000)
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_is_quick_says_nothing(stream, clock):
    assert run(stream(), clock, 1.9) == ""


def test_lines_in_a_log(clock):
    lines = run(io.StringIO(), clock, 32).splitlines()
    assert lines[0] == "loading m: 1/4 tensors, 2.00/8.00 GB, 250 MB/s, 8s gone, 24s left"
    assert lines[-1] == "loading m: 4/4 tensors, 8.00/8.00 GB, 250 MB/s, 32s gone, 0s left"
    assert len(lines) == 3  # at 8 and 24 seconds, for 16 comes too soon, and at the end


def test_one_line_on_a_terminal(clock):
    text = run(Terminal(), clock, 400)
    assert text.endswith("\n") and text.count("\n") == 1
    *_, before, last = text.rstrip("\n").split("\r\033[K")
    assert before == last == "loading m: 4/4 tensors, 8.00/8.00 GB, 20 MB/s, 6m40s gone, 0s left"
    assert "1/4 tensors, 2.00/8.00 GB, 20 MB/s, 1m40s gone, 5m00s left" in text


def test_a_line_is_cut_to_the_terminal(clock, monkeypatch):
    """Or each redraw would leave a part of it above."""
    monkeypatch.setenv("COLUMNS", "40")
    *_, last = run(Terminal(), clock, 400).rstrip("\n").split("\r\033[K")
    assert last == "loading m: 4/4 tensors, 8.00/8.00 GB, 20"[:39]


def test_the_terminal_is_the_one_that_is_written_to(clock, monkeypatch):
    """As where standard output goes into a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    ours, theirs = pty.openpty()
    with open(ours, "rb") as shown, open(theirs, "w") as terminal:
        termios.tcsetwinsize(terminal, (24, 40))
        redraw(terminal, "x" * 100)
        assert os.read(shown.fileno(), 200) == b"\r\033[K" + b"x" * 39


def test_an_interrupted_line_is_ended(clock):
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress("x", 2, 10, stream=stream) as bar:
        clock[0] += 3
        bar.advance(5)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("1/2 tensors, 0.00/0.00 GB, 0 MB/s, 3s gone, 3s left\n")
