"""Tokenizers as their files describe them, and the ids that end a completion."""

import json
import sys

import pytest
from folders import HF, V5, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qerl_jax.data.prompts import prompt_ids, text_ids
from qerl_jax.errors import UserError
from qerl_jax.models.tokenizer import load_generation_config, load_tokenizer


def write_config(folder, generation=None, **config):
    (folder / "config.json").write_text(json.dumps(HF | V5 | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def begin_texts(folder, token, number):
    """Has tokenizer.json put a token before each text."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(f"{token} $A", special_tokens=[(token, number)])
    backend.save(str(folder / "tokenizer.json"))


def test_round_trip_without_torch(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path), 24)
    assert tokenizer("w3 w17 w5")["input_ids"] == [3, 17, 5]
    assert tokenizer.decode([3, 17, 21], skip_special_tokens=True) == "w3 w17"
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (22, 20, 21)
    assert "torch" not in sys.modules


def test_the_file_is_followed_whatever_class_it_names(tmp_path):
    """A word-level vocabulary under the name of Qwen2's class, without <|endoftext|>: nothing is rebuilt or added."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, more={"tokenizer_class": "Qwen2Tokenizer"}), 22)
    assert "<|endoftext|>" not in tokenizer.get_vocab() and len(tokenizer) == 22


@pytest.mark.parametrize(
    ("kind", "add_bos_token", "in_file", "begins"),
    [
        ("LlamaTokenizerFast", True, False, True),  # as DeepSeek-R1-Distill-Qwen and -Llama are published
        ("LlamaTokenizer", True, True, True),
        ("LlamaTokenizer", False, True, False),
        ("LlamaTokenizer", False, False, False),
        ("LlamaTokenizerFast", None, True, True),
        ("LlamaTokenizerFast", None, False, False),
        ("PreTrainedTokenizerFast", True, False, False),
        ("PreTrainedTokenizerFast", False, True, True),
        ("Qwen2Tokenizer", True, False, False),
    ],
)
def test_texts_begin_with_a_bos_as_in_transformers_4(tmp_path, kind, add_bos_token, in_file, begins):
    """There Llama's classes obey add_bos_token, others tokenizer.json alone."""
    more = {"tokenizer_class": kind, "bos_token": "w7", "chat_template": "{{ bos_token }} {{ messages[0].content }}"}
    write_tokenizer(tmp_path, more=more | ({} if add_bos_token is None else {"add_bos_token": add_bos_token}))
    if in_file:
        begin_texts(tmp_path, "w7", 7)
    tokenizer = load_tokenizer(tmp_path, 24)
    assert tokenizer("w3 w4")["input_ids"] == [7] * begins + [3, 4]
    assert tokenizer("")["input_ids"] == [7] * begins
    assert prompt_ids(tokenizer, "w7 w3") == prompt_ids(tokenizer, [{"role": "user", "content": "w3"}]) == [7, 3]


def test_where_no_bos_is_named_texts_are_left_to_the_file(tmp_path):
    more = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    assert load_tokenizer(write_tokenizer(tmp_path, more=more), 24)("w3")["input_ids"] == [3]
    begin_texts(tmp_path, "w7", 7)
    assert load_tokenizer(tmp_path, 24)("w3")["input_ids"] == [7, 3]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "w8"}))
    assert load_tokenizer(tmp_path, 24)("w3")["input_ids"] == [8, 3]


def test_code_that_a_folder_brings_is_not_run(tmp_path):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(config | {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_is_read(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w0"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, more={"chat_template": template}), 24)
    messages = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "w3 w4 w0"


def test_qwen2_pipeline(tmp_path):
    """Byte-level BPE as Qwen2 has it, with merges, digits that stay single, and special tokens inside texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "he", "llo", "ll", "hello", "Ġhello"])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("Ġ", "hello")]
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    )
    tokenizer = load_tokenizer(tmp_path, 300)
    text = "hello hello é 12<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert ids[:2] == [vocab["hello"], vocab["Ġhello"]] and ids[-1] == 261
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == text[:-10]


def test_no_id_beyond_the_embedding(tmp_path):
    write_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, 22)
    with pytest.raises(UserError, match=r"tokenizer.json: .* 22 tokens, the largest id 21 \('<eos>'\); .* has 21 rows"):
        load_tokenizer(tmp_path, 21)


def test_the_embedding_is_that_of_the_folder_where_none_is_given(tmp_path):
    write_config(write_tokenizer(tmp_path), vocab_size=21)
    with pytest.raises(UserError, match=r"the largest id 21 \('<eos>'\); the embedding has 21 rows"):
        load_tokenizer(tmp_path)
    assert len(load_tokenizer(tmp_path, 22)) == 22
    assert len(load_tokenizer(write_config(tmp_path, vocab_size=22))) == 22
    (tmp_path / "config.json").unlink()  # a tokenizer alone
    assert len(load_tokenizer(tmp_path)) == 22


@pytest.mark.parametrize("vocab_size", ["24", 24.0, -1, True])
def test_an_embedding_of_no_number_of_rows(tmp_path, vocab_size):
    with pytest.raises(UserError, match=f"vocab_size is {vocab_size!r}; allowed: a whole number >= 1, or None"):
        load_tokenizer(write_tokenizer(tmp_path), vocab_size)


def test_no_sparse_id_beyond_the_embedding(tmp_path):
    Tokenizer(models.WordLevel({"a": 0, "b": 90}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"2 tokens, the largest id 90 \('b'\); the embedding has 24 rows"):
        load_tokenizer(tmp_path, 24)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer.json is missing; take that of .*vocab.json and merges.txt: `Auto"),
        ("tokenizer.json", "{", "tokenizer.json: not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json: not a valid tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}', "tokenizer.json: not a valid tokenizer"),
        # of a prefix longer than what is merged, at which the library panics
        (
            "tokenizer.json",
            '{"added_tokens": [], "model": {"type": "BPE", "continuing_subword_prefix": "<long>", "merges": '
            '[["a", "b"]], "vocab": {"a": 0, "b": 1, "ab": 2}}}',
            "tokenizer.json: not a valid tokenizer",
        ),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object, found list"),
        *(
            ("tokenizer_config.json", text, r"tokenizer_config.json: no tokenizer can be made with it \(.+\)")
            for text in (
                '{"eos_token": {"content": "w2"}}',  # no "__type", by which transformers knows a token
                '{"extra_special_tokens": 5}',
                '{"added_tokens_decoder": null}',
                '{"padding_side": null}',
                '{"chat_template": [{"name": "default"}]}',
            )
        ),
        (
            "special_tokens_map.json",
            '{"eos_token": 5}',
            r"tokenizer_config.json or .*special_tokens_map.json: no tokenizer can be made with it \(.+\)",
        ),
        (
            "chat_template.jinja",
            b"{{ 'caf\xe9' }}",
            r"chat_template.jinja: not UTF-8 text \(byte 7\); save it as UTF-8",
        ),
        ("additional_chat_templates/rag.jinja", b"\xff\xfe", r"rag.jinja: not UTF-8 text \(byte 0\); save it as UTF-8"),
    ],
)
def test_broken_tokenizers(tmp_path, name, content, message):
    write_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path, 24)


@pytest.mark.parametrize("name", ["eos_token", "bos_token"])
def test_an_end_that_is_no_token_is_refused_unless_a_file_gives_its_id(tmp_path, name):
    """The embedding may have rows for it, which nothing was trained on."""
    write_tokenizer(tmp_path, more={name: "<eso>"})
    wrong = r"config.json: \w+ is '<eso>', which tokenizer.json does not have \(did you mean '<eos>'\?\); expected"
    with pytest.raises(UserError, match=wrong):
        load_tokenizer(tmp_path, 64)
    write_config(tmp_path, vocab_size=64)
    with pytest.raises(UserError, match=wrong):
        load_generation_config(tmp_path)
    decoder = {"30": {"content": "<eso>", "special": True}}
    write_tokenizer(tmp_path, more={name: "<eso>", "added_tokens_decoder": decoder})
    assert getattr(load_tokenizer(tmp_path, 64), name) == "<eso>"
    write_tokenizer(tmp_path, more={name: "<eso>"})
    (tmp_path / "added_tokens.json").write_text('{"<eso>": 22}')
    assert load_tokenizer(tmp_path, 64).convert_tokens_to_ids("<eso>") == 22


@pytest.mark.parametrize("length", ["128", [], {}, "", 8])
def test_a_length_that_is_not_used_may_be_anything(tmp_path, length):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, more={"model_max_length": length}), 24)
    assert text_ids(tokenizer, "w3 " * 20, "prompt", special=True) == [3] * 20


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 21, "pad_token_id": 20}, {}, ((21,), 20)),
        ({"eos_token_id": [5, 21], "pad_token_id": 20}, {"eos_token_id": 7}, ((5, 21), 20)),
        ({}, {"eos_token_id": 7, "pad_token_id": 3}, ((7, 21), 3)),
        (None, {"eos_token_id": [7, 8]}, ((7, 8, 21), 20)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ((21,), 20)),
        ({"eos_token_id": []}, {}, ((21,), 20)),
        ({"eos_token_id": 20}, {"eos_token_id": 20}, ((20, 21), 20)),  # a chat fine-tune that kept its base's
    ],
)
def test_eos_and_pad(tmp_path, generation, config, expected):
    assert load_generation_config(write_config(write_tokenizer(tmp_path), generation, **config)) == expected


def test_pad_without_any_source_is_the_first_eos(tmp_path):
    write_config(write_tokenizer(tmp_path, pad=None), {"eos_token_id": [4, 5]})
    assert load_generation_config(tmp_path) == ((4, 5, 20), 4)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (
            {"eos_token_id": 24},
            "generation_config.json: eos_token_id is 24; expected an id from 0 to below vocab_size 24",
        ),
        ({"eos_token_id": [1, -1]}, "generation_config.json: eos_token_id is -1"),
        ({"eos_token_id": "21"}, "generation_config.json: eos_token_id is '21'"),
        ({"eos_token_id": True}, "generation_config.json: eos_token_id is True"),
        ({"eos_token_id": 1, "pad_token_id": 99}, "generation_config.json: pad_token_id is 99"),
    ],
)
def test_ids_that_are_wrong(tmp_path, generation, message):
    write_config(write_tokenizer(tmp_path), generation)
    with pytest.raises(UserError, match=message):
        load_generation_config(tmp_path)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_no_eos_anywhere(tmp_path, with_tokenizer):
    if with_tokenizer:
        write_tokenizer(tmp_path, eos=None)
    write_config(tmp_path)
    with pytest.raises(UserError, match=r"no EOS: expected eos_token_id in generation_config.json or config.json"):
        load_generation_config(tmp_path)
