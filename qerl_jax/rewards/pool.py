"""A user's reward functions in programs of their own, with hard deadlines.

Each function has one worker (`qerl_jax.rewards.worker`) and gets whole batches, so it may compare completions. A worker
that passes its deadline, or dies, is killed with everything it started; the next call starts another one.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, cast

from qerl_jax.errors import UserError, beginning
from qerl_jax.rewards import channel
from qerl_jax.rewards.loading import FileFinder, RewardName, own_file, refuse_while_importing

# Importing a user's module may take a while (a tokenizer, a parser), whatever the deadline of a call.
LOAD_TIMEOUT = 120.0
# The worker ends itself at the deadline and says where it stood; this much later it is killed from outside. It has as
# long to end once it is told to.
_GRACE = 2.0
_LOOK = 0.5  # seconds between looks at whether a worker still runs
_STILL = 2.0  # seconds that a look takes longer where the whole job was suspended, as by SIGSTOP
_newest_standstill = 0.0  # when such a look ended


class Worker:
    """One user function in its process. `submit` starts a call, `result` waits for it.

    Attributes:
      source: digest of the file that the function was imported from last; None before, or where there is no file.
    """

    def __init__(self, name: RewardName, timeout: float) -> None:
        """Starts the program and the import of the user's module.

        Args:
          name: the function.
          timeout: seconds that one call may take.

        Raises:
          UserError: see `refuse_while_importing`.
        """
        refuse_while_importing()
        self.name, self.timeout = name, timeout
        self.source: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = bytearray()
        self._loaded = self._unanswered = False
        self._deadline = self._sent = 0.0
        self._stack = _scratch()
        self._start()

    def _start(self) -> None:
        # The parent's whole search path, so that the worker finds what the parent's script would. The worker takes it
        # out of its environment again: another Python that the user's code starts has modules of its own.
        path = [entry or os.getcwd() for entry in sys.path]
        # The training process holds the accelerator's memory.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
        if (file := own_file(self.name)) is not None:
            env[FileFinder.VARIABLE] = file
        self._process = subprocess.Popen(
            # -P: else the current folder would come first, and a `math.py` in it replace Python's.
            [sys.executable, "-P", "-m", "qerl_jax.rewards.worker", str(self._stack.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            pass_fds=[self._stack.fileno()],
            start_new_session=True,  # Ctrl-C is the trainer's; and a whole session can be killed at once
        )
        self._loaded = False
        self._send((self.name, os.environ.get("PYTHONPATH"), LOAD_TIMEOUT), LOAD_TIMEOUT)

    def _send(self, message: Any, timeout: float) -> None:
        """Writes a request and sets the deadline of its answer."""
        assert self._process is not None and self._process.stdin is not None
        self._stack.seek(0)
        self._stack.truncate()
        self._unanswered, self._sent = True, time.monotonic()
        self._deadline = self._sent + timeout + _GRACE
        self._pending = bytearray()
        pipe = self._process.stdin.fileno()
        os.set_blocking(pipe, False)
        data = memoryview(channel.packed(message))
        while data:
            if not self._in_time(pipe, select.POLLOUT):
                return  # the answer's deadline has passed as well; `_receive` reports it
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                return  # the worker died; `_receive` reports it

    def _in_time(self, pipe: int, event: int) -> bool:
        """Waits until a pipe can be read or written, the worker has ended (what it has started may hold the pipe's
        other end), or the deadline has passed; whether it can."""
        global _newest_standstill
        assert self._process is not None
        poll = select.poll()  # select.select takes no file number beyond 1023
        poll.register(pipe, event)
        while (left := self._deadline - (began := time.monotonic())) > 0 and self._process.poll() is None:
            found = poll.poll(1000 * min(left, _LOOK))
            if (now := time.monotonic()) - began > _LOOK + _STILL:
                _newest_standstill = now
            if found:
                return True
        return bool(poll.poll(0))

    def _receive(self, what: str) -> Any:
        """The answer to the last request.

        Raises:
          UserError: the deadline passed, the worker died, or the user's code failed.
        """
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        complete = False
        answer: tuple[str, Any] = ("", None)
        while not complete:
            readable = self._in_time(pipe, select.POLLIN)
            data = os.read(pipe, 1 << 20) if readable else b""
            if not data:
                raise UserError(self._obituary(what, timed_out=not readable and self._process.poll() is None))
            self._pending += data
            complete, answer = channel.unpacked(self._pending)
        self._unanswered = False
        kind, value = answer
        if kind == "ok":
            return value
        if kind == "user":
            raise UserError(value)
        if kind == "overdue":
            raise UserError(self._late(what) + (f"; it was cancelled here:\n{value}" if value else ""))
        raise UserError(f"reward function {self.name.spec!r} raised {what}:\n{value}")

    def _obituary(self, what: str, timed_out: bool) -> str:
        """Ends the worker and says what became of it."""
        late = self._late(what)
        code = self._kill()
        self._stack.seek(0)
        lines = self._stack.read().decode(errors="replace").splitlines()
        others = "/qerl_jax/rewards/", "<frozen runpy>", "Timeout ("  # the last is the watchdog's, behind the deadline
        stack = "\n".join(line for line in lines if not any(other in line for other in others))
        if stack or timed_out:
            where = f"; its process was ended here:\n{stack}" if stack else "; its process was killed"
            return late + where
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"reward function {self.name.spec!r}: its process ended {how} {what}"

    def _late(self, what: str) -> str:
        allowed = f"{self.timeout:g} s (reward.timeout)" if self._loaded else f"{LOAD_TIMEOUT:g} s"
        return f"reward function {self.name.spec!r} took longer than {allowed} {what}"

    def submit(
        self, prompts: list[Any], completions: list[Any], ids: list[list[int]], columns: dict[str, list[Any]]
    ) -> None:
        """Starts scoring a batch; its deadline runs from here (after the user's module has been imported)."""
        self.ready()
        self._batch = prompts, completions, ids, columns
        self._send((self.timeout, "call", self._batch), self.timeout)

    def check(self, columns: list[str]) -> list[str]:
        """Those of a data set's columns that the function takes, by its signature.

        Raises:
          UserError: see `qerl_jax.rewards.calling.accepted`.
        """
        self.ready()
        self._send((self.timeout, "accepted", (columns,)), self.timeout)
        taken: list[str] = self._receive("on the names of the columns")
        return taken

    def ready(self) -> None:
        """Waits until the user's module is imported; starts a new program in place of one that ended.

        Raises:
          UserError: it cannot be imported, or has no such function; or the program has ended since its last answer.
        """
        if self._process is None:
            self._start()
        elif not self._unanswered and self._process.poll() is not None:
            raise UserError(self._obituary("while it waited for the next call", timed_out=False))
        if not self._loaded:
            try:
                self.source = self._receive("while it was imported")
            except UserError:
                self._kill()
                raise
            self._loaded = True

    def result(self) -> list[float | None]:
        """The scores of the batch submitted last. After an error it is scored once more if the whole job was suspended
        meanwhile, for which deadlines do not wait.

        Raises:
          UserError: the function raised, returned something else than scores, ended its process or passed its deadline.
        """
        what = f"on {_told(self._batch[0])}"
        try:
            return self._receive(what)
        except UserError:
            if _newest_standstill < self._sent:
                raise
        self.submit(*self._batch)
        return self._receive(what)

    def cancel(self) -> None:
        """Gives up a call in progress, if there is one."""
        if self._unanswered:
            self._kill()

    def _kill(self) -> int:
        """Kills the worker's whole session; returns its exit code."""
        process, self._process = self._process, None
        self._loaded = False
        if process is None:
            return 0
        # An idle worker exits on this, and may have a cache to write first; one that has closed its pipe is about to
        # exit, with a code worth reporting.
        _close(process.stdin)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2 if self._unanswered else _GRACE)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        _close(process.stdout)
        return code

    def close(self) -> None:
        """Ends the worker; it cannot be used afterwards."""
        self._kill()
        self._stack.close()


def _scratch() -> IO[bytes]:
    """A file for a while; in memory where the system has such, so that no folder for temporary files is needed."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stack"), "w+b")
    return cast(IO[bytes], tempfile.TemporaryFile())


def _told(prompts: list[Any]) -> str:
    """Completions by their prompts, in the order of these."""
    if not prompts:
        return "no completions"
    count = "1 completion" if len(prompts) == 1 else f"{len(prompts)} completions"
    first, last = beginning(prompts[0]), beginning(prompts[-1])
    if first == last:
        return f"{count}, of the prompt that begins {first}"
    return f"{count}, of prompts from the one that begins {first} to the one that begins {last}"


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
