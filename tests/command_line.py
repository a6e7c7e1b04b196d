"""Commands as a user gives them, and the small run that tests train by them."""

import contextlib
import io
import json

from qerl_jax.cli import main

CONFIG = """\
lora: {lora_r: 4, lora_alpha: 8}
generation: {num_generations: 4, max_completion_length: 40}
optimizer: {max_steps: 3, learning_rate: 3e-2, per_device_train_batch_size: 8, gradient_accumulation_steps: 1}
noise: {num_stages: 2, sigma_start: 1e-2}
evaluation: {num_problems: 16}
run: {seed: 3, save_steps: 2}
"""
MODEL = "builtin:quickstart"


def run_main(*words):
    """Runs a command, which must succeed, and returns what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([str(word) for word in words]) == 0, err.getvalue()
    return out.getvalue()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
