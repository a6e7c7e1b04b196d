"""The memory of a load, by the benchmark's own measure on a checkpoint of 0.5 GB: `pytest -m slow`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_load_needs_the_model_and_less_than_its_two_largest_tensors(tmp_path):
    command = [sys.executable, "-m", "benchmarks.load_model", "--shape", "small", "--work", str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, "--output", str(tmp_path / "result.json")], check=True, cwd=ROOT, env=env)
    found = json.loads((tmp_path / "result.json").read_text())
    for kind in ("bf16_to_nvfp4", "packed"):
        for state in ("cold", "warm"):
            row = found[kind][state]
            assert row["within_bound"] and row["peak_above_model_gb"] < row["two_largest_tensors_gb"], (kind, row)
    # A packed folder is copied, no more; a merged one needs a tensor at a time.
    assert found["packed"]["warm"]["peak_above_model_gb"] < 0.05
    assert found["packed"]["merged_export"]["peak_anonymous_above_packed_model_gb"] < 0.3
