"""What the tests of the trainer share: a small run's configuration, the run itself, and rewards of one's own."""

import json

from run_harness import leaves, small_config

from qerl_jax.config_files import load_config
from qerl_jax.data.dataset import load_dataset
from qerl_jax.rl import trainer


def config_in(folder, policy, **sections):
    """These tests' config with `sections` laid over it; files of few rows, since a run checks all that it trains on."""
    files = {"train": folder / "problems.jsonl", "eval": folder / "held_out.jsonl"}
    folder.mkdir(parents=True, exist_ok=True)
    for split, file in files.items():
        problems = load_dataset("arithmetic", split, size=64)
        file.write_text("".join(json.dumps(problems[index]) + "\n" for index in range(64)))
    base = {
        "data": {"train_dataset": str(files["train"])},
        "evaluation": {"eval_dataset": str(files["eval"])},
        "optimizer": {"max_steps": 6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        "run": {"save_steps": 2, "save_total_limit": 9},
    }
    for section, options in sections.items():
        base[section] = base.get(section, {}) | options
    return small_config(folder, policy, **base)


def train(config, run, *words):
    return trainer.train(load_config(str(config), [f"run.output_dir={run}", *words]))


COUNTED = """\
    calls += 1
    scores = [sum(character.isdigit() for character in text) / 10 + len(text) / 1000 for text in completions]
"""


class Killed(BaseException):
    """Stands for a kill: nothing in the trainer catches it."""


def stop_after(patch, step):
    """From now on a run dies as soon as it has saved this step."""
    save = trainer.save_checkpoint

    def save_and_die(directory, saved_step, *arguments, **options):
        save(directory, saved_step, *arguments, **options)
        if saved_step == step:
            raise Killed

    patch.setattr(trainer, "save_checkpoint", save_and_die)


def same_adapter(run, other, step=None):
    mine, theirs = leaves(run, step)[0], leaves(other, step)[0]
    names = [name for name in mine if name.startswith("train.adapter")]
    assert names
    return all(mine[name].tobytes() == theirs[name].tobytes() for name in names)


def reward_file(folder, body):
    """A reward function of a user's own, `file.py:digits`, with `body`."""
    file = folder / "rewards.py"
    file.write_text(f"calls = 0\n\n\ndef digits(prompts, completions, **columns):\n    global calls\n{body}")
    return file
