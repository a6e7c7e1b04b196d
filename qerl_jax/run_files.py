"""What lies in a run's folder, by name."""

from pathlib import Path

CONFIG = "config.yaml"  # every option in force; the command that continues the run reads it
METRICS = "metrics.jsonl"  # a row for each update and each evaluation
COMPLETIONS = "completions.jsonl"  # a row for each completion sampled in training
ROWS = METRICS, COMPLETIONS  # there from the beginning: by both a folder is known as a run's
CHECKPOINTS = "checkpoints"  # a folder for each step saved (`checkpoints`)
COMPILED = "compiled"  # programs, for a start without compiling
TENSORBOARD = "tensorboard"  # what it is reported to, if it is
WANDB_RUN_ID = "wandb_run_id"  # by which W&B goes on with the same run after a resume
ADAPTER = "adapter"  # the PEFT folder of what was learned, when the run has ended
PLOTS = "plots"  # its pictures, then too
SUMMARY = "summary.json"  # written last: with it the run is finished
LOCK = ".lock"  # held by the process at work on it
MODEL_CONFIG = "config.json"  # of a model's folder, beside which a run's has the others


def is_run(folder: Path) -> bool:
    """Whether a folder has what a run writes beside its config, since other programs too have a config.yaml."""
    begun = all((folder / name).is_file() for name in ROWS) or any(folder.glob(f"{CHECKPOINTS}/step_*"))
    return (folder / CONFIG).is_file() and (begun or (folder / SUMMARY).is_file())


def means_run(folder: Path) -> bool:
    """Whether a folder that may be a run's or a model's is a run's, be it that its config and adapter alone were kept:
    a model's, in which another program has a config.yaml, is not."""
    return is_run(folder) or ((folder / CONFIG).is_file() and not (folder / MODEL_CONFIG).exists())
