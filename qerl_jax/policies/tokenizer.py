"""The tokenizer of the quickstart policy: Qwen2's byte-level BPE with a small vocabulary.

256 bytes, and merges that make one token of every word of `qerl_jax.data.arithmetic`; digits stay single, as in Qwen2.
Any text can be encoded, and `encode(decode(ids)) == ids` for the problems' texts.

It must be Qwen2's own kind: for a qwen2 config.json, transformers 5's AutoTokenizer ignores the class named in
tokenizer_config.json and the pipeline in tokenizer.json, and rebuilds Qwen2Tokenizer from vocabulary and merges alone
(a word-level model then encodes to other ids, silently). For the same reason the EOS is `<|endoftext|>`: the class adds
that token where it is missing, and the ids outgrow the embedding.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from qerl_jax.data import arithmetic

EOS, PAD = "<|endoftext|>", "<|pad|>"
# Qwen2's pre-tokenizer, which its tokenizer class hard-codes.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A conversation is the concatenation of its messages, so that conversational prompts work with this policy too.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def build_tokenizer() -> Tokenizer:
    """The tokenizer as the `tokenizers` library runs it.

    A word's merges grow it from its first byte on, so its prefixes are tokens too; no merge starts inside a word, hence
    no word can end up split.
    """
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {word for text in arithmetic.vocabulary() for word, _ in split.pre_tokenize_str(text)}
    merges: dict[tuple[str, str], None] = {}
    for word in sorted(words):
        for end in range(1, len(word)):
            merges.setdefault((word[:end], word[end]))
    tokens = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(merges), fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    return tokenizer


def save_tokenizer(folder: Path, model_max_length: int) -> None:
    """Writes the two tokenizer files into `folder`."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": model_max_length,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class PieceEncoder:
    """Turns pieces into ids without a Python loop over the texts; each table is encoded once and kept."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tables: dict[tuple[str, ...], np.ndarray] = {}

    def __call__(self, pieces: list[arithmetic.Piece]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the texts that `pieces` spell, equal to encoding each text: tokens never cross the pieces' borders.

        Returns:
          Right-padded ids [N, L] int32 (L the longest that the tables allow) and lengths [N] int32.
        """
        ragged = np.concatenate([self._table(table)[rows] for table, rows in pieces], axis=1)
        present = ragged >= 0
        lengths = present.sum(axis=1).astype(np.int32)
        packed = np.full(ragged.shape, self._tokenizer.token_to_id(PAD), np.int32)
        packed[np.arange(ragged.shape[1]) < lengths[:, None]] = ragged[present]
        return packed, lengths

    def _table(self, table: tuple[str, ...]) -> np.ndarray:
        if table not in self._tables:
            encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(table))]
            padded = np.full((len(table), max(map(len, encoded))), -1, np.int32)
            for row, ids in zip(padded, encoded, strict=True):
                row[: len(ids)] = ids
            self._tables[table] = padded
        return self._tables[table]
