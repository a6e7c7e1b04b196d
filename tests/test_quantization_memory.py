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
    # Of 36 more layers not ten are in memory; what is not a layer or its Gram matrices is compiled programs mostly.
    assert found["growth_of_file_mb"] == pytest.approx(36 * found["layer_mb"], rel=0.01)
    assert found["growth_mb"] < 10 * found["layer_mb"]
    assert found["rows"][0]["peak_mb"] < 10 * found["layer_mb"] + 2 * found["gram_mb"] + 300
