"""Tokenizers and chat templates of each family against transformers' AutoTokenizer.

`oracles/tokenizers_chat.py` wrote the folders and what is expected. The tokenizer here is the generic one, whatever
class a folder names: AutoTokenizer builds the class of Qwen2 from vocabulary and merges anew.
"""

import copy
import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from qerl_jax.data.prompts import prompt_ids, prompt_text, reads_clock
from qerl_jax.errors import UserError
from qerl_jax.models.tokenizer import load_generation_config, load_tokenizer

FOLDERS = Path(__file__).parent / "oracles" / "tokenizers"
EXPECTED = json.loads((FOLDERS / "expected.json").read_text(encoding="utf-8"))
NAMES = tuple(EXPECTED)
LLAMAS = ("llama30", "llama31", "llama32")
VARIABLES = {"qwen2": set(), "qwen3": {"enable_thinking"}, **{name: {"date_string"} for name in LLAMAS}}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: load_tokenizer(FOLDERS / name, EXPECTED[name]["vocab_size"]) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_texts_become_the_ids_of_transformers(tokenizers, name):
    tokenizer, backend = tokenizers[name], Backend.from_file(str(FOLDERS / name / "tokenizer.json"))
    for text, ids, plain, decoded in EXPECTED[name]["texts"]:
        assert tokenizer(text)["input_ids"] == backend.encode(text).ids == ids, text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == plain
        assert tokenizer.decode(ids) == decoded
    assert len(tokenizer) == EXPECTED[name]["vocab_size"]


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_rendered_as_by_transformers(tokenizers, name):
    tokenizer = tokenizers[name]
    for messages, options, text, ids in EXPECTED[name]["chats"]:
        assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options) == text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        if options.keys() - VARIABLES[name]:
            with pytest.raises(UserError, match=rf"sets '{next(iter(options))}', which the .* template does not use"):
                prompt_text(tokenizer, messages, chat_template_kwargs=options)
        else:
            assert prompt_text(tokenizer, messages, chat_template_kwargs=options) == text
            assert prompt_ids(tokenizer, messages, chat_template_kwargs=options) == ids
            assert prompt_ids(tokenizer, text) == ids  # rendered by someone else: no second BOS


def test_a_template_may_ask_for_the_date(tokenizers):
    messages, _, text, _ = EXPECTED["llama32"]["chats"][0]
    days = [datetime.datetime.now(), datetime.datetime.now() - datetime.timedelta(minutes=1)]  # midnight may pass
    assert prompt_text(tokenizers["llama32"], messages) in [
        text.replace("01 Jan 2030", day.strftime("%d %b %Y")) for day in days
    ]


@pytest.mark.parametrize("name", NAMES)
def test_which_templates_may_ask_for_the_date(tokenizers, name):
    assert reads_clock(tokenizers[name], {}) == (name == "llama32")
    assert not reads_clock(tokenizers[name], {"date_string": "1 Jan 2030"})


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_3_begins_texts_and_chats_with_one_bos(tokenizers, name):
    tokenizer, bos = tokenizers[name], EXPECTED[name]["ids"]["<|begin_of_text|>"]
    chat = [{"role": "user", "content": "What is 7?"}]
    for prompt in ("What is 7?", "<|begin_of_text|>What is 7?", chat):
        ids = prompt_ids(tokenizer, prompt)
        assert ids[0] == bos and ids.count(bos) == 1
    assert prompt_ids(tokenizer, "What is 7?") == prompt_ids(tokenizer, "<|begin_of_text|>What is 7?")
    twice = copy.deepcopy(tokenizer)
    twice.chat_template = "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}"  # a template's own are left to it
    assert prompt_ids(twice, chat)[:2] == [bos, bos]


@pytest.mark.parametrize(
    ("name", "ends", "pad"),
    [
        ("qwen2", ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"),
        ("qwen3", ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"),
        ("llama30", ("<|end_of_text|>", "<|eot_id|>"), "<|end_of_text|>"),
        ("llama31", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|finetune_right_pad_id|>"),
        ("llama32", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|finetune_right_pad_id|>"),
    ],
)
def test_ends_and_padding_are_the_makers(name, ends, pad):
    ids = EXPECTED[name]["ids"]
    assert load_generation_config(FOLDERS / name) == (tuple(ids[token] for token in ends), ids[pad])


def test_thinking_tokens_stay_in_the_text(tokenizers):
    """Qwen3 has them as added tokens that are not special: a reward reads them."""
    tokenizer = tokenizers["qwen3"]
    text = "<think>\nIt is 7.\n</think>\n\n7"
    ids = tokenizer(text + "<|im_end|>")["input_ids"]
    assert ids[0] == EXPECTED["qwen3"]["ids"]["<think>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_templates_that_refuse(tmp_path, tokenizers):
    with pytest.raises(UserError, match=r"chat template refuses .*'content': None"):
        prompt_text(tokenizers["qwen2"], [{"role": "user", "content": None}])
    for file in (FOLDERS / "llama31").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [entry for entry in config["chat_template"] if entry["name"] != "default"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, 400)
    messages = [{"role": "user", "content": "What is 7?"}]
    with pytest.raises(UserError, match=r"has chat templates named tool_use, none of them default; write .*\.jinja in"):
        prompt_text(tokenizer, messages)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }} Answer: ")
    assert prompt_text(load_tokenizer(tmp_path, 400), messages) == "What is 7? Answer: "


def test_decoded_text_is_not_cleaned_up(tmp_path):
    """Llama 3's makers have it in their files. transformers warns of it, and of how to force it."""
    for file in (FOLDERS / "llama31").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": True}))
    code = (
        "from qerl_jax.models.tokenizer import load_tokenizer as load; "
        f"t = load({str(tmp_path)!r}, 400); print(t.decode(t('Is 7 , or 8 ?')['input_ids'], skip_special_tokens=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Is 7 , or 8 ?\n", "")


def test_nothing_of_it_needs_pytorch():
    code = (
        "import sys; from qerl_jax.models.tokenizer import load_tokenizer as load; "
        "from qerl_jax.data.prompts import prompt_ids; "
        f"t = load({str(FOLDERS / 'qwen3')!r}, 400); "
        "assert prompt_ids(t, [{'role': 'user', 'content': 'x'}]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
