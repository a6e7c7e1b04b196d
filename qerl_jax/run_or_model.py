"""What a name means that may be a run's or a model's: a model, and what a run has learned with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qerl_jax import run_files, run_folder, run_options
from qerl_jax.config import Config
from qerl_jax.config_files import load_config
from qerl_jax.durable import with_home
from qerl_jax.errors import UserError
from qerl_jax.models.dtypes import DtypeOption
from qerl_jax.models.params import Adapter
from qerl_jax.models.source import ADAPTER_CONFIG, CONFIG
from qerl_jax.policy import model_identity
from qerl_jax.rl.saved import learned_adapter


class Learned(NamedTuple):
    """A run whose adapter is used: its folder, its config, and what it was trained on."""

    run: Path
    config: Config
    identity: dict[str, Any]


class Source(NamedTuple):
    """A model as `load_model` takes it, and the run that it comes from if that run's own adapter is used.

    Of a model alone `weight_format` is None and `dtype` is "auto"; `chat_template_kwargs` are a run's, None without.
    """

    model: str
    weight_format: str | None
    dtype: DtypeOption
    learned: Learned | None
    chat_template_kwargs: Mapping[str, Any] | None

    def adapter(self) -> Adapter | None:
        """What the run has learned (see `learned_adapter`); None without a run."""
        return None if self.learned is None else learned_adapter(self.learned.run, self.learned.config)

    def refuse_another_model(self, fingerprint: str | None) -> None:
        """Refuses a run whose model is not the one that it was trained on; does nothing without a run.

        Args:
          fingerprint: that of the model's weights; None compares tokenizer and ids alone.

        Raises:
          UserError: naming what has changed.
        """
        if self.learned is not None:
            run, _, identity = self.learned
            run_folder.refuse_another_model(run, identity, model_identity(self.model, fingerprint))


def find_source(name: str, own_adapter: bool) -> Source:
    """The model that a name means, its own or that of a run.

    Args:
      name: a run's folder, or a model as `load_model` takes it.
      own_adapter: whether a run's adapter is used, and not another one in its place.

    Raises:
      UserError: the folder is neither, the run's model has gone, or its config has been edited since it began.
    """
    run = _find_run(name)
    if run is None:
        return Source(name, None, "auto", None, None)
    config = load_config(str(run / run_files.CONFIG))
    run_options.refuse_what_has_gone(config, run, "model.model_name_or_path")
    learned = Learned(run, config, run_folder.trained_on(run, config).identity) if own_adapter else None
    model, kwargs = config.model, config.data.chat_template_kwargs
    return Source(model.model_name_or_path, model.weight_format, model.dtype, learned, kwargs)


def _find_run(name: str) -> Path | None:
    """The folder of the run that a name means; None for a model: its folder, or a name that is no folder here."""
    folder = with_home(name)
    if run_files.means_run(folder):
        return folder
    if not folder.is_dir() or (folder / CONFIG).exists():
        return None
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{name} is a PEFT adapter; give the base model, and --adapter {name}")
    raise UserError(
        f"{name} is neither a run folder, with {run_files.CONFIG}, nor a model's folder, with {CONFIG}; expected one "
        "of them, or a model's name on the Hugging Face Hub"
    )
