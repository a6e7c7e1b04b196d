"""What `qerl train` refuses of what its options name: models, data, rewards, folders. (Options: test_config.py.)"""

import importlib.util
import sys

import pytest
from mistakes import MODEL, POSITIONS, jsonl, policy

from qerl_jax.rl import trainer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["my.yaml", "model.model_name_or_path=/no/such/folder"], "/no/such/folder: no such folder; allowed: a folder"),
        (["my.yaml", "model.model_name_or_path=builtin:quick"], "builtin:quick is unknown; allowed: quickstart"),
        (["my.yaml", "data.train_dataset=rows.jsonl"], "rows.jsonl': there is no file"),
        (["my.yaml", "data.max_prompt_length=8"], "arithmetic, row 0 (counted from 0): has 3"),
        (["my.yaml", f"data.max_prompt_length={POSITIONS}"], f"is {POSITIONS + 16}; {MODEL} has {POSITIONS} positions"),
        (["my.yaml", "reward.functions=[{function: mine.py:f}]"], "there is no file"),
        (["my.yaml", "lora.adapter=/no/such/adapter"], "/no/such/adapter: no such folder"),
        (["my.yaml", "run.output_dir=my.yaml"], "my.yaml is a file; expected a folder, or a name that is free"),
        (["my.yaml", "run.output_dir=my.yaml/run"], "my.yaml is a file; expected a folder"),
        (["my.yaml", "--profile", "my.yaml"], "profile (--profile): my.yaml is a file; expected a folder"),
    ],
)
def test_train(words, expected, refused):
    assert expected in refused("train", *words)


def test_a_service_that_is_not_installed_is_said_before_a_model_is_loaded_and_a_folder_made(
    folder, refused, monkeypatch
):
    """The model of these commands does not exist, which would be the error of a later look."""
    (folder / "wandb").mkdir()  # as W&B leaves it, and Python takes it for a package without a file
    monkeypatch.syspath_prepend(str(folder))
    if (there := importlib.util.find_spec("wandb")) is not None and there.origin is not None:
        monkeypatch.setitem(sys.modules, "wandb", None)
    for command in ("train", "plan"):
        said = refused(command, "my.yaml", "run.report_to=[wandb]", "model.model_name_or_path=./nowhere")
        assert "run.report_to names wandb, whose package wandb is not installed; pip install 'qerl-jax[wandb]'" in said
    assert not (folder / "run").exists()
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    for command in ("train", "plan"):
        said = refused(command, "my.yaml", "run.report_to=[tensorboard]", "model.model_name_or_path=./nowhere")
        assert "tensorboard, whose package tensorboardX is not installed" in said
    assert not (folder / "run").exists()


def test_data_without_the_column_that_a_reward_reads(folder, refused):
    jsonl(folder, {"prompt": "Ann has 10 pens.", "anwser": "10"})
    said = refused("train", "my.yaml", "data.train_dataset=rows.jsonl", "evaluation.eval_dataset=rows.jsonl")
    assert "rows.jsonl: reward function 'accuracy' needs a column 'answer' (did you mean 'anwser'?)" in said


def test_a_held_out_prompt_that_is_too_long_is_said_before_anything_is_compiled(folder, refused, monkeypatch):
    monkeypatch.setattr(trainer, "compiled_run", None)
    rows = jsonl(folder, {"prompt": "Ann has 10 pens.", "answer": "10"}, {"prompt": "and " * 200, "answer": "1"})
    rows.write_text(rows.read_text().replace("\n", "\n\n"))  # lines without a row have numbers too
    said = refused("train", "my.yaml", "evaluation.eval_dataset=rows.jsonl")
    assert "rows.jsonl, line 3: has " in said


def test_variables_of_the_chat_template_are_checked_before_anything_is_compiled(folder, refused, monkeypatch):
    monkeypatch.setattr(trainer, "compiled_run", None)
    words = "my.yaml", "data.train_dataset=rows.jsonl", "data.chat_template_kwargs.enable_thinkin=false"
    jsonl(folder, *({"prompt": f"Ann has {n} pens.", "answer": str(n)} for n in range(10, 14)))
    said = refused("train", *words, "model.model_name_or_path=./nowhere")
    assert "data.chat_template_kwargs has no effect in this run: the prompts of " in said
    assert f"{folder}/rows.jsonl and arithmetic are texts, which pass no chat template" in said
    talk = [{"role": "user", "content": "Ann has 10 pens."}]
    jsonl(folder, *({"prompt": talk, "answer": str(n)} for n in range(10, 14)))
    template = "{{ messages[0].content }}{% if enable_thinking is false %} Ann{% endif %}"
    policy(folder / "thinking", tokenizer_config=lambda values: values.update(chat_template=template))
    expected = "data.chat_template_kwargs sets 'enable_thinkin', which the tokenizer's chat template does not use (did "
    for command in ("train", "plan"):
        said = refused(command, *words, "model.model_name_or_path=thinking")
        assert f"{expected}you mean 'enable_thinking'?); allowed: enable_thinking\n" in said


def test_what_rewards_cannot_score_is_said_before_a_model_is_loaded(folder, refused):
    """The model of these commands does not exist, which would be the error of a later look."""
    words = ("train", "my.yaml", "model.model_name_or_path=./nowhere", "data.train_dataset=rows.jsonl")
    rows = [{"prompt": f"Ann has {n} pens.", "answer": str(n)} for n in range(10, 18)]
    jsonl(folder, *rows[:5], rows[5] | {"answer": "four"}, *rows[6:])
    assert "rows.jsonl: reward accuracy: column answer of row 5 (counted from 0) is 'four'" in refused(*words)
    jsonl(folder, *[row | {"completions": "what another model wrote"} for row in rows])
    assert "rows.jsonl: column 'completions' has the name of what every reward function is given" in refused(*words)
    jsonl(folder, *rows)
    own = folder / "mine.py"
    own.write_text("def short(completions):\n    return [0.0 for _ in completions]\n")
    said = refused(*words, "reward.functions=[{function: mine.py:short}]")
    assert f"rows.jsonl: reward function '{own}:short' does not take prompts, completion_ids; expected" in said
    own.write_text("def needs(completions, level, **columns):\n    return level\n")
    said = refused(*words, "reward.functions=[{function: mine.py:needs}]")
    expected = f"reward function '{own}:needs' needs a column 'level'; the data set has answer"
    assert f"data.train_dataset {folder}/rows.jsonl: {expected}" in said
    said = refused(*words[:3], "evaluation.eval_dataset=rows.jsonl", "reward.functions=[{function: mine.py:needs}]")
    assert f"data.train_dataset arithmetic: {expected}" in said
    jsonl(folder, *[row | {"level": 1} for row in rows])
    said = refused(*words, "reward.functions=[{function: mine.py:needs}]")
    assert f"evaluation.eval_dataset arithmetic: {expected}" in said
    (folder / "empty").mkdir()
    said = refused(*words[:3], "lora.adapter=empty")
    assert "empty/adapter_config.json is missing; expected a PEFT folder" in said
