"""What a run takes is said before it samples anything, and a run whose update cannot fit is refused by then."""

import re
import shutil
import sys

import jax
import pytest
from run_harness import checkpoints, rows
from tiny import Device
from training_runs import Killed, config_in, stop_after, train

from qerl_jax import cli
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl.plan import plan_run
from qerl_jax.rollout import memory


def test_a_run_is_refused_before_it_samples_and_goes_on_with_less(config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [Device(10**5)])
        patch.setattr(memory, "_device_bytes", lambda *_: 10**9)  # rollouts fit
        with pytest.raises(UserError, match="8 rows of 56 tokens at once"):
            train(config, run)
    assert checkpoints(run) == [] and rows(run) == []
    train(config, run, "optimizer.per_device_train_batch_size=4", "optimizer.gradient_accumulation_steps=2")
    assert checkpoints(run)[-1] == len(rows(run)) == 6


def test_an_evaluation_that_is_larger_than_a_rollout_is_refused_where_it_cannot_fit(policy, tmp_path, monkeypatch):
    evaluation = {"num_problems": 64, "num_generations_eval": 6, "batch_size": 384}
    config = config_in(tmp_path, policy, generation={"kv_cache_gb": 0.5}, evaluation=evaluation)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(16 * 10**6)])
    message = (
        r"an evaluation does not fit in memory: .* need \d+\.\d kB, and all 384 completions at once, \d+\.\d MB with "
        r"generation.kv_cache_gb 0.5; the device has 16.0 MB. Try a lower evaluation.batch_size; or"
    )
    with pytest.raises(UserError, match=message):
        plan_run(load_config(str(config)))
    plan, refused = plan_run(load_config(str(config), ["evaluation.batch_size=8"]))
    assert "an evaluation, 8 of 384 completions" in plan and not refused


def test_the_plan_of_a_run_is_what_the_run_does_and_takes_and_leaves_nothing_behind(policy, tmp_path, capsys):
    evaluation = {"num_problems": 4, "num_generations_eval": 3, "batch_size": 4}
    config = config_in(tmp_path, policy, generation={"max_slots": 3}, evaluation=evaluation)
    before = {*tmp_path.rglob("*")}
    assert cli.main(["plan", str(config)]) == 0
    out, err = capsys.readouterr()
    assert "compiling" in err
    steps, memory = out.splitlines()
    assert {*tmp_path.rglob("*")} == before
    assert steps == (
        "steps: 6 of 8 completions; 3 rollouts of 2 x 4 completions (prompts x num_generations): 0.09 epochs of "
        "64 prompts"
    )
    size = r"\d+\.\d [kM]B"
    assert re.fullmatch(
        f"memory: weights {size}, adapter and optimizer {size}; beside them by turns a rollout, "
        f"3 of 8 completions at once, {size}, an evaluation, 4 of 12 completions at once, {size}, and an update, {size}"
        f": {size} at most; what the device has is not known",
        memory,
    )
    cli.main(["train", str(config)])
    assert memory in capsys.readouterr().out.splitlines()
    assert len(rows(tmp_path / "run")) == 6 and rows(tmp_path / "run")[-1]["rollout"] == 2


def told(capsys, *words, code=0):
    """The plan's line on the run's folder, after its figures have been found to be there."""
    assert cli.main(["plan", *map(str, words)]) == code
    line, steps, memory = capsys.readouterr().out.splitlines()
    assert steps.startswith("steps: 6 of ") and memory.startswith("memory: weights ")
    return line


def test_the_plan_of_a_run_that_has_begun_says_what_train_would_do(finished, tmp_path, capsys, monkeypatch):
    stored = finished / "config.yaml"
    monkeypatch.setitem(sys.modules, "wandb", None)  # a finished run does without it
    for words in ((), ("run.report_to=[wandb]",)):
        said = told(capsys, stored, *words)
        assert said.startswith(f"run: {finished} is finished: see {finished}/summary.json. `--fresh` ")
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "summary.json").unlink()
    stored, before = run / "config.yaml", {*run.rglob("*")}
    assert told(capsys, stored) == f"run: continues {run} from step 6 of 6"
    shutil.rmtree(run / "checkpoints/step_00000006")
    (run / "checkpoints/step_00000004/manifest.json").write_text("{}")
    assert told(capsys, stored, "reward.timeout=9") == f"run: continues {run} from step 2 of 6"
    assert {*run.rglob("*")} < before
    text = stored.read_text()
    stored.write_text(text.replace("shuffle: true", "shuffle: false"))
    assert re.fullmatch(
        rf"run: `.*qerl.* train` refuses it: {re.escape(str(run))} was begun with another config: data.shuffle was "
        r"True, is now False; run.seed was 0, is now 1; Go back to the old values .* run.output_dir=NAME",
        told(capsys, stored, "run.seed=1", code=2),
    )
    stored.write_text(text)
    data = tmp_path / "problems.jsonl"
    (row,) = re.findall("train_dataset: (.*)", text)
    with open(row) as file:
        data.write_text("".join(file.readlines()[1:]))
    stored.write_text(text.replace(row, str(data)))
    assert re.search("refuses it: .* training data was '.*', is now '.*'; Restore", told(capsys, stored, code=2))
    for step in (0, 2):
        (run / f"checkpoints/step_{step:08d}/manifest.json").write_text("{}")
    assert told(capsys, stored, code=2).endswith(
        f" train` refuses it: every checkpoint in {run}/checkpoints is damaged"
    )


def test_a_run_that_began_in_another_dtype_is_planned_in_that(config, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    stop_after(monkeypatch, 2)
    with pytest.raises(Killed):
        train(config, run, "model.dtype=float16")
    capsys.readouterr()
    line = told(capsys, config, f"run.output_dir={run}", "model.dtype=auto")
    assert line == f"run: continues {run} from step 2 of 6"
