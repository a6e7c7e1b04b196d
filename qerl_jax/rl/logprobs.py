"""Log-probabilities of sampled completions under the learner: one forward pass over prompt + completion.

Dimension letters: B rows, P prompt slots, C completion slots, T = P + C, D hidden size, V vocabulary, M tokens.
"""

import jax
import jax.numpy as jnp

from qerl_jax.models.params import Adapter, Model
from qerl_jax.models.transformer import forward, head

_LOGITS_BUDGET = 2**26  # float32 logits held at a time (256 MB); a whole batch's would not fit at 152k tokens


def joined_rows(
    prompt_BP: jax.Array, prompt_lengths_B: jax.Array, completion_BC: jax.Array, completion_lengths_B: jax.Array
) -> jax.Array:
    """[B, P + C] rows of prompt, then completion, then zeros: contiguous, padded on the right only."""
    P, C = prompt_BP.shape[1], completion_BC.shape[1]
    t_BT = jnp.arange(P + C)[None, :]
    place_BT = t_BT - prompt_lengths_B[:, None]
    prompt_BT = jnp.take_along_axis(prompt_BP, jnp.minimum(t_BT, P - 1), axis=1)
    completion_BT = jnp.take_along_axis(completion_BC, jnp.clip(place_BT, 0, C - 1), axis=1)
    live_BT = place_BT < completion_lengths_B[:, None]
    return jnp.where(live_BT, jnp.where(place_BT < 0, prompt_BT, completion_BT), 0)


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
) -> tuple[jax.Array, jax.Array]:
    """The learner's log-probability and entropy at every completion slot, float32 [B, C]; slots past the end hold
    values of no meaning, to be masked by length."""
    P, C = prompt_BP.shape[1], completion_BC.shape[1]
    tokens_BT = joined_rows(prompt_BP, prompt_lengths_B, completion_BC, completion_lengths_B)
    hidden_BTD, _ = forward(model, adapter, tokens_BT, gradient_checkpointing=gradient_checkpointing)
    before_BC = jnp.minimum(prompt_lengths_B[:, None] - 1 + jnp.arange(C), P + C - 1)
    hidden_BCD = jnp.take_along_axis(hidden_BTD, before_BC[:, :, None], axis=1)
    logps_M, entropies_M = token_logps(
        model, hidden_BCD.reshape(-1, hidden_BCD.shape[-1]), completion_BC.reshape(-1), temperature
    )
    return logps_M.reshape(completion_BC.shape), entropies_M.reshape(completion_BC.shape)
