"""What goes into a rollout and what comes out: prompts and completions as arrays.

Dimension letters: N prompts, G completions per prompt, P prompt slots, C completion slots, B = N * G rows.
"""

import flax.struct
import jax


class Prompts(flax.struct.PyTreeNode):
    """Prompts padded on the right: tokens [N, P] int32, lengths [N] int32 (at least 1), and each prompt's place in the
    data order [N] int32, which is its identity for the random number generator."""

    tokens: jax.Array
    lengths: jax.Array
    places: jax.Array


class Rollout(flax.struct.PyTreeNode):
    """Completions of a batch, prompt-major: rows n * G .. n * G + G - 1 belong to prompt n.

    tokens [B, C] int32, padded after the end; lengths [B], the EOS included; terminated [B], whether an EOS was drawn;
    logps [B, C] float32, log_softmax(logits / temperature) over the full vocabulary, 0 after the end; truncated_logps,
    the same renormalised over the tokens that sampling allowed, None where it allowed all.
    """

    tokens: jax.Array
    lengths: jax.Array
    terminated: jax.Array
    logps: jax.Array
    truncated_logps: jax.Array | None
