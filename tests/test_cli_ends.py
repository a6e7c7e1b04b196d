"""How a command of the command line ends: exit codes and messages of errors and interruptions, and closed streams."""

import errno
import os
import subprocess
import sys

import jax
import pytest

from qerl_jax.cli import main
from qerl_jax.errors import UserError

PLOT = ["plot", "runs/a", "runs/b", "--output", "x"]


@pytest.fixture
def fails(monkeypatch):
    """`fails(error)` has a command that raises it."""

    def fails(error):
        def run(arguments):
            raise error

        monkeypatch.setattr("qerl_jax.commands.plot.run", run)

    return fails


def test_an_error_of_the_user_and_an_interruption(fails, capsys):
    fails(UserError("the base differs"))
    assert main(PLOT) == 2
    assert capsys.readouterr().err == "qerl plot: the base differs\n"

    class Interrupted(KeyboardInterrupt):
        pass

    fails(Interrupted("saved at step 12; `qerl train x.yaml` continues it"))
    assert main(PLOT) == 130
    assert "saved at step 12; `qerl train x.yaml` continues it" in capsys.readouterr().err
    fails(KeyboardInterrupt())
    assert main(PLOT) == 130


def test_an_error_with_text_of_a_file_sends_no_control_characters(tmp_path, capsys):
    (file := tmp_path / "x.yaml").write_text('"\\e[2J\\u009b3J": 1\n"\\e[2J\\u009b3J": 2\n')
    assert main(["plan", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and r'duplicate key "\x1b[2J\x9b3J", also in line 1' in line


def test_an_interruption_amid_a_computation_is_no_crash():
    code = """
import jax, numpy as np, sys
from qerl_jax import cli
from qerl_jax.commands import plot
def interrupted(arguments):
    found = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, x: x @ x / 500, x))(np.ones((500, 500)))
    found.copy_to_host_async()  # the first that `jax.device_get` does
    raise KeyboardInterrupt
plot.run = interrupted
sys.exit(cli.main(["plot", "x"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_an_interruption_of_imports_is_told_as_one():
    code = """
import sys
from qerl_jax.cli import main
class Interrupting:
    def find_spec(self, name, path, target):
        if name == "numpy.lib":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
sys.exit(main(["export", "x", "y", "--format", "bf16"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_a_current_folder_that_has_gone(tmp_path):
    """Before a command begins, it is an error; amid one, the commands that it prints need none."""
    code = """
import os, sys
from qerl_jax import cli
from qerl_jax.commands import plot
from qerl_jax.program import program
def run(arguments):
    os.rmdir(arguments.runs[0])
    print(program())
plot.run = run
os.chdir(sys.argv[2])
sys.exit(cli.main(sys.argv[1:]) or cli.main(sys.argv[1:]))
"""
    (here := tmp_path / "here").mkdir()
    done = subprocess.run([sys.executable, "-c", code, "plot", here], capture_output=True, text=True)
    assert (done.returncode, len(done.stdout.splitlines())) == (2, 1)
    assert done.stderr == "qerl plot: the current folder has been deleted; change to one that exists\n"


@pytest.mark.parametrize("closed", [False, True])
def test_output_in_a_locale_of_ascii_and_to_a_closed_terminal(closed):
    code = """
import os, sys
from qerl_jax import cli
from qerl_jax.commands import plot
plot.run = lambda arguments: print("é" + os.fsdecode(b"\\xff"))
sys.exit(cli.main(["plot", "x"]))
"""
    command = [sys.executable, "-c", code]
    if closed:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"" if closed else "é".encode() + b"\xff\n", b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_number_of_a_closed_stream(closed, tmp_path):
    code = """
import os, subprocess, sys
from qerl_jax import cli
from qerl_jax.commands import plot
def run(arguments):
    assert not sys.stdout.isatty() and not sys.stderr.isatty()
    with open(arguments.runs[0], "w") as file:
        print(file.fileno() > 2, file=file)
        print(subprocess.run(["sh", "-c", "echo 1; echo 2 >&2"]).returncode, file=file, flush=True)
        os.write(1, b"written to 1"), os.write(2, b"written to 2")
plot.run = run
sys.exit(cli.main(["plot", sys.argv[1]]))
"""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(tmp_path / "file")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert (tmp_path / "file").read_text() == "True\n0\n"


def test_a_warning_for_the_user_is_one_line_without_its_place_in_the_source():
    code = "import warnings as w; from qerl_jax.cli import main; main([]); w.warn('said'); w.warn('b', Warning)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["WARNING: said", "<string>:1: Warning: b"]


@pytest.mark.parametrize("error", [
    ZeroDivisionError("x"), jax.errors.JaxRuntimeError("INTERNAL: x"), RuntimeError("RESOURCE_EXHAUSTED: x"),
    OSError(errno.EIO, os.strerror(errno.EIO)),
])  # fmt: skip
def test_errors_that_are_no_users_keep_their_traceback(error, fails):
    fails(error)
    with pytest.raises(type(error)) as caught:
        main(PLOT)
    assert caught.value is error


def test_too_little_memory_is_told_in_one_line(fails, capsys):
    full = "RESOURCE_EXHAUSTED: Out of memory allocating 400000000000000 bytes."
    fails(jax.errors.JaxRuntimeError(f"{full}\nBuffers: many"))
    assert main(PLOT) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"qerl plot: {full[:-1]}; lower what takes memory: rows, lengths, slots, lora_r or ")


def test_an_error_of_the_runtime_without_jax_keeps_its_traceback():
    code = """
import sys
from qerl_jax import cli
from qerl_jax.commands import plot
def failed(arguments):
    raise RuntimeError("RESOURCE_EXHAUSTED: x")
plot.run = failed
try: cli.main(["plot", "x"])
except RuntimeError: print("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_in_one_line(fails, capsys, code):
    """A write that fails names no file."""
    fails(OSError(code, os.strerror(code)))
    assert main(PLOT) == 2
    assert capsys.readouterr().err == f"qerl plot: {os.strerror(code)}\n"
    # So a copy fails, whose source has room enough.
    fails(OSError(code, os.strerror(code), "from/a", None, "to/a"))
    assert main(PLOT) == 2
    assert capsys.readouterr().err == f"qerl plot: from/a -> to/a: {os.strerror(code)}\n"


def test_a_reader_that_has_gone_is_no_error_message(monkeypatch, fails, capfd):
    """What Python still has to write at its end goes nowhere."""
    replaced, nowhere = [], os.stat(os.devnull)
    monkeypatch.setattr(os, "dup2", lambda new, old: replaced.append((os.path.samestat(os.fstat(new), nowhere), old)))
    fails(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert main(PLOT) == 1
    assert replaced == [(True, sys.stdout.fileno())] and capfd.readouterr().err == ""
