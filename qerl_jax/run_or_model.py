"""Whether a name means a run or a model."""

from pathlib import Path

from qerl_jax import run_files
from qerl_jax.durable import with_home
from qerl_jax.errors import UserError
from qerl_jax.models.source import ADAPTER_CONFIG, CONFIG


def find_run(name: str) -> Path | None:
    """The folder of the run that a name means; None for a model: its folder, or a name that is no folder here.

    Raises:
      UserError: the folder is neither.
    """
    folder = with_home(name)
    if (folder / run_files.CONFIG).is_file():
        return folder
    if not folder.is_dir() or (folder / CONFIG).exists():
        return None
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{name} is a PEFT adapter; give the base model, and --adapter {name}")
    raise UserError(
        f"{name} is neither a run folder, with {run_files.CONFIG}, nor a model's folder, with {CONFIG}; expected one "
        "of them, or a model's name on the Hugging Face Hub"
    )
