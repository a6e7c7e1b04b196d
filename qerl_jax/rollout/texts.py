"""Completions of texts, for people: from a model or a run to strings."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from qerl_jax.data.prompts import encode_prompts
from qerl_jax.models.peft import load_adapter

from qerl_jax import run_folder
from qerl_jax.config import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl.assembly import Policy, decode_completions, load_policy
from qerl_jax.rollout.generate import Prompts, generate
from qerl_jax.rollout.sampling import SamplingSettings

_ROWS = 64  # completions decoded at once
_BUCKET = 32  # prompt slots come in multiples of this, so that few shapes are compiled


def generate_texts(
    model_or_run: str,
    prompts: list[Any],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_completion_length: int = 256,
    adapter: str | None = None,
    seed: int = 0,
    greedy: bool = False,
) -> Iterator[list[str]]:
    """Yields the `n` completions of each prompt, in order.

    Args:
      model_or_run: a run folder (its model, format and adapter are used), or a model as `load_model` takes it, whose
        weights stay in the format they are stored in.
      prompts: texts, or lists of messages.
      adapter: a PEFT folder; for a run, instead of its own.
      greedy: take the most likely token each time; the sampling options are then ignored.

    Raises:
      UserError: a prompt that is empty or leaves no room for the completion, or a model that cannot be loaded.
    """
    run = Path(model_or_run)
    if (run / run_folder.CONFIG).is_file():
        options = load_config(str(run / run_folder.CONFIG)).model
        policy = load_policy(options.model_name_or_path, options.weight_format, options.dtype)
        adapter = adapter or str(run / run_folder.ADAPTER)
    else:
        policy = load_policy(model_or_run, None, "auto")
    weights = None if adapter is None else load_adapter(adapter, policy.model)
    room = policy.model.config.max_position_embeddings - max_completion_length
    if room < 1:
        raise UserError(
            f"max_completion_length is {max_completion_length}; allowed: less than the model's "
            f"{policy.model.config.max_position_embeddings} positions, so that a prompt fits too"
        )
    settings = SamplingSettings(max_completion_length, policy.eos_token_ids, policy.pad_token_id, temperature=0.0)
    if not greedy:
        settings = dataclasses.replace(settings, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    run_batch = jax.jit(functools.partial(generate, settings=settings, num_generations=n))
    size = max(1, _ROWS // n)
    for low in range(0, len(prompts), size):
        batch = _encode(policy, prompts[low : low + size], room, low)
        texts, _ = decode_completions(policy.tokenizer, run_batch(policy.model, weights, batch, jax.random.key(seed)))
        for row in range(0, len(texts), n):
            yield texts[row : row + n]


def _encode(policy: Policy, prompts: list[Any], room: int, first: int) -> Prompts:
    tokens, lengths = encode_prompts(policy.tokenizer, prompts, room)
    slots = min(room, -(-int(lengths.max()) // _BUCKET) * _BUCKET)
    places = jnp.arange(first, first + len(prompts), dtype=jnp.int32)
    return Prompts(jnp.asarray(tokens[:, :slots]), jnp.asarray(lengths), places)
