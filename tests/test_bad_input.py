"""Mistakes at the command line: exit code 2, and one message that says what to mend, without a traceback."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import edit_arrays, edit_options
from run_harness import ROOT

from qerl_jax import generation
from qerl_jax.cli import main
from qerl_jax.errors import UserError
from qerl_jax.models.init import init_adapter
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import Adapter, LoRA
from qerl_jax.models.peft import save_adapter
from qerl_jax.models.source import resolve
from qerl_jax.policy import load_policy
from qerl_jax.rl import trainer

MODEL = "builtin:quickstart"
SHAPE = json.loads((resolve(MODEL) / "config.json").read_text())
POSITIONS = SHAPE["max_position_embeddings"]
CONFIG = """\
generation: {num_generations: 2, max_completion_length: 16}
optimizer: {max_steps: 2, per_device_train_batch_size: 4, gradient_accumulation_steps: 1}
noise: {num_stages: 2}
evaluation: {num_problems: 4}
run: {output_dir: run}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a config that is in order."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def refused(capfd):
    """Runs a command that must fail; gives its message."""

    def run(*words):
        capfd.readouterr()
        assert main([str(word) for word in words]) == 2
        captured = capfd.readouterr()
        # On a slow machine lines come first that say how far loading is; a plan's first line says what it does.
        message = re.sub(r"^(loading .*\n)+", "", captured.err)
        assert message.startswith(f"qerl {words[0]}: ") and "Traceback" not in message
        assert message.count("\n") == 1, captured.err
        assert words[0] == "train" or captured.out == ""
        return message

    return run


def policy(folder, **changes):
    """A copy of the shipped policy with JSON files edited: `tokenizer=lambda values: ...`."""
    shutil.copytree(resolve(MODEL), folder)
    for name, change in changes.items():
        file = folder / f"{name}.json"
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))
    return folder


def jsonl(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["missing.yaml"], "missing.yaml: no such file, and no shipped recipe of that name"),
        (["quickstrt"], "did you mean 'quickstart'?"),
        (["optimizer.learning_rat=1e-3"], "unknown option optimizer.learning_rat (did you mean 'learning_rate'?)"),
        (["optimizr.learning_rate=1e-3"], "unknown section optimizr (did you mean 'optimizer'?)"),
        (["my.yaml", "model.model_name_or_path=/no/such/folder"], "/no/such/folder: no such folder; allowed: a folder"),
        (["my.yaml", "model.model_name_or_path=builtin:quick"], "builtin:quick is unknown; allowed: quickstart"),
        (["my.yaml", "data.train_dataset=rows.jsonl"], "rows.jsonl': there is no file"),
        (["my.yaml", "data.train_dataset=arithmetics"], "'arithmetics' is unknown (did you mean 'arithmetic'?)"),
        (["my.yaml", "data.max_prompt_length=8"], "arithmetic, row 0 (counted from 0): has 3"),
        (["my.yaml", f"data.max_prompt_length={POSITIONS}"], f"is {POSITIONS + 16}; {MODEL} has {POSITIONS} positions"),
        (["my.yaml", "reward.functions=[{function: acuracy}]"], "'acuracy' is unknown (did you mean 'accuracy'?)"),
        (["my.yaml", "reward.functions=[{function: mine.py:f}]"], "there is no file"),
        (["my.yaml", "reward.functions=[{function: no_module_here:f}]"], "there is no module 'no_module_here'"),
        (["my.yaml", "lora.adapter=/no/such/adapter"], "/no/such/adapter: no such folder"),
        (["my.yaml", "run.output_dir=my.yaml"], "my.yaml is a file; expected a folder, or a name that is free"),
        (["my.yaml", "run.output_dir=my.yaml/run"], "my.yaml is a file; expected a folder"),
        (["my.yaml", "--profile", "my.yaml"], "profile (--profile): my.yaml is a file; expected a folder"),
    ],
)
def test_train(words, expected, refused):
    assert expected in refused("train", *words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: [1\nlora: }", "bad.yaml, line 2, column 5: not readable as YAML"),
        ("", "bad.yaml: found nothing; expected sections"),
        (
            "optimizer: {max_steps: many}",
            "bad.yaml, line 1: optimizer.max_steps is 'many'; allowed: a whole number",
        ),
        ("optimiser: {max_steps: 1}", "bad.yaml, line 1: unknown section optimiser (did you mean 'optimizer'?)"),
    ],
)
def test_train_on_an_unusable_file(text, expected, folder, refused):
    (folder / "bad.yaml").write_text(text)
    assert expected in refused("train", "bad.yaml")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "rows.jsonl: has no rows"),
        ('{"prompt": "one"}\n{"prompt": ', "rows.jsonl, line 2: not JSON"),
        ('{"promt": "one"}\n', "rows.jsonl, line 1: there is no column 'prompt' (did you mean 'promt'?)"),
        ('{"prompt": ""}\n', "rows.jsonl, line 1: the prompt is empty"),
    ],
)
def test_train_on_unusable_data(content, expected, folder, refused):
    (folder / "rows.jsonl").write_text(content)
    assert expected in refused("train", "my.yaml", "data.train_dataset=rows.jsonl")


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


def test_what_rewards_cannot_score_is_said_before_a_model_is_loaded(folder, refused):
    """The model of these commands does not exist, which would be the error of a later look."""
    words = ("train", "my.yaml", "model.model_name_or_path=./nowhere", "data.train_dataset=rows.jsonl")
    rows = [{"prompt": f"Ann has {n} pens.", "answer": str(n)} for n in range(10, 18)]
    jsonl(folder, *rows[:5], rows[5] | {"answer": "four"}, *rows[6:])
    assert "rows.jsonl: reward accuracy: column answer of row 5 is 'four'" in refused(*words)
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


def test_a_run_or_an_adapter_in_the_place_of_a_model_or_an_adapter(folder, refused):
    (folder / "mine").mkdir()
    (folder / "mine" / "config.yaml").write_text(CONFIG)
    (folder / "tuned").mkdir()
    (folder / "tuned" / "adapter_config.json").write_text("{}")
    for words in (["train", "my.yaml", "model.model_name_or_path=mine"], ["quantize", "mine", "out"]):
        said = refused(*words)
        assert "mine is a run, not a model; its base is model.model_name_or_path in " in said
        assert "mine OUT --format bf16` merges base and adapter into a model" in said
    for words in (["train", "my.yaml", "model.model_name_or_path=tuned"], ["quantize", "tuned", "out"]):
        said = refused(*words)
        assert "tuned is a PEFT adapter, not a model; give its base, with lora.adapter=" in said
        assert "export BASE OUT --format bf16 --adapter " in said
    for words in (
        ["train", "my.yaml", "lora.adapter=mine"],
        ["generate", MODEL, "--prompt", "x", "--adapter", "mine"],
        ["export", MODEL, "out", "--format", "bf16", "--adapter", "mine"],
    ):
        said = refused(*words)
        assert "mine is a run, not an adapter; its adapter is " in said
        assert said.endswith("mine/adapter, once it has ended\n")


def test_prompts_are_not_read_from_standard_input(folder, refused, monkeypatch):
    monkeypatch.setattr("qerl_jax.generation.load_policy", lambda *args: pytest.fail("loaded"))
    said = refused("generate", MODEL, "--prompts", "-")
    assert "--prompts -: standard input is not read; expected a .jsonl or .ndjson file" in said


def one_token_more(tokenizer):
    token = {"content": "<more>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocabulary = max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])])
    tokenizer["added_tokens"].append(token | {"id": vocabulary + 1, "special": True})


def test_a_tokenizer_with_more_ids_than_the_embedding(folder, refused):
    policy(folder / "more", tokenizer=one_token_more)
    V = SHAPE["vocab_size"]
    expected = f"the tokenizer has {V + 1} tokens, the largest id {V} ('<more>'); the embedding has {V} rows"
    assert expected in refused("train", "my.yaml", "model.model_name_or_path=more")
    assert expected in refused("generate", "more", "--prompt", "x")


def test_a_tokenizer_is_read_before_the_weights(folder, monkeypatch):
    """Which takes minutes where a large model is quantized."""
    policy(folder / "more", tokenizer=one_token_more)
    monkeypatch.setattr("qerl_jax.policy.load_model", None)
    with pytest.raises(UserError, match=r"the embedding has \d+ rows"):
        load_policy(str(folder / "more"), "nvfp4", "auto")


def test_a_tokenizer_without_an_end(folder, refused):
    def without(values):
        values.pop("eos_token_id", None)
        values.pop("eos_token", None)

    policy(folder / "endless", config=without, generation_config=without, tokenizer_config=without)
    assert "endless: no EOS" in refused("train", "my.yaml", "model.model_name_or_path=endless")
    assert "endless: no EOS" in refused("generate", "endless", "--prompt", "x")


def test_an_adapter_of_another_model(folder, refused):
    pair = LoRA(np.zeros((4, 32), np.float32), np.zeros((32, 4), np.float32), 2.0)
    save_adapter(Adapter(({"q_proj": pair}, {"q_proj": pair}), None), folder / "adapter", "another")
    train, generate = (
        ("train", "my.yaml", "lora.adapter=adapter"),
        ("generate", MODEL, "--prompt", "x", "--adapter", "adapter"),
    )
    for words in (train, generate):
        said = refused(*words)
        assert (
            "adapter/adapter_model.safetensors: tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A" in said
        )
        assert f"expected shape [4, {SHAPE['hidden_size']}] by the configuration, found [4, 32]" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/no/such/model", "--prompt", "x"], "/no/such/model: no such folder"),
        (["my.yaml", "--prompt", "x"], "my.yaml is a file; expected the folder it lies in"),
        ([MODEL, "--prompt", ""], "the prompt is empty; expected a text"),
        ([MODEL, "--prompt", " pens" * 200], f"the prompt has 200 tokens; allowed: 1 to {POSITIONS - 1}"),
        (
            [MODEL, "--prompt", " pens" * 40, "--max-completion-length", "100"],
            f"the prompt has 40 tokens; allowed: 1 to {POSITIONS - 100}",
        ),
        (
            [MODEL, "--prompt", "x", "--max-completion-length", str(POSITIONS)],
            f"max_completion_length (--max-completion-length or --max-new-tokens) is {POSITIONS}; allowed: 1 or more, "
            f"and less than the model's {POSITIONS}",
        ),
        (
            [MODEL, "--prompt", "x", "--max-new-tokens", "0"],
            "--max-completion-length (or --max-new-tokens) is 0; allowed: a whole number >= 1",
        ),
        ([MODEL, "--prompt", "x", "--output", "."], "--output . is a folder; expected the name of a file"),
        ([MODEL, "--prompt", "x", "--output", "no/rows.jsonl"], "--output no/rows.jsonl: there is no folder /"),
        (
            [MODEL, "--prompt", "x", "--output", "no/../rows.jsonl"],
            "--output no/../rows.jsonl: there is no folder no/..;",
        ),
        ([MODEL, "--prompt", "x", "--output", f"{__file__}/rows.jsonl"], ".py is a file; choose another name"),
        ([MODEL, "--prompts", "rows.ndjson"], "data set 'rows.ndjson': there is no file"),
        ([MODEL, "--prompts", "rows.jsonl"], "data set 'rows.jsonl': there is no file"),
        ([MODEL, "--prompt", "x", "--adapter", "/no/such/adapter"], "/no/such/adapter: no such folder"),
        (
            [MODEL, "--prompt", "x", "--temperature", "0"],
            "--temperature is 0.0; allowed: a number from 1e-30 to 1e30; use --greedy for the most likely token",
        ),
        (
            [MODEL, "--prompt", "x", "--temperature", "1e-40"],
            "--temperature is 1e-40; allowed: a number from 1e-30 to 1e30\n",
        ),
        ([MODEL, "--prompt", "x", "--top-p", "2"], "--top-p is 2.0; allowed: a number from 1e-30 to 1\n"),
        ([MODEL, "--prompt", "x", "--top-k", "-1"], "--top-k is -1; allowed: a whole number >= 0\n"),
        ([MODEL, "--prompt", "x", "--min-p", "nan"], "--min-p is nan; allowed: a number from 0 to 1\n"),
    ],
)
def test_generate(words, expected, refused):
    assert expected in refused("generate", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["/no/such/model", "--prompt", "x"],
        [MODEL, "--prompt", ""],
        [MODEL, "--prompt", "x", "--adapter", "/no/such/adapter"],
        [MODEL, "--prompt", "x", "--max-completion-length", str(POSITIONS)],
    ],
)
def test_a_mistake_leaves_the_output_that_is_there(words, folder, refused):
    (folder / "keep.jsonl").write_text("old\n")
    refused("generate", *words, "--output", "keep.jsonl")
    refused("generate", *words, "--output", "new.jsonl")
    assert (folder / "keep.jsonl").read_text() == "old\n"
    assert not (folder / "new.jsonl").exists()


@pytest.mark.parametrize("output", ["link", "folder/rows.jsonl"])
def test_an_output_that_a_link_leads_nowhere_for_is_refused_before_a_model_is_loaded(output, folder, refused):
    (folder / "link").symlink_to("gone/rows.jsonl")
    (folder / "folder").symlink_to("gone")
    said = refused("generate", "/no/such/model", "--prompt", "x", "--output", output)
    assert f"--output {output}: there is no folder {folder.resolve()}/gone; make it" in said


@pytest.mark.parametrize(("output", "written"), [("old.jsonl", "old.jsonl"), ("new.jsonl", "")])
def test_an_output_that_may_not_be_written_is_refused_before_a_model_is_loaded(
    output, written, folder, monkeypatch, refused
):
    (folder / "old.jsonl").touch()
    real, closed = os.access, (folder / written).resolve()  # who is root may write everything
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and real(path, mode))
    said = refused("generate", "/no/such/model", "--prompt", "x", "--output", output)
    assert f"--output {output}: {closed} may not be written; change its permissions" in said


def test_generate_names_the_rows_it_cannot_answer_and_answers_the_others(folder, capsys):
    jsonl(folder, *({"prompt": " pens" * count} for count in (3, 200, 0)))
    assert main(["generate", MODEL, "--prompts", "rows.jsonl", "--max-new-tokens", "2"]) == 3
    printed = capsys.readouterr()
    rows = {row["row"]: row for row in map(json.loads, printed.out.splitlines())}
    assert rows[0]["finish_reason"] in ("length", "eos")
    assert rows[1]["error"].startswith(f"the prompt has 200 tokens; allowed: 1 to {POSITIONS - 2}")
    assert rows[2]["error"] == "the prompt is empty; expected a text"
    assert "2 of 3 prompts not answered" in printed.err


def test_texts_and_messages_in_one_file_are_answered_and_a_malformed_prompt_is_the_error_of_its_row(folder, capsys):
    user = {"role": "user", "content": "2 pens"}
    wrong = {
        "": "the prompt is empty; expected a text",
        None: "the prompt is None; expected a text, or a list of one message or more",
        3: "the prompt is 3; expected a text, or a list",
        "text in a list": "'2 pens' is not a message; expected {'role': text, 'content': text}",
        "role": "the role is 'robot'; allowed: system, user, assistant, tool",
        "end": "the prompt ends with the assistant's message; expected the user's",
    }
    prompts = ["", None, 3, ["2 pens"], [user | {"role": "robot"}], [user, {"role": "assistant", "content": "2"}]]
    jsonl(folder, *({"prompt": prompt} for prompt in ("2 pens", [user], *prompts)))
    assert main(["generate", MODEL, "--prompts", "rows.jsonl", "--max-new-tokens", "2"]) == 3
    rows = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert sorted(rows) == list(range(8))
    assert all(rows[row]["finish_reason"] in ("length", "eos") for row in (0, 1))
    for row, error in enumerate(wrong.values(), start=2):
        assert rows[row]["prompt"] == prompts[row - 2] and rows[row]["error"].startswith(error)


def test_a_line_that_cannot_be_read_is_the_error_of_its_row_with_file_and_line(folder, capsys):
    lines = ['{"prompt": "2 pens"}', "", '{"prompt": "2 pens', '{"promt": "2 pens"}', '{"prompt": "2 pens"}']
    (folder / "rows.jsonl").write_text("\n".join(lines))
    assert main(["generate", MODEL, "--prompts", "rows.jsonl", "--max-new-tokens", "2"]) == 3
    printed = capsys.readouterr()
    rows = {row["row"]: row for row in map(json.loads, printed.out.splitlines())}
    assert [rows[row]["prompt"] for row in range(4)] == ["2 pens", None, None, "2 pens"]
    assert all(rows[row]["finish_reason"] in ("length", "eos") for row in (0, 3))
    assert rows[1]["error"].startswith("rows.jsonl, line 3: not JSON (Unterminated string starting at, column 12)")
    assert rows[2]["error"].startswith("rows.jsonl, line 4: there is no column 'prompt' (did you mean 'promt'?)")
    assert "2 of 4 prompts not answered" in printed.err


def test_a_file_without_one_prompt_is_refused_before_a_model_is_loaded(folder, refused):
    (folder / "rows.jsonl").write_text('[\n{"prompt": "2 pens"},\n{"prompt": "3 pens"},\n]')
    said = refused("generate", "/no/such/model", "--prompts", "rows.jsonl")
    assert "rows.jsonl, line 1: not JSON" in said and "expected one JSON object a line" in said


def test_generate_says_that_logits_are_no_numbers(folder, refused, capfd, monkeypatch):
    def overflowing(*args):
        loaded = load_policy(*args)
        base = loaded.model.base
        return dataclasses.replace(loaded, model=loaded.model.replace(base=base.replace(embed=base.embed * jnp.inf)))

    load_policy = generation.load_policy
    monkeypatch.setattr(generation, "load_policy", overflowing)
    words = "generate", MODEL, "--max-new-tokens", "2"
    assert "log-probabilities that are not finite" in refused(*words, "--prompt", "2 pens")
    jsonl(folder, {"prompt": "2 pens"})
    assert main([*words, "--prompts", "rows.jsonl"]) == 3
    printed = capfd.readouterr()
    assert "completion" not in (row := json.loads(printed.out)) and "In float16" in row["error"]
    assert "1 of 1 prompts not answered" in printed.err


def test_generate_from_conversations_without_a_chat_template(folder, capsys):
    policy(folder / "plain", tokenizer_config=lambda values: values.pop("chat_template"))
    jsonl(folder, {"prompt": [{"role": "user", "content": "x"}]})
    assert main(["generate", "plain", "--prompts", "rows.jsonl"]) == 3
    assert "has no chat template" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("command", ["evaluate", "plot"])
def test_a_folder_that_is_no_run(command, folder, refused):
    (folder / "runs" / "other").mkdir(parents=True)
    assert "runs/othr: no such run folder (did you mean 'other'?)" in refused(command, "runs/othr")
    assert "runs/other: holds no " in refused(command, "runs/other")
    assert "expected the folder that `qerl train` made" in refused(command, "my.yaml")


SOURCES = pytest.mark.parametrize(
    ("command", "words"), [("generate", ["--prompt", "x"]), ("export", ["out", "--format", "bf16"])]
)


@SOURCES
def test_a_folder_that_is_neither_run_nor_model(command, words, folder, refused):
    (folder / "runs" / "quickstart").mkdir(parents=True)
    (folder / "tuned").mkdir()
    (folder / "tuned" / "adapter_config.json").write_text("{}")
    said = refused(command, "runs", *words)
    assert "runs is neither a run folder, with config.yaml, nor a model's folder, with config.json" in said
    assert "tuned is a PEFT adapter; give the base model, and --adapter tuned" in refused(command, "tuned", *words)


@SOURCES
def test_a_folder_that_is_missing_has_its_neighbour_named(command, words, folder, refused, monkeypatch):
    def unreachable(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    (folder / "runs" / "quickstart").mkdir(parents=True)
    said = refused(command, "runs/quikstart", *words)
    assert "runs/quikstart: no such folder here (did you mean 'quickstart'?), and it could not be had" in said
    assert "./rusn: no such folder (did you mean 'runs'?); allowed: a folder" in refused(command, "./rusn", *words)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A folder with two adapters of the shipped policy, `plain`, and `norms` with trained norm scales."""
    root, model = tmp_path_factory.mktemp("adapters"), load_model(MODEL)
    for name, train_norms in (("plain", False), ("norms", True)):
        adapter = init_adapter(jax.random.key(0), model, 4, 8, train_norms=train_norms)
        save_adapter(adapter, root / name, MODEL, weight_format="nvfp4")
    return root


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    for name in ("generation.load_policy", "export.load_model", "policy.load_model"):
        monkeypatch.setattr(f"qerl_jax.{name}", lambda *args: pytest.fail("loaded"))


@pytest.mark.parametrize(
    "words",
    [
        ["generate", MODEL, "--prompt", "x", "--adapter", "adapter"],
        ["train", "my.yaml", "lora.adapter=adapter"],
        ["plan", "my.yaml", "lora.adapter=adapter"],
        ["export", MODEL, "out", "--format", "bf16", "--adapter", "adapter"],
        ["export", MODEL, "out", "--format", "peft", "--adapter", "adapter"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shutil.rmtree, "adapter: no such folder"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing; expected a PEFT folder"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json: not valid JSON"),
        (edit_options(use_dora=True), "adapter_config.json: option use_dora (True) is not supported"),
        (edit_options(lora_alpha=None), "adapter_config.json: lora_alpha is None; expected a number"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a valid safetensors file"),
        (lambda f: (f / "qerl_adapter.json").write_text("{"), "qerl_adapter.json: not valid JSON"),
        (lambda f: (f / "qerl_adapter.json").write_text('{"weight_format": "fp4"}'), "weight_format is 'fp4'; allowed"),
        (edit_options(r=8), "lora_A.weight: expected shape [8, "),
        (edit_arrays(lambda arrays: arrays.popitem()), " is missing; expected float32["),
        (edit_arrays(lambda arrays: next(iter(arrays.values())).fill(np.nan)), "has numbers that are not finite"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said_before_the_model_is_loaded(
    words, damage, expected, folder, refused, adapters, nothing_is_loaded
):
    damage(shutil.copytree(adapters / "plain", folder / "adapter"))
    assert expected in refused(*words)


@pytest.mark.parametrize(
    "words",
    [["evaluate", "run"], ["generate", "run", "--prompt", "x"], ["export", "run", "out", "--format", "bf16"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "adapter_config.json").write_text("{"), "run/adapter/adapter_config.json: not valid JSON"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a valid safetensors file"),
        (edit_options(r=8), "lora_A.weight: expected shape [8, "),
        (edit_arrays(lambda arrays: next(iter(arrays.values())).fill(np.nan)), "has numbers that are not finite"),
    ],
)
def test_what_is_wrong_with_a_runs_own_adapter_is_said_before_the_model_is_loaded(
    words, damage, expected, folder, refused, adapters, nothing_is_loaded
):
    damage(shutil.copytree(adapters / "plain", folder / "run" / "adapter"))
    (folder / "run" / "config.yaml").write_text(CONFIG)
    assert expected in refused(*words)


def test_trained_norms_that_are_not_asked_for_are_said_before_the_model_is_loaded(refused, adapters, nothing_is_loaded):
    said = refused("train", "my.yaml", f"lora.adapter={adapters}/norms")
    assert "has trained norm scales, but train_norms is false; set lora.train_norms=true" in said


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plot", ["run", "--output", "my.yaml"]),
        ("plot", ["run", "--output", "my.yaml/inside"]),
        ("export", [MODEL, "my.yaml/inside", "--format", "bf16"]),
        ("quantize", [MODEL, "my.yaml/inside"]),
    ],
)
def test_a_folder_in_a_file(command, words, folder, refused):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert "my.yaml is a file; expected a folder" in refused(command, *words)


def test_a_run_that_has_saved_nothing_yet(folder, refused):
    """`run/adapter` has the form of a name on the Hub, which must not be asked for it."""
    refused("train", "my.yaml", "data.max_prompt_length=8")
    assert (folder / "run" / "config.yaml").is_file()
    for words in (("evaluate", "run"), ("generate", "run", "--prompt", "x")):
        assert "run: holds neither adapter/ nor a checkpoint: the run has saved nothing yet" in refused(*words)
    assert "run/metrics.jsonl: no step was recorded yet" in refused("plot", "run")


@pytest.mark.parametrize("command", [["train", "my.yaml"], ["generate", MODEL, "--prompt", "a"]])
@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there_is_told(command, platform):
    if platform == "cuda" and jax.default_backend() != "cpu":
        pytest.skip("it is there")
    env = os.environ | {"JAX_PLATFORMS": platform, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "qerl_jax.cli", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"JAX_PLATFORMS is '{platform}', and JAX finds no such device here" in done.stderr.splitlines()[-1]
    assert not os.path.exists("run")
