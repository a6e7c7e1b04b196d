import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import config, edit, open_once

from qerl_jax import run_folder, run_options
from qerl_jax.config import Config, NoiseOptions, OptimizerOptions, RunOptions
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.program import program


def test_a_new_folder_holds_the_resolved_config(tmp_path):
    folder = open_once(config(tmp_path))
    assert folder == tmp_path / "run"
    assert load_config(str(folder / "config.yaml")).run.seed == 0


def test_the_same_config_continues_and_free_options_may_change(tmp_path):
    open_once(config(tmp_path))
    (tmp_path / "run" / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert open_once(config(tmp_path, "run.save_steps=30", "run.save_total_limit=9")) == tmp_path / "run"


def test_what_has_changed_amid_a_run_stays_so(tmp_path):
    folder = open_once(config(tmp_path))
    (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    stored = str(folder / "config.yaml")
    open_once(config(tmp_path, "reward.timeout=90", "run.report_to=[tensorboard]", "run.save_steps=null"))
    with run_folder.open_run(load_config(stored)) as (_, continued):
        assert continued.reward.timeout == 90 and continued.run.report_to == ("tensorboard",)
        assert continued.run.save_steps is None
    (folder / "summary.json").write_text("{}")
    with pytest.raises(run_folder.RunFinished):
        open_once(config(tmp_path, "reward.timeout=80"))
    assert load_config(stored).reward.timeout == 90


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=1", "run.seed was 0, is now 1"),
        ("lora.lora_r=8", "lora.lora_r was 16, is now 8"),
        ("data.max_prompt_length=44", "data.max_prompt_length was"),
        ("model.weight_format=bf16", "model.weight_format was 'nvfp4', is now 'bf16'"),
        ("data.train_dataset=other.jsonl", "data.train_dataset was 'arithmetic', is now '/.*/other.jsonl'"),
        ("optimizer.max_steps=90", "optimizer.max_steps was"),
    ],
)
def test_a_changed_config_is_refused_with_both_values(tmp_path, override, message):
    (open_once(config(tmp_path)) / "checkpoints" / "step_00000010").mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        open_once(config(tmp_path, override))


def test_before_the_first_checkpoint_a_config_may_be_corrected(tmp_path):
    open_once(config(tmp_path))
    folder = open_once(config(tmp_path, "run.seed=1"))
    assert load_config(str(folder / "config.yaml")).run.seed == 1


def test_a_process_killed_before_it_wrote_the_config_is_no_hindrance(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".tmp-config.yaml").write_text("model:")
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert (open_once(config(tmp_path)) / "config.yaml").is_file()


def test_fresh_starts_beside(tmp_path):
    open_once(config(tmp_path))
    assert open_once(config(tmp_path, "run.seed=1"), fresh=True) == tmp_path / "run-2"
    assert open_once(config(tmp_path, "run.seed=2"), fresh=True) == tmp_path / "run-3"


def test_the_stored_config_names_the_folder_it_lies_in(tmp_path):
    open_once(config(tmp_path))
    with run_folder.open_run(config(tmp_path), fresh=True) as (folder, held):
        (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
        assert held.run.output_dir == str(folder)
    assert "run-2" in (folder / "config.yaml").read_text()
    assert open_once(load_config(str(folder / "config.yaml"))) == folder


def test_a_run_folder_may_be_moved_and_continued(tmp_path, monkeypatch):
    folder = open_once(config(tmp_path))
    (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    moved = folder.rename(tmp_path / "else where")
    stored = str(moved / "config.yaml")
    assert run_folder.continuing(moved) == f"{program()} train '{stored}'"
    assert open_once(load_config(stored)) == moved and not folder.exists()
    monkeypatch.chdir(moved)
    assert open_once(load_config("config.yaml")) == moved
    assert open_once(load_config(stored, ["run.seed=1", f"run.output_dir={folder}"])) == folder


def test_so_may_one_that_holds_no_checkpoint_yet(tmp_path):
    folder = open_once(config(tmp_path))
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert open_once(load_config(str(copy / "config.yaml"))) == copy
    moved = folder.rename(tmp_path / "moved")
    assert open_once(load_config(str(moved / "config.yaml"))) == moved and not folder.exists()


@pytest.mark.parametrize("files", [["checkpoints/step_00000000/manifest.json"], ["metrics.jsonl", "completions.jsonl"]])
def test_only_beside_what_a_run_has_a_config_means_its_own_folder(tmp_path, files):
    file = tmp_path / "config.yaml"
    file.write_text("optimizer: {max_steps: 20}\nrun: {output_dir: elsewhere}\n")
    for name in files:
        assert load_config(str(file)).run.output_dir == "elsewhere"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert load_config(str(file)).run.output_dir == str(tmp_path)
    file.rename(tmp_path / "my.yaml")
    assert load_config(str(tmp_path / "my.yaml")).run.output_dir == "elsewhere"


def test_a_config_made_in_a_script_continues_its_run(tmp_path):
    run = RunOptions(output_dir=str(tmp_path / "run"))
    made = Config(optimizer=OptimizerOptions(max_steps=20), noise=NoiseOptions(num_stages=1), run=run)
    (open_once(made) / "checkpoints" / "step_00000010").mkdir(parents=True)
    with run_folder.open_run(made) as (folder, held):
        assert held == load_config(str(folder / "config.yaml"))
    other = dataclasses.replace(made, run=dataclasses.replace(made.run, seed=1))
    with pytest.raises(UserError, match=r"config:\n  run.seed was 0, is now 1\nGo back"):
        open_once(other)


def test_a_config_made_in_a_script_is_refused_with_an_option_without_effect(tmp_path):
    noise, run = NoiseOptions(num_stages=1, sigma_start=0.02), RunOptions(output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^noise\.sigma_start has no effect in this run: with noise\.num_stages 1 "):
        open_once(Config(optimizer=OptimizerOptions(max_steps=20), noise=noise, run=run))
    assert not (tmp_path / "run").exists()


def test_a_config_without_a_folder_is_refused():
    with pytest.raises(UserError, match=r"run.output_dir is None.*RunOptions\(output_dir="):
        open_once(Config(optimizer=OptimizerOptions(max_steps=20)))


def test_a_finished_run_says_so_and_offers_a_new_one(tmp_path):
    folder = open_once(config(tmp_path))
    (folder / "summary.json").write_text(json.dumps({}))
    for words in ([], ["reward.timeout=90"]):
        with pytest.raises(run_folder.RunFinished, match="run-2"):
            open_once(config(tmp_path, *words))
    assert load_config(str(folder / "config.yaml")).reward.timeout == 30


def test_a_finished_run_whose_checkpoints_are_gone_is_not_taken_for_one_of_another_config(tmp_path):
    with run_folder.open_run(config(tmp_path)) as (folder, held):
        (folder / "summary.json").write_text(json.dumps({"options": run_options.options_to_keep(held)}))
    begin = r"run\.seed was 0, is now 1\nGo back to the old values, or start another run: "
    with pytest.raises(UserError, match=begin + r"`--fresh` \(in a script `fresh=True`\), .*run-2, or"):
        open_once(config(tmp_path, "run.seed=1"))
    assert run_folder.standing(config(tmp_path, "run.seed=1"), {}).refused
    edited = edit(folder, ("seed: 0", "seed: 1"))
    for given in edited, config(tmp_path, "run.seed=1"):
        with pytest.raises(UserError, match=r"run\.seed was 0, is now 1"):
            open_once(given)


def test_a_run_whose_checkpoints_are_gone_keeps_its_rows(tmp_path):
    folder = open_once(config(tmp_path))
    rows = '{"rollout": 0, "step": 0, "eval/accuracy": 0.5}\n{"rollout": 0, "step": 1, "loss": 0.1}\n'
    (folder / "metrics.jsonl").write_text(rows)
    for given in (config(tmp_path), config(tmp_path, "run.seed=1"), load_config(str(folder / "config.yaml"))):
        with pytest.raises(UserError, match=r"metrics\.jsonl has rows of updates \(1\), .* holds no checkpoint.*run-2"):
            open_once(given)
        assert run_folder.standing(given, {}).refused
    assert (folder / "metrics.jsonl").read_text() == rows
    (folder / "metrics.jsonl").write_text(rows.splitlines(keepends=True)[0])  # killed before its first checkpoint
    assert open_once(config(tmp_path)) == folder


def test_a_damaged_identity_of_a_finished_run_is_told(tmp_path):
    (tmp_path / "summary.json").write_text('{"identity": "base"}')
    with pytest.raises(UserError, match=r"summary\.json: identity is 'base'; expected an object"):
        run_folder.trained_on(tmp_path, config(tmp_path))


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is no run"):
        open_once(config(tmp_path))
    (tmp_path / "run" / "thesis.tex").rename(tmp_path / "run" / "completions.jsonl")  # not empty: nor left by a kill
    with pytest.raises(UserError, match="is no run"):
        open_once(config(tmp_path))
    (tmp_path / "run" / "config.yaml").write_text("# another program's\nlearning_rate: 1\n")
    (tmp_path / "run" / "completions.jsonl").write_text('{"answer": 1}\n')
    before = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    for fresh in (False, True):
        with pytest.raises(UserError, match="is no run") if not fresh else contextlib.nullcontext():
            assert open_once(config(tmp_path), fresh=fresh) == tmp_path / "run-2"
    assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file; expected a folder, or a name that is free"):
        open_once(load_config("quickstart", [f"run.output_dir={tmp_path / 'file'}"]))


@pytest.mark.parametrize("name", ["file/run", "file/deep/run", "link", "link/run"])
def test_a_folder_that_cannot_be_made_is_refused_by_the_plan_as_by_the_run(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    found = "file is a file" if name.startswith("file") else "link is a symbolic link to gone, which does not exist"
    allowed = "expected a folder, or a name that is free"
    expected = f"{tmp_path / name}: run.output_dir cannot be made: {tmp_path}/{found}; {allowed}"
    given = load_config("quickstart", [f"run.output_dir={tmp_path / name}"])
    with pytest.raises(UserError) as refusal:
        open_once(given)
    assert str(refusal.value) == expected
    assert run_folder.as_begun(given) == given
    planned = run_folder.standing(given, {})
    assert planned.said.endswith(f" train` refuses it: {expected}") and planned.refused


@pytest.mark.parametrize("begun", [False, True])
def test_a_place_that_cannot_be_written_to_is_refused_by_the_plan_as_by_the_run(tmp_path, monkeypatch, begun):
    run = tmp_path / "deep" / "run"
    given = load_config("quickstart", [f"run.output_dir={run}"])
    place = tmp_path
    if begun:
        open_once(given)
        (place := run / "checkpoints").mkdir()
    assert run_folder.standing(given, {}) is None
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place)  # as where a disk is read-only
    expected = f"{place} cannot be written to, so run.output_dir {run} can hold no run"
    planned = run_folder.standing(given, {})
    assert planned.refused and planned.said.endswith(expected)
    with pytest.raises(UserError, match=re.escape(expected)):
        open_once(given)


def test_a_second_process_is_refused(tmp_path):
    script = (
        "import sys; from qerl_jax import run_folder; from qerl_jax.config_files import load_config\n"
        f"c = load_config('quickstart', ['run.output_dir={tmp_path / 'run'}'])\n"
        "try:\n    run_folder.open_run(c).__enter__()\n"
        "except Exception as e: print(e); sys.exit(3)\n"
    )
    with run_folder.open_run(config(tmp_path)):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 3 and "another process" in done.stdout


def test_what_a_run_begun_earlier_did_not_write_down_is_not_compared(tmp_path):
    stored, now = {"base weights": "a"}, {"base weights": "a", "tokenizer": "x"}
    assert run_folder.refuse_changed_identity(tmp_path, stored, now, 1) is None
    with pytest.raises(UserError, match="tokenizer was 'y', is now 'x'"):
        run_folder.refuse_changed_identity(tmp_path, stored | {"tokenizer": "y"}, now, 1)


def test_the_dtype_is_settled_when_a_run_begins(tmp_path, monkeypatch):
    with run_folder.open_run(config(tmp_path)) as (folder, settled):
        assert settled.model.dtype == load_config(str(folder / "config.yaml")).model.dtype == "float32"
    (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with run_folder.open_run(config(tmp_path)) as (_, continued):
        assert continued.model.dtype == "float32"
    with pytest.raises(UserError, match=r"model.dtype was .float32., is now .bfloat16."):
        open_once(config(tmp_path, "model.dtype=bfloat16"))
    with run_folder.open_run(config(tmp_path), fresh=True) as (_, fresh):
        assert fresh.model.dtype == "bfloat16"


def test_before_the_first_step_a_config_may_still_be_corrected(tmp_path):
    checkpoint = open_once(config(tmp_path)) / "checkpoints" / "step_00000000"
    events, wandb_run = tmp_path / "run" / "tensorboard" / "events", tmp_path / "run" / "wandb_run_id"
    for path in (checkpoint / "manifest.json", events, wandb_run):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert open_once(config(tmp_path)) == tmp_path / "run"
    assert checkpoint.exists() and events.exists() and wandb_run.exists()
    folder = open_once(config(tmp_path, "run.seed=1"))
    assert not (checkpoint.exists() or events.exists() or wandb_run.exists())
    assert load_config(str(folder / "config.yaml")).run.seed == 1


def test_a_kill_while_a_corrected_run_forgets_leaves_nothing_damaged(tmp_path, monkeypatch):
    """The files of a checkpoint are not removed one by one under its name."""
    checkpoint = open_once(config(tmp_path)) / "checkpoints" / "step_00000000"
    checkpoint.mkdir(parents=True)
    for name in ("manifest.json", "arrays"):
        (checkpoint / name).touch()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"rollout": 0, "step": 1, "loss": 0.1}\n')

    def killed(folder, **_):
        if (found := list(Path(folder).rglob("arrays"))) != []:
            found[0].unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        open_once(config(tmp_path, "run.seed=1"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert open_once(config(tmp_path, "run.seed=1")) == tmp_path / "run"
    for seed in (0, 1, 0):  # and what was left behind is in nobody's way
        (tmp_path / "run" / "checkpoints" / "step_00000000").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / "checkpoints" / "step_00000000" / "manifest.json").touch()
        assert load_config(str(open_once(config(tmp_path, f"run.seed={seed}")) / "config.yaml")).run.seed == seed
    assert not list((tmp_path / "run").glob(".old-*"))


def test_a_name_beside_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run_folder._beside(Path(".")) == tmp_path / "here-2"
