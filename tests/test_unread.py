"""Output that cannot be written any more."""

import os
import pty
import subprocess
import sys

import pytest

CODE = """
import sys
from qerl_jax.unread import going_on_unread
with going_on_unread("goes on"):
    input()  # until the reader has gone
    for number in range(3):
        print(number)
        print(number, flush=True)
    print("said", file=sys.stderr)
open(sys.argv[1], "w").write("the end")
"""


@pytest.fixture
def program(tmp_path):
    """Starts the program, whose output loses its reader before it prints; gives its exit code and standard error."""

    def run(reader, writer, stderr):
        command = [sys.executable, "-c", CODE, str(tmp_path / "file")]
        streams = {"stdin": subprocess.PIPE, "stdout": writer, "stderr": stderr}
        process = subprocess.Popen(command, start_new_session=True, **streams)
        os.close(writer)
        os.close(reader)
        _, said = process.communicate(b"\n")
        return process.returncode, said

    return run


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_a_program_goes_on_and_says_so_once(opened, program, tmp_path):
    assert program(*opened(), subprocess.PIPE) == (0, b"goes on\nsaid\n")
    assert (tmp_path / "file").read_text() == "the end"


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_a_program_goes_on_where_nobody_reads_its_errors_either(opened, program, tmp_path):
    assert program(*opened(), subprocess.STDOUT) == (0, None)
    assert (tmp_path / "file").read_text() == "the end"


@pytest.mark.parametrize("path, mode", [("/dev/full", os.O_WRONLY), (os.devnull, os.O_RDONLY)])  # `1</dev/null`
def test_a_program_goes_on_whatever_keeps_it_from_writing(path, mode, program, tmp_path):
    opened = os.open(path, mode)
    assert program(os.dup(opened), opened, subprocess.PIPE) == (0, b"goes on\nsaid\n")
    assert (tmp_path / "file").read_text() == "the end"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_program_goes_on_whose_stream_was_closed_before(closed, tmp_path):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CODE, str(tmp_path / "file")]
    done = subprocess.run(command, input=b"\n", capture_output=True)
    left = (b"", b"said\n") if closed == ">&-" else (b"0\n0\n1\n1\n2\n2\n", b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, *left)
    assert (tmp_path / "file").read_text() == "the end"
