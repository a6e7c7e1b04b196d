"""What transformers' AutoTokenizer makes of small tokenizers of each family, stored for the tests. Runs in the
environment of `transformers_logits.py`:

    oracle/bin/python tests/oracles/tokenizers_chat.py           # writes tokenizers/ beside it, with expected.json

The folders have the pipelines of the makers (normalizer, split expression, byte-level BPE, post-processor, special
tokens, generation_config.json) over a vocabulary trained on a few sentences, and templates that use what theirs use.

    qwen2    template in tokenizer_config.json
    qwen3    template in chat_template.jinja, with a switch and a look at later messages
    llama31  several templates by name in tokenizer_config.json; no pad token is named
    llama32  template with today's date; the pad token is named
    llama30  a vocabulary without the token for padding
Per folder, expected.json holds: `texts` [text, ids with the tokenizer's special tokens, ids without, decoded], `chats`
[messages, options of the template, rendered, ids], `vocab_size`, and `ids` of named tokens.
"""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).parent / "tokenizers"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "What is the sum of twelve and thirty? The answer is forty-two.",
    "You are a helpful assistant. Think about the question, then answer it.",
    "There are 24 apples and 1365 pears; they're worth 0.75 each, and I'll buy 100.",
    "Let x = 3. Then 2x + 1 = 7, so the answer is 7.\n\nIs that right? It's right.",
]
TEXTS = [
    "What is 12345 + 678?",
    "  leading, trailing  \n\n and \ttabs ",
    "é versus é, naïve, 数学, 🙂",  # composed and decomposed
    "They're here; I'LL GO.",
    "",
]
CHATS = [
    [{"role": "user", "content": "What is 7 + 5?"}],
    [{"role": "system", "content": "Think, then answer."}, {"role": "user", "content": " What is 7 + 5? "}],
    [
        {"role": "user", "content": "What is 7?"},
        {"role": "assistant", "content": "<think>\nIt is 7.\n</think>\n\n7"},
        {"role": "user", "content": "And 5?"},
    ],
]
QWEN2_TEMPLATE = (
    "{%- if tools %}{{- raise_exception('no tools here') }}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if not (message.role == 'system' and loop.first) %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
QWEN3_TEMPLATE = """\
{%- set ns = namespace(last_question=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and index > ns.last_question %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last_question %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = DATE %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools: " + (tools | tojson) + "\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA31_TEMPLATE = LLAMA_TEMPLATE.replace("DATE", '"26 Jul 2024"')
LLAMA32_TEMPLATE = LLAMA_TEMPLATE.replace(
    "DATE", 'strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024"'
)
QWEN2_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN3_PLAIN = ["<think>", "</think>"]  # added tokens that decoding does not skip
LLAMA30_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_SPECIAL = [*LLAMA30_SPECIAL, "<|finetune_right_pad_id|>", "<|eom_id|>"]


def build(qwen: bool, special: list[str], plain: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=not qwen))
    if qwen:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT % ("" if qwen else "{1,3}")), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if not qwen:
        bos = special[0]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(
                    single=f"{bos} $A",
                    pair=f"{bos} $A {bos}:1 $B:1",
                    special_tokens=[(bos, tokenizer.token_to_id(bos))],
                ),
            ]
        )
    return tokenizer


def write_folder(
    name: str, tokenizer: Tokenizer, config: dict, model_type: str, eos: list[str], pad: str | None
) -> None:
    folder = HERE / name
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if "file" in config:
        (folder / "chat_template.jinja").write_text(config.pop("file"))
    common = {"clean_up_tokenization_spaces": False, "model_max_length": 131072}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | common, indent=1) + "\n")
    ids = [tokenizer.token_to_id(token) for token in eos]
    generation = {"eos_token_id": ids} | ({} if pad is None else {"pad_token_id": tokenizer.token_to_id(pad)})
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": size + 8}) + "\n")


def expected(name: str) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(HERE / name)
    special = tokenizer.all_special_tokens
    texts = [*TEXTS, "".join(special) + " is text", f"7{special[0]}7"]
    chats = []
    for messages in CHATS:
        for options in ({}, {"enable_thinking": False}, {"date_string": "01 Jan 2030"}):
            if name == "llama32" and "date_string" not in options:
                continue  # the day of the run would be in it
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
            chats.append([messages, options, text, ids])
    encoded = [
        [
            text,
            (ids := tokenizer(text)["input_ids"]),
            tokenizer.encode(text, add_special_tokens=False),
            tokenizer.decode(ids),
        ]
        for text in texts
    ]
    vocabulary = tokenizer.get_vocab()
    named = {token: vocabulary[token] for token in QWEN2_SPECIAL + QWEN3_PLAIN + LLAMA_SPECIAL if token in vocabulary}
    return {"texts": encoded, "chats": chats, "vocab_size": len(tokenizer), "ids": named}


def write() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    qwen = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    ends = ["<|im_end|>", "<|endoftext|>"]
    tokenizer = build(True, QWEN2_SPECIAL, [])
    write_folder("qwen2", tokenizer, qwen | {"chat_template": QWEN2_TEMPLATE}, "qwen2", ends, "<|endoftext|>")
    tokenizer = build(True, QWEN2_SPECIAL, QWEN3_PLAIN)
    write_folder("qwen3", tokenizer, qwen | {"file": QWEN3_TEMPLATE}, "qwen3", ends, "<|endoftext|>")
    llama = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    named = [
        {"name": "default", "template": LLAMA31_TEMPLATE},
        {"name": "tool_use", "template": "{{- raise_exception('tools') }}"},
    ]
    ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    tokenizer = build(False, LLAMA_SPECIAL, [])
    write_folder("llama31", tokenizer, llama | {"chat_template": named}, "llama", ends, None)
    padded = llama | {"chat_template": LLAMA32_TEMPLATE, "pad_token": "<|finetune_right_pad_id|>"}
    write_folder("llama32", tokenizer, padded, "llama", ends, None)
    tokenizer = build(False, LLAMA30_SPECIAL, [])
    write_folder("llama30", tokenizer, llama | {"chat_template": LLAMA31_TEMPLATE}, "llama", [ends[0], ends[2]], None)
    names = sorted(path.name for path in HERE.iterdir())
    text = json.dumps({name: expected(name) for name in names}, ensure_ascii=False, indent=None)
    (HERE / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
