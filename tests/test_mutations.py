"""Hundreds of damaged folders: none crashes, hangs, takes memory without bound, or is loaded as something else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("run_mutations.py")


def run(seed, cases):
    command = [sys.executable, str(PROGRAM), "--seed", str(seed), "--cases", str(cases)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROGRAM.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    # A crash or a limit ends the program: its last lines say in which case.
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_damaged_folders_are_refused_or_load_as_they_were():
    found = run(0, 650)
    assert found["failures"] == []
    assert found["outcomes"]["refused"] >= 550 and found["outcomes"]["harmless"] >= 10
    assert sum(found["outcomes"].values()) == 650
    assert len(found["mutations"]) >= 20 and min(found["mutations"].values()) >= 9


@pytest.mark.slow
def test_fresh_seeds():
    """`MUTATION_SEED=7 pytest -m slow tests/test_mutations.py` repeats one."""
    seed = int(os.environ.get("MUTATION_SEED") or int.from_bytes(os.urandom(4)))
    print(f"MUTATION_SEED={seed}")
    assert run(seed, 10_000)["failures"] == []
