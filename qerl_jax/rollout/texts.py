"""Completions of texts, for people: from a model or a run to strings."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import run_folder
from qerl_jax.config import load_config
from qerl_jax.data.prompts import prompt_ids, prompt_text
from qerl_jax.errors import UserError
from qerl_jax.evaluation import trained_adapter
from qerl_jax.models.peft import load_adapter
from qerl_jax.rl.assembly import Policy, decode_completions, load_policy
from qerl_jax.rollout.batch import Prompts
from qerl_jax.rollout.generate import generate
from qerl_jax.rollout.sampling import SamplingSettings

_ROWS = 64  # completions decoded at once
_BUCKET = 32  # prompt slots come in multiples of this, so that few shapes are compiled
_LENGTH = 256  # tokens of a completion, if nothing else is asked for

_generate = jax.jit(generate, static_argnames=("settings", "num_generations"))


def generate_texts(
    model_or_run: str,
    prompts: list[Any],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_completion_length: int | None = None,
    adapter: str | None = None,
    seed: int = 0,
    greedy: bool = False,
) -> Iterator[list[str]]:
    """Yields the `n` completions of each prompt, in order, batch by batch; all prompts are checked before the first.

    A prompt's completions depend on the seed, its number and its text, never on the prompts around it.

    Args:
      model_or_run: a run folder (its model, format and adapter are used), or a model as `load_model` takes it, whose
        weights stay in the format they are stored in.
      prompts: texts, or lists of messages.
      max_completion_length: None is 256, or what the model's positions leave beside the longest prompt.
      adapter: a PEFT folder; for a run, instead of its own.
      greedy: take the most likely token each time; the sampling options are then ignored.

    Raises:
      UserError: a prompt that is empty or leaves no room for the completion, a model that cannot be loaded, or a run
        that has no adapter yet.
    """
    run, trained = Path(model_or_run), None
    if (run / run_folder.CONFIG).is_file():
        options = load_config(str(run / run_folder.CONFIG)).model
        policy = load_policy(options.model_name_or_path, options.weight_format, options.dtype)
        trained = trained_adapter(run, policy.model) if adapter is None else None
    else:
        policy = load_policy(model_or_run, None, "auto")
    weights = trained if adapter is None else load_adapter(adapter, policy.model)
    ids, length = _encode(policy, prompts, max_completion_length)
    settings = SamplingSettings(length, policy.eos_token_ids, policy.pad_token_id, temperature=0.0)
    if not greedy:
        settings = dataclasses.replace(settings, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    # Two rows at least: on CPU a single one takes another code path, with other rounding.
    size = max(1 if n > 1 else 2, min(_ROWS // n, len(ids)))
    for low in range(0, len(ids), size):
        rows = ids[low : low + size]
        batch = _padded(rows + rows[-1:] * (size - len(rows)), low, policy)
        completions = _generate(policy.model, weights, batch, jax.random.key(seed), settings, n)
        texts, _ = decode_completions(policy.tokenizer, completions)
        for row in range(len(rows)):
            yield texts[row * n : row * n + n]


def _encode(policy: Policy, prompts: list[Any], max_completion_length: int | None) -> tuple[list[list[int]], int]:
    """Token ids of the prompts, and the most tokens of a completion."""
    positions = policy.model.config.max_position_embeddings
    if max_completion_length is not None and max_completion_length >= positions:
        raise UserError(
            f"max_completion_length is {max_completion_length}; allowed: less than the model's {positions} positions, "
            "so that a prompt fits too"
        )
    room = positions - (max_completion_length or 1)
    ids: list[list[int]] = []
    for number, prompt in enumerate(prompts, start=1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
        text = prompt_text(policy.tokenizer, prompt)
        if not text:
            raise UserError(f"{which} is empty; expected a text")
        encoded = prompt_ids(policy.tokenizer, prompt)
        if not 1 <= len(encoded) <= room:
            raise UserError(
                f"{which} has {len(encoded)} tokens; allowed: 1 to {room} (the model has {positions} positions, and "
                f"{positions - room} are for the completion); it begins {text[:60]!r}"
            )
        ids.append(encoded)
    return ids, max_completion_length or min(_LENGTH, positions - max(map(len, ids)))


def _padded(rows: list[list[int]], first: int, policy: Policy) -> Prompts:
    longest, positions = max(map(len, rows)), policy.model.config.max_position_embeddings
    tokens = np.full((len(rows), min(positions, -(-longest // _BUCKET) * _BUCKET)), policy.pad_token_id, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    places = jnp.arange(first, first + len(rows), dtype=jnp.int32)
    return Prompts(jnp.asarray(tokens), jnp.asarray([len(ids) for ids in rows], jnp.int32), places)
