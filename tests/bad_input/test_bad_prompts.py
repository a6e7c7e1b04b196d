"""What `qerl generate` refuses, and prompts of a file that cannot be answered while the others are."""

import dataclasses
import json
import os

import jax.numpy as jnp
import pytest
from mistakes import MODEL, POSITIONS, jsonl, policy

from qerl_jax import generation
from qerl_jax.cli import main
from qerl_jax.commands.generate import _check_output


def test_prompts_are_not_read_from_standard_input(folder, refused, monkeypatch):
    monkeypatch.setattr("qerl_jax.generation.load_policy", lambda *args: pytest.fail("loaded"))
    said = refused("generate", MODEL, "--prompts", "-")
    assert "--prompts -: standard input is not read; expected a .jsonl or .ndjson file" in said


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
            "--max-completion-length (or --max-new-tokens) is 0; allowed: a whole number from 1 to 2^31 - 1",
        ),
        (
            ["/no/such/model", "--prompt", "x", "--chat-template-kwargs", '{"enable_thinking": false}'],
            "chat_template_kwargs (--chat-template-kwargs) has no effect: no prompt is a list of messages",
        ),
        (
            [MODEL, "--prompt", "x", "--chat-template-kwargs", "{enable_thinking: false}"],
            "--chat-template-kwargs {enable_thinking: false}: not JSON (Expecting property name enclosed in double "
            """quotes: line 1 column 2 (char 1)); expected variables of the chat template with their values, as """
            """'{"enable_thinking": false}'""",
        ),
        (
            [MODEL, "--prompt", "x", "--chat-template-kwargs", '["enable_thinking"]'],
            """--chat-template-kwargs ["enable_thinking"]: no JSON object; expected variables of the chat template""",
        ),
        (
            [MODEL, "--prompt", "x", "--chat-template-kwargs", '{"x": 1, "x": 2}'],
            """--chat-template-kwargs {"x": 1, "x": 2}: not JSON (the name 'x' occurs twice); expected""",
        ),
        ([MODEL, "--prompt", "x", "--output", "."], "--output . is a folder; expected the name of a file"),
        ([MODEL, "--prompt", "x", "--output", "-"], "--output -: expected the name of a file; /dev/stdout is standard"),
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
            [MODEL, "--prompt", "x", "--adapter", MODEL],
            f"{MODEL}: no such folder; allowed: a folder, owner/name on the Hugging Face Hub\n",
        ),
        (
            [MODEL, "--prompt", "x", "--temperature", "0"],
            "--temperature is 0.0; allowed: a number from 1e-30 to 1e30; use --greedy for the most likely token",
        ),
        (
            [MODEL, "--prompt", "x", "--temperature", "1e-40"],
            "--temperature is 1e-40; allowed: a number from 1e-30 to 1e30\n",
        ),
        ([MODEL, "--prompt", "x", "--top-p", "2"], "--top-p is 2.0; allowed: a number from 1e-30 to 1\n"),
        ([MODEL, "--prompt", "x", "--top-k", "-1"], "--top-k is -1; allowed: a whole number from 0 to 2^31 - 1\n"),
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


def test_an_output_may_be_a_pipe_by_its_name(monkeypatch):
    reading, writing = os.pipe()
    name = f"/dev/fd/{writing}"  # as /dev/stdout leads to
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) == name)  # who is root may write /dev/fd itself
    _check_output(name, None)
    os.close(reading)
    os.close(writing)


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


def test_variables_that_the_chat_template_has_not_are_refused_for_all_rows(folder, refused):
    jsonl(folder, {"prompt": [{"role": "user", "content": "2 pens"}]})
    said = refused("generate", MODEL, "--prompts", "rows.jsonl", "--chat-template-kwargs", '{"enable_thinking": false}')
    assert "chat_template_kwargs (--chat-template-kwargs) sets " in said
    assert "'enable_thinking', which the tokenizer's chat template does not use; allowed: nothing\n" in said


def test_generate_from_conversations_without_a_chat_template(folder, capsys):
    policy(folder / "plain", tokenizer_config=lambda values: values.pop("chat_template"))
    jsonl(folder, {"prompt": [{"role": "user", "content": "x"}]})
    assert main(["generate", "plain", "--prompts", "rows.jsonl"]) == 3
    assert "has no chat template" in json.loads(capsys.readouterr().out)["error"]
