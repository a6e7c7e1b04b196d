"""Prompts as token ids."""

import subprocess
import sys

import pytest
import transformers

from qerl_jax.data.prompts import check_prompts, encode_prompts, prompt_ids, prompt_text
from qerl_jax.errors import UserError
from qerl_jax.models.tokenizer import load_tokenizer
from qerl_jax.policies.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 128)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def test_texts_are_padded_on_the_right(tokenizer):
    tokens, lengths = encode_prompts(tokenizer, ["Ann has 12 pens.", "Ann"], 8)
    assert tokens.dtype == lengths.dtype == "int32" and tokens.shape == (2, 8)
    assert lengths.tolist() == [7, 1]
    assert tokenizer.decode(tokens[0, :7]) == "Ann has 12 pens."
    assert (tokens[1, 1:] == tokenizer.pad_token_id).all()


def test_messages_go_through_the_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Ann has 1."}, {"role": "user", "content": "How many?"}]
    tokens, lengths = encode_prompts(tokenizer, [messages], 16)
    assert tokenizer.decode(tokens[0, : lengths[0]]) == "Ann has 1. How many?"
    assert prompt_text(tokenizer, messages) == "Ann has 1. How many?"


def test_a_prompt_is_never_cut(tokenizer):
    with pytest.raises(
        UserError,
        match=r"prompt 1 \(counted from 0\): has 7 tokens; allowed: 1 to 6 \(max_prompt_length\); .*'Ann has 12 pens.'",
    ):
        encode_prompts(tokenizer, ["Ann", "Ann has 12 pens."], 6)


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"prompt 1 \(counted from 0\): the prompt is empty; expected a text"):
        encode_prompts(tokenizer, ["Ann", ""], 6)


def test_one_text_is_no_list(tokenizer):
    with pytest.raises(TypeError, match="prompts are one text, 'Ann'; expected a list"):
        encode_prompts(tokenizer, "Ann", 6)


def test_messages_without_a_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="no chat template"):
        encode_prompts(tokenizer, [[{"role": "user", "content": "a"}]], 6)


def test_a_template_that_refuses(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    talk = [{"role": "user", "content": "a"}]
    with pytest.raises(UserError, match=r"^prompt 1 \(counted from 0\): .*roles must alternate"):
        encode_prompts(tokenizer, ["Ann", talk], 6)
    with pytest.raises(UserError, match=r"^mine\.jsonl, line 1: .*roles must alternate"):
        check_prompts(tokenizer, [{"prompt": "Ann"}, {"prompt": talk}], "mine.jsonl, line {}".format, 6)


def test_a_row_with_too_many_tokens_is_named(tokenizer):
    with pytest.raises(
        UserError, match=r"^mine\.jsonl, line 1: has 7 tokens; allowed: 1 to 6 \(data\.max_prompt_length\)"
    ):
        check_prompts(tokenizer, [{"prompt": "Ann"}, {"prompt": "Ann has 12 pens."}], "mine.jsonl, line {}".format, 6)


def test_half_of_a_surrogate_pair_is_named():
    with pytest.raises(UserError, match=r"is no text: character 4 is half of a surrogate"):
        prompt_ids(load_tokenizer("builtin:quickstart", 10**6), "Ann \udcff")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"role": "user", "content": "x"}, "the prompt is {.*; expected a text, or a list of one message or more"),
        ([], r"the prompt is \[\]; expected a text"),
        (b"x", "the prompt is b'x'; expected a text"),
        (7, "the prompt is 7; expected a text"),
        (["x"], "'x' is not a message; expected {'role': text"),
        ([1, 2, 3], "1 is not a message"),
        ([{"role": "robot", "content": "x"}], "the role is 'robot'; allowed: system, user, assistant, tool"),
        ([{"role": "assistant", "content": "x"}], "the prompt ends with the assistant's message; expected the user's"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_number_or_its_row(tokenizer, prompt, message):
    with pytest.raises(UserError, match=rf"^prompt 1 \(counted from 0\): {message}"):
        encode_prompts(tokenizer, ["Ann", prompt], 8)
    with pytest.raises(UserError, match=rf"^mine\.jsonl, line 1: {message}"):
        check_prompts(tokenizer, [{"prompt": "Ann"}, {"prompt": prompt}], "mine.jsonl, line {}".format, 8)


def test_a_length_that_no_prompt_has(tokenizer):
    for length in (-1, 0, 8.5, "8", True):
        with pytest.raises(
            ValueError, match=f"max_prompt_length is {length!r}; allowed: a whole number of tokens, 1 or"
        ):
            encode_prompts(tokenizer, ["Ann"], length)


def test_checking_prompts_is_quick_because_it_imports_neither_transformers_nor_jax():
    code = "import sys; from qerl_jax.data import dataset, prompts; prompts.check_prompt('x'); "
    code += "print({'transformers', 'jax', 'jinja2'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
