"""The tokenizer of the quickstart policy: whole words, single digits, a leading space kept in the token.

A word or digit after a space is another token (` 3`) than one without (`3`), so decoding is plain concatenation and
`encode(decode(ids)) == ids` for every text of `qerl_jax.data.arithmetic`. Runs of white space count as one space; words
outside the vocabulary become `<unk>`. There is no token for the beginning of a sequence.

Writes tokenizer.json and tokenizer_config.json as transformers 5 reads them without adding a token.
"""

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from qerl_jax.data import arithmetic

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
PATTERN = r" ?[A-Za-z]+| ?[0-9]| ?####|[^A-Za-z0-9]"
# A conversation is the concatenation of its messages, so that conversational prompts work with this policy too.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def vocabulary() -> list[str]:
    """All tokens in the order of their ids: special ones, digits, signs, then words in alphabetical order."""
    found = {token for text in arithmetic.vocabulary() for token in re.findall(PATTERN, text)}
    digits = [str(digit) for digit in range(10)] + [f" {digit}" for digit in range(10)]
    signs = ["+", "-", "=", ".", ",", "?", arithmetic.MARKER]
    return [PAD, EOS, UNK, *digits, *signs, *sorted(found - set(digits) - set(signs))]


def build_tokenizer() -> Tokenizer:
    """The tokenizer as the `tokenizers` library runs it."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token=UNK))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, UNK)])
    return tokenizer


def save_tokenizer(folder: Path, model_max_length: int) -> None:
    """Writes the two tokenizer files into `folder`."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        # Named explicitly: for a qwen2 config transformers would else build Qwen2Tokenizer and add <|endoftext|>.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "model_max_length": model_max_length,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_pieces(pieces: list[arithmetic.Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the texts that `pieces` spell, without a Python loop over the texts.

    Returns:
      Right-padded ids [N, L] int32 (L the longest possible) and lengths [N] int32; equal to encoding each text.
    """
    ids = {token: i for i, token in enumerate(vocabulary())}
    columns = []
    for table, rows in pieces:
        encoded = [[ids[token] for token in re.findall(PATTERN, text)] for text in table]
        padded = np.full((len(table), max(map(len, encoded))), -1, np.int32)
        for row, tokens in zip(padded, encoded, strict=True):
            row[: len(tokens)] = tokens
        columns.append(padded[rows])
    ragged = np.concatenate(columns, axis=1)
    absent = ragged < 0
    order = np.argsort(absent, axis=1, kind="stable")
    lengths = (~absent).sum(axis=1).astype(np.int32)
    return np.where(np.take_along_axis(absent, order, 1), ids[PAD], np.take_along_axis(ragged, order, 1)), lengths
