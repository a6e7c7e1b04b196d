"""The benchmark of `qerl train` on random weights: its options are valid ones, and a tiny run does what it reports."""

import json

import pytest

from benchmarks import train_at_size
from benchmarks.even_share import even_share
from qerl_jax.config_files import load_config

TINY = [
    "--model",
    "tiny",
    "--steps",
    "2",
    "--completion",
    "8",
    "--num-generations",
    "4",
    "--micro-batch",
    "2",
    "--lora-rank",
    "4",
]


def test_its_options_are_those_of_a_recipe(tmp_path):
    arguments = train_at_size.arguments_of(["--folder", str(tmp_path), "--prompts", "2", "--dtype", "float16"])
    config = load_config("quickstart", train_at_size.overrides(arguments))
    assert (config.prompts_per_rollout, config.completions_per_rollout, config.updates_per_rollout) == (2, 16, 1)
    assert config.generation.max_completion_length == 2048 and config.optimizer.max_steps == 3
    assert config.model.dtype == "float16"


@pytest.mark.parametrize(("words", "said"), [
    (["--micro-batch", "3"], "--micro-batch is 3; allowed: what divides the 8 completions"),
    (["--steps", "1"], "--steps is less than 2; the first is without noise"),
])  # fmt: skip
def test_what_no_run_takes_is_refused_before_a_model_is_written(words, said, capsys):
    with pytest.raises(SystemExit):
        train_at_size.arguments_of(["--folder", "x", *words])
    assert said in capsys.readouterr().err


def test_a_run_that_is_there_is_not_timed_again(tmp_path, capsys):
    """Whose seconds would be of the start alone, and which may be of another model."""
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit):
        train_at_size.main([*TINY, "--folder", str(tmp_path), "--output", str(tmp_path / "result.json")])
    assert f"{tmp_path}/run is there already, and only a new run is timed; remove it" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()


def test_each_model_has_a_folder_of_its_own(tmp_path):
    paths = []
    for model in ("tiny", "qwen2.5-7b"):
        arguments = train_at_size.arguments_of(["--model", model, "--folder", str(tmp_path)])
        paths.append(load_config("quickstart", train_at_size.overrides(arguments)).model.model_name_or_path)
    assert paths == [f"{tmp_path}/tiny", f"{tmp_path}/qwen2.5-7b"]


def test_the_reward():
    assert even_share([], [], [[2, 4, 5, 8], [1]]) == [0.75, 0.0]


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
    output = tmp_path / "result.json"
    assert train_at_size.main([*TINY, "--folder", str(tmp_path / "folder"), "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert len(result["steps"]) == 2 and result["finite"] and result["smallest_largest_entry_of_a_lora_B"] > 0
    assert all(step["completions/mean_length"] > 0 and step["perf/update_time"] > 0 for step in result["steps"])
    assert json.loads((tmp_path / "folder" / "tiny" / "config.json").read_text())["quantization_config"]
