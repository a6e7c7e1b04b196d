"""Log-probabilities of sampled completions under the learner: one forward pass over prompt + completion.

Dimension letters: B rows, P prompt slots, C completion slots, T token slots (P + C, or fewer), S completion slots that
are computed, D hidden size, V vocabulary, M tokens.
"""

import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model
from qerl_jax.models.transformer import forward, head

_LOGITS_BUDGET = 2**26  # float32 logits held at a time (256 MB); a whole batch's would not fit at 152k tokens


def joined_rows(
    prompt_BP: jax.Array, prompt_lengths_B: jax.Array, completion_BC: jax.Array, completion_lengths_B: jax.Array
) -> jax.Array:
    """[B, P + C] rows of prompt and completion, filled up with the last token: contiguous, padded on the right only.

    What fills a row up has no weight in its attention, but 0 times what has overflowed is NaN, and another token might
    overflow in float16 where none of the row's own does.
    """
    P, C = prompt_BP.shape[1], completion_BC.shape[1]
    t_BT = jnp.arange(P + C)[None, :]
    place_BT = t_BT - prompt_lengths_B[:, None]
    prompt_BT = jnp.take_along_axis(prompt_BP, jnp.minimum(t_BT, P - 1), axis=1)
    last_B1 = jnp.maximum(completion_lengths_B, 1)[:, None] - 1
    completion_BT = jnp.take_along_axis(completion_BC, jnp.clip(place_BT, 0, last_B1), axis=1)
    return jnp.where(place_BT < 0, prompt_BT, completion_BT)


def token_logps(
    model: Model, hidden_MD: jax.Array, targets_M: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """log_softmax(logits / temperature)[target] and the entropy of that distribution (no gradient), float32 [M].

    The vocabulary's logits exist for one chunk of tokens at a time, in the backward pass too.
    """

    def chunk(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets = args
        logs = jax.nn.log_softmax(head(model, hidden) / temperature, axis=-1)
        detached = jax.lax.stop_gradient(logs)
        return jnp.take_along_axis(logs, targets[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(detached) * detached, -1)

    M, D = hidden_MD.shape
    rows = max(1, _LOGITS_BUDGET // model.config.vocab_size)
    if rows >= M:
        return chunk((hidden_MD, targets_M))
    chunks = -(-M // rows)
    padding = chunks * rows - M
    hidden = jnp.pad(hidden_MD, ((0, padding), (0, 0))).reshape(chunks, rows, D)
    targets = jnp.pad(targets_M, (0, padding)).reshape(chunks, rows)
    logps, entropies = jax.lax.map(jax.checkpoint(chunk), (hidden, targets))
    return logps.reshape(-1)[:M], entropies.reshape(-1)[:M]


def completion_logps(
    model: Model,
    adapter: Adapter | None,
    prompt_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    completion_BC: jax.Array,
    completion_lengths_B: jax.Array,
    temperature: float,
    gradient_checkpointing: bool = False,
    width: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probability and entropy at every completion slot, float32 [B, C]; slots past the end hold
    values of no meaning, to be masked by length. No row is longer than `width`, the token slots that are computed;
    None is P + C."""
    P, C = prompt_BP.shape[1], completion_BC.shape[1]
    T = P + C if width is None else width
    slots = min(C, T)  # S
    tokens_BT = joined_rows(prompt_BP, prompt_lengths_B, completion_BC, completion_lengths_B)[:, :T]
    hidden_BTD, _ = forward(model, adapter, tokens_BT, gradient_checkpointing=gradient_checkpointing)
    before_BS = jnp.minimum(prompt_lengths_B[:, None] - 1 + jnp.arange(slots), T - 1)
    hidden_BSD = jnp.take_along_axis(hidden_BTD, before_BS[:, :, None], axis=1)
    targets_M = completion_BC[:, :slots].reshape(-1)
    found = token_logps(model, hidden_BSD.reshape(-1, hidden_BSD.shape[-1]), targets_M, temperature)
    logps_BC, entropies_BC = (jnp.pad(x_M.reshape(-1, slots), ((0, 0), (0, C - slots))) for x_M in found)
    return logps_BC, entropies_BC
