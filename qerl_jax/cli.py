r"""The command line: a thin layer that reads arguments, calls one function, and prints what it returns (each command in
`qerl_jax.commands`).

    qerl train quickstart run.seed=1
    qerl generate runs/quickstart --prompt \
        "Vic has 5 bags of 13 bars. He puts 15 into each and drops 77. How many bars are left?"
    qerl evaluate runs/quickstart --seed 7
    qerl plot runs/quickstart runs/quickstart-2

Exit codes: 0 done; 1 whoever read the output has gone (a run that trains says so and goes on); 2 a mistake in the
arguments, options or files, told in one line each (of a run's folder by `plan` in the plan), or too little memory for
what they ask; 3 some prompts of a file could not be answered; 130 interrupted by Ctrl-C, or by SIGTERM or SIGHUP while
a run trains.
JAX is imported by the commands that compute, so that `--help` answers at once.
"""

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence

from qerl_jax import __version__
from qerl_jax.commands import evaluate, export, generate, plan, plot, quantize, train
from qerl_jax.errors import UserError, nearest, on_terminal
from qerl_jax.unread import open_closed_streams

_DESCRIPTION = """\
Reinforcement learning of language models whose frozen weights are 4-bit floats.

  qerl train               trains the shipped 1M-parameter policy on this machine, in minutes
  qerl train my.yaml       trains as my.yaml says
  qerl COMMAND --help      explains a command, with examples
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    open_closed_streams()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    warnings.formatwarning = _as_logged
    if isinstance(sys.stdout, io.TextIOWrapper):
        # JSON is UTF-8, and texts have characters that a locale may lack; a folder's name may have other bytes
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    if not words:
        parser.print_help()
        return 2
    if words[0] in commands:
        # Not by the parser of all commands: only an intermixed parse takes `train quickstart --fresh run.seed=1`.
        parsed = commands[words[0]].parse_intermixed_args(words[1:])
    else:
        if not words[0].startswith("-"):
            parser.error(f"unknown command {words[0]!r}{nearest(words[0], commands)}; commands: {', '.join(commands)}")
        parsed = parser.parse_args(words)
    try:
        os.getcwd()  # or packages that are imported later would fail by it
    except FileNotFoundError:
        print(f"qerl {words[0]}: the current folder has been deleted; change to one that exists", file=sys.stderr)
        return 2
    try:
        code: int | None = parsed.command(parsed)
        sys.stdout.flush()
    except UserError as error:
        print(f"qerl {words[0]}: {on_terminal(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\n{stop}" if str(stop) else "\ninterrupted", file=sys.stderr)
        _wait_for_programs()
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`qerl generate ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file or folder that cannot be made, read or written: no permission, a full disk
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        # Of two names the system does not say which it means: a copy that finds no room gives the source first.
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        place = f"{' -> '.join(names)}: " if names else ""
        print(f"qerl {words[0]}: {place}{error.strerror}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        shortage = _shortage_of_memory(error)
        if shortage is None:
            raise
        print(
            f"qerl {words[0]}: {shortage}; lower what takes memory: rows, lengths, slots, lora_r or the size of the "
            "model",
            file=sys.stderr,
        )
        return 2
    return code or 0


def _shortage_of_memory(error: RuntimeError) -> str | None:
    """The first line of an error of JAX that says that memory has run out; None for any other error."""
    errors = sys.modules.get("jax.errors")  # not imported for this: what raised such an error has imported it
    if errors is None or not isinstance(error, errors.JaxRuntimeError):
        return None
    first = str(error).partition("\n")[0].rstrip(".")
    return first if first.startswith("RESOURCE_EXHAUSTED") else None


def _as_logged(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as the log has it. Where in the source it was given says something to those who change it alone."""
    place = "WARNING" if category is UserWarning else f"{filename}:{lineno}: {category.__name__}"
    return f"{place}: {message}\n"


def _wait_for_programs() -> None:
    """Waits for what JAX computes, or for another Ctrl-C: a process that ends before what it waited for is aborted."""
    jax = sys.modules.get("jax")
    if jax is None:
        return
    with contextlib.suppress(KeyboardInterrupt):
        for array in jax.live_arrays():
            array.block_until_ready()
        # Threads that are done ask for the interpreter, to drop what they held; one that ends aborts those that ask.
        time.sleep(0.2)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        "qerl", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"qerl-jax {__version__}")
    made = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (train, plan, generate, evaluate, export, plot, quantize):
        command.add(made)
    return parser, made.choices
