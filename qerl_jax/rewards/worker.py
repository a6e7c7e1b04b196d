"""The program in which a user's reward function runs; started by `qerl_jax.rewards.pool`, not by hand.

    python -m qerl_jax.rewards.worker STACK_FD

A program of its own rather than a fork (unsafe once JAX has started its threads) or a spawned process (which imports
the user's script again). Reads messages, each with its deadline, from stdin and answers on stdout: first a
`RewardName` with the PYTHONPATH that the user's code is to see, answered by a digest of its source, then calls, or data
sets' columns to be compared with the function's signature. What the user's code prints goes to stderr, or nowhere once
nobody reads that or its disk is full. A coroutine is cancelled at the deadline of its call. Right behind it a watchdog
that needs no interpreter lock ends the process and leaves the stack of every thread in the file STACK_FD. Once the
parent is gone, the worker ends with all that it has started, so none outlives a killed parent by more than a call. (If
that call runs into its deadline, the watchdog ends the worker alone.)
"""

import faulthandler
import io
import os
import subprocess
import sys
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn, cast

from qerl_jax.errors import UserError
from qerl_jax.rewards import channel
from qerl_jax.rewards.calling import Overdue, accepted, call
from qerl_jax.rewards.loading import FileFinder, load_function, own_file, source_digest
from qerl_jax.unread import going_on_unread

_LAST_SECONDS = 2.0
_TO_CANCEL = 0.5  # seconds behind the deadline, in which a coroutine can end

sys.meta_path.append(FileFinder())  # also where this module is imported again, by a process of `spawn`


@going_on_unread()
def main() -> None:
    stack_fd = int(sys.argv[1])
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # To Python it is a pipe still, whose text waits for 8 KB of it, and is lost where the process is killed.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    function: Any = None
    worker = os.getpid()

    def answer(action: Any, timeout: float) -> None:
        faulthandler.dump_traceback_later(timeout + _TO_CANCEL, exit=True, file=stack_fd)
        try:
            result = "ok", action()
        except UserError as error:
            result = "user", str(error)
        except Overdue as error:
            result = "overdue", str(error)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the user's code are its faults too
            if os.getpid() != worker:
                _exit_forked(error)
            result = "raised", "".join(traceback.format_exception(type(error), error, _users_part(error)))
        faulthandler.cancel_dump_traceback_later()
        answers.write(channel.packed(result))
        answers.flush()

    def load() -> str | None:
        nonlocal function
        # The folder of the function's file, and the current one last: the `qerl` program has neither on its path.
        file = own_file(name)
        sys.path += [*([] if file is None else [os.path.dirname(os.path.realpath(file))]), os.getcwd()]
        function = load_function(name)
        return source_digest(name)

    try:
        name, python_path, load_timeout = channel.read(requests)
        del os.environ["PYTHONPATH"]
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
        answer(load, load_timeout)
        while True:
            timeout, kind, arguments = channel.read(requests)
            if kind == "call":
                arguments = (*arguments, time.monotonic() + timeout)
            action = {"call": call, "accepted": accepted}[kind]
            answer(lambda action=action, arguments=arguments: action(name.spec, function, *arguments), timeout)
    except (EOFError, BrokenPipeError):  # of the channel: the parent is gone, or done with this worker
        os.dup2(os.open(os.devnull, os.O_WRONLY), answers.fileno())  # for what Python still has to write at its end
        # Python would wait for the threads that the user's code has left, which may never end; and a program that it
        # has started, such as a server, would stay and hold its port. The session is this worker's (see `pool`).
        end = f"sleep {_LAST_SECONDS:g}; kill -s KILL -- -{os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", end], stdin=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _exit_forked(error: BaseException) -> NoReturn:
    """Ends a process that the user's code has forked as Python ends one by this exception, but for Python's own end,
    which would wait for the watchdog that only the worker has."""
    code = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, _users_part(error))
    elif isinstance(error.code, int | None):
        code = (error.code or 0) & 0xFF
    else:
        print(error.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame outside this package and the import machinery on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(file) != os.path.dirname(__file__) and "importlib" not in file:
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
