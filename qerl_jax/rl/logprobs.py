"""Log-probabilities of sampled completions under the learner: one forward pass over prompts and completions.

Dimension letters: N rows, P prompt slots, C completion slots, L token slots of the pack that the rows make, M tokens, D
hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.models.packed_rows import frames_of, in_a_row, moved, packed_rows
from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.models.transformer import checked_tokens, forward, head

_MULTIPLE = 16  # of the longest row, so that packs have as many slots as products of 16-bit numbers are fast with
# About so many float32 logits are held at a time (256 MB); a whole batch's would not fit at 152k tokens. With chunks of
# whole tiles a token takes 5% less of an H200's time than with 441.
_LOGITS_BUDGET, _TILE = 2**26, 128
# Of what the output matrix is multiplied by backward, most of which is probabilities: 1e-6 is subnormal in float16.
_SLOPES_SCALE = 2.0**4


def token_logps(
    model: Model,
    hidden_MD: jax.Array,
    targets_M: jax.Array,
    temperature: jax.Array | float,
    wanted: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log_softmax(logits / temperature)[target] and the entropy of that distribution, float32 [M]; only the former have
    a gradient, with respect to `hidden_MD` and the temperature.

    The vocabulary's logits exist for one chunk of tokens at a time, in the forward pass alone; where there are several
    chunks, those behind the first `wanted` tokens are left out, and zeros.
    """
    M = targets_M.shape[0]
    rows = _LOGITS_BUDGET // model.config.vocab_size
    rows = max(1, min(M, rows if rows < _TILE else -(-rows // _TILE) * _TILE))
    padding = max(1, -(-M // rows)) * rows - M
    hidden = jnp.pad(hidden_MD, ((0, padding), (0, 0))).reshape(-1, rows, hidden_MD.shape[1])
    targets = jnp.pad(targets_M, (0, padding)).reshape(-1, rows)
    used = -(-jnp.int32(M if wanted is None else wanted) // rows)
    logps, entropies = _of_chunks(model, jnp.asarray(temperature, jnp.float32), hidden, targets, used)
    return logps.reshape(-1)[:M], entropies.reshape(-1)[:M]


@jax.custom_vjp
def _of_chunks(
    model: Model, temperature: jax.Array, hidden: jax.Array, targets: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of the first `used` chunks.

    A token's gradient is a vector times that of its log-probability. The vector is made with the log-probability, while
    there are logits: they are neither kept nor made again.
    """
    logps, entropies = _for_each(functools.partial(_of_chunk, False, model, temperature), hidden, targets, used)
    return logps, entropies


def _of_chunks_forward(
    model: Model, temperature: jax.Array, hidden: jax.Array, targets: jax.Array, used: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    found = _for_each(functools.partial(_of_chunk, True, model, temperature), hidden, targets, used)
    logps, entropies, slopes = found
    return (logps, entropies), (slopes, temperature, logps + entropies)


def _of_chunks_backward(kept: tuple[Any, ...], gradients: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    (slopes, temperature, above_mean), (dlogps, _) = kept, gradients
    dhidden = slopes * (dlogps / (_SLOPES_SCALE * temperature))[..., None]
    # d logp / d temperature = (mean of the scores - the target's score) / temperature
    dtemperature = -jnp.sum(dlogps * above_mean) / temperature
    return None, dtemperature, dhidden.astype(slopes.dtype), None, None


_of_chunks.defvjp(_of_chunks_forward, _of_chunks_backward)


def _of_chunk(
    with_slopes: bool, model: Model, temperature: jax.Array, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, ...]:
    """A chunk's log-probabilities and entropies, and `with_slopes` the former's gradients [M, D], each token's own, in
    units of 1 / (_SLOPES_SCALE temperature)."""
    logits, back = jax.vjp(functools.partial(head, model), hidden)
    scores = logits / temperature
    below = scores - jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(below)
    sums = weights.sum(-1)
    log_sums = jnp.log(sums)  # of what is below the largest: logits may be far larger than their differences
    target = jnp.take_along_axis(below, targets[:, None], axis=-1)[:, 0]
    found = target - log_sums, log_sums - (weights * below).sum(-1) / sums
    if not with_slopes:
        return found
    is_target = jnp.arange(scores.shape[-1]) == targets[:, None]
    return *found, *back(_SLOPES_SCALE * (is_target.astype(weights.dtype) - weights / sums[:, None]))


def _for_each(
    of_chunk: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
    hidden: jax.Array,
    targets: jax.Array,
    used: jax.Array,
) -> tuple[jax.Array, ...]:
    """What the first `used` chunks give, and zeros behind them; a lone chunk takes no loop."""
    if targets.shape[0] == 1:
        return tuple(x[None] for x in of_chunk(hidden[0], targets[0]))

    def one(i: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(kept.at[i].set(x) for kept, x in zip(found, of_chunk(hidden[i], targets[i]), strict=True))

    kinds = jax.eval_shape(of_chunk, hidden[0], targets[0])
    zeros = tuple(jnp.zeros((targets.shape[0], *kind.shape), kind.dtype) for kind in kinds)
    every: tuple[jax.Array, ...] = jax.lax.fori_loop(0, used, one, zeros)
    return every


def per_token_logps(
    model: Model,
    tokens_BT: jax.Array,
    *,
    adapter: Adapter | None = None,
    norms: Norms | None = None,
    attention_mask: jax.Array | None = None,
    temperature: jax.Array | float = 1.0,
    gradient_checkpointing: bool = False,
) -> jax.Array:
    """The log-probability of every token but the first, each given those before it, float32 [B, T - 1].

    Differentiable as `logits` is, once. The logits exist for one chunk of tokens at a time, in the forward pass alone.

    Args:
      model, tokens_BT, adapter, norms, attention_mask: as `logits` takes them; two tokens at least. What stands where
        a token or the one before it is padding has no meaning.
      temperature: above 0, that logits are divided by.
      gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.

    Raises:
      TypeError, ValueError: as `logits` does; for one token, which none precedes; and for a temperature of 0 or below.
    """
    if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
        raise ValueError(f"temperature is {temperature}; allowed: a number above 0")
    tokens_BT, mask_BT = checked_tokens(model, tokens_BT, adapter, norms, attention_mask)
    B, T = tokens_BT.shape
    if T < 2:
        raise ValueError("tokens are of one place; the first token, which none precedes, has no log-probability")
    hidden_BTD, _ = forward(
        model,
        adapter,
        tokens_BT,
        norms=norms,
        attention_mask_BT=mask_BT,
        gradient_checkpointing=gradient_checkpointing,
    )
    before = hidden_BTD[:, :-1].reshape(B * (T - 1), -1)
    return token_logps(model, before, tokens_BT[:, 1:].reshape(-1), temperature)[0].reshape(B, T - 1)


def longest_row(prompt_slots: int, completion_slots: int) -> int:
    """The token slots that packs have for the longest prompt and completion together."""
    return -(-(prompt_slots + completion_slots) // _MULTIPLE) * _MULTIPLE


def completion_logps(
    model: Model,
    adapter: Adapter | None,
    prompt_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    completion_NC: jax.Array,
    completion_lengths_N: jax.Array,
    temperature: float,
    gradient_checkpointing: bool = False,
    size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probability and entropy at every completion slot, float32 [N, C].

    The rows go through the network as one pack.

    Args:
      model, adapter: the policy.
      prompt_NP, completion_NC: int32, padded on the right.
      prompt_lengths_N, completion_lengths_N: 1 or more, and 0 or more; both 0 where there is no row, at the end only.
      temperature: that logits are divided by.
      gradient_checkpointing: see `forward`.
      size: the pack has room for so many rows of the greatest length, and the rows must fit into it by the rules of
        `packs_of`; None is N.

    Returns:
      Both [N, C]; 0 past a completion's end, as the sampler records it, so that a loss which looks there finds the same
      however the batch is cut.
    """
    (N, P), C = prompt_NP.shape, completion_NC.shape[1]
    longest = longest_row(P, C)
    slots = (N if size is None else size) * longest
    pack = packed_rows(prompt_lengths_N + completion_lengths_N, slots, frames_of(N, slots, longest))
    row_L, place_L, starts_N = pack.row_L, pack.place_L, pack.starts_N
    of_completion_L = place_L - prompt_lengths_N[row_L]  # the token's place in the completion
    tokens_L = jnp.where(
        of_completion_L < 0,
        prompt_NP[row_L, jnp.minimum(place_L, P - 1)],
        completion_NC[row_L, jnp.clip(of_completion_L, 0, C - 1)],
    )
    hidden_1LD, _ = forward(model, adapter, tokens_L[None], pack=pack, gradient_checkpointing=gradient_checkpointing)

    # The completions' tokens alone, one behind the other, M slots; each is predicted by the token before it.
    M = min(slots, N * C)
    row_M, place_M, real_M, first_N = in_a_row(completion_lengths_N, M)
    before_M = jnp.clip(starts_N[row_M] + prompt_lengths_N[row_M] - 1 + place_M, 0, slots - 1)
    next_L = of_completion_L + 1
    tells_L = pack.live_L & (next_L >= 0) & (next_L < completion_lengths_N[row_L])
    hidden_MD = moved(hidden_1LD[0], before_M, jnp.where(tells_L, first_N[row_L] + next_L, -1))
    wanted = jnp.sum(completion_lengths_N)
    found = token_logps(model, hidden_MD, completion_NC[row_M, place_M], temperature, wanted)

    slot_NC = jnp.clip(first_N[:, None] + jnp.arange(C, dtype=jnp.int32), 0, M - 1)
    slot_back_M = jnp.where(real_M, row_M * C + place_M, -1)
    real_NC = jnp.arange(C) < completion_lengths_N[:, None]
    logps_NC, entropies_NC = (jnp.where(real_NC, moved(x_M, slot_NC, slot_back_M), 0) for x_M in found)
    return logps_NC, entropies_NC
