"""Slots: samples that all begin at once and decode together, each until it ends, in one while loop with no host in it.

A slot whose sample has ended computes on, and nothing of it is kept. Where more samples wait than there are slots, see
`qerl_jax.rollout.queued`.

Dimension letters: S slots, R prompts, C completion positions, D hidden size.
"""

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.models.transformer import head
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.batch import Rollout
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
    slots = Slots(
        cache=cache,
        prompt_of_S=prompt_of_S,
        keys_S=keys_S,
        limits_S=limits_S,
        live_S=jnp.ones(S, bool),
        out=Rollout(
            tokens=jnp.full((S, C), settings.pad_token_id, jnp.int32),
            lengths=jnp.zeros(S, jnp.int32),
            terminated=jnp.zeros(S, bool),
            # Arrays of their own, since slots are donated.
            logps=jnp.zeros((S, C), jnp.float32),
            truncated_logps=jnp.zeros((S, C), jnp.float32) if settings.truncated else None,
        ),
    )
    return _draw(slots, model, prompt_hidden_RD[prompt_of_S], slots.live_S, settings)


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
      group: static; G promises that slot s reads prompt s // G.
    """

    def more(state: tuple[Slots, jax.Array]) -> jax.Array:
        return (state[1] < max_steps) & (jnp.sum(state[0].live_S) > leave)

    def step(state: tuple[Slots, jax.Array]) -> tuple[Slots, jax.Array]:
        slots, steps = state
        newest_S = jnp.maximum(slots.out.lengths - 1, 0)
        fed_S = jnp.take_along_axis(slots.out.tokens, newest_S[:, None], axis=1)[:, 0]
        hidden_SD, cache = decode_step(
            model, adapter, fed_S, slots.cache, slots.prompt_of_S, newest_S, slots.live_S, norms, group
        )
        return _draw(slots.replace(cache=cache), model, hidden_SD, slots.live_S, settings), steps + 1

    slots, _ = jax.lax.while_loop(more, step, (slots, jnp.int32(0)))
    return slots


def draw(
    model: Model, hidden_SD: jax.Array, keys_S: jax.Array, places_S: jax.Array, settings: SamplingSettings
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """The tokens at `places_S` (0-based) of samples with these keys: `sample`'s three, and whether each is an EOS."""
    step_keys_S = jax.vmap(jax.random.fold_in)(keys_S, places_S)
    tokens_S, logps_S, truncated_S = sample(head(model, hidden_SD), step_keys_S, settings)
    return tokens_S, logps_S, truncated_S, jnp.isin(tokens_S, jnp.asarray(settings.eos_token_ids, jnp.int32))


def _draw(slots: Slots, model: Model, hidden_SD: jax.Array, which_S: jax.Array, settings: SamplingSettings) -> Slots:
    """Draws and records the next token of the slots in the mask `which_S`."""
    out = slots.out
    S, C = out.tokens.shape
    tokens_S, logps_S, truncated_S, eos_S = draw(model, hidden_SD, slots.keys_S, out.lengths, settings)
    ended_S = which_S & eos_S
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
