"""Calibration text as token ids: one document a row, cut to a length, padded on the right and never packed.

Documents are not joined: a policy has seen each at the beginning of a row, and so do its activations here. Rows of the
file are taken evenly over its whole length. Every eighth row is held out: scales are searched without it, and errors,
perplexity and entropy are also measured on it: of all tokens, or of the completion where a row has one.

    {"text": ...}                        as the tokenizer encodes a text
    {"messages": [{"role": ..., "content": ...}, ...]}   a whole conversation through the chat template
    {"prompt": text or messages, "completion": text}     a prompt as training encodes it, and what follows (optional)
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qerl_jax.data import ROW_FILES, arithmetic
from qerl_jax.data.prompts import (
    KWARGS_OPTION,
    Prompt,
    check_template_kwargs,
    prompt_ids,
    refuse_idle_kwargs,
    templated,
    text_ids,
)
from qerl_jax.data.row_files import line_of, numbered_lines, read_bytes, read_row
from qerl_jax.durable import with_home
from qerl_jax.errors import UserError
from qerl_jax.models.tokenizer import Tokenizer

ARITHMETIC = "arithmetic"
DEFAULT_SEQUENCES, DEFAULT_LENGTH = 256, 2048
_HELD_OUT = 8  # one row in so many
_COLUMNS = ("text", "messages", "prompt")


class Rows(NamedTuple):
    """Token ids [S, L] int32, and of each row [S] int32 the length and the first token that perplexity counts."""

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray


# Token ids of one row, and the first that counts.
Document = tuple[list[int], int]


class Calibration(NamedTuple):
    """The rows that scales are searched on, those that are held out, and a description for the report."""

    search: Rows
    held_out: Rows
    description: dict[str, Any]


def load_calibration(
    source: str,
    tokenizer: Tokenizer,
    sequences: int | None,
    length: int | None,
    max_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Calibration:
    """Reads calibration text.

    Args:
      source: a .jsonl or .ndjson file, or `arithmetic` for the problems that the shipped policy was made with.
      tokenizer: the model's.
      sequences: rows to take; None takes 256, or all where the file has fewer.
      length: most tokens of a row; None takes 2048, or `max_length` where that is less.
      max_length: positions that the network has.
      chat_template_kwargs: variables of the chat template, which messages pass; None sets none.

    Raises:
      UserError: naming the file and line, or the option, what was found and what is allowed.
    """
    if sequences is not None and sequences < 2:
        raise UserError(f"--sequences is {sequences}; allowed: 2 or more (one is held out)")
    if length is not None and not 2 <= length <= max_length:
        raise UserError(f"--length is {length}; allowed: 2 to {max_length}, the positions that the network has")
    length = min(DEFAULT_LENGTH, max_length) if length is None else length
    check_template_kwargs(tokenizer, chat_template_kwargs, KWARGS_OPTION)
    if source == ARITHMETIC:
        documents, has_messages = _arithmetic(tokenizer, sequences or DEFAULT_SEQUENCES), False
    else:
        rows = _jsonl(with_home(source), sequences)
        documents = [_document(row, where, tokenizer, chat_template_kwargs) for row, where in rows]
        has_messages = any("messages" in row or isinstance(row.get("prompt"), list) for row, _ in rows)
    refuse_idle_kwargs(chat_template_kwargs, has_messages, f"no row of {source} has messages")
    lengths = np.asarray([min(length, len(ids)) for ids, _ in documents], np.int32)
    starts = np.asarray([start for _, start in documents], np.int32)
    tokens = np.zeros((len(documents), lengths.max()), np.int32)
    for row, (ids, _) in zip(tokens, documents, strict=True):
        row[: len(ids)] = ids[: len(row)]
    held = np.arange(len(documents)) % _HELD_OUT == min(_HELD_OUT, len(documents)) - 1
    if not (lengths > starts)[held].any():
        raise UserError(f"{source}: the held-out rows have no token of a completion within --length {length}")
    description = {
        "source": source,
        "sequences": int((~held).sum()),
        "held_out_sequences": int(held.sum()),
        "length": length,
        "tokens": int(lengths[~held].sum()),
        "held_out_tokens": int(lengths[held].sum()),
        "sha256": hashlib.sha256(b"".join(array.tobytes() for array in (tokens, lengths, starts))).hexdigest(),
    }
    if chat_template_kwargs is not None:
        description["chat_template_kwargs"] = dict(chat_template_kwargs)
    search, held_out = (Rows(tokens[part], lengths[part], starts[part]) for part in (~held, held))
    return Calibration(search, held_out, description)


def _arithmetic(tokenizer: Tokenizer, count: int) -> list[Document]:
    """Problems of the split that the shipped policy was made with: half of them worked, half answered directly, among
    the held-out ones too."""
    problems = arithmetic.generate(0, "pretrain", np.arange(count))
    prompts = arithmetic.texts(arithmetic.prompt_pieces(problems))
    worked, direct = (arithmetic.texts(of(problems)) for of in (arithmetic.worked_pieces, arithmetic.direct_pieces))
    end = tokenizer.eos_token or ""
    return [_joined(tokenizer, prompts[i], (worked, direct)[(i + i // _HELD_OUT) % 2][i] + end) for i in range(count)]


def _joined(tokenizer: Tokenizer, prompt: Prompt, completion: str, kwargs: Mapping[str, Any] | None = None) -> Document:
    before = prompt_ids(tokenizer, prompt, chat_template_kwargs=kwargs)
    return before + text_ids(tokenizer, completion, "completion", special=False), max(1, len(before))


def _jsonl(path: Path, sequences: int | None) -> list[tuple[dict[str, Any], str]]:
    """Rows of a file at evenly spaced lines, and where each is."""
    if path.suffix not in ROW_FILES:
        raise UserError(f"--calibration is {path}; allowed: a {' or '.join(ROW_FILES)} file, or {ARITHMETIC}")
    lines = numbered_lines(path, read_bytes(path))
    if len(lines) < max(2, sequences or 0):
        raise UserError(f"{path}: has {len(lines)} rows; expected {max(2, sequences or 0)} or more (--sequences)")
    count = min(DEFAULT_SEQUENCES, len(lines)) if sequences is None else sequences
    chosen = [lines[i * len(lines) // count] for i in range(count)]
    return [(read_row(path, number, line), line_of(path, number)) for number, line in chosen]


def _document(row: dict[str, Any], where: str, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None) -> Document:
    if sum(name in row for name in _COLUMNS) != 1:
        found = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where}: expected one of the columns {', '.join(_COLUMNS)}; found {found}")
    try:
        ids, start = _encode(row, tokenizer, kwargs)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if len(ids) < 2:
        raise UserError(f"{where}: has {len(ids)} tokens; expected 2 or more")
    return ids, start


def _encode(row: dict[str, Any], tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None) -> Document:
    def text(name: str) -> str:
        if not isinstance(row[name], str):
            raise UserError(f"{name} is {row[name]!r:.80}; expected a text")
        return row[name]

    if "text" in row:
        return text_ids(tokenizer, text("text"), "text", special=True), 1
    if "messages" in row:
        _check_messages(row["messages"])
        if not tokenizer.chat_template:
            raise UserError("has messages, and the model's tokenizer has no chat template; use text")
        chat = templated(tokenizer, row["messages"], answers=False, chat_template_kwargs=kwargs)
        return text_ids(tokenizer, chat, "conversation", special=False), 1
    if isinstance(row["prompt"], list):
        _check_messages(row["prompt"])
    prompt = row["prompt"] if isinstance(row["prompt"], list) else text("prompt")
    if "completion" in row:
        return _joined(tokenizer, prompt, text("completion"), kwargs)
    return prompt_ids(tokenizer, prompt, chat_template_kwargs=kwargs), 1


def _check_messages(messages: Any) -> None:
    def is_message(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))

    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise UserError(f"the messages are {messages!r:.80}; expected one or more of {{'role': text, 'content': text}}")
