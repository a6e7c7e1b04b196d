"""Prompts: what one may be, and as token ids.

The caller brings the tokenizer, so that code which only checks prompts imports neither transformers nor JAX.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qerl_jax.errors import UserError, beginning, check_kind, is_whole, nearest, raised_by_tokenizers, shown

if TYPE_CHECKING:
    from qerl_jax.models.tokenizer import Tokenizer

Prompt = str | list[dict[str, Any]]
KWARGS_OPTION = "chat_template_kwargs (--chat-template-kwargs)"  # as scripts and commands have it
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


def check_template_kwargs(
    tokenizer: "Tokenizer", chat_template_kwargs: Mapping[str, Any] | None, option: str = "chat_template_kwargs"
) -> None:
    """Refuses what could not reach the tokenizer's chat template, or would do nothing there.

    Args:
      tokenizer: the model's.
      chat_template_kwargs: variables of the template by name; None or none at all pass.
      option: the name by which the caller's user gives them.

    Raises:
      UserError: there is no chat template, no default one, or none that can be read; a name is an argument that
        `apply_chat_template` has itself, or no variable of the template.
      TypeError: something else than a mapping.
    """
    if chat_template_kwargs is None:
        return
    check_kind(option, chat_template_kwargs, Mapping)
    if not chat_template_kwargs:
        return
    if not tokenizer.chat_template:
        raise UserError(
            f"{option} is {dict(chat_template_kwargs)!r:.80}, and the model's tokenizer has no chat template; leave it "
            "out, or add a template (chat_template in tokenizer_config.json, or chat_template.jinja)"
        )
    _check_default(tokenizer)
    apply = tokenizer.apply_chat_template
    try:
        known = _variables(tokenizer.get_chat_template()) - _taken(apply)
    except Exception as error:  # see `templated`
        raise UserError(f"{option}: the tokenizer's chat template cannot be read: {_told(error)}") from error
    for name in chat_template_kwargs:
        if name not in known:
            why = "is an argument of apply_chat_template itself"
            if name not in _taken(apply):
                why = f"the tokenizer's chat template does not use{nearest(str(name), known)}"
            raise UserError(f"{option} sets {name!r}, which {why}; allowed: {', '.join(sorted(known)) or 'nothing'}")


def _check_default(tokenizer: "Tokenizer") -> None:
    named = tokenizer.chat_template
    if isinstance(named, dict) and "default" not in named:
        raise UserError(
            f"the model's tokenizer has chat templates named {', '.join(map(shown, sorted(named)))}, none of them "
            "default; write the one for messages to chat_template.jinja in the model's folder"
        )


def refuse_idle_kwargs(chat_template_kwargs: Mapping[str, Any] | None, has_messages: bool, otherwise: str) -> None:
    """Refuses variables of the chat template (`KWARGS_OPTION`) where no messages pass it, which `otherwise` says."""
    if chat_template_kwargs is not None and not has_messages:
        raise UserError(f"{KWARGS_OPTION} has no effect: {otherwise}, and texts pass no chat template; leave it out")


def reads_clock(tokenizer: "Tokenizer", chat_template_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether messages become other prompts on another day: the chat template may ask for the date, as Llama 3.2's does
    where `date_string` is not set."""
    asks = bool(tokenizer.chat_template) and "strftime_now" in tokenizer.get_chat_template()
    return asks and "date_string" not in (chat_template_kwargs or {})


@functools.lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    """The names that a chat template, in the grammar of transformers, reads where it may not have set them itself."""
    import jinja2.meta
    from transformers.utils.chat_template_utils import _compile_jinja_template  # which has it in a cache

    environment = _compile_jinja_template(template).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


def _taken(apply: Callable[..., Any]) -> set[str]:
    """The arguments of `apply_chat_template`, and the name by which templates have the messages."""
    return {*inspect.signature(apply).parameters, "messages"}


def prompt_text(
    tokenizer: "Tokenizer", prompt: Prompt, *, chat_template_kwargs: Mapping[str, Any] | None = None
) -> str:
    """A text as it is; messages through the tokenizer's chat template, up to where the assistant's answer begins.

    `chat_template_kwargs` sets variables of the template, as in `tokenizer.apply_chat_template(messages, **kwargs)`.

    Raises:
      UserError: messages, and the tokenizer has no chat template, or its template refuses them or the variables (see
        `check_template_kwargs`).
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(
            "the prompt is a list of messages, and the model's tokenizer has no chat template (chat_template in "
            "tokenizer_config.json, or chat_template.jinja); use text prompts, or add a template"
        )
    return templated(tokenizer, prompt, answers=True, chat_template_kwargs=chat_template_kwargs)


def templated(
    tokenizer: "Tokenizer",
    messages: list[dict[str, Any]],
    answers: bool,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Messages through the tokenizer's chat template, which it has; `answers`: up to where the assistant's begins.

    Raises:
      UserError: the template refuses them, or the variables given (see `check_template_kwargs`), or there are several
        templates and none is the default.
    """
    _check_default(tokenizer)
    check_template_kwargs(tokenizer, chat_template_kwargs)
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=answers, tokenize=False, **(chat_template_kwargs or {})
        )
    except Exception as error:  # a template is somebody else's program, which may raise anything
        raise UserError(f"the tokenizer's chat template refuses {messages!r:.120}: {_told(error)}") from error
    assert isinstance(text, str)
    return text


def _told(error: Exception) -> str:
    """What a template raised, on one line: a word of its own, or Python's with its kind."""
    own = any(kind.__module__.startswith("jinja2") for kind in type(error).__mro__)
    return shown(error) if own else f"{type(error).__name__}: {shown(error)}"


def prompt_ids(
    tokenizer: "Tokenizer", prompt: Prompt, *, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of one prompt, none for an empty text.

    A text gets the special tokens that the tokenizer puts around texts (Llama 3's BOS); messages get those of the
    chat template alone.
    """
    text = prompt_text(tokenizer, prompt, chat_template_kwargs=chat_template_kwargs)
    if not text:
        return []
    return text_ids(tokenizer, text, "prompt", special=isinstance(prompt, str))


def text_ids(tokenizer: "Tokenizer", text: str, what: str, special: bool) -> list[int]:
    """Token ids of a text, with the special tokens around it that the tokenizer puts there, if `special`. A text that
    begins with the BOS already, as a rendered template does, gets no second one.

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
    try:
        # Not verbose: transformers would warn of prompts beyond model_max_length, which callers refuse by name.
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except BaseException as error:
        if not raised_by_tokenizers(error):
            raise
        found = f"the {what} that begins {beginning(text)}: {shown(error)}"
        raise UserError(f"the model's tokenizer fails at {found}; is its tokenizer.json damaged?") from error
    twice = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if special and twice else ids


def check_prompts(
    tokenizer: "Tokenizer",
    examples: Iterable[dict[str, Any]],
    where: Callable[[int], str],
    max_prompt_length: int,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Refuses rows of a data set with a prompt of no tokens or too many, before anything is trained on them.

    Args:
      tokenizer: the model's.
      examples: the first rows of the data set, or all.
      where: says where a row stands, by its number (see `data.dataset.Dataset`).
      max_prompt_length: the most tokens of a prompt.
      chat_template_kwargs: variables of the chat template.

    Returns:
      The tokens of the longest prompt.

    Raises:
      UserError: naming the row, and its prompt's length and beginning or what that is refused for; or the variable that
        the template has not (see `check_template_kwargs`).
    """
    check_template_kwargs(tokenizer, chat_template_kwargs, "data.chat_template_kwargs")
    limit = max_prompt_length, "data.max_prompt_length"
    return max(
        len(_checked_ids(tokenizer, example["prompt"], where(row), *limit, chat_template_kwargs))
        for row, example in enumerate(examples)
    )


def _checked_ids(
    tokenizer: "Tokenizer",
    prompt: Prompt,
    where: str,
    max_prompt_length: int,
    option: str,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """Ids of a prompt; `option` is the name by which the caller's user sets the most that there may be."""
    try:
        check_prompt(prompt)
        ids = prompt_ids(tokenizer, prompt, chat_template_kwargs=chat_template_kwargs)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not 1 <= len(ids) <= max_prompt_length:
        raise UserError(
            f"{where}: has {len(ids)} tokens; allowed: 1 to {max_prompt_length} ({option}); the prompt begins "
            f"{beginning(prompt)}"
        )
    return ids


def encode_prompts(
    tokenizer: "Tokenizer",
    prompts: Sequence[Prompt],
    max_prompt_length: int,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of prompts (see `prompt_ids`), which are never cut.

    Args:
      tokenizer: the model's.
      prompts: N texts or lists of messages.
      max_prompt_length: P, the most tokens of a prompt.
      chat_template_kwargs: variables of the chat template, as in `tokenizer.apply_chat_template(messages, **kwargs)`;
        {"enable_thinking": False} for Qwen3 to answer without thinking.

    Returns:
      Ids [N, P] int32, padded on the right, and lengths [N] int32.

    Raises:
      UserError: what is no prompt (see `check_prompt`), has no tokens or more than P, or is refused by the tokenizer's
        chat template; by its number in the list (from 0). Or a variable that the template has not (see
        `check_template_kwargs`).
      TypeError: one text instead of a list, or variables that are no mapping.
      ValueError: max_prompt_length is no whole number from 1 on.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts are one text, {beginning(prompts)}; expected a list of prompts")
    if not is_whole(max_prompt_length) or max_prompt_length < 1:
        raise ValueError(f"max_prompt_length is {max_prompt_length!r}; allowed: a whole number of tokens, 1 or more")
    check_template_kwargs(tokenizer, chat_template_kwargs)
    pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = np.full((len(prompts), max_prompt_length), pad, np.int32)
    lengths = np.zeros(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        where = f"prompt {row} (counted from 0)"
        ids = _checked_ids(tokenizer, prompt, where, max_prompt_length, "max_prompt_length", chat_template_kwargs)
        tokens[row, : len(ids)] = ids
        lengths[row] = len(ids)
    return tokens, lengths
