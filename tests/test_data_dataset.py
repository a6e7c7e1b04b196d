"""Data sets from files and generators, and the order in which they are read."""

import json
import os
import re

import numpy as np
import pytest

from qerl_jax.data import arithmetic
from qerl_jax.data.dataset import load_dataset, load_prompts, prompt_indices
from qerl_jax.errors import UserError


@pytest.fixture
def jsonl(tmp_path):
    """Writes lines (texts, or rows to be dumped) into a file and returns its name."""

    def write(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


def test_arithmetic_rows():
    data = load_dataset("arithmetic", split="eval", seed=5, size=64)
    assert len(data) == 64
    row = data[3]
    assert set(row) == {"prompt", "answer", "operands"}
    assert [int(word) for word in row["prompt"].replace(".", "").split() if word.isdigit()] == row["operands"]
    arithmetic.check_split([data[i]["operands"] for i in range(64)], "eval")
    row["answer"] = "changed"
    assert data[3]["answer"] != "changed"


def test_arithmetic_seed_split_and_fingerprint():
    train = load_dataset("arithmetic", size=8)
    assert train.fingerprint == load_dataset("arithmetic", split="train", size=8).fingerprint
    assert train.fingerprint != load_dataset("arithmetic", size=8, seed=1).fingerprint
    assert train.fingerprint != load_dataset("arithmetic", split="eval", size=8).fingerprint
    assert len(load_dataset("arithmetic")) == 16384 and len(load_dataset("arithmetic", "eval")) == 4096


def test_jsonl_with_texts(jsonl):
    data = load_dataset(
        jsonl({"prompt": "2+2?", "answer": "4", "n": 1}, "", {"prompt": "é?", "answer": None, "n": 2.5})
    )
    assert len(data) == 2
    assert data[0] == {"prompt": "2+2?", "answer": "4", "n": 1.0}
    assert data[1] == {"prompt": "é?", "answer": None, "n": 2.5}


def test_jsonl_keeps_dates_as_the_texts_they_are(jsonl):
    data = load_dataset(jsonl({"prompt": "When?", "answer": "2020-01-02"}))
    assert data[0]["answer"] == "2020-01-02"


def test_jsonl_with_conversations(jsonl):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?", "name": "Ann"}]
    data = load_dataset(jsonl({"prompt": messages, "answer": 4}, {"prompt": [messages[-1] | {"name": None}]}))
    assert data[0] == {"prompt": messages, "answer": 4}
    assert data[1] == {"prompt": [{"role": "user", "content": "2+2?"}], "answer": None}


def test_jsonl_rows_of_nested_keys_and_numbers_are_what_their_lines_say(jsonl):
    def asked(arguments):
        call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}
        return [{"role": "user", "content": "2+2?"}, call, {"role": "tool", "content": "4"}]

    rows = [
        {"prompt": asked({"a": 1}), "tests": [{"x": 1}], "answer": 3},
        {"prompt": asked({"b": "c"}), "tests": [{"y": None}], "answer": 2.5},
    ]
    data = load_dataset(jsonl(*rows))
    assert [data[0], data[1]] == rows
    assert str(data[0]["answer"]) == "3"
    data[0]["tests"][0]["x"] = 2
    assert data[0] == rows[0]


def test_jsonl_columns_that_some_rows_lack_are_none(jsonl):
    data = load_dataset(jsonl({"prompt": "a"}, {"prompt": "b", "answer": "1"}))
    assert data[0] == {"prompt": "a", "answer": None}


def test_jsonl_columns_may_be_nested_64_deep(jsonl):
    value = 64 * "[" + "1" + 64 * "]"
    assert json.dumps(load_dataset(jsonl('{"prompt": "b", "x": ' + value + "}"))[0]["x"]) == value


def test_jsonl_fingerprint_follows_the_contents(jsonl):
    first = load_dataset(jsonl({"prompt": "a"})).fingerprint
    assert first == load_dataset(jsonl({"prompt": "a"}, name="other.jsonl")).fingerprint
    assert first != load_dataset(jsonl({"prompt": "b"})).fingerprint


def test_jsonl_lists_and_objects_of_a_column_hold_whatever_their_rows_do(jsonl):
    rows = [
        {"prompt": "a", "tests": [{"input": [1, 2], "output": 3}, {"input": "abc", "output": "x"}], "a.b": 1},
        {"prompt": "b", "tests": [{"input": {"n": True}, "output": None}, 1, "2"], "a.b": None, "a": {"b": [[1], 2]}},
    ]
    data = load_dataset(jsonl(*rows))
    assert [data[0], data[1]] == [rows[0] | {"a": None}, rows[1]]


GOOD = '{"prompt": "a", "answer": 1}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, '{"prompt": "b"'], r"line 2: not JSON .*; expected one JSON object a line"),
        (["[", GOOD, "]"], r"line 1: not JSON .*; expected one JSON object a line"),
        ([f"[{GOOD}]"], r"line 1: found a list; expected one JSON object a line"),
        ([GOOD, '{"prompt": "b", "answer": NaN}'], r"line 2: cannot be read as JSON \(NaN is no JSON; null is\)"),
        ([GOOD, '{"prompt": "b", "answer": 1e999}'], r"line 2: cannot be read as JSON \(1e999 is beyond the numbers"),
        (['{"prompt": "b", "a": 1e' + "9" * 1000 + "}"], r"line 1: cannot be read as JSON \(1e9{18}\.\.\. is beyond"),
        (["{" + ", ".join(f'"column{i}": 1' for i in range(99)) + "}"], r"found 'column0', .{180,190}\.\.\.$"),
        ([GOOD, "", "[1]"], r"line 3: found a list; expected one JSON object"),
        ([GOOD, '{"promt": "b"}'], r"line 2: there is no column 'prompt' \(did you mean 'promt'\?\); found 'promt'"),
        ([GOOD, '{"prompt": 3}'], r"line 2: the prompt is 3; expected a text"),
        ([GOOD, '{"prompt": ""}'], r"line 2: the prompt is empty"),
        ([GOOD, '{"prompt": []}'], r"line 2: the prompt is \[\]"),
        (['{"prompt": ["a"]}'], r"line 1: 'a' is not a message"),
        (['{"prompt": [{"role": "user"}]}'], r"is not a message"),
        (['{"prompt": [{"role": "robot", "content": "a"}]}'], r"role is 'robot'; allowed: system, user"),
        (['{"prompt": [{"role": "assistant", "content": "a"}]}'], r"ends with the assistant's message"),
        (
            [GOOD, '{"prompt": [{"role": "user", "content": "a"}]}'],
            r"line 2: column 'prompt' is a list, but a text in line 1; expected one type in all rows$",
        ),
        (
            ['{"prompt": "a", "answer": null}', "", GOOD, '{"prompt": "b", "answer": "x"}'],
            r"line 4: column 'answer' is a text, but a number in line 3; expected one type in all rows, or null",
        ),
        (
            [GOOD, '{"prompt": "b", "answer": true}'],
            r"line 2: column 'answer' is true or false, but a number in line 1",
        ),
        (
            [GOOD, GOOD, '{"prompt": "b", "answer": true}'],
            r"line 3: column 'answer' is true or false, but a number in line 1",
        ),
        (
            ['{"prompt": "a", "tests": [1]}', '{"prompt": "b", "tests": {}}'],
            r"line 2: column 'tests' is an object, but a list in line 1; expected one type in all rows, or null$",
        ),
        ([GOOD, '\ufeff{"prompt": "b"}'], r"line 2: not JSON \(Unexpected UTF-8 BOM"),
        ([GOOD, '{"prompt": "\\ud800"}'], r"line 2: '\\ud800' is half of a surrogate pair"),
        ([GOOD, '{"prompt": "b", "\\ud800": 1}'], r"line 2: '\\ud800' is half of a surrogate pair"),
        (['{"prompt": "b", "x": ' + 65 * "[" + 65 * "]" + "}"], r"line 1: column 'x' is nested more than 64 deep"),
        (['{"prompt": "b", "x": ' + 10**5 * "[" + 10**5 * "]" + "}"], r"line 1: cannot be read as JSON \(lists or obj"),
        (
            [GOOD, '{"prompt": "b", "x": -' + 6000 * "1" + "}"],
            r"line 2: cannot be read as JSON \(-1{19}\.\.\. is a whole number of 6000 digits; allowed: at most 4300\)",
        ),
        ([GOOD, '{"prompt": "b", "answer": 1, "answer": 2}'], r"line 2: .* \(the name 'answer' occurs twice\)"),
        (['{"prompt": "b", "x": [{"y": 1, "y": 1}]}'], r"line 1: .* \(the name 'y' occurs twice\)"),
        ([""], r"has no rows"),
    ],
)
def test_bad_files_name_the_line(jsonl, lines, message):
    with pytest.raises(UserError, match=message):
        load_dataset(jsonl(*lines))


def test_prompts_alone_are_whatever_their_rows_hold(jsonl):
    messages = [{"role": "user", "content": "2+2?", "name": None}]
    wrong = ["", None, 3, [], ["a", {}], [{"role": "robot"}]]
    rows = [{"prompt": prompt, "n": number % 2 or "even"} for number, prompt in enumerate(["a", messages, *wrong])]
    assert load_prompts(jsonl(*rows)) == ["a", [{"role": "user", "content": "2+2?"}], *wrong]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b"', r"not JSON \(.*, column 15\); expected one JSON object a line"),
        ("2 pens", "not JSON"),
        ("[1]", "found a list; expected one JSON object a line"),
        ('{"prompt": "b", "n": NaN}', "cannot be read as JSON"),
        ('{"promt": "b"}', r"there is no column 'prompt' \(did you mean 'promt'\?\)"),
        ('{"prompt": "\\ud800"}', r"'\\ud800' is half of a surrogate pair"),
        ('{"prompt": ' + 65 * "[" + 65 * "]" + "}", "column 'prompt' is nested more than 64 deep"),
        ('{"prompt": ' + 10**5 * "[" + 10**5 * "]" + "}", r"cannot be read as JSON \(lists or obj"),
    ],
)
def test_a_line_that_cannot_be_read_is_the_error_in_its_prompts_place_and_refuses_a_data_set(jsonl, line, message):
    first, error, last = load_prompts(jsonl(GOOD, "", line, GOOD))
    assert (first, last) == ("a", "a") and isinstance(error, UserError)
    assert re.search(rf"rows\.jsonl, line 3: {message}", str(error))
    with pytest.raises(UserError, match=message):
        load_dataset(jsonl(GOOD, "", line, GOOD))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[", GOOD + ",", "]"], r"rows\.jsonl, line 1: not JSON .*; expected one JSON object a line"),
        (["", '{"text": "a"}', '{"text": "b"}'], r"line 2: there is no column 'prompt'; found 'text'"),
        ([""], r"has no rows"),
    ],
)
def test_a_file_without_one_prompt_is_refused_by_its_first_line(jsonl, lines, message):
    with pytest.raises(UserError, match=message):
        load_prompts(jsonl(*lines))


def test_numbers_of_both_kinds_and_any_size_are_one_type(jsonl):
    data = load_dataset(jsonl({"prompt": "a", "n": 2.5}, {"prompt": "b", "n": 10**30}))
    assert [data[i]["n"] for i in range(2)] == [2.5, 10**30]


def test_bytes_that_are_not_text_name_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "line 2: not UTF-8" in str(load_prompts(str(path))[1])
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        load_dataset(str(path))


def test_rows_are_asked_for_one_by_one(jsonl):
    for data in (load_dataset("arithmetic", size=4), load_dataset(jsonl({"prompt": "a"}, {"prompt": "b"}))):
        for index in (slice(0, 2), "prompt", 1.0):
            with pytest.raises(TypeError, match=re.escape(f"row is asked for by {index!r}; allowed: its number")):
                data[index]
        assert data[np.int32(-1)] == data[len(data) - 1]
        with pytest.raises(IndexError):
            data[len(data)]


def test_unknown_and_missing_data_sets():
    with pytest.raises(UserError, match=r"did you mean 'arithmetic'"):
        load_dataset("aritmetic")
    with pytest.raises(UserError, match=r"there is no file .*nowhere.jsonl"):
        load_dataset("nowhere.jsonl")
    with pytest.raises(UserError, match=r"local \.jsonl or \.ndjson file, such as `Dataset.to_json\('rows\.jsonl'\)`"):
        load_dataset("data.csv")


def test_what_is_there_but_no_file_of_rows_is_told_as_that(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    for name, message in (
        ("rows.JSONL", r"its name ends in \.JSONL; expected a \.jsonl or \.ndjson file"),
        (
            "rows.parquet",
            r"ends in \.parquet; expected a .* file, which has .*, such as `Dataset.to_json\('rows\.jsonl'\)`",
        ),
        ("rows", "no end"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=message):
            load_dataset(str(tmp_path / name))
    with pytest.raises(UserError, match=r"is a folder; expected a \.jsonl or \.ndjson file, such as `Dataset.to_json"):
        load_dataset(str(tmp_path / "rows.jsonl"))


def test_what_cannot_be_opened_is_told_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("moved/rows.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name, message in (
        ("pipe.jsonl", r"pipe\.jsonl: cannot be read \(expected a file, found a pipe, socket or device\)"),
        ("gone.jsonl", r"gone\.jsonl is a link to moved/rows\.jsonl, where nothing is"),
        ("loop.jsonl", r"loop\.jsonl: cannot be read \(Too many levels of symbolic links\)"),
        ("a" * 300 + ".jsonl", "there is no file"),
    ):
        for read in (load_dataset, load_prompts):
            with pytest.raises(UserError, match=message):
                read(str(tmp_path / name))


def test_an_epoch_holds_every_row_once_in_an_order_of_its_own():
    first = prompt_indices(seed=7, cursor=0, count=10, n=10)
    second = prompt_indices(seed=7, cursor=10, count=10, n=10)
    assert [place for place, _ in first + second] == list(range(20))
    assert sorted(row for _, row in first) == sorted(row for _, row in second) == list(range(10))
    assert [row for _, row in first] != [row for _, row in second]
    assert [row for _, row in first] != [row for _, row in prompt_indices(8, 0, 10, 10)]


def test_the_cursor_alone_resumes():
    whole = prompt_indices(1, 0, 35, 16)
    pieces = [pair for low in range(0, 35, 5) for pair in prompt_indices(1, low, 5, 16)]
    assert whole == pieces


def test_without_shuffling_rows_come_as_they_are():
    assert prompt_indices(0, 3, 4, 5, shuffle=False) == [(3, 3), (4, 4), (5, 0), (6, 1)]


def test_the_order_never_moves():
    """A resumed run, perhaps under another numpy, must meet the same prompts."""
    assert [row for _, row in prompt_indices(0, 0, 8, 8)] == [6, 4, 2, 3, 5, 1, 0, 7]


def test_an_unknown_split_is_named():
    with pytest.raises(UserError, match=r"no split 'trian' .did you mean 'train'.*allowed: pretrain, train, eval"):
        load_dataset("arithmetic", split="trian")


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_size_that_cannot_be(size):
    with pytest.raises(UserError, match=rf"size is {size}; allowed: a whole number >= 1, or None"):
        load_dataset("arithmetic", size=size)
