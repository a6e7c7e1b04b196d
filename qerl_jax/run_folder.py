"""A run's folder: named by its config, held by one process at a time, continued, or refused.

A config that names an unfinished folder, such as the folder's own config.yaml, continues it; a finished one says so. A
config that differs from the stored one in anything that the run's course depends on is refused, with both values. So is
the stored one itself if it has been edited: checkpoints keep the options that were in force (`run_options`).

A run folder may be moved or copied: its config.yaml means the folder that it lies in (see
`qerl_jax.config_files.load_config`), and names everything else by absolute paths, so that it means the same in any
working folder. If something has moved since, the user writes its new place into config.yaml; checkpoints know what it
was (`refuse_changed_identity`).
"""

import contextlib
import dataclasses
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qerl_jax.checkpoints import checkpoint_steps, newest_progress
from qerl_jax.config import Config
from qerl_jax.config_files import load_config, save_yaml, settled_config
from qerl_jax.durable import locked, make_folder, named, not_writable, refuse_no_folder, staying
from qerl_jax.errors import UserError
from qerl_jax.input_files import read_json
from qerl_jax.json_fields import Fields
from qerl_jax.manifest import Progress
from qerl_jax.metrics import truncate_after, updates_logged
from qerl_jax.models.dtypes import DtypeOption, settled_dtype
from qerl_jax.program import program
from qerl_jax.run_files import CHECKPOINTS, CONFIG, LOCK, METRICS, ROWS, SUMMARY, TENSORBOARD, WANDB_RUN_ID, is_run
from qerl_jax.run_options import (
    LOCATIONS,
    OPTIONS,
    as_named_now,
    changes,
    changes_of_policy,
    refuse_what_has_gone,
    with_whole_paths,
)
from qerl_jax.services import check_services

# What a run's identity holds if it has no functions of a user's own (`rl.own_functions`).
NO_OWN_FUNCTIONS = {"loss function": "as configured", "advantage function": "as configured"}

# How another run is started beside one, for messages: by the command line and by `trainer.train`.
FRESH = "`--fresh` (in a script `fresh=True`)"

_log = logging.getLogger(__name__)


class RunFinished(Exception):
    """The run folder holds a finished run."""


def _beside(folder: Path) -> Path:
    """The first free name beside `folder`: folder-2, folder-3, ..."""
    folder, number = named(folder), 2
    while (candidate := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return candidate


@contextlib.contextmanager
def open_run(config: Config, fresh: bool = False) -> Iterator[tuple[Path, Config]]:
    """Yields the folder of the run, locked against a second process, and the config in force, which names the folder.

    The config's paths are absolute. model.dtype `auto` is settled when a run begins and stays, so a run may go on where
    another backend began it.

    Until the first step has been saved, any config replaces the stored one; afterwards only one that differs in nothing
    but what may change amid a run. The options that the newest checkpoint keeps, or the summary of a finished run,
    outweigh what config.yaml says by now.

    Args:
      config: its run.output_dir names the folder.
      fresh: start over in a new folder beside an existing one.

    Raises:
      RunFinished: the folder's run is complete.
      UserError: it has no name, cannot be written to, another process works on it, it is no run folder, the config
        differs from the stored one, its checkpoints are gone, or what it names has gone or is not installed.
    """
    folder, config = _named(config, fresh)
    _refuse_unwritable(folder)
    make_folder(folder)
    with locked(folder / LOCK, f"{folder}: another process is working on this run; wait for it, or use {FRESH}"):
        config, begun, changed, _ = _compared(folder, config)
        if changed:  # There is only the checkpoint before the first step: a mistake may still be corrected.
            _forget(folder)
        if changed or begun is None:
            config = _with_dtype(config, settled_dtype(config.model.dtype))
        for name in ROWS:  # before its config: from then on the folder is known as a run's (`run_files.is_run`)
            (folder / name).touch()
        if config != begun:  # or the command that continues the run would fall back to what was free to change
            run = dataclasses.replace(config.run, output_dir=os.path.abspath(folder))
            save_yaml(dataclasses.replace(config, run=run), folder / CONFIG)
        yield folder, config


def _refuse_unwritable(folder: Path) -> None:
    """Refuses before anything is computed what would be lost at the first save."""
    for path in (folder, folder / CHECKPOINTS):
        if (place := not_writable(path)) is not None:
            raise UserError(f"{place} cannot be written to, so run.output_dir {folder} can hold no run")


class Standing(NamedTuple):
    """What would become of a run, on a line, and whether it would be refused."""

    said: str
    refused: bool = False


def standing(config: Config, identity: dict[str, Any]) -> Standing | None:
    """What `open_run` and the trainer would do with the folder that a config names; None where the run would begin.
    Nothing is written there, and a process that is at work on it goes unnoticed.

    Args:
      config: the run's.
      identity: what it would be trained on (`rl.assembly.Experiment.identity`).
    """
    try:
        folder, config = _named(config, fresh=False)
        _, begun, changed, newest = _compared(folder, config)
        _refuse_unwritable(folder)
        if begun is None or changed:
            return None
        if newest is None:
            raise UserError(f"every checkpoint in {folder / CHECKPOINTS} is damaged")
        progress, step = newest
        refuse_changed_identity(folder, progress["identity"], identity, step)
    except RunFinished as finished:
        return _finished(folder, identity, str(finished))
    except UserError as error:
        return _refused(error)
    return Standing(f"run: continues {folder} from step {step} of {identity['total optimizer steps']}")


def _finished(folder: Path, identity: dict[str, Any], said: str) -> Standing:
    try:
        refuse_other_functions(folder, {name: identity[name] for name in NO_OWN_FUNCTIONS})
    except UserError as error:
        return _refused(error)
    return Standing(f"run: {said}")


def _refused(error: UserError) -> Standing:
    first, *lines = str(error).splitlines()
    said = f"run: `{program()} train` refuses it: {first} {'; '.join(map(str.strip, lines))}".rstrip()
    return Standing(said, refused=True)


def _named(config: Config, fresh: bool) -> tuple[Path, Config]:
    """The folder of a run of `config`, which may not exist yet, and the config that names it, with absolute paths."""
    if config.run.output_dir is None:
        raise UserError(
            "run.output_dir is None, so the run has no folder; expected a name, as in "
            'Config(run=RunOptions(output_dir="runs/mine"), ...), or a config from load_config, which gives one'
        )
    folder = Path(config.run.output_dir)
    if fresh and folder.exists():
        folder = _beside(folder)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output_dir=str(folder)))
    config = with_whole_paths(settled_config(config))
    try:
        refuse_no_folder(folder)
    except UserError as error:
        raise UserError(f"{folder}: run.output_dir cannot be made: {error}, or a name that is free") from None
    if folder.is_dir() and not is_run(folder) and not all(map(_left_before_the_config, folder.iterdir())):
        raise UserError(
            f"{folder}: run.output_dir holds files but no {CONFIG} with the {' and '.join(ROWS)} or {CHECKPOINTS} of a "
            "run beside it, so it is no run; choose another name"
        )
    refuse_missing_services(config)
    return folder, config


def refuse_missing_services(config: Config) -> None:
    """Refuses what `check_services` refuses, unless the run is finished, and reports nothing any more."""
    folder = config.run.output_dir
    if folder is None or not (Path(folder) / SUMMARY).is_file():
        check_services(config.run.report_to)


def _left_before_the_config(path: Path) -> bool:
    """Whether a process that was killed at a run's very start leaves this."""
    return path.name in (LOCK, f".tmp-{CONFIG}") or (path.name in ROWS and path.stat().st_size == 0)


class _Compared(NamedTuple):
    """A config, compared with what a run's folder holds.

    Attributes:
      config: the given one, with the dtype that the run began with.
      begun: the folder's; None where it has no checkpoint yet, and no summary.
      changed: how they differ, if they still may: there is no checkpoint but the one before the first step.
      newest: progress and step of the newest undamaged checkpoint.
    """

    config: Config
    begun: Config | None
    changed: list[str]
    newest: tuple[Progress, int] | None


def _compared(folder: Path, config: Config) -> _Compared:
    """Refuses what `open_run` refuses of a run that has begun; nothing is written."""
    begun, kept, newest = _begun(folder)
    config = _in_its_dtype(config, begun, kept)
    changed = [] if begun is None else changes(begun, kept, config)
    finished = (folder / SUMMARY).is_file()
    another = f"start another run: {FRESH}, {_beside(folder)}, or run.output_dir=NAME"
    if changed and (finished or any(checkpoint_steps(folder / CHECKPOINTS))):
        raise UserError(f"{_begun_otherwise(folder, changed)}{'' if finished else ' to continue it'}, or {another}")
    if begun is None and (updates := updates_logged(folder)):
        raise UserError(
            f"{folder / METRICS} has rows of updates ({updates}), but {folder / CHECKPOINTS} holds no checkpoint, so "
            f"the run would begin again without them. Put its checkpoints back to continue it, or {another}"
        )
    if finished:
        raise RunFinished(
            f"{folder} is finished: see {folder / SUMMARY}. {FRESH} starts a new run beside it, {_beside(folder)}; "
            "`run.output_dir=NAME` names one."
        )
    if begun is not None:
        refuse_what_has_gone(config, folder, *LOCATIONS)
    return _Compared(config, begun, changed, newest)


def _begun(folder: Path) -> tuple[Config | None, dict[str, Any], tuple[Progress, int] | None]:
    """The config of a folder, None if it has no checkpoint and is not finished; the options that its newest undamaged
    checkpoint keeps, or its summary; and that checkpoint's progress and step."""
    newest = newest_progress(folder / CHECKPOINTS)
    *_, kept = _kept(folder, newest)
    has_begun = (folder / SUMMARY).is_file() or checkpoint_steps(folder / CHECKPOINTS)
    return load_config(str(folder / CONFIG)) if has_begun else None, kept, newest


def _kept(folder: Path, newest: tuple[Progress, int] | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a run is trained on, the sources of its reward functions and its options, by its summary, or by
    `newest_progress`; empty where it has neither."""
    names = "identity", "rewards", OPTIONS
    if (summary := folder / SUMMARY).is_file():
        fields = Fields(read_json(summary), str(summary))
        identity, rewards, options = map(fields.object, names)
    else:
        progress = {} if newest is None else newest[0]
        identity, rewards, options = (progress.get(name, {}) for name in names)
    return identity, rewards, as_named_now(options)


def as_begun(config: Config) -> Config:
    """The config with model.dtype `auto` replaced by the dtype that its run began with, if it has begun."""
    if config.run.output_dir is None or not os.path.isdir(config.run.output_dir):
        return config
    begun, kept, _ = _begun(Path(config.run.output_dir))
    return _in_its_dtype(config, begun, kept)


def _in_its_dtype(config: Config, begun: Config | None, kept: dict[str, Any]) -> Config:
    if begun is None or config.model.dtype != "auto":
        return config
    return _with_dtype(config, kept.get("model.dtype", begun.model.dtype))


def _forget(folder: Path) -> None:
    """Removes what a run of another config would inherit."""
    truncate_after(folder, 0)  # first: a folder with rows of updates and without checkpoints is refused
    (folder / WANDB_RUN_ID).unlink(missing_ok=True)
    shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
    # As a whole: with checkpoints removed in part, the folder would be taken for one whose checkpoints are damaged.
    if (gone := folder / f".old-{CHECKPOINTS}").exists():
        shutil.rmtree(gone)
    (folder / CHECKPOINTS).rename(gone)
    shutil.rmtree(gone)


def held(folder: Path) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Yields a check that must be made before anything is written to a run's folder by its path.

    Raises:
      UserError: by the check, where the folder has been moved, deleted or replaced since.
    """
    return staying(
        folder,
        f"{folder}: the run's folder is no longer there: it was moved, deleted or replaced while the run went on, and "
        f"nothing more is written. What was saved by then is in it: continue it at its new place, "
        f"`{continuing(Path('NEW'))}`",
    )


def continuing(folder: Path) -> str:
    """The command that continues the run in `folder`, whatever command began it."""
    return f"{program()} train {shlex.quote(str(folder / CONFIG))}"


def _with_dtype(config: Config, dtype: DtypeOption) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))


def warn_of_earlier_version(progress: Progress, step: int) -> None:
    """Says that a checkpoint without options is of an earlier version, whose numbers may have been others."""
    if not progress.get(OPTIONS):
        _log.warning(
            "the checkpoint of step %d was saved by an earlier version, which kept no options; some of those drew "
            "other completions and rounded the steps of warm-up otherwise: what is sampled and the learning rate may "
            "not go on as there; finish the run with that version, or start another run with %s, if that is not meant",
            step,
            FRESH,
        )


def warn_of_changed_rewards(stored: dict[str, str], now: dict[str, str], step: int) -> None:
    """Says which reward functions have another source (a digest of it, by name) than before `step`.

    They are not refused: a run that a reward function has stopped goes on once the function is corrected.
    """
    for name in _changed(stored, now):
        _log.warning(
            "the source of reward function %s has changed since step %d was saved: rewards and evaluations from here "
            "on are the new one's and may not compare with those before; restore the old file, or start another run "
            "with %s, if that is not meant",
            name,
            step,
            FRESH,
        )


def _changed(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in now if name in stored and stored[name] != now[name]]


def refuse_changed_identity(folder: Path, stored: dict[str, Any], now: dict[str, Any], step: int) -> None:
    """Refuses to continue when what a checkpoint was trained on (base weights, data, total steps) has changed.

    Only what both have is compared, so that a run of an earlier version, which wrote down less, can go on. That version
    had no functions of a user's own; and before the first step they have had no effect yet, and may change.

    Raises:
      UserError: naming each with the two values.
    """
    stored = NO_OWN_FUNCTIONS | stored
    if step == 0:
        stored |= {name: now[name] for name in NO_OWN_FUNCTIONS if name in now}
    said = f"{folder}: its checkpoints belong to a run on something else"
    _refuse_changes(said, stored, now, f"start another run with {FRESH}")


def refuse_other_functions(folder: Path, now: dict[str, Any]) -> None:
    """Refuses to take a finished run for one with these functions of a user's own (`OwnFunctions.identity`).

    Raises:
      UserError: naming those that it was trained with and these.
    """
    summary = folder / SUMMARY
    stored = NO_OWN_FUNCTIONS | Fields(read_json(summary), str(summary)).object("identity")
    said = f"{folder} is finished, and was trained with other functions"
    _refuse_changes(said, {name: stored[name] for name in NO_OWN_FUNCTIONS}, now, f"start another run with {FRESH}")


def refuse_another_model(folder: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to use what a run learned with a model that is not the one it was trained on.

    Args:
      folder: the run's.
      stored: what it was trained on (`trained_on`).
      now: that of the model (`policy.model_identity`). What is not known of both is not compared.

    Raises:
      UserError: naming each with the two values.
    """
    said = f"{folder}: the run was trained on another model than is there now"
    _refuse_changes(said, stored, now, f"write its place into model.model_name_or_path of {folder / CONFIG}")


class TrainedOn(NamedTuple):
    """What a run was trained on (`rl.assembly.Experiment.identity`), and digests of the sources of its reward functions
    by name (`RewardFunctions.sources`), of which an earlier version kept none at its end."""

    identity: dict[str, Any]
    rewards: dict[str, str]

    def changed_rewards(self, now: dict[str, str]) -> list[str]:
        """The functions that have another source now."""
        return _changed(self.rewards, now)


def trained_on(folder: Path, config: Config) -> TrainedOn:
    """What a run was trained on, as its end or its newest undamaged checkpoint tells; empty where it has neither.

    Args:
      folder: the run's.
      config: its own, by which its model and what it has learned are to be loaded.

    Raises:
      UserError: the config has been edited since, and would load others.
    """
    newest = None if (folder / SUMMARY).is_file() else newest_progress(folder / CHECKPOINTS)
    identity, rewards, kept = _kept(folder, newest)
    if changed := changes_of_policy(kept, config):
        raise UserError(_begun_otherwise(folder, changed) + f" in {folder / CONFIG}")
    return TrainedOn(identity, rewards)


def _begun_otherwise(folder: Path, changed: list[str]) -> str:
    lines = "\n  ".join(changed)
    return f"{folder} was begun with another config:\n  {lines}\nGo back to the old values"


def _refuse_changes(said: str, stored: dict[str, Any], now: dict[str, Any], otherwise: str) -> None:
    if changed := _changed(stored, now):
        lines = "\n  ".join(f"{name} was {stored[name]!r}, is now {now[name]!r}" for name in changed)
        raise UserError(f"{said}:\n  {lines}\nRestore what was there before, or {otherwise}")
