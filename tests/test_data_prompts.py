"""Prompts as token ids."""

import copy
import subprocess
import sys

import pytest
import transformers

from qerl_jax.data.prompts import (
    check_prompts,
    check_template_kwargs,
    encode_prompts,
    prompt_ids,
    prompt_text,
    templated,
)
from qerl_jax.errors import UserError
from qerl_jax.models.tokenizer import load_tokenizer
from qerl_jax.policies.tokenizer import save_tokenizer

THINKING = (  # as Qwen3's, with what transformers adds to the grammar
    "{% for message in messages %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% if stop_early %}{% break %}{% endif %}{% endfor %}{% if tools %} Ann{% endif %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %} pens.{% endif %}"
    "{% endif %}"
)
TALK = [{"role": "user", "content": "Ann has 1."}, {"role": "user", "content": " How many?"}]


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
    other = copy.deepcopy(tokenizer)
    other.pad_token = tokenizer.eos_token
    assert (encode_prompts(other, ["Ann"], 8)[0][0, 1:] == tokenizer.eos_token_id).all() and tokenizer.eos_token_id != 0


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


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ '{0} {1}'.format(messages[0].content) }}", "IndexError: "),
        ("{{ '{a}'.format() }}", "KeyError: 'a'"),
        ("{{ 'a'.encode('foo') }}", "LookupError: unknown encoding"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError: "),
        ("{% break %}", "SyntaxError: "),
        ("{{ 'x' * 10**18 }}", "(MemoryError|OverflowError): "),
        ("{{ raise_exception('two\nlines') }}", r"two\\nlines$"),
        (-2.5, "TypeError: "),
    ],
)
def test_a_template_that_fails(tokenizer, monkeypatch, template, told):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=r"^prompt 0 .*: the tokenizer's chat template refuses .*" + told):
        encode_prompts(tokenizer, [[{"role": "user", "content": "a"}]], 6)


@pytest.mark.parametrize("template", ["{% break %}", "(" * 3000, -2.5])
def test_a_template_that_cannot_be_read_for_its_variables(tokenizer, monkeypatch, template):
    template = f"{{{{ {template}1{')' * 3000} }}}}" if template == "(" * 3000 else template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="the tokenizer's chat template cannot be read: "):
        check_template_kwargs(tokenizer, {"a": 1})


def test_a_row_with_too_many_tokens_is_named(tokenizer):
    with pytest.raises(
        UserError, match=r"^mine\.jsonl, line 1: has 7 tokens; allowed: 1 to 6 \(data\.max_prompt_length\)"
    ):
        check_prompts(tokenizer, [{"prompt": "Ann"}, {"prompt": "Ann has 12 pens."}], "mine.jsonl, line {}".format, 6)
    assert check_prompts(tokenizer, [{"prompt": "Ann has 12 pens."}, {"prompt": "Ann"}], "{}".format, 9) == 7


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
        ([TALK[0], {"role": "assistant", "content": "x"}], "the prompt ends with the assistant's message"),
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


@pytest.fixture
def thinking(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    return tokenizer


@pytest.mark.parametrize("given", [None, {}, {"enable_thinking": False}, {"enable_thinking": True, "stop_early": 1}])
def test_variables_reach_the_chat_template_as_by_transformers(thinking, given):
    expected = thinking.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False, **(given or {}))
    assert expected.endswith(" pens.") == (given == {"enable_thinking": False})
    assert prompt_text(thinking, TALK, chat_template_kwargs=given) == expected
    ids = thinking(expected, add_special_tokens=False)["input_ids"]
    assert prompt_ids(thinking, TALK, chat_template_kwargs=given) == ids
    tokens, lengths = encode_prompts(thinking, [TALK, "Ann"], 16, chat_template_kwargs=given)
    assert tokens[0, : lengths[0]].tolist() == ids and lengths[1] == 1  # a text is left as it is
    assert "pens" not in templated(thinking, TALK, answers=False, chat_template_kwargs=given)
    row = [{"prompt": TALK}]
    check_prompts(thinking, row, "row {}".format, len(ids), chat_template_kwargs=given)
    with pytest.raises(UserError, match=f"^row 0: has {len(ids)} tokens"):
        check_prompts(thinking, row, "row {}".format, len(ids) - 1, chat_template_kwargs=given)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("enable_thinkin", r"the tokenizer's chat template does not use \(did you mean 'enable_thinking'\?\)"),
        ("message", "the tokenizer's chat template does not use"),  # it sets this itself
        ("raise_exception", "the tokenizer's chat template does not use"),
        ("messages", "is an argument of apply_chat_template itself"),
        ("tools", "is an argument of apply_chat_template itself"),
        ("tokenize", "is an argument of apply_chat_template itself"),
        ("conversation", "is an argument of apply_chat_template itself"),
        ("add_generation_prompt", "is an argument of apply_chat_template itself"),
        ("chat_template", "is an argument of apply_chat_template itself"),
    ],
)
def test_variables_that_cannot_be_set_or_do_nothing_are_refused(thinking, name, why):
    given = {"enable_thinking": False, name: True}
    said = f" sets '{name}', which {why}; allowed: enable_thinking, stop_early$"
    for refused in (
        lambda: prompt_text(thinking, TALK, chat_template_kwargs=given),
        lambda: prompt_ids(thinking, TALK, chat_template_kwargs=given),
        lambda: templated(thinking, TALK, answers=True, chat_template_kwargs=given),
        lambda: encode_prompts(thinking, ["Ann", TALK], 16, chat_template_kwargs=given),
    ):
        with pytest.raises(UserError, match=f"^chat_template_kwargs{said}"):
            refused()
    with pytest.raises(UserError, match=rf"^data\.chat_template_kwargs{said}"):
        check_prompts(thinking, [{"prompt": TALK}], "row {}".format, 16, chat_template_kwargs=given)


def test_of_several_chat_templates_the_default_one_counts(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", {"default": THINKING, "rag": "{{ style }}{{ messages }}"})
    given = {"enable_thinking": False}
    assert prompt_text(tokenizer, TALK, chat_template_kwargs=given).endswith(" pens.")
    with pytest.raises(UserError, match="sets 'style', which the tokenizer's chat template does not use"):
        prompt_text(tokenizer, TALK, chat_template_kwargs={"style": "x"})
    monkeypatch.setattr(tokenizer, "chat_template", {"rag": THINKING, "tool_use": THINKING})
    with pytest.raises(UserError, match=r"has chat templates named rag, tool_use, none of them default; write"):
        prompt_text(tokenizer, TALK, chat_template_kwargs=given)
    monkeypatch.setattr(tokenizer, "chat_template", "{% for message in %}")
    with pytest.raises(UserError, match="chat template cannot be read: "):
        prompt_text(tokenizer, TALK, chat_template_kwargs=given)


def test_variables_without_a_template_or_that_are_no_mapping(tokenizer, monkeypatch):
    with pytest.raises(TypeError, match="chat_template_kwargs is of type str; expected a Mapping"):
        encode_prompts(tokenizer, [TALK], 16, chat_template_kwargs="enable_thinking")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UserError, match=r"^chat_template_kwargs is {'x': 1}, and the model's .* no chat template;"):
        encode_prompts(tokenizer, ["Ann"], 16, chat_template_kwargs={"x": 1})


def test_checking_prompts_is_quick_because_it_imports_neither_transformers_nor_jax():
    code = "import sys; from qerl_jax.data import dataset, prompts; prompts.check_prompt('x'); "
    code += "print({'transformers', 'jax', 'jinja2'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
