"""Prompts: what one may be, and as token ids.

The caller brings the tokenizer, so that code which only checks prompts imports neither transformers nor JAX.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qerl_jax.errors import UserError, beginning, is_whole

if TYPE_CHECKING:
    from qerl_jax.models.tokenizer import Tokenizer

Prompt = str | list[dict[str, Any]]
_ROLES = ("system", "user", "assistant", "tool")


def check_prompt(prompt: Any) -> None:
    """Refuses what is neither a text nor messages that end with one to be answered.

    Raises:
      UserError: saying what was found, and what a prompt may be.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise UserError("the prompt is empty; expected a text")
        return
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"the prompt is {prompt!r:.80}; expected a text, or a list of one message or more")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{message!r:.80} is not a message; expected {{'role': text, 'content': text}}")
        if message["role"] not in _ROLES:
            raise UserError(f"the role is {message['role']!r}; allowed: {', '.join(_ROLES)}")
    if prompt[-1]["role"] == "assistant":
        raise UserError("the prompt ends with the assistant's message; expected the user's, to be answered")


def prompt_text(tokenizer: "Tokenizer", prompt: Prompt) -> str:
    """A text as it is; messages through the tokenizer's chat template, up to where the assistant's answer begins.

    Raises:
      UserError: messages, and the tokenizer has no chat template or its template refuses them.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(
            "the prompt is a list of messages, and the model's tokenizer has no chat template (chat_template in "
            "tokenizer_config.json, or chat_template.jinja); use text prompts, or add a template"
        )
    return templated(tokenizer, prompt, answers=True)


def templated(tokenizer: "Tokenizer", messages: list[dict[str, Any]], answers: bool) -> str:
    """Messages through the tokenizer's chat template, which it has; `answers`: up to where the assistant's begins.

    Raises:
      UserError: the template refuses them.
    """
    import jinja2  # which transformers imports for a template, and nothing else here

    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=answers, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
        # ValueError: several templates by name, none of them the default one. TypeError: content that is no text.
        raise UserError(f"the tokenizer's chat template refuses {messages!r:.120}: {error}") from error
    assert isinstance(text, str)
    return text


def prompt_ids(tokenizer: "Tokenizer", prompt: Prompt) -> list[int]:
    """Token ids of one prompt, none for an empty text.

    A text gets the special tokens that the tokenizer puts around texts (Llama 3's BOS); messages get those of the
    chat template alone. A text that begins with the BOS already, as a rendered template does, gets no second one.
    """
    text = prompt_text(tokenizer, prompt)
    if not text:
        return []
    ids = text_ids(tokenizer, text, "prompt", special=isinstance(prompt, str))
    twice = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if twice and isinstance(prompt, str) else ids


def text_ids(tokenizer: "Tokenizer", text: str, what: str, special: bool) -> list[int]:
    """Token ids of a text, with the special tokens around it that the tokenizer puts there, if `special`.

    Raises:
      UserError: it is no Unicode text; named as `what`, by its beginning and the character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the {what} that begins {beginning(text)} is no text: character {error.start} is half of a surrogate "
            "pair, or a byte that is not UTF-8"
        ) from None
    # Not verbose: transformers would warn of prompts beyond model_max_length, which callers refuse by name.
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def check_prompts(
    tokenizer: "Tokenizer", examples: Iterable[dict[str, Any]], where: Callable[[int], str], max_prompt_length: int
) -> None:
    """Refuses rows of a data set with a prompt of no tokens or too many, before anything is trained on them.

    Args:
      tokenizer: the model's.
      examples: the first rows of the data set, or all.
      where: says where a row stands, by its number (see `data.dataset.Dataset`).
      max_prompt_length: the most tokens of a prompt.

    Raises:
      UserError: naming the row, and its prompt's length and beginning or what that is refused for.
    """
    for row, example in enumerate(examples):
        _checked_ids(tokenizer, example["prompt"], where(row), max_prompt_length, "data.max_prompt_length")


def _checked_ids(tokenizer: "Tokenizer", prompt: Prompt, where: str, max_prompt_length: int, option: str) -> list[int]:
    """Ids of a prompt; `option` is the name by which the caller's user sets the most that there may be."""
    try:
        check_prompt(prompt)
        ids = prompt_ids(tokenizer, prompt)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not 1 <= len(ids) <= max_prompt_length:
        raise UserError(
            f"{where}: has {len(ids)} tokens; allowed: 1 to {max_prompt_length} ({option}); the prompt begins "
            f"{beginning(prompt)}"
        )
    return ids


def encode_prompts(
    tokenizer: "Tokenizer", prompts: Sequence[Prompt], max_prompt_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of prompts (see `prompt_ids`), which are never cut.

    Args:
      tokenizer: the model's.
      prompts: N texts or lists of messages.
      max_prompt_length: P, the most tokens of a prompt.

    Returns:
      Ids [N, P] int32, padded on the right, and lengths [N] int32.

    Raises:
      UserError: what is no prompt (see `check_prompt`), has no tokens or more than P, or is refused by the tokenizer's
        chat template; by its number in the list (from 0).
      TypeError: one text instead of a list.
      ValueError: max_prompt_length is no whole number from 1 on.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts are one text, {beginning(prompts)}; expected a list of prompts")
    if not is_whole(max_prompt_length) or max_prompt_length < 1:
        raise ValueError(f"max_prompt_length is {max_prompt_length!r}; allowed: a whole number of tokens, 1 or more")
    pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = np.full((len(prompts), max_prompt_length), pad, np.int32)
    lengths = np.zeros(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        where = f"prompt {row} (counted from 0)"
        ids = _checked_ids(tokenizer, prompt, where, max_prompt_length, "max_prompt_length")
        tokens[row, : len(ids)] = ids
        lengths[row] = len(ids)
    return tokens, lengths
