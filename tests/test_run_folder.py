import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_jax import run_folder, run_options
from qerl_jax.checkpoints import save_checkpoint
from qerl_jax.cli import main
from qerl_jax.config import Config, NoiseOptions, OptimizerOptions, RunOptions
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.program import program


def config(tmp_path, *overrides):
    return load_config("quickstart", [f"run.output_dir={tmp_path / 'run'}", *overrides])


def open_once(config, fresh=False):
    with run_folder.open_run(config, fresh) as (folder, _):
        return folder


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
        ("model.weight_format=nf4", "model.weight_format was 'nvfp4', is now 'nf4'"),
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
    message = r"run\.seed was 0, is now 1\nGo back to the old values, or start another run: `--fresh` \(.*run-2\)"
    with pytest.raises(UserError, match=message):
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


def test_a_changed_identity_is_refused_with_both_values(tmp_path):
    run_folder.refuse_changed_identity(tmp_path, {"base weights": "a"}, {"base weights": "a"}, 1)
    with pytest.raises(UserError, match="base weights was 'a', is now 'b'"):
        run_folder.refuse_changed_identity(tmp_path, {"base weights": "a"}, {"base weights": "b"}, 1)


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


def lie_in(folder):
    """A model's folder, data and a reward function, in `folder`."""
    (folder / "model").mkdir(parents=True)
    (folder / "rows.jsonl").touch()
    (folder / "own.py").touch()


PLACES = [
    "model.model_name_or_path=model", "data.train_dataset=rows.jsonl", "evaluation.eval_dataset=rows.jsonl",
    "reward.functions=[{function: 'own.py:f', weight: 1.0}, {function: accuracy, weight: 1.0}]",
]  # fmt: skip


def test_a_runs_config_means_the_same_in_any_working_folder(tmp_path, monkeypatch):
    lie_in(tmp_path / "here")
    lie_in(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    with run_folder.open_run(load_config("quickstart", [*PLACES, "run.output_dir=run"])) as (folder, held):
        assert folder == Path("run")
    monkeypatch.chdir(tmp_path / "there")
    here, stored = tmp_path / "here", load_config(str(tmp_path / "here" / "run" / "config.yaml"))
    assert stored.run.output_dir == str(here / "run")  # also before its first checkpoint
    for config in (held, stored):
        assert config.model.model_name_or_path == str(here / "model")
        assert config.data.train_dataset == config.evaluation.eval_dataset == str(here / "rows.jsonl")
        assert [one.function for one in config.reward.functions] == [f"{here / 'own.py'}:f", "accuracy"]


def test_what_a_run_reads_may_lie_elsewhere_once_its_config_says_so(tmp_path, monkeypatch):
    for name in ("here", "there"):
        lie_in(tmp_path / name)
    monkeypatch.chdir(tmp_path / "here")
    folder = open_once(config(tmp_path, *PLACES))
    (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    stored = folder / "config.yaml"
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(UserError, match=r"model_name_or_path was .*/here/model', is now .*/there/model'"):
        open_once(load_config(str(stored), PLACES))
    stored.write_text(stored.read_text().replace(f"{tmp_path / 'here'}", f"{tmp_path / 'there'}"))
    with run_folder.open_run(load_config(str(stored))) as (_, held):
        assert held.model.model_name_or_path == str(tmp_path / "there" / "model")


def test_the_metric_of_dynamic_sampling_stays_that_of_its_function(tmp_path, monkeypatch):
    for name in ("a", "b"):
        lie_in(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    words = ["reward.functions=[{function: 'a/own.py:f'}, {function: 'b/own.py:f'}]"]
    with run_folder.open_run(config(tmp_path, *words, "grpo.dynamic_sampling.metric=b/own.py:f")) as (folder, held):
        assert held.grpo.dynamic_sampling.metric == f"{tmp_path / 'b' / 'own.py'}:f"
    assert load_config(str(folder / "config.yaml")).grpo.dynamic_sampling == held.grpo.dynamic_sampling


def begun_with(tmp_path, *overrides, step=10, options=None):
    """A run's folder with a checkpoint that keeps `options`, or those of its config."""
    with run_folder.open_run(config(tmp_path, *overrides)) as (folder, held):
        kept = run_options.options_to_keep(held) if options is None else options
        save_checkpoint(folder / "checkpoints", step, {}, {"options": kept})
    return folder


def edit(folder, *changes):
    """Changes the file of the run in `folder`, and returns the config that it has become."""
    text = (folder / "config.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "config.yaml").write_text(text)
    return load_config(str(folder / "config.yaml"))


def test_a_file_edited_amid_the_run_is_refused_with_both_values(tmp_path):
    options = {"run.seed": 0, "lora.lora_alpha": 32.0, "of.a.later.version": 1}
    folder = begun_with(tmp_path, options=options)
    seed, alpha, timeout = (
        ("seed: 0", "seed: 1"), ("lora_alpha: 32.0", "lora_alpha: 3200.0"), ("timeout: 30.0", "timeout: 9.0")
    )  # fmt: skip
    with pytest.raises(UserError) as refusal:
        open_once(edit(folder, seed, alpha, timeout))
    assert str(refusal.value) == (
        f"{folder} was begun with another config:\n  lora.lora_alpha was 32.0, is now 3200.0\n"
        "  run.seed was 0, is now 1\n"
        f"Go back to the old values to continue it, or start another run: `--fresh` ({folder}-2) or run.output_dir=NAME"
    )
    open_once(config(tmp_path))  # which has the old values
    assert load_config(str(folder / "config.yaml")).run.seed == 0


def test_of_a_checkpoint_without_options_the_file_is_believed(tmp_path):
    folder = open_once(config(tmp_path))
    save_checkpoint(folder / "checkpoints", 10, {}, {})
    with run_folder.open_run(edit(folder, ("seed: 0", "seed: 1"))) as (_, held):
        assert held.run.seed == 1


def test_options_edited_since_are_refused_with_what_was_learned_but_those_of_evaluations_may_be(tmp_path):
    folder = open_once(config(tmp_path, "model.dtype=float32"))
    options = {"lora.lora_alpha": 32.0, "model.dtype": "float32", "evaluation.num_problems": 4, "of.a.later.version": 1}
    save_checkpoint(folder / "checkpoints", 10, {}, {"options": options, "identity": {"base weights": "a"}})
    assert run_folder.trained_on(folder, edit(folder, ("dtype: float32", "dtype: auto"))) == {"base weights": "a"}
    edited = edit(folder, ("lora_alpha: 32.0", "lora_alpha: 3200.0"), ("\n  dtype: auto", "\n  dtype: bfloat16"))
    with pytest.raises(UserError) as refusal:
        run_folder.trained_on(folder, edited)
    assert str(refusal.value) == (
        f"{folder} was begun with another config:\n  lora.lora_alpha was 32.0, is now 3200.0\n"
        f"  model.dtype was 'float32', is now 'bfloat16'\nGo back to the old values in {folder / 'config.yaml'}"
    )


def test_before_the_first_step_a_file_may_be_edited(tmp_path):
    folder = begun_with(tmp_path, step=0)
    with run_folder.open_run(edit(folder, ("seed: 0", "seed: 1"))) as (_, held):
        assert held.run.seed == 1
    assert not (folder / "checkpoints").exists()  # of seed 0


def test_checkpoints_keep_the_options_that_matter_without_places(tmp_path, monkeypatch):
    lie_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    with run_folder.open_run(config(tmp_path, *PLACES, "noise={num_stages: 1}")) as (_, held):
        options = run_options.options_to_keep(held)
    assert options["lora.lora_alpha"] == 32.0 and options["model.dtype"] == "float32"
    assert [one["function"] for one in options["reward.functions"]] == ["*.py:f", "accuracy"]
    for name in ("run.output_dir", "run.save_steps", "data.train_dataset", "lora.adapter", "noise.sigma_start"):
        assert name not in options
    assert str(tmp_path) not in json.dumps(options)


def test_what_a_run_reads_may_move_also_where_checkpoints_keep_options(tmp_path, monkeypatch):
    for name in ("here", "there"):
        lie_in(tmp_path / name)
    words = [*PLACES[:-1], "reward.functions=[{function: 'own.py:f', weight: 1.0}]"]
    monkeypatch.chdir(tmp_path / "here")
    folder = begun_with(tmp_path, *words, "grpo.dynamic_sampling.metric=f")
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(UserError, match=r"functions was .*/here/own.py:f'.*, is now .*/there/own.py:f'"):
        open_once(load_config(str(folder / "config.yaml"), words))
    with run_folder.open_run(edit(folder, (str(tmp_path / "here"), str(tmp_path / "there")))) as (_, held):
        assert held.reward.functions[0].function == f"{tmp_path / 'there' / 'own.py'}:f"
    weights = r"reward.functions was .*'\*.py:f', 'weight': 1.0.*, is now .*'\*.py:f', 'weight': 2.0"
    with pytest.raises(UserError, match=weights):
        open_once(edit(folder, ("weight: 1.0", "weight: 2.0")))


def test_the_dtype_that_a_run_began_with_outlives_an_edited_file(tmp_path):
    folder = begun_with(tmp_path)
    with run_folder.open_run(edit(folder, ("dtype: float32", "dtype: auto"))) as (_, held):
        assert held.model.dtype == "float32"
    with pytest.raises(UserError, match=r"model.dtype was .float32., is now .bfloat16."):
        open_once(edit(folder, ("dtype: float32", "dtype: bfloat16")))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model", r"model.model_name_or_path: .*/model is no longer there; .*config.yaml$"),
        ("rows.jsonl", r"data.train_dataset: .*/rows.jsonl is no longer there; .*config.yaml$"),
        ("own.py", r"reward.functions: .*/own.py is no longer there; .*config.yaml$"),
    ],
)
def test_what_a_run_no_longer_finds_is_named_with_its_option(tmp_path, monkeypatch, gone, message):
    lie_in(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    folder = open_once(config(tmp_path, *PLACES))
    (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    (tmp_path / "here" / gone).rename(tmp_path / gone)
    with pytest.raises(UserError, match=message):
        open_once(load_config(str(folder / "config.yaml")))


EVALUATE, GENERATE = ["evaluate", "run"], ["generate", "run", "--prompt", "x"]
EXPORT = ["export", "run", "out", "--format", "peft"]


@pytest.mark.parametrize(
    ("gone", "option", "refusing", "others"),
    [
        ("model", "model.model_name_or_path", [EVALUATE, GENERATE, EXPORT], []),
        ("rows.jsonl", "evaluation.eval_dataset", [EVALUATE], [GENERATE, EXPORT]),
        ("own.py", "reward.functions", [EVALUATE], [GENERATE, EXPORT]),
    ],
)
def test_so_do_the_commands_that_read_it(gone, option, refusing, others, tmp_path, monkeypatch, capsys):
    lie_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    open_once(load_config("quickstart", [*PLACES, "run.output_dir=run"]))
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    expected = (
        f"{option}: {tmp_path / gone} is no longer there; put it back or, if it has moved, write its place into "
        "run/config.yaml\n"
    )
    for words in (*refusing, *others):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said == f"qerl {words[0]}: {expected}" if words in refusing else "is no longer there" not in said
