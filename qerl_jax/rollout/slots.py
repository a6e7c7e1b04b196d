"""Slots: what decodes on the device at once, each slot at a step of its own, and the programs that change them.

`admit` prefills prompts into the pool, `fill` puts a sample into a slot and draws its first token, `decode` is one
while loop over tokens with no host in it. A slot whose sample has ended computes on, and nothing of it is kept, until
it is filled again.

Dimension letters: S slots, R rows of the prompt pool, A prompts admitted, P prompt positions, C completion positions, D
hidden size.
"""

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.models.transformer import KV, head
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.batch import Rollout
from qerl_jax.rollout.decode import decode_step, prefill
from qerl_jax.rollout.sampling import SamplingSettings, sample


class Slots(flax.struct.PyTreeNode):
    """The state of a decode batch."""

    cache: KVCache
    prompt_hidden_RD: jax.Array  # of each prompt's last token, from which first tokens are drawn
    prompt_of_S: jax.Array  # int32, the slot's row of the pool
    keys_S: jax.Array  # the samples' own PRNG keys
    limits_S: jax.Array  # int32, most tokens of the sample, at most C
    live_S: jax.Array  # bool, whether the sample goes on
    out: Rollout  # rows are slots; lengths is also the number of tokens drawn so far


def empty_slots(
    prompt_hidden_RD: jax.Array, cache: KVCache, slots: int, settings: SamplingSettings, key: jax.Array
) -> Slots:
    """Slots without samples over a pool; `key` only says what kind the keys are."""
    C = settings.max_completion_length
    return Slots(
        cache=cache,
        prompt_hidden_RD=prompt_hidden_RD,
        prompt_of_S=jnp.zeros(slots, jnp.int32),
        keys_S=jnp.broadcast_to(key, (slots,)),
        limits_S=jnp.full(slots, C, jnp.int32),
        live_S=jnp.zeros(slots, bool),
        out=Rollout(
            tokens=jnp.full((slots, C), settings.pad_token_id, jnp.int32),
            lengths=jnp.zeros(slots, jnp.int32),
            terminated=jnp.zeros(slots, bool),
            # Arrays of their own, since slots are donated.
            logps=jnp.zeros((slots, C), jnp.float32),
            truncated_logps=jnp.zeros((slots, C), jnp.float32) if settings.truncated else None,
        ),
    )


def empty_pool(model: Model, rows: int, max_prompt_length: int) -> tuple[jax.Array, tuple[KV, ...]]:
    """Zero hidden states [R, D], and zero keys and values [R, P, K, E] for each layer."""
    config, dtype = model.config, model.base.embed.dtype
    shape = (rows, max_prompt_length, config.num_key_value_heads, config.head_dim)
    layers = tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in model.base.layers)
    return jnp.zeros((rows, config.hidden_size), dtype), layers


def empty_completions(model: Model, slots: int, max_completion_length: int) -> tuple[KV, ...]:
    """Zero keys and values [S, C, K, E] for each layer."""
    config, dtype = model.config, model.base.embed.dtype
    shape = (slots, max_completion_length, config.num_key_value_heads, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in model.base.layers)


def admit(
    slots: Slots,
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    tokens_AP: jax.Array,
    lengths_A: jax.Array,
    rows_A: jax.Array,
) -> Slots:
    """Prefills prompts into rows of the pool; a row number beyond the pool is that of padding, and is dropped."""
    last_AD, layers = prefill(model, adapter, tokens_AP, lengths_A, norms)

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[rows_A].set(rows.astype(pool.dtype), mode="drop")

    cache = slots.cache.replace(
        prompt=jax.tree.map(put, slots.cache.prompt, layers),
        prompt_lengths_R=put(slots.cache.prompt_lengths_R, lengths_A),
    )
    return slots.replace(cache=cache, prompt_hidden_RD=put(slots.prompt_hidden_RD, last_AD))


def fill(
    slots: Slots,
    model: Model,
    which_S: jax.Array,
    prompt_of_S: jax.Array,
    keys_S: jax.Array,
    limits_S: jax.Array,
    settings: SamplingSettings,
) -> Slots:
    """Starts a sample in every slot of the mask `which_S`, whose prompt is in the pool, with its first token."""

    def reset(new: jax.Array | int | float | bool, old: jax.Array) -> jax.Array:
        mask = which_S.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(mask, new, old)

    out = slots.out
    slots = slots.replace(
        prompt_of_S=reset(prompt_of_S, slots.prompt_of_S),
        keys_S=reset(keys_S, slots.keys_S),
        limits_S=reset(limits_S, slots.limits_S),
        live_S=reset(True, slots.live_S),
        out=Rollout(
            tokens=reset(settings.pad_token_id, out.tokens),
            lengths=reset(0, out.lengths),
            terminated=reset(False, out.terminated),
            logps=reset(0.0, out.logps),
            truncated_logps=None if out.truncated_logps is None else reset(0.0, out.truncated_logps),
        ),
    )
    return _draw(slots, model, slots.prompt_hidden_RD[slots.prompt_of_S], which_S, settings)


def decode(
    slots: Slots,
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    max_steps: jax.Array | int,
    stop_at: jax.Array | int,
    settings: SamplingSettings,
    group: int | None = None,
) -> tuple[Slots, jax.Array]:
    """Draws tokens in all live slots until `stop_at` slots hold no live sample, but for at most `max_steps` tokens.

    Args:
      group: static; G promises that slot s reads row s // G of the pool.

    Returns:
      The slots and the number of steps made.
    """

    def more(state: tuple[Slots, jax.Array]) -> jax.Array:
        return (state[1] < max_steps) & (jnp.sum(~state[0].live_S) < stop_at)

    def step(state: tuple[Slots, jax.Array]) -> tuple[Slots, jax.Array]:
        slots, steps = state
        newest_S = jnp.maximum(slots.out.lengths - 1, 0)
        fed_S = jnp.take_along_axis(slots.out.tokens, newest_S[:, None], axis=1)[:, 0]
        hidden_SD, cache = decode_step(
            model, adapter, fed_S, slots.cache, slots.prompt_of_S, newest_S, slots.live_S, norms, group
        )
        return _draw(slots.replace(cache=cache), model, hidden_SD, slots.live_S, settings), steps + 1

    return jax.lax.while_loop(more, step, (slots, jnp.int32(0)))


def _draw(slots: Slots, model: Model, hidden_SD: jax.Array, which_S: jax.Array, settings: SamplingSettings) -> Slots:
    """Draws and records the next token of the slots in the mask `which_S`."""
    out = slots.out
    S, C = out.tokens.shape
    step_keys_S = jax.vmap(jax.random.fold_in)(slots.keys_S, out.lengths)
    tokens_S, logps_S, truncated_S = sample(head(model, hidden_SD), step_keys_S, settings)
    ended_S = which_S & jnp.isin(tokens_S, jnp.asarray(settings.eos_token_ids, jnp.int32))
    place_S = jnp.where(which_S, out.lengths, C)  # beyond the row: dropped

    def put(array_SC: jax.Array, values_S: jax.Array) -> jax.Array:
        return array_SC.at[jnp.arange(S), place_S].set(values_S, mode="drop", unique_indices=True)

    truncated_logps = out.truncated_logps
    if truncated_logps is not None and truncated_S is not None:
        truncated_logps = put(truncated_logps, truncated_S)
    lengths = out.lengths + which_S
    return slots.replace(
        live_S=slots.live_S & ~ended_S & (lengths < slots.limits_S),
        out=Rollout(
            tokens=put(out.tokens, tokens_S),
            lengths=lengths,
            terminated=out.terminated | ended_S,
            logps=put(out.logps, logps_S),
            truncated_logps=truncated_logps,
        ),
    )
