"""Completions of texts, for people: from a model or a run to strings."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax.compiled import compiled_together
from qerl_jax.data.prompts import (
    KWARGS_OPTION,
    check_prompt,
    check_template_kwargs,
    prompt_ids,
    prompt_text,
    refuse_idle_kwargs,
)
from qerl_jax.errors import UserError, is_whole
from qerl_jax.models.loading import model_shapes
from qerl_jax.models.peft import load_adapter
from qerl_jax.policy import NOT_A_NUMBER, Policy, load_policy
from qerl_jax.quantization.adapters import warn_of_other_format, warn_of_scaled_base
from qerl_jax.rollout.engine import Engine
from qerl_jax.rollout.requests import Completion, Request
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.stop_strings import GrowingText, cut_at_stop, tokens_until_stop
from qerl_jax.run_or_model import find_source

_BUCKET = 32  # prompt positions come in multiples of this, so that few shapes are compiled
_LENGTH = 256  # tokens of a completion, if nothing else is asked for
_MAX_SLOTS = 64  # completions decoded at once
_STREAM, _LOOK = 4, 32  # steps between two pieces shown, and between two looks for stop strings


@dataclasses.dataclass(frozen=True)
class Answer:
    """A completion of a prompt as text, or why there is none.

    Attributes:
      prompt, sample: the number of the prompt, and of the completion (0-based).
      text: without special tokens, and up to a stop string.
      ids, logps: the fewest tokens that spell the text (all of them, the EOS included, where it ended by itself), and
        their log-probabilities.
      finish_reason: "eos", "length", "stop" or "error"; None for what there is of a text while it grows.
      error: why the prompt was refused, or why its completion is none.
    """

    prompt: int
    sample: int
    text: str
    ids: list[int]
    logps: np.ndarray
    finish_reason: str | None
    error: str | None = None


def generate_texts(
    model_or_run: str,
    prompts: Sequence[Any],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_completion_length: int | None = None,
    adapter: str | None = None,
    weight_format: str | None = None,
    seed: int = 0,
    greedy: bool = False,
    stop: Sequence[str] = (),
    stream: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Answer]:
    """Yields the `n` completions of each prompt as they end; first the prompts that are refused, each alone.

    A prompt's completions depend on the seed, its number and its text, but for rounding never on the prompts around it.

    Args:
      model_or_run: a run folder (its model, format and adapter are used, the newest checkpoint's before its end), or
        a model as `load_model` takes it.
      prompts: texts, or lists of messages; or, in the place of one, the UserError with which it is refused.
      max_completion_length: None is 256, or what the model's positions leave beside the prompt.
      adapter: a PEFT folder; for a run, instead of its own. One that was trained on weights of another format is used
        with a warning.
      weight_format: of a model's linear weights, as `load_model` takes it; a run has its own.
      greedy: take the most likely token each time; the sampling options are then ignored.
      stop: texts that end a completion, found across the borders of tokens; special tokens, which a text is without,
        end it as an EOS does.
      stream: also yields texts while they grow, as far as they are sure.
      chat_template_kwargs: variables of the chat template, which messages pass; None is those of the run, for a model
        none.

    Raises:
      UserError: a folder that is neither run nor model, a model that cannot be loaded or that the adapter does not fit,
        a run that has saved nothing yet or that a format is given for, one whose model is another than it was trained
        on, or whose config says another one or another adapter, lengths that do not fit the model, a stop text that is
        empty or holds a special token beside other text, one text in the place of a list, variables that the chat
        template has not or that no prompt passes it with, or `n` that is no whole number from 1 on.
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts is the text {prompts!r:.60}; expected a list of texts, or of lists of messages")
    if isinstance(stop, str):
        raise UserError(f"stop is the text {stop!r:.60}; expected a list of texts")
    if not is_whole(n) or n < 1:
        raise UserError(f"n is {n!r}; allowed: a whole number, 1 or more")
    if "" in stop:
        raise UserError("stop holds an empty text, which would end every completion before its first token")
    kwargs_option = KWARGS_OPTION
    has_messages = any(isinstance(prompt, list) for prompt in prompts)
    refuse_idle_kwargs(chat_template_kwargs, has_messages, "no prompt is a list of messages")
    source = find_source(model_or_run, own_adapter=adapter is None)
    if source.weight_format is not None and weight_format is not None:
        raise UserError(
            f"weight_format (--weight-format) is {weight_format!r}, but {model_or_run} is a run, which keeps the one "
            f"it was trained with, {source.weight_format}; leave it out, or give a model and its adapter"
        )
    weight_format = source.weight_format or weight_format
    if adapter is None:
        weights = source.adapter()
    else:
        weights = load_adapter(adapter, model_shapes(source.model))
        warn_of_scaled_base(adapter, source.model)
        warn_of_other_format(adapter, source.model, weight_format)
    policy = load_policy(source.model, weight_format, source.dtype)
    source.refuse_another_model(policy.fingerprint)
    ends, stop = _ends(policy, stop)
    if chat_template_kwargs is None:
        chat_template_kwargs = source.chat_template_kwargs
        kwargs_option = f"data.chat_template_kwargs of {model_or_run}"
    check_template_kwargs(policy.tokenizer, chat_template_kwargs, kwargs_option)
    requests, length, errors = _encode(policy, prompts, n, max_completion_length, chat_template_kwargs)
    for number, error in errors.items():
        yield Answer(number, 0, "", [], np.zeros(0, np.float32), "error", error)
    if not requests:
        return
    settings = SamplingSettings(length, ends, policy.pad_token_id, temperature=0.0)
    if not greedy:
        settings = dataclasses.replace(settings, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    longest = max(len(request.prompt) for request in requests)
    width = min(policy.model.config.positions, -(-longest // _BUCKET) * _BUCKET)
    # One call does not save the time that compiling programs for its last samples takes.
    engine = Engine(
        policy.model, settings, max_prompt_length=width, max_slots=_MAX_SLOTS, tail_sizes=(), in_training=False
    )

    def decode(ids: Sequence[int]) -> str:
        text = policy.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    key = jax.random.key(seed)
    compiled_together(engine.lowered_requests(weights, requests, key))
    every = _STREAM if stream else _LOOK if stop else None
    completions = engine.generate(
        weights,
        requests,
        key,
        until=(lambda ids: tokens_until_stop(decode, ids, stop, every)) if stop else None,
        every=every,
    )
    broken: set[tuple[int, int]] = set()  # samples that have been answered with an error while they grow
    texts: dict[tuple[int, int], GrowingText] = {}  # of those that grow
    for done in completions:
        sample = done.request, done.sample
        if sample in broken or (done.finish_reason is None and not stream):
            continue
        answer = _answer(done, requests[done.request], decode, stop)
        if answer.finish_reason == "error":
            broken.add(sample)
        if answer.finish_reason is None:
            text = texts.setdefault(sample, GrowingText(decode, stop)).grown(answer.ids)
            answer = dataclasses.replace(answer, text=text)
        yield answer


def _ends(policy: Policy, stop: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """The ids that end a completion, with those of the special tokens in `stop`, and its other texts."""
    special = {str(token): id for id, token in policy.tokenizer.added_tokens_decoder.items() if token.special}
    texts = [text for text in stop if text not in special]
    for text in texts:
        if (token := next((token for token in special if token in text), None)) is not None:
            raise UserError(
                f"stop (--stop) is {text!r}, which no text holds, for texts are without special tokens, as {token} is; "
                f"give {token!r} alone, at which completions end as at an EOS"
            )
    ids = (special[text] for text in stop if text in special)
    return tuple(dict.fromkeys((*policy.eos_token_ids, *ids))), texts


def _answer(done: Completion, request: Request, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> Answer:
    number = request.place
    assert number is not None
    if done.error is not None:
        return Answer(number, 0, "", [], done.logps, "error", f"the prompt {done.error}")
    end = None if done.finish_reason is None else tokens_until_stop(decode, done.ids, stop)  # looks may miss one
    ids, logps = done.ids[:end], done.logps[:end]
    if not np.isfinite(logps).all():
        return Answer(number, done.sample, "", [], logps, "error", NOT_A_NUMBER)
    if done.finish_reason is None:
        return Answer(number, done.sample, "", ids, logps, None)
    text, count = cut_at_stop(decode, ids, stop)
    reason = done.finish_reason if end is None else "stop"
    return Answer(number, done.sample, text, ids[:count], logps[:count], reason)


def _encode(
    policy: Policy,
    prompts: Sequence[Any],
    n: int,
    max_completion_length: int | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> tuple[list[Request], int, dict[int, str]]:
    """The requests of the prompts that can be answered, the most tokens of any completion, and the others' errors."""
    positions = policy.model.config.positions
    if max_completion_length is not None and not 1 <= max_completion_length < positions:
        raise UserError(
            f"max_completion_length (--max-completion-length or --max-new-tokens) is {max_completion_length}; allowed: "
            f"1 or more, and less than the model's {positions} positions, so that a prompt fits too"
        )
    room = positions - (1 if max_completion_length is None else max_completion_length)
    requests: list[Request] = []
    errors: dict[int, str] = {}
    longest = 0
    for number, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, UserError):
                raise prompt
            check_prompt(prompt)
            text = prompt_text(policy.tokenizer, prompt, chat_template_kwargs=chat_template_kwargs)
            ids = prompt_ids(policy.tokenizer, prompt, chat_template_kwargs=chat_template_kwargs)
        except UserError as error:  # of messages that the chat template refuses, too
            errors[number] = str(error)
            continue
        if not 1 <= len(ids) <= room:
            errors[number] = (
                f"the prompt has {len(ids)} tokens; allowed: 1 to {room} (of the model's {positions} positions "
                f"the completion needs {positions - room}); it begins {text[:60]!r}"
            )
        else:
            limit = min(_LENGTH, positions - len(ids)) if max_completion_length is None else max_completion_length
            requests.append(Request(ids, n, number, limit))
            longest = max(longest, limit)
    return requests, longest, errors
