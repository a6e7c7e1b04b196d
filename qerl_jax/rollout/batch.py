"""What goes into a rollout and what comes out: prompts and completions as arrays.

Dimension letters: N prompts, G completions per prompt, P prompt slots, C completion slots, B = N * G rows.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError, is_whole


class Prompts(flax.struct.PyTreeNode):
    """Prompts padded on the right: tokens [N, P] int32, lengths [N] int32 (at least 1), and each prompt's place in the
    data order [N] int32, which is its identity for the random number generator: rows of one prompt and one place are
    completed alike. Outside of jit NumPy's arrays, lists and ranges are taken too."""

    tokens: jax.Array
    lengths: jax.Array
    places: jax.Array


def is_place(number: int) -> bool:
    """Whether a whole number may be a prompt's place: an int32."""
    return -(2**31) <= number < 2**31


def of_arrays(prompts: Prompts) -> Prompts:
    """The prompts with arrays, of JAX or NumPy, in the place of lists and ranges.

    Raises:
      UserError: a part whose rows differ in length, or a place, if it is known, that is no int32.
    """
    parts = {name: _array(name, getattr(prompts, name)) for name in ("tokens", "lengths", "places")}
    if not isinstance(parts["places"], jax.core.Tracer):
        for number, place in enumerate(np.asarray(parts["places"]).ravel().tolist()):
            if is_whole(place) and not is_place(place):
                raise UserError(f"prompt {number} has the place {place}; allowed: an int32")
    return prompts.replace(**parts)


def _array(name: str, part: Any) -> Any:
    if hasattr(part, "dtype"):
        return part
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(part))
    try:
        return jnp.asarray(part) if traced else np.asarray(part)
    except (TypeError, ValueError):  # of lists in it that differ in length
        raise UserError(
            f"prompts have {name} {part!r:.60}; expected an array, with rows filled up to one length"
        ) from None


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


def join_rows(prompts: Prompts, completions: Rollout) -> tuple[jax.Array, jax.Array]:
    """Each completion right behind the end of its prompt: rows as a network reads them, for what goes over whole rows,
    such as `logits` and `per_token_logps`, or as the prompts of another turn.

    Returns:
      Tokens [B, P + C] int32, 0 behind a row's end, which is `prompts.lengths` of its prompt and its own length; and
      which of them are the completion's [B, P + C] bool. The logits of place t are those of token t + 1.

    Raises:
      UserError: prompts whose rows differ in length. ValueError: not equally many completions of each prompt.
    """
    prompts = of_arrays(prompts)
    (N, P), (B, C) = prompts.tokens.shape, completions.tokens.shape
    if N < 1 or B < 1 or B % N:
        raise ValueError(f"there are {B} completions of {N} prompts; allowed: equally many of each, prompt-major")
    prompt_BP, lengths_B = (jnp.repeat(jnp.asarray(part), B // N, axis=0) for part in (prompts.tokens, prompts.lengths))
    place_BT = jnp.arange(P + C) - lengths_B[:, None]  # in the completion
    is_completion_BT = (place_BT >= 0) & (place_BT < completions.lengths[:, None])
    behind_BT = jnp.take_along_axis(completions.tokens, jnp.clip(place_BT, 0, C - 1), axis=1)
    tokens_BT = jnp.where(place_BT < 0, jnp.pad(prompt_BP, ((0, 0), (0, C))), jnp.where(is_completion_BT, behind_BT, 0))
    return tokens_BT, is_completion_BT
