"""Services that show a run's metrics while it goes: TensorBoard and W&B. What their packages raise, each kinds of its
own, is told as a UserError, so that a run which one of them stops is saved first."""

import contextlib
import importlib.util
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_jax.durable import make_folder, named, write_whole
from qerl_jax.errors import UserError
from qerl_jax.option_names import Service
from qerl_jax.run_files import METRICS, TENSORBOARD, WANDB_RUN_ID


def check_services(report_to: Sequence[Service]) -> None:
    """Refuses services whose packages are not installed, without importing one.

    Raises:
      UserError: naming the first, and how to install it.
    """
    for name in report_to:
        spec = importlib.util.find_spec(package := _SERVICES[name].package)
        if spec is None or spec.origin is None:  # a mere folder, such as the `wandb` that W&B makes, is found too
            raise UserError(
                f"run.report_to names {name}, whose package {package} is not installed; "
                f"pip install 'qerl-jax[{name}]', or leave it out"
            )


class Reporter:
    """One service that a run reports to.

    Args:
      name: the service.
      run_dir: the run folder.
      step: optimizer steps already done; TensorBoard hides what an earlier process has written beyond them.
      options: the run's, which W&B compares runs by.

    Raises:
      UserError: its package is not installed, or failed, here as in the methods.
    """

    def __init__(self, name: Service, run_dir: Path, step: int, options: Mapping[str, Any]) -> None:
        check_services((name,))
        self._name = name
        with _failures_told(name):
            self._service = _SERVICES[name](run_dir, step, options)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Shows the numbers of a step."""
        with _failures_told(self._name):
            self._service.log(numbers, step)

    def close(self) -> None:
        """Nothing is shown afterwards."""
        with _failures_told(self._name):
            self._service.close()


@contextlib.contextmanager
def _failures_told(name: Service) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # W&B raises kinds of its own, and of the connection to the program that it starts
        raise UserError(
            f"run.report_to: {name} failed, {type(error).__name__}: {str(error) or 'it says no more'}. Mend that, or "
            f"leave {name} out of run.report_to, and start again: {METRICS} has every row"
        ) from error


class _TensorBoard:
    """Writes by itself what tensorboardX's SummaryWriter leaves to a thread: once that has died, of a full disk, the
    run waited for it for ever."""

    package = "tensorboardX"

    def __init__(self, run_dir: Path, step: int, options: Mapping[str, Any]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        self._event, self._summary, self._scalar = Event, Summary, scalar
        folder = run_dir / TENSORBOARD
        again = any(folder.glob("*tfevents*"))
        make_folder(folder)
        self._writer = EventsWriter(str(folder / "events"))
        if again:
            started = SessionLog(status=SessionLog.START)  # from this step on, what earlier files have is hidden
            self._write(Event(wall_time=time.time(), step=step + 1, session_log=started))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        values = [value for key, number in numbers.items() for value in self._scalar(key, number).value]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _write(self, event: object) -> None:
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    package = "wandb"

    def __init__(self, run_dir: Path, step: int, options: Mapping[str, Any]) -> None:
        import wandb

        kept = run_dir / WANDB_RUN_ID
        if not kept.exists():
            write_whole(kept, uuid.uuid4().hex[:12])
        # W&B reads these variables itself only where init is given neither.
        project = os.environ.get("WANDB_PROJECT") or "qerl-jax"
        name = os.environ.get("WANDB_NAME") or named(run_dir).name
        self._run = wandb.init(
            project=project, name=name, id=kept.read_text(), resume="allow", dir=str(run_dir),
            config=dict(options), allow_val_change=True,  # of what may differ when a run is continued
        )  # fmt: skip
        self._newest = step

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        # W&B drops what has a smaller step than a row before: an evaluation behind an update that was refused.
        self._newest = max(self._newest, step)
        self._run.log(dict(numbers), step=self._newest)

    def close(self) -> None:
        self._run.finish()


_SERVICES: dict[Service, type[_TensorBoard] | type[_WeightsAndBiases]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}
