"""Tokenizers and the ids that end a completion, read without PyTorch."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

# Silences transformers' advice to install PyTorch, which it prints at import.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import PreTrainedTokenizerFast as Tokenizer

from qerl_jax.errors import UserError, is_whole
from qerl_jax.input_files import files_fingerprint, read_json
from qerl_jax.json_fields import Fields
from qerl_jax.models.source import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, resolve

__all__ = ["GenerationIds", "Tokenizer", "load_generation_config", "load_tokenizer", "tokenizer_fingerprint"]

_WITHOUT_JSON = ("vocab.json", "merges.txt")  # all that is there where a slow tokenizer was saved
_PADDING_OF_LLAMA_3 = "<|finetune_right_pad_id|>"


class GenerationIds(NamedTuple):
    """Ids that end a completion, and the one that fills rows behind their end."""

    eos_token_ids: tuple[int, ...]
    pad_token_id: int


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a model folder, exactly as its tokenizer.json describes it; decoded text is not cleaned up.

    The generic class is used whatever tokenizer_config.json names: the Qwen2 class of transformers 5 rebuilds the
    pipeline from vocabulary and merges alone, and adds `<|endoftext|>` where it is missing.

    Args:
      path: as for `load_model`.
      vocab_size: rows of the embedding. JAX clamps an id beyond it in silence, so none may exist. None takes them from
        the folder's config.json; the tokenizer of a folder that has none is held against nothing.

    Raises:
      UserError: tokenizer.json is missing or malformed, or has an id that the embedding lacks; tokenizer_config.json
        has values of which no tokenizer can be made; a vocab_size below 1.
    """
    if vocab_size is not None and not (is_whole(vocab_size) and vocab_size >= 1):
        raise UserError(f"vocab_size is {vocab_size!r}; allowed: a whole number >= 1, or None for that of {CONFIG}")
    folder = resolve(path)
    if vocab_size is None and (folder / CONFIG).exists():
        vocab_size = Fields(read_json(folder / CONFIG), str(folder / CONFIG)).get("vocab_size", int)
    file, *optional = (folder / name for name in TOKENIZER_FILES if name.endswith(".json"))
    if not os.path.lexists(file):
        raise UserError(
            f"{file} is missing; take that of the model that this one was made from, or have transformers write it of "
            f"{' and '.join(_WITHOUT_JSON)}: `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
        )
    if "added_tokens" not in read_json(file):
        raise UserError(f"{file}: not a valid tokenizer (added_tokens is missing)")
    for extra in optional:
        if extra.exists():
            read_json(extra)
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:
            raise
        # What the tokenizers library raises for a malformed file is of no narrower class.
        raise UserError(f"{file}: not a valid tokenizer ({error})") from error
    try:
        # Llama 3's files ask for a clean-up meant for WordPiece: it takes spaces out of what byte-level BPE gives.
        tokenizer = Tokenizer.from_pretrained(folder, local_files_only=True, clean_up_tokenization_spaces=False)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What transformers raises for values of another type than it expects.
        raise UserError(f"{folder / TOKENIZER_FILES[1]}: no tokenizer can be made with it ({error})") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and max(len(tokenizer), largest + 1) > vocab_size:
        raise UserError(
            f"{file}: the tokenizer has {len(tokenizer)} tokens, the largest id {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}); the embedding has {vocab_size} rows, so ids must be "
            f"below {vocab_size}"
        )
    return tokenizer


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str:
    """Digest of the files that a tokenizer and its chat template are read from."""
    folder = resolve(path)
    return files_fingerprint(folder / name for name in TOKENIZER_FILES)


def load_generation_config(path: str | os.PathLike[str]) -> GenerationIds:
    """EOS ids: of generation_config.json, else config.json, and the tokenizer's own, which ends answers as in TRL and
    vLLM where a fine-tune has changed it alone. The pad id is the first that these three have.

    So Qwen's chat models end at `<|im_end|>` and `<|endoftext|>` and are padded with the latter; Llama 3's end at
    `<|end_of_text|>`, `<|eom_id|>` and `<|eot_id|>` and are padded with `<|finetune_right_pad_id|>`, which their
    vocabulary has for that, though their configuration may not say so. Sampling options in generation_config.json are
    not read; a run's config has them. Without a pad id the first EOS serves: rows are cut by length, never by the pad
    id.

    Raises:
      UserError: no EOS anywhere, or an id that is no row of the embedding.
    """
    folder = resolve(path)
    config = read_json(folder / CONFIG)
    sources = [(CONFIG, config)]
    if (folder / GENERATION_CONFIG).exists():
        sources.insert(0, (GENERATION_CONFIG, read_json(folder / GENERATION_CONFIG)))
    vocab_size = config.get("vocab_size")

    def ids(key: str) -> list[int]:
        for name, values in sources:
            if (value := values.get(key)) is not None:
                found = value if isinstance(value, list) else [value]
                for item in found:
                    _check_id(folder / name, key, item, vocab_size)
                if found:
                    return found
        return []

    own = _own_ids(folder, vocab_size)
    eos = list(dict.fromkeys(ids("eos_token_id") + own["eos_token"]))
    pad = ids("pad_token_id") or own["pad_token"]
    if not eos:
        raise UserError(
            f"{folder}: no EOS: expected eos_token_id in {GENERATION_CONFIG} or {CONFIG}, or eos_token in "
            f"{TOKENIZER_FILES[1]}; found none, and without one no completion ends"
        )
    return GenerationIds(tuple(eos), (pad or eos)[0])


def _check_id(where: Path, key: str, value: Any, vocab_size: Any) -> None:
    if type(value) is not int or value < 0 or (type(vocab_size) is int and value >= vocab_size):
        raise UserError(f"{where}: {key} is {value!r}; expected an id from 0 to below vocab_size {vocab_size}")


def _own_ids(folder: Path, vocab_size: Any) -> dict[str, list[int]]:
    """The ids of the tokenizer's named tokens; none where it has no such name or no tokenizer is there."""
    if not (folder / TOKENIZER_FILES[0]).exists() or type(vocab_size) is not int:
        return {"eos_token": [], "pad_token": []}
    tokenizer = load_tokenizer(folder, vocab_size)
    ids = {"eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}
    if ids["pad_token"] is None:
        ids["pad_token"] = tokenizer.get_vocab().get(_PADDING_OF_LLAMA_3)
    return {name: [] if value is None else [value] for name, value in ids.items()}
