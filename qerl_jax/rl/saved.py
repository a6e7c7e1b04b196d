"""What a run has learned, as it is kept: the arrays of a checkpoint, and its adapter, whether it has ended or not."""

import logging
from pathlib import Path

import jax

from qerl_jax import run_options
from qerl_jax.checkpoints import checkpoint_steps, restore_checkpoint
from qerl_jax.config import Config
from qerl_jax.errors import UserError
from qerl_jax.models.loading import model_shapes
from qerl_jax.models.params import Adapter, Model
from qerl_jax.models.peft import load_adapter
from qerl_jax.rl.assembly import initial_adapter, optimizer_spec
from qerl_jax.rl.optimizer import make_optimizer
from qerl_jax.rl.state import TrainState, init_state
from qerl_jax.run_files import ADAPTER, CHECKPOINTS, SUMMARY
from qerl_jax.trees import Tree

_log = logging.getLogger(__name__)


class Saved(Tree):
    """The arrays of a checkpoint: the training state and the run's root PRNG key."""

    train: TrainState
    key: jax.Array


def learned_adapter(run: Path, config: Config) -> Adapter:
    """The adapter that a run left when it ended, or that of its newest checkpoint, with a warning if steps are missing.

    No weight of the run's model is read. The caller loads the model afterwards, and compares it with the one that the
    run was trained on (`run_folder.refuse_another_model`).

    Args:
      run: its folder. Nothing in it is changed, and the run may be going on meanwhile.
      config: its own.

    Raises:
      UserError: it has saved nothing yet, nothing that is whole, or an adapter of another network than the model's.
    """
    model = model_shapes(config.model.model_name_or_path)
    left = (run / ADAPTER).is_dir()  # whole, since it appears at once
    ended = (run / SUMMARY).is_file() or not checkpoint_steps(run / CHECKPOINTS)
    if left and ended:  # of a run that goes on it may be an export
        return load_adapter(run / ADAPTER, model)
    run_options.refuse_what_has_gone(config, run, "lora.adapter")

    def begun(base: Model, key: jax.Array) -> Saved:
        return Saved(init_state(initial_adapter(config, base, key), make_optimizer(optimizer_spec(config, 1))), key)

    found = restore_checkpoint(run / CHECKPOINTS, jax.eval_shape(begun, model, jax.random.key(0)))
    if found is None:
        what = "the run has saved nothing yet"
        if (run / SUMMARY).is_file():
            what = f"by its {SUMMARY} the run is finished, so they were taken away; put {ADAPTER}/ back"
        raise UserError(f"{run}: holds neither {ADAPTER}/ nor a checkpoint: {what}")
    saved, progress, step = found
    total = progress["identity"]["total optimizer steps"]
    if step < total:
        _log.warning("%s is of a run that has not ended: taking the checkpoint's of step %d of %d", run, step, total)
    return saved.train.adapter
