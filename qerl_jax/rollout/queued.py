"""Slots that are filled again on the device: one that is free takes the next sample of a queue by itself.

`admit` prefills prompts into a pool; `decode_queue` is one while loop over tokens with no host in it. A sample's first
token is drawn from the hidden state that its prompt left in the pool, in the same step and by the same head as the
other slots' tokens, so that starting a sample is no program of its own. What is drawn goes into a log, a row for each
step; the host puts the samples together.

Dimension letters: S slots, R rows of the prompt pool, A prompts admitted, Q places of the queue, T steps of the log, P
prompt positions, C completion positions, D hidden size.
"""

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.rollout.attention import KVCache, empty_kv
from qerl_jax.rollout.decode import decode_step, prefill
from qerl_jax.rollout.generate import sample_key
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import draw

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
    """What each step drew in each slot: the number of the sample (negative: none) and, of samples, its next token, and
    the token's log-probabilities as in `Rollout`."""

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
    """An empty pool, and slots without samples, of which only the first `used` ever take one; `key` only says of what
    kind the keys are."""
    prompts = empty_kv(model, rows, max_prompt_length)
    completions = empty_kv(model, slots, settings.max_completion_length)
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
    """Prefills prompts into rows of the pool; a row number beyond the pool is that of padding, and is dropped."""
    last_AD, layers = prefill(model, adapter, tokens_AP, lengths_A, norms)

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[rows_A].set(rows.astype(pool.dtype), mode="drop")

    cache = slots.cache.replace(
        prompt=jax.tree.map(put, slots.cache.prompt, layers),
        prompt_lengths_R=put(slots.cache.prompt_lengths_R, lengths_A),
    )
    return slots.replace(cache=cache, prompt_hidden_RD=put(slots.prompt_hidden_RD, last_AD))


def freed(slots: QueuedSlots, which_S: jax.Array) -> QueuedSlots:
    """The slots with those of the mask free, whatever was in them."""
    return slots.replace(samples_S=jnp.where(which_S, _FREE, slots.samples_S))


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
    keys_Q = jax.vmap(sample_key, (None, 0, 0))(key, queue.places_Q, queue.indices_Q)
    State = tuple[QueuedSlots, Log, jax.Array, jax.Array]

    def more(state: State) -> jax.Array:
        slots, _, steps, taken = state
        return (steps < max_steps) & ((taken < queue.count) | (jnp.sum(slots.samples_S == _FREE) < stop_at))

    def step(state: State) -> State:
        slots, log, steps, taken = state
        slots, taken = _take(slots, queue, keys_Q, taken)
        live_S, fresh_S = slots.samples_S >= 0, slots.drawn_S == 0
        hidden_SD, cache = decode_step(
            model, adapter, slots.newest_S, slots.cache, slots.prompt_of_S, jnp.maximum(slots.drawn_S - 1, 0),
            live_S & ~fresh_S, norms, None,
        )  # fmt: skip
        hidden_SD = jnp.where(fresh_S[:, None], slots.prompt_hidden_RD[slots.prompt_of_S], hidden_SD)
        tokens_S, logps_S, truncated_S, eos_S = draw(model, hidden_SD, slots.keys_S, slots.drawn_S, settings)
        drawn = Log(slots.samples_S, tokens_S, logps_S, truncated_S)
        log = jax.tree.map(lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, steps, 0), log, drawn)
        drawn_S = slots.drawn_S + live_S
        slots = slots.replace(cache=cache, drawn_S=drawn_S, newest_S=tokens_S)
        return freed(slots, live_S & (eos_S | (drawn_S >= slots.limits_S))), log, steps + 1, taken

    S = slots.samples_S.shape[0]
    numbers, logps = jnp.zeros((log_steps, S), jnp.int32), jnp.zeros((log_steps, S), jnp.float32)
    log = Log(numbers, numbers, logps, logps if settings.truncated else None)
    slots, log, steps, taken = jax.lax.while_loop(more, step, (slots, log, jnp.int32(0), jnp.int32(0)))
    return slots, log, steps, taken


def _take(slots: QueuedSlots, queue: Queue, keys_Q: jax.Array, taken: jax.Array) -> tuple[QueuedSlots, jax.Array]:
    """Puts the queue's next samples into the free slots, in the slots' order."""
    free_S = slots.samples_S == _FREE
    next_S = taken + jnp.cumsum(free_S) - 1
    takes_S = free_S & (next_S < queue.count)
    entry_S = jnp.clip(next_S, 0, queue.samples_Q.shape[0] - 1)

    def put(values_Q: jax.Array, old_S: jax.Array) -> jax.Array:
        return jnp.where(takes_S, values_Q[entry_S], old_S)

    slots = slots.replace(
        samples_S=put(queue.samples_Q, slots.samples_S),
        prompt_of_S=put(queue.prompt_of_Q, slots.prompt_of_S),
        keys_S=put(keys_Q, slots.keys_S),
        limits_S=put(queue.limits_Q, slots.limits_S),
        drawn_S=jnp.where(takes_S, 0, slots.drawn_S),
    )
    return slots, taken + jnp.sum(takes_S)
