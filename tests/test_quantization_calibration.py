"""Calibration text: which rows, which tokens, which of them count, and what is refused."""

import json

import numpy as np
import pytest
from folders import write_tokenizer

from qerl_jax.errors import UserError
from qerl_jax.models.tokenizer import load_tokenizer
from qerl_jax.quantization.calibration import load_calibration

TEMPLATE = "{% for message in messages %}{{ message['content'] }} <eos> {% endfor %}{% if loud %}w19 {% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Words w0.. are their numbers; <pad> is 20, <eos> 21."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), more={"chat_template": TEMPLATE})
    return load_tokenizer(folder, 24)


def written(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_rows_are_cut_padded_and_every_eighth_is_held_out(tmp_path, tokenizer):
    texts = [" ".join(f"w{(i + j) % 20}" for j in range(2 + i % 4)) for i in range(17)]
    found = load_calibration(written(tmp_path, [{"text": text} for text in texts]), tokenizer, None, 4, 64)
    assert found.search.tokens.shape == (15, 4) and found.held_out.tokens.shape == (2, 4)
    assert found.held_out.tokens.tolist() == [[7, 8, 9, 10], [15, 16, 17, 18]]
    assert found.search.tokens[:4].tolist() == [[0, 1, 0, 0], [1, 2, 3, 0], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert found.search.lengths[:4].tolist() == [2, 3, 4, 4]
    assert set(found.search.starts.tolist()) == {1}
    assert found.description["held_out_tokens"] == 8 and found.description["length"] == 4


def test_a_file_may_lie_at_home(tmp_path, tokenizer, monkeypatch):
    written(tmp_path, [{"text": "w1 w2"}] * 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_calibration("~/rows.jsonl", tokenizer, None, 4, 64).search.tokens.tolist() == [[1, 2]]


def test_fewer_rows_than_the_file_has_are_spread_over_it(tmp_path, tokenizer):
    rows = [{"text": f"w{i} w0"} for i in range(20)]
    found = load_calibration(written(tmp_path, rows), tokenizer, 4, None, 64)
    assert found.search.tokens[:, 0].tolist() == [0, 5, 10] and found.held_out.tokens[:, 0].tolist() == [15]


def test_the_three_kinds_of_rows(tmp_path, tokenizer):
    rows = [
        {"prompt": "w1 w2 w3", "completion": "w4 w5"},
        {"messages": [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7"}]},
        {"prompt": [{"role": "user", "content": "w8 w9"}], "completion": "w10"},
        {"prompt": "w11 w12"},
    ]
    found = load_calibration(written(tmp_path, rows), tokenizer, None, None, 64)
    assert found.search.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 21, 7, 21, 0], [8, 9, 21, 10, 0]]
    assert found.search.lengths.tolist() == [5, 4, 4] and found.search.starts.tolist() == [3, 1, 3]
    assert found.held_out.tokens.tolist() == [[11, 12, 0, 0, 0]]


def test_a_rendered_text_gets_no_second_bos(tmp_path):
    more = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "w0", "add_bos_token": True}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, more=more), 24)
    rows = [{"text": "w0 w1 w2"}, {"text": "w1 w2"}, {"prompt": "w0 w1", "completion": "w2"}, {"text": "w5 w6"}]
    found = load_calibration(written(tmp_path, rows), tokenizer, None, None, 64)
    assert found.search.tokens.tolist() == [[0, 1, 2]] * 3


def test_variables_of_the_chat_template(tmp_path, tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": "w6"}]},
        {"prompt": [{"role": "user", "content": "w8"}], "completion": "w10"},
        {"prompt": [{"role": "user", "content": "w9"}]},
        {"text": "w1 w2"},
    ]
    path = written(tmp_path, rows)
    plain, loud = (load_calibration(path, tokenizer, None, None, 64, kwargs) for kwargs in (None, {"loud": True}))
    assert plain.search.tokens.tolist() == [[6, 21, 0], [8, 21, 10], [9, 21, 0]]
    assert loud.search.tokens.tolist() == [[6, 21, 19, 0], [8, 21, 19, 10], [9, 21, 19, 0]]
    assert loud.held_out.tokens[0, :2].tolist() == [1, 2]
    assert loud.description["chat_template_kwargs"] == {"loud": True}
    assert "chat_template_kwargs" not in plain.description


def test_variables_that_would_do_nothing_are_refused(tmp_path, tokenizer):
    messages, texts = [{"messages": [{"role": "user", "content": "w6"}]}] * 2, [{"text": "w1 w2"}] * 2
    for rows, kwargs, message in (
        (messages, {"lout": True}, r"\(--chat-template-kwargs\) sets 'lout', which the .* does not use.*'loud'"),
        (texts, {"loud": True}, "has no effect: no row of .*rows.jsonl has messages"),
        (texts, {}, "has no effect: no row of .*rows.jsonl has messages"),
    ):
        with pytest.raises(UserError, match=message):
            load_calibration(written(tmp_path, rows), tokenizer, None, None, 64, kwargs)


def test_the_shipped_policys_own_problems():
    tokenizer = load_tokenizer("builtin:quickstart", 464)
    found = load_calibration("arithmetic", tokenizer, 16, None, 128)
    text = tokenizer.decode(found.search.tokens[0][: found.search.lengths[0]])
    assert text.count("=") == 3 and text.endswith("<|endoftext|>")
    counted = tokenizer.decode(found.search.tokens[1][found.search.starts[1] : found.search.lengths[1]])
    assert counted.startswith(" ####") and "=" not in counted
    ends = [tokenizer.decode(row[:n]) for row, n in zip(found.held_out.tokens, found.held_out.lengths, strict=True)]
    assert [text.count("=") for text in ends] == [0, 3]
    other = load_calibration("arithmetic", tokenizer, 16, 40, 128)
    assert other.description["sha256"] != found.description["sha256"]
    assert np.array_equal(found.search.tokens, load_calibration("arithmetic", tokenizer, 16, None, 128).search.tokens)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{", '{"text": "w1 w2"}'], r"line 1: not JSON \(.*, column 2\); expected one JSON object a line"),
        (["[" * 100_000] * 2, r"line 1: cannot be read as JSON \(lists or objects in one another"),
        (["1" * 6000] * 2, r"line 1: cannot be read as JSON \(1{20}\.\.\. is a whole number of 6000 digits"),
        (
            ['{"text": "w1 w2", "text": "w3 w4"}'] * 2,
            r"line 1: cannot be read as JSON \(the name 'text' occurs twice\)",
        ),
        (['{"text": "w1 w2", "id": NaN}'] * 2, r"line 1: cannot be read as JSON \(NaN is no JSON; null is\)"),
        (['{"text": "w1 w2"}', "[1]"], "line 2: found a list; expected one JSON object a line"),
        (['{"txt": "w1"}'] * 2, "line 1: expected one of the columns text, messages, prompt; found 'txt'"),
        (['{"text": "w1 w2", "prompt": "w1"}'] * 2, "line 1: expected .*; found 'text', 'prompt'"),
        (['{"text": 3}'] * 2, "line 1: text is 3; expected a text"),
        (['{"text": "w1"}'] * 2, "line 1: has 1 tokens; expected 2 or more"),
        (['{"prompt": "w1 w2", "completion": null}'] * 2, "line 1: completion is None; expected a text"),
        (['{"messages": [{"role": "user"}]}'] * 2, "line 1: the messages are .*; expected one or more"),
        (['{"prompt": []}'] * 2, r"line 1: the messages are \[\]; expected one or more"),
        (['{"text": "w1 \\ud800"}'] * 2, r"line 1: the text that begins 'w1 .* is no text: character 3 is half of a"),
        (
            ['{"messages": [{"role": "user", "content": "\\udfff"}]}'] * 2,
            "line 1: the conversation that begins .* is no text: character 0 is half",
        ),
        (['{"prompt": "w1 w2", "completion": "\\ud800"}'] * 2, "line 1: the completion that begins .* is no text"),
        (['{"prompt": "\\ud800 w2"}'] * 2, "line 1: the prompt that begins .* is no text"),
        ([], "rows.jsonl: has no rows; expected one JSON object a line"),
        (['{"text": "w1 w2"}'], "has 1 rows; expected 2 or more"),
        (['{"prompt": "w1 w2 w3 w4", "completion": "w5"}'] * 2, "no token of a completion within --length 3"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, tokenizer, rows, message):
    with pytest.raises(UserError, match=message):
        load_calibration(written(tmp_path, rows), tokenizer, None, 3, 64)
