"""Options of a run that has begun: edited in its file, and what they name moved or gone."""

import json
from pathlib import Path

import pytest
from tiny_runs import config, edit, open_once

from qerl_jax import run_folder, run_options
from qerl_jax.checkpoints import save_checkpoint
from qerl_jax.cli import main
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError


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
    for found in (held, stored):
        assert found.model.model_name_or_path == str(here / "model")
        assert found.data.train_dataset == found.evaluation.eval_dataset == str(here / "rows.jsonl")
        assert [one.function for one in found.reward.functions] == [f"{here / 'own.py'}:f", "accuracy"]


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
    """Which has another name among functions that are named by their whole paths."""
    for folder in (tmp_path, tmp_path / "b"):
        lie_in(folder)
    monkeypatch.chdir(tmp_path)
    words = ["reward.functions=[{function: 'b/own.py:f'}, {function: 'own.py:f'}]"]
    with run_folder.open_run(config(tmp_path, *words, "grpo.dynamic_sampling.metric=own.py:f")) as (folder, held):
        assert held.grpo.dynamic_sampling.metric == f"{tmp_path.name}/own.py:f"
    assert load_config(str(folder / "config.yaml")).grpo.dynamic_sampling == held.grpo.dynamic_sampling


def begun_with(tmp_path, *overrides, step=10, options=None):
    """A run's folder with a checkpoint that keeps `options`, or those of its config."""
    with run_folder.open_run(config(tmp_path, *overrides)) as (folder, held):
        kept = run_options.options_to_keep(held) if options is None else options
        save_checkpoint(folder / "checkpoints", step, {}, {"options": kept})
    return folder


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
        f"Go back to the old values to continue it, or start another run: {run_folder.FRESH}, {folder}-2, or "
        "run.output_dir=NAME"
    )
    open_once(config(tmp_path))  # which has the old values
    assert load_config(str(folder / "config.yaml")).run.seed == 0


def test_constant_of_an_earlier_version_goes_on_as_constant_with_warmup(tmp_path):
    earlier = {"optimizer.lr_scheduler_type": "constant", "optimizer.warmup_ratio": 0.5}
    warm = "optimizer.lr_scheduler_type=constant_with_warmup", "optimizer.warmup_ratio=0.5"
    folder = begun_with(tmp_path, *warm, options=earlier)
    open_once(load_config(str(folder / "config.yaml")))
    kind, ratio = ("type: constant_with_warmup", "type: constant"), ("warmup_ratio: 0.5", "")
    with pytest.raises(UserError, match="constant_with_warmup, which earlier versions called constant, has one"):
        edit(folder, kind)
    with pytest.raises(UserError, match="lr_scheduler_type was 'constant_with_warmup', is now 'constant'"):
        open_once(edit(folder, ratio))
    plain = begun_with(tmp_path / "plain", "optimizer.lr_scheduler_type=constant")
    open_once(load_config(str(plain / "config.yaml")))


@pytest.mark.parametrize(
    "change",
    ["run.save_steps=4", "run.save_total_limit=2", "run.log_completions=false", "run.report_to=[tensorboard]",
     "run.max_nonfinite_steps=9", "reward.timeout=9.0", "evaluation.eval_steps=4", "evaluation.batch_size=9"],
)  # fmt: skip
def test_what_a_runs_course_does_not_depend_on_may_change(tmp_path, change):
    stored = config(tmp_path)
    given = config(tmp_path, change)
    assert given != stored and run_options.changes(stored, run_options.options_to_keep(stored), given) == []


def test_other_variables_of_the_chat_template_are_refused_with_both_values(tmp_path):
    lie_in(tmp_path)
    words, name = [f"data.train_dataset={tmp_path / 'rows.jsonl'}"], "data.chat_template_kwargs"
    folder = begun_with(tmp_path, *words, f"{name}={{enable_thinking: false, x: 1}}")
    for given, shown in (
        ("{enable_thinking: false, x: true}", """'{"enable_thinking": false, "x": true}'"""),  # not 1
        ("{enable_thinking: false}", """'{"enable_thinking": false}'"""),
        ("null", "None"),
    ):
        with pytest.raises(UserError) as refusal:
            open_once(config(tmp_path, *words, f"{name}={given}"))
        expected = f"""  {name} was '{{"enable_thinking": false, "x": 1}}', is now {shown}\n"""
        assert expected in str(refusal.value)
    open_once(config(tmp_path, *words, f"{name}={{x: 1, enable_thinking: false}}"))
    with pytest.raises(UserError, match=f"{name} was .*false, .*, is now .*true, "):
        open_once(edit(folder, ("enable_thinking: false", "enable_thinking: true")))
    begun_without = begun_with(tmp_path / "other", *words)
    with pytest.raises(UserError, match=f"""{name} was None, is now '{{"x": 2}}'"""):
        open_once(edit(begun_without, (f"{name.partition('.')[2]}: null", "chat_template_kwargs: {x: 2}")))


def test_of_a_checkpoint_without_options_the_file_is_believed(tmp_path):
    folder = open_once(config(tmp_path))
    save_checkpoint(folder / "checkpoints", 10, {}, {})
    with run_folder.open_run(edit(folder, ("seed: 0", "seed: 1"))) as (_, held):
        assert held.run.seed == 1


def test_options_edited_since_are_refused_with_what_was_learned_but_those_of_evaluations_may_be(tmp_path):
    folder = open_once(config(tmp_path, "model.dtype=float32"))
    options = {"lora.lora_alpha": 32.0, "model.dtype": "float32", "evaluation.num_problems": 4, "of.a.later.version": 1}
    save_checkpoint(folder / "checkpoints", 10, {}, {"options": options, "identity": {"base weights": "a"}})
    edited = edit(folder, ("dtype: float32", "dtype: auto"))
    assert run_folder.trained_on(folder, edited).identity == {"base weights": "a"}
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
