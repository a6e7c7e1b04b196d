"""Output that nobody reads any more."""

import os
import pty
import subprocess
import sys

import pytest

CODE = """
import sys
from qerl_jax.unread import going_on_unread
with going_on_unread("goes on", is_log=len(sys.argv) > 2):
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

    def run(reader, writer, stderr, *more):
        command = [sys.executable, "-c", CODE, str(tmp_path / "file"), *more]
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


@pytest.mark.parametrize("path, mode, error", [
    ("/dev/full", os.O_WRONLY, b"No space left on device"),
    (os.devnull, os.O_RDONLY, b"Bad file descriptor"),  # `1</dev/null`
])  # fmt: skip
def test_other_failures_to_write_stay_errors_but_for_a_log(path, mode, error, program, tmp_path):
    opened = os.open(path, mode)
    code, said = program(os.dup(opened), opened, subprocess.PIPE)
    assert code != 0 and error in said and b"goes on" not in said
    assert not (tmp_path / "file").exists()
    opened = os.open(path, mode)
    assert program(os.dup(opened), opened, subprocess.PIPE, "log") == (0, b"goes on\nsaid\n")
    assert (tmp_path / "file").read_text() == "the end"
