"""What the tests of mistakes at the command line are made with."""

import json
import shutil

from qerl_jax.models.source import resolve

MODEL = "builtin:quickstart"
SHAPE = json.loads((resolve(MODEL) / "config.json").read_text())
POSITIONS = SHAPE["max_position_embeddings"]
CONFIG = """\
generation: {num_generations: 2, max_completion_length: 16}
optimizer: {max_steps: 2, per_device_train_batch_size: 4, gradient_accumulation_steps: 1}
noise: {num_stages: 2}
evaluation: {num_problems: 4}
run: {output_dir: run}
"""


def policy(folder, **changes):
    """A copy of the shipped policy with JSON files edited: `tokenizer=lambda values: ...`."""
    shutil.copytree(resolve(MODEL), folder)
    for name, change in changes.items():
        file = folder / f"{name}.json"
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))
    return folder


def jsonl(folder, *rows):
    """The file rows.jsonl in a folder, with these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
