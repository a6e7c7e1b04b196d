"""Slots that are filled again on the device: one that is free takes the next sample of a queue by itself.

`admit` prefills prompts into a pool; `decode_queue` is one while loop over tokens with no host in it. A sample's first
token is drawn from the hidden state that its prompt left in the pool, in the same step and by the same head as the
other slots' tokens, so that starting a sample is no program of its own. What is drawn goes into a log, a row for each
step; the host puts the samples together.

Dimension letters: S slots, R rows of the prompt pool, A prompts admitted, Q places of the queue, T steps of the log, P
prompt positions, C completion positions, D hidden size.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.models.transformer import KV
from qerl_jax.rollout import log
from qerl_jax.rollout.attention import KVCache, empty_kv
from qerl_jax.rollout.begun import sample_key
from qerl_jax.rollout.carried import keys_of, more_than, words_of
from qerl_jax.rollout.decode import decode_step, prefill
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import draw, token_keys

_FREE, _CLOSED = -1, -2  # in place of a sample's number: of a slot without one, and of one that never takes any


class QueuedSlots(flax.struct.PyTreeNode):
    """The pool, and what is in the slots. Arrays per slot are int32 but for the keys."""

    cache: KVCache
    prompt_hidden_RD: jax.Array  # of each prompt's last token, from which first tokens are drawn
    samples_S: jax.Array  # the number of the sample in the slot, _FREE or _CLOSED
    prompt_of_S: jax.Array  # its prompt's row of the pool
    keys_S: jax.Array  # its own PRNG key
    limits_S: jax.Array  # its most tokens, at most C
    drawn_S: jax.Array  # how many it has so far
    newest_S: jax.Array  # the last of them


class Queue(flax.struct.PyTreeNode):
    """Samples whose prompts are in the pool, int32, in the order in which they start; entries from `count` on are of no
    meaning."""

    samples_Q: jax.Array  # their numbers, 0 or more
    prompt_of_Q: jax.Array  # rows of the pool
    places_Q: jax.Array  # the prompts' places in the data order, and
    indices_Q: jax.Array  # the samples' in their group, of which their keys are made
    limits_Q: jax.Array  # most tokens, 1 to C
    count: jax.Array


class Log(flax.struct.PyTreeNode):
    """What each step drew in each slot: the number of the sample (negative: none), and if there is one its next token
    and that token's log-probabilities as in `Rollout`."""

    samples_TS: jax.Array
    tokens_TS: jax.Array
    logps_TS: jax.Array
    truncated_logps_TS: jax.Array | None


def empty_slots(
    model: Model,
    settings: SamplingSettings,
    key: jax.Array,
    *,
    rows: int,
    max_prompt_length: int,
    slots: int,
    used: int,
) -> QueuedSlots:
    """An empty pool, and slots without samples, of which only the first `used` ever take one. `key` only shows of what
    kind the samples' keys will be."""
    prompts = empty_kv(model, rows, max_prompt_length, settings.kv_cache_dtype)
    completions = empty_kv(model, slots, settings.max_completion_length, settings.kv_cache_dtype)
    # Arrays of their own, since slots are donated.
    prompt_of_S, limits_S, drawn_S, newest_S = (jnp.zeros(slots, jnp.int32) for _ in range(4))
    return QueuedSlots(
        cache=KVCache(prompts, completions, jnp.ones(rows, jnp.int32)),
        prompt_hidden_RD=jnp.zeros((rows, model.config.hidden_size), model.base.embed.dtype),
        samples_S=jnp.full(slots, _CLOSED, jnp.int32).at[:used].set(_FREE),
        prompt_of_S=prompt_of_S,
        keys_S=jnp.broadcast_to(key, (slots,)),
        limits_S=limits_S,
        drawn_S=drawn_S,
        newest_S=newest_S,
    )


def admit(
    slots: QueuedSlots,
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    tokens_AP: jax.Array,
    lengths_A: jax.Array,
    rows_A: jax.Array,
) -> QueuedSlots:
    """Prefills prompts into rows of the pool, all different; padding has row numbers beyond the pool and is dropped."""
    pool = slots.prompt_hidden_RD, slots.cache.prompt
    hidden_RD, layers = prefill(model, adapter, tokens_AP, lengths_A, norms, pool, rows_A)
    lengths_R = slots.cache.prompt_lengths_R.at[rows_A].set(lengths_A, mode="drop")
    cache = slots.cache.replace(prompt=layers, prompt_lengths_R=lengths_R)
    return slots.replace(cache=cache, prompt_hidden_RD=hidden_RD)


def freed(slots: QueuedSlots, which_S: jax.Array) -> QueuedSlots:
    """The slots with those of the mask free, whatever was in them."""
    return slots.replace(samples_S=jnp.where(which_S, _FREE, slots.samples_S))


class _Held(NamedTuple):
    """Samples, in slots or as the queue has them."""

    samples_S: jax.Array
    prompt_of_S: jax.Array
    prompt_lengths_S: jax.Array
    limits_S: jax.Array
    words: tuple[jax.Array, ...]  # `words_of` their keys


class _Loop(NamedTuple):
    """What a step leaves to the next one; counts are the same in all slots."""

    completion: tuple[KV, ...]  # the cache's
    log_TKS: jax.Array
    left_S: jax.Array  # what has not ended in the slots, before those that are free take a sample
    held: _Held  # and after that
    first_S: jax.Array  # the step that draws the sample's first token, negative if it was in an earlier loop
    newest_S: jax.Array
    places_S: jax.Array  # the newest token's place in the completion, -1 where there is none
    words: tuple[jax.Array, ...]  # `token_keys` of the next tokens
    steps_S: jax.Array  # how many steps there were
    taken_before_S: jax.Array  # how many samples of the queue had been taken with `left_S`,
    taken_S: jax.Array  # and how many with `held`


def decode_queue(
    slots: QueuedSlots,
    queue: Queue,
    key: jax.Array,
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    max_steps: jax.Array | int,
    stop_at: jax.Array | int,
    settings: SamplingSettings,
    log_steps: int,
) -> tuple[QueuedSlots, Log, jax.Array, jax.Array]:
    """Draws tokens for at most `max_steps` steps, or until the queue is empty and `stop_at` slots are free.

    Args:
      key: of which, with place and index, the samples' keys are made (see `sample_key`).
      max_steps: at most `log_steps`.
      stop_at: 1 or more, at most as many as there are slots in use.
      log_steps: T, static.

    Returns:
      The slots, the log, the number of steps made, and how many samples of the queue have been taken.
    """
    S = slots.samples_S.shape[0]
    keys_Q = jax.vmap(sample_key, (None, 0, 0))(key, queue.places_Q, queue.indices_Q)
    lengths_R = slots.cache.prompt_lengths_R
    waiting = _Held(queue.samples_Q, queue.prompt_of_Q, lengths_R[queue.prompt_of_Q], queue.limits_Q, words_of(keys_Q))

    def filled(loop: _Loop) -> _Loop:
        """With the queue's next samples in the free slots, in the slots' order, and what is then to be done."""
        free_S = loop.left_S == _FREE
        free_so_far_S = jnp.cumsum(free_S, dtype=jnp.int32)
        next_S = loop.taken_before_S + free_so_far_S - 1
        takes_S = free_S & (next_S < queue.count)
        entry_S = jnp.clip(next_S, 0, queue.samples_Q.shape[0] - 1)
        old = loop.held._replace(samples_S=loop.left_S)
        held = jax.tree.map(lambda new_Q, old_S: jnp.where(takes_S, new_Q[entry_S], old_S), waiting, old)
        first_S = jnp.where(takes_S, loop.steps_S, loop.first_S)
        drawn_S = loop.steps_S - first_S
        return loop._replace(
            held=held,
            first_S=first_S,
            places_S=jnp.where(held.samples_S >= 0, drawn_S - 1, -1),
            words=token_keys(keys_of(held.words, slots.keys_S), drawn_S),
            taken_S=jnp.minimum(loop.taken_before_S + free_so_far_S[-1], queue.count),
        )

    def more(loop: _Loop) -> jax.Array:
        at_work = jnp.where(loop.taken_before_S[0] < queue.count, -1, S - stop_at)
        return more_than(jnp.where(loop.steps_S[0] < max_steps, at_work, S), loop.left_S != _FREE)

    def step(loop: _Loop) -> _Loop:
        held, drawn_S = loop.held, loop.steps_S - loop.first_S
        hidden_SD, cache = decode_step(
            model, adapter, loop.newest_S, slots.cache.replace(completion=loop.completion), held.prompt_of_S,
            held.prompt_lengths_S, loop.places_S, norms, None,
        )  # fmt: skip
        hidden_SD = jnp.where((drawn_S == 0)[:, None], slots.prompt_hidden_RD[held.prompt_of_S], hidden_SD)
        tokens_S, *logps, eos_S = draw(model, hidden_SD, keys_of(loop.words, slots.keys_S), settings)
        kinds = held.samples_S, tokens_S, *jax.tree.leaves(logps)
        ended_S = (held.samples_S >= 0) & (eos_S | (drawn_S + 1 >= held.limits_S))
        return filled(
            loop._replace(
                completion=cache.completion,
                log_TKS=log.recorded(loop.log_TKS, loop.steps_S[0], *kinds),
                left_S=jnp.where(ended_S, _FREE, held.samples_S),
                newest_S=tokens_S,
                steps_S=loop.steps_S + 1,
                taken_before_S=loop.taken_S,
            )
        )

    dtypes = [jnp.int32, jnp.int32, jnp.float32, *([jnp.float32] if settings.truncated else [])]
    none_S = jnp.zeros(S, jnp.int32)
    inside = _Held(
        slots.samples_S, slots.prompt_of_S, lengths_R[slots.prompt_of_S], slots.limits_S, words_of(slots.keys_S)
    )
    begin = _Loop(
        completion=slots.cache.completion,
        log_TKS=log.empty(log_steps, len(dtypes), S),
        left_S=slots.samples_S,
        held=inside,
        first_S=-slots.drawn_S,
        newest_S=slots.newest_S,
        places_S=none_S,
        words=inside.words,
        steps_S=none_S,
        taken_before_S=none_S,
        taken_S=none_S,
    )
    end = jax.lax.while_loop(more, step, filled(begin))
    # What the last step has put into slots for another one stays in the queue.
    slots = slots.replace(
        cache=slots.cache.replace(completion=end.completion),
        samples_S=end.left_S,
        prompt_of_S=end.held.prompt_of_S,
        keys_S=keys_of(end.held.words, slots.keys_S),
        limits_S=end.held.limits_S,
        drawn_S=end.steps_S - end.first_S,
        newest_S=end.newest_S,
    )
    samples_TS, tokens_TS, logps_TS, *truncated = log.read(end.log_TKS, dtypes)
    drawn = Log(samples_TS, tokens_TS, logps_TS, truncated[0] if truncated else None)
    return slots, drawn, end.steps_S[0], end.taken_before_S[0]
