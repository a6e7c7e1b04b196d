"""`qerl quantize` killed at random instants and started again: the folder of one that was left alone, or none."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import HF, contents, write_tokenizer

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_model
from qerl_jax.models.saving import save_model

ROOT = Path(__file__).parent.parent
LAYERS, KILLS = 6, 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_instants_it_ends_the_same(tmp_path):
    # A layer takes some tenths of a second: longer than this process may need to see that one is finished.
    config = dataclasses.replace(ModelConfig.from_hf(HF), num_hidden_layers=LAYERS, intermediate_size=4096)
    save_model(init_model(jax.random.key(0), config, jnp.bfloat16, 0.2), tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    rng = np.random.default_rng(0)
    rows = [{"text": " ".join(f"w{i}" for i in rng.integers(0, 20, 9))} for _ in range(16)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(name):
        words = ["quantize", "model", name, "--method", "awq", "--calibration", "text.jsonl"]
        return subprocess.Popen(
            [sys.executable, "-m", "qerl_jax", *words],
            cwd=tmp_path,
            env=os.environ | cache | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(name):
        """Seconds from the first layer's line to the last one's."""
        process = start(name)
        times = [time.monotonic() for _ in process.stderr]
        assert process.wait() == 0 and len(times) == LAYERS
        return times[-1] - times[0]

    run("warm")  # fills the compilation cache
    a_layer = run("whole") / (LAYERS - 1)
    whole = contents(tmp_path / "whole")
    assert contents(tmp_path / "warm") == whole
    draw, finished = random.Random(0), []
    for _ in range(KILLS):
        with start("killed") as process:
            # Lines tell where it is, whatever else the machine does; the instant after them is drawn.
            for _ in range(draw.randrange(LAYERS + 1)):
                process.stderr.readline()
            time.sleep(draw.uniform(0, 2 * a_layer))
            process.kill()
        finished.append(len(list(tmp_path.glob(".quantize-killed-*/layer-*.json"))))
        if (tmp_path / "killed").exists():
            assert contents(tmp_path / "killed") == whole
            (tmp_path / "killed").rename(tmp_path / f"done-{len(finished)}")
    print(f"layers finished after each kill, of {LAYERS}: {finished}; {a_layer:.2f} s each")
    assert any(0 < count < LAYERS for count in finished), "no kill came between two layers"
    run("killed")
    assert contents(tmp_path / "killed") == whole
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
