"""What `qerl quantize` holds in memory: nothing of a layer that is done, and no more for a deeper network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from qerl_jax.quantization import quantize_folder

ROOT = Path(__file__).parent.parent


def test_between_two_layers_only_embeddings_and_the_final_norm_are_on_the_device(tmp_path):
    before = {id(array) for array in jax.live_arrays()}
    held = []

    def look(line):
        held.append(sum(array.nbytes for array in jax.live_arrays() if id(array) not in before))

    quantize_folder("builtin:quickstart", tmp_path / "out", calibration="arithmetic", sequences=16, say=look)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # float32; the head is the embeddings. Some kilobytes are constants that stay with compiled functions.
    ends = 4 * (config["vocab_size"] + 1) * config["hidden_size"]
    assert len(held) == 2 and ends <= held[0] <= ends + 10_000 and held[1] <= held[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_deeper_network_needs_no_more_memory(tmp_path):
    command = [sys.executable, "-m", "benchmarks.quantize_memory", "--work", str(tmp_path), "--layers", "4", "40"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, "--output", str(tmp_path / "result.json")], check=True, cwd=ROOT, env=env)
    found = json.loads((tmp_path / "result.json").read_text())
    few, _, wide = found["rows"]
    # Of 36 more layers not ten are in memory.
    assert found["growth_of_file_mb"] == pytest.approx(36 * few["layer_mb"], rel=0.01)
    assert found["growth_mb"] < 10 * few["layer_mb"]
    # Compiled programs, the Gram matrices, and a layer in float32 a few times.
    assert few["peak_mb"] < 300
    assert wide["peak_mb"] < 300 + wide["gram_mb"] + 8 * wide["layer_mb"]
