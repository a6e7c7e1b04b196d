"""The shipped recipe on fewer steps: RL finds the worked way, and rewards permuted among completions find nothing."""

import json
from pathlib import Path

import pytest

from qerl_jax.config_files import load_config
from qerl_jax.data.arithmetic import check_split
from qerl_jax.data.dataset import load_dataset
from qerl_jax.rl.trainer import train

pytestmark = pytest.mark.usefixtures("compiled_for_users")

CONTROL = Path(__file__).parent.parent / "benchmarks" / "permuted_rewards.py"
PERMUTED = f"reward.functions=[{{function: '{CONTROL}:accuracy'}}, {{function: '{CONTROL}:format', weight: 0.2}}]"


def gains(folder, *overrides):
    """Points of accuracy gained, sampled and greedy, and the summary."""
    short = ["optimizer.max_steps=15", "optimizer.learning_rate=2e-3", "evaluation.num_problems=256"]
    run = train(load_config("quickstart", [f"run.output_dir={folder}", *short, *overrides]))
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    return [100 * (after[mode]["accuracy"] - before[mode]["accuracy"]) for mode in ("sampled", "greedy")], summary


def test_reward_teaches(tmp_path):
    true, summary = gains(tmp_path)
    assert summary["before"]["sampled"]["format"] >= 0.95
    assert min(true) >= 25, true


def test_permuted_reward_does_not(tmp_path):
    permuted, _ = gains(tmp_path, PERMUTED)
    assert max(permuted) <= 5, permuted


def test_held_out_operands_are_in_no_other_split():
    for seed in (0, 1):
        held_out = load_dataset("arithmetic", split="eval", seed=seed)
        assert len(held_out) >= 512
        check_split([held_out[i]["operands"] for i in range(512)], "eval")
    training = load_dataset("arithmetic", split="train")
    seen = {tuple(sorted(training[i]["operands"])) for i in range(len(training))}
    check_split([training[i]["operands"] for i in range(512)], "train")
    assert not seen & {tuple(sorted(held_out[i]["operands"])) for i in range(512)}
