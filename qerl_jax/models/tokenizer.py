"""Tokenizers and the ids that end a completion, read without PyTorch."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

# Silences transformers' advice to install PyTorch, which it prints at import.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import PreTrainedTokenizerFast as Tokenizer

from qerl_jax.errors import UserError, is_whole, nearest, raised_by_tokenizers, shown
from qerl_jax.input_files import files_fingerprint, read_json
from qerl_jax.json_fields import Fields
from qerl_jax.models.source import CHAT_TEMPLATES, CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, resolve

__all__ = ["GenerationIds", "Tokenizer", "load_generation_config", "load_tokenizer", "tokenizer_fingerprint"]

_WITHOUT_JSON = ("vocab.json", "merges.txt")  # all that is there where a slow tokenizer was saved
# Tokens that begin and end texts. What the tokenizer lacks transformers adds, with an id that nothing was trained on.
_NAMED = ("bos_token", "eos_token")
# The classes of transformers 4 that put the special tokens of tokenizer_config.json around texts, not tokenizer.json's.
_LLAMAS = ("LlamaTokenizer", "LlamaTokenizerFast")
_PADDING_OF_LLAMA_3 = "<|finetune_right_pad_id|>"


class GenerationIds(NamedTuple):
    """Ids that end a completion, and the one that fills rows behind their end."""

    eos_token_ids: tuple[int, ...]
    pad_token_id: int


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a model folder, as its tokenizer.json describes it; decoded text is not cleaned up.

    The generic class is used whatever tokenizer_config.json names: the Qwen2 class of transformers 5 rebuilds the
    pipeline from vocabulary and merges alone, and adds `<|endoftext|>` where it is missing. But add_bos_token in
    tokenizer_config.json is obeyed where the class is Llama's, as transformers 4 does and 5 does not: nothing else has
    texts begin with a BOS in the folders of DeepSeek's distilled Qwen2 and Llama.

    Args:
      path: as for `load_model`.
      vocab_size: rows of the embedding. JAX clamps an id beyond it in silence, so none may exist. None takes them from
        the folder's config.json; the tokenizer of a folder that has none is held against nothing.

    Raises:
      UserError: tokenizer.json is missing or malformed, or has an id that the embedding lacks; tokenizer_config.json
        has values of which no tokenizer can be made, or an EOS or BOS that is no token; a chat template in a file of
        its own is no UTF-8 text; a vocab_size below 1.
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
    beside = {extra: read_json(extra) for extra in optional if extra.exists()}
    _check_templates(folder)
    try:
        own = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if not raised_by_tokenizers(error):
            raise
        raise UserError(f"{file}: not a valid tokenizer ({shown(error)})") from error
    try:
        # Llama 3's files ask for a clean-up meant for WordPiece: it takes spaces out of what byte-level BPE gives. What
        # they say of lengths is not asked for, and may be of any type.
        other: dict[str, Any] = {"clean_up_tokenization_spaces": False, "model_max_length": 10**30}
        other |= _around_texts(beside)
        tokenizer = Tokenizer.from_pretrained(folder, local_files_only=True, **other)
    except BaseException as error:
        # What transformers raises for values of another type than it expects.
        of_values = isinstance(error, AttributeError | KeyError | TypeError | ValueError)
        if not (of_values or raised_by_tokenizers(error)):
            raise
        where = " or ".join(map(str, beside)) or str(folder)
        raise UserError(f"{where}: no tokenizer can be made with it ({shown(error)})") from error
    _check_named(tokenizer, own, file, beside)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and max(len(tokenizer), largest + 1) > vocab_size:
        raise UserError(
            f"{file}: the tokenizer has {len(tokenizer)} tokens, the largest id {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}); the embedding has {vocab_size} rows, so ids must be "
            f"below {vocab_size}"
        )
    return tokenizer


def _around_texts(beside: dict[Path, dict[str, Any]]) -> dict[str, bool]:
    """Which special tokens are put around texts, of the files beside tokenizer.json; nothing where they leave it to
    that."""
    values = next((values for path, values in beside.items() if path.name == TOKENIZER_FILES[1]), {})
    obeyed = values.get("tokenizer_class") in _LLAMAS and type(values.get("add_bos_token")) is bool
    if not obeyed or not any(values.get("bos_token") for values in beside.values()):
        return {}
    return {name: values.get(name) is True for name in ("add_bos_token", "add_eos_token")}


def _check_templates(folder: Path) -> None:
    """Raises UserError for a chat template in a file of its own that is no UTF-8 text."""
    own = [folder / name for name in TOKENIZER_FILES if name.endswith(".jinja")]
    for path in (*own, *sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))):
        try:
            if path.is_file():
                path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _check_named(
    tokenizer: Tokenizer, own: tokenizers.Tokenizer, file: Path, beside: dict[Path, dict[str, Any]]
) -> None:
    """Raises UserError for an EOS or BOS that no file gives an id: no completion would ever end there."""
    for name in _NAMED:
        token = getattr(tokenizer, name)
        if token is None or own.token_to_id(token) is not None:
            continue
        if any(_gives_an_id(values, token) for values in beside.values()):
            continue
        where = next((path for path, values in beside.items() if values.get(name) is not None), file)
        known = [added.content for added in own.get_added_tokens_decoder().values()]
        raise UserError(
            f"{where}: {name} is {shown(repr(token))}, which {file.name} does not have{nearest(token, known)}; "
            f"expected one of its tokens, such as {', '.join(map(repr, known[:5])) or 'those of its vocabulary'}"
        )


def _gives_an_id(values: dict[str, Any], token: str) -> bool:
    """Whether a file beside tokenizer.json has the token with its id: as added_tokens.json, or as added_tokens_decoder
    in tokenizer_config.json."""
    decoder = values.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else ()
    return type(values.get(token)) is int or any(isinstance(e, dict) and e.get("content") == token for e in entries)


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
