"""Slots: samples that all begin at once and decode together, each until it ends, in one while loop with no host in it.

A slot whose sample has ended computes on, and nothing of it is kept. Where more samples wait than there are slots, see
`qerl_jax.rollout.queued`.

What the loop carries from step to step is in the form that `qerl_jax.rollout.carried` explains.

Dimension letters: S slots, R prompts, C completion positions, D hidden size.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.models.transformer import KV, head
from qerl_jax.rollout import log
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.batch import Rollout
from qerl_jax.rollout.carried import keys_of, more_than, words_of
from qerl_jax.rollout.decode import decode_step
from qerl_jax.rollout.sampling import SamplingSettings, sample


class Slots(flax.struct.PyTreeNode):
    """The state of a decode batch."""

    cache: KVCache
    prompt_of_S: jax.Array  # int32, the slot's row of the cache's prompts
    keys_S: jax.Array  # the samples' own PRNG keys
    limits_S: jax.Array  # int32, most tokens of the sample, at most C
    live_S: jax.Array  # bool, whether the sample goes on
    out: Rollout  # rows are slots; lengths is also the number of tokens drawn so far


class _Loop(NamedTuple):
    """What a step leaves to the next one."""

    completion: tuple[KV, ...]  # the cache's
    log_TKS: jax.Array  # tokens and log-probabilities of each step
    newest_S: jax.Array  # int32, the last tokens
    drawn_S: jax.Array  # int32, how many tokens a sample has if it goes on
    places_S: jax.Array  # int32, the newest token's place in the completion, -1 where the sample has ended
    lengths_S: jax.Array  # int32, how many tokens there are
    words: tuple[jax.Array, ...]  # `token_keys` of the next tokens
    terminated_S: jax.Array  # bool


def started(
    model: Model,
    prompt_hidden_RD: jax.Array,
    cache: KVCache,
    prompt_of_S: jax.Array,
    keys_S: jax.Array,
    limits_S: jax.Array,
    settings: SamplingSettings,
) -> Slots:
    """A sample in every slot with its first token, drawn from the hidden state of its prompt's last one."""
    S, C = prompt_of_S.shape[0], settings.max_completion_length
    first_keys_S = jax.vmap(jax.random.fold_in)(keys_S, jnp.zeros(S, jnp.int32))
    tokens_S, logps_S, truncated_S, eos_S = draw(model, prompt_hidden_RD[prompt_of_S], first_keys_S, settings)

    def first(values_S: jax.Array, fill: int) -> jax.Array:
        return jnp.full((S, C), fill, values_S.dtype).at[:, 0].set(values_S)

    return Slots(
        cache=cache,
        prompt_of_S=prompt_of_S,
        keys_S=keys_S,
        limits_S=limits_S,
        live_S=~eos_S & (limits_S > 1),
        out=Rollout(
            tokens=first(tokens_S, settings.pad_token_id),
            lengths=jnp.ones(S, jnp.int32),
            terminated=eos_S,
            logps=first(logps_S, 0),
            truncated_logps=None if truncated_S is None else first(truncated_S, 0),
        ),
    )


def decode(
    slots: Slots,
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    max_steps: jax.Array | int,
    leave: jax.Array | int,
    settings: SamplingSettings,
    group: int | None = None,
) -> Slots:
    """Draws tokens in all live slots until at most `leave` are live, but at most `max_steps` in each.

    Args:
      leave: 0 or more.
      group: static; G promises that slot s reads prompt s // G.
    """
    before = slots.out
    S, C = before.tokens.shape
    prompt_lengths_S = slots.cache.prompt_lengths_R[slots.prompt_of_S]

    def more(loop: _Loop) -> jax.Array:
        goes_on = loop.drawn_S[0] - before.lengths[0] < max_steps
        return more_than(jnp.where(goes_on, leave, S), loop.places_S >= 0)

    def step(loop: _Loop) -> _Loop:
        hidden_SD, cache = decode_step(
            model, adapter, loop.newest_S, slots.cache.replace(completion=loop.completion), slots.prompt_of_S,
            prompt_lengths_S, loop.places_S, norms, group,
        )  # fmt: skip
        tokens_S, *logps, eos_S = draw(model, hidden_SD, keys_of(loop.words, slots.keys_S), settings)
        live_S = loop.places_S >= 0
        drawn_S = loop.drawn_S + 1
        return _Loop(
            completion=cache.completion,
            log_TKS=log.recorded(loop.log_TKS, loop.drawn_S[0] - before.lengths[0], tokens_S, *jax.tree.leaves(logps)),
            newest_S=tokens_S,
            drawn_S=drawn_S,
            places_S=jnp.where(live_S & ~eos_S & (drawn_S < slots.limits_S), drawn_S - 1, -1),
            lengths_S=jnp.where(live_S, drawn_S, loop.lengths_S),
            words=token_keys(slots.keys_S, drawn_S),
            terminated_S=loop.terminated_S | (live_S & eos_S),
        )

    kinds = [kind for kind in (before.tokens, before.logps, before.truncated_logps) if kind is not None]
    newest_S = jnp.take_along_axis(before.tokens, before.lengths[:, None] - 1, axis=1)[:, 0]
    begin = _Loop(
        completion=slots.cache.completion,
        log_TKS=log.empty(C, len(kinds), S),
        newest_S=newest_S,
        drawn_S=before.lengths,
        places_S=jnp.where(slots.live_S, before.lengths - 1, -1),
        lengths_S=before.lengths,
        words=token_keys(slots.keys_S, before.lengths),
        terminated_S=before.terminated,
    )
    end = jax.lax.while_loop(more, step, begin)
    step_SC = jnp.arange(C) - before.lengths[:, None]  # which step drew the token at a place
    new_SC = (step_SC >= 0) & (jnp.arange(C) < end.lengths_S[:, None])
    merged = [
        jnp.where(new_SC, jnp.take_along_axis(rows_TS.T, jnp.maximum(step_SC, 0), axis=1), old_SC)
        for old_SC, rows_TS in zip(kinds, log.read(end.log_TKS, [kind.dtype for kind in kinds]), strict=True)
    ]
    tokens, logps, *truncated = merged
    return slots.replace(
        cache=slots.cache.replace(completion=end.completion),
        live_S=end.places_S >= 0,
        out=Rollout(tokens, end.lengths_S, end.terminated_S, logps, truncated[0] if truncated else None),
    )


def token_keys(keys_S: jax.Array, places_S: jax.Array) -> tuple[jax.Array, ...]:
    """The `words_of` the keys of the tokens at `places_S` (0-based) of samples with these keys."""
    return words_of(jax.vmap(jax.random.fold_in)(keys_S, places_S))


def draw(
    model: Model, hidden_SD: jax.Array, token_keys_S: jax.Array, settings: SamplingSettings
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Tokens, each from a key of its own: `sample`'s three, and whether each is an EOS."""
    tokens_S, logps_S, truncated_S = sample(head(model, hidden_SD), token_keys_S, settings)
    return tokens_S, logps_S, truncated_S, jnp.isin(tokens_S, jnp.asarray(settings.eos_token_ids, jnp.int32))
