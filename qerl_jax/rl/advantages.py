"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2; TRL's `scale_rewards`).

Dimension letters: N prompts, G completions per prompt, C completion slots.
"""

from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp

from qerl_jax.option_names import ScaleRewards

AdvantageFn = Callable[[jax.Array], jax.Array]

_EPSILON = 1e-4  # TRL's: keeps a group of nearly equal rewards from being blown up


def group_advantages(rewards_NG: jax.Array, scale_rewards: ScaleRewards = "group") -> jax.Array:
    """(r - group mean) / (std + 1e-4), [N, G] float32.

    Args:
      rewards_NG: rewards, up to 1e15, of N groups of G >= 2 completions; NaN, where one cannot be scored, is in no mean
        and no deviation.
      scale_rewards: divide by the group's unbiased standard deviation, by that of all N * G, or not at all (Dr. GRPO).

    Returns:
      Advantages; exactly 0 in a group whose rewards are all equal, and where the reward is NaN.

    Raises:
      ValueError: fewer than 2 completions per group, or an unknown `scale_rewards`.
    """
    rewards_NG = jnp.asarray(rewards_NG).astype(jnp.float32)
    _refuse_other_shapes("rewards", rewards_NG)
    # From the group's smallest on, which is all but exact: a mean of large rewards is rounded by more than they differ.
    above_NG = rewards_NG - jnp.nanmin(rewards_NG, 1, keepdims=True)
    centred_NG = above_NG - jnp.nanmean(above_NG, 1, keepdims=True)
    if scale_rewards == "group":
        centred_NG /= jnp.nanstd(above_NG, 1, ddof=1, keepdims=True) + _EPSILON
    elif scale_rewards == "batch":
        centred_NG /= deviation(rewards_NG) + _EPSILON
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards is {scale_rewards!r}; allowed: {', '.join(get_args(ScaleRewards))}")
    # A mean of equal numbers may be off by an ulp, and a division by 1e-4 would make a signal of it.
    signal_NG = informative_groups(rewards_NG)[:, None] & ~jnp.isnan(rewards_NG)
    return jnp.where(signal_NG, centred_NG, 0.0)


def deviation(rewards_NG: jax.Array) -> jax.Array:
    """The unbiased standard deviation of all rewards that are not NaN, float32."""
    return jnp.nanstd(rewards_NG - jnp.nanmin(rewards_NG), ddof=1)


def advantages_of(advantage_fn: AdvantageFn, rewards_NG: jax.Array, slots: int) -> jax.Array:
    """What `advantage_fn` makes of the rewards, float32, as a batch has it: [N * G], or [N * G, C] of its C `slots`.

    Raises:
      ValueError: it gives another shape than [N, G] or [N, G, C].
    """
    given_back = advantage_fn(rewards_NG)
    try:
        advantages = jnp.asarray(given_back, jnp.float32)
    except (TypeError, ValueError):
        raise ValueError(f"advantage_fn gave a {type(given_back).__name__}; expected an array") from None
    N, G = rewards_NG.shape
    if advantages.shape not in ((N, G), (N, G, slots)):
        raise ValueError(
            f"advantage_fn gave the shape {advantages.shape}; expected {(N, G)}, one for each reward of a group in its "
            f"row, or {(N, G, slots)}, one for each of a completion's slots"
        )
    return advantages.reshape(N * G, *advantages.shape[2:])


def informative_groups(scores_NG: jax.Array) -> jax.Array:
    """Whether at least two completions of a group have different scores, [N] bool: what DAPO's dynamic sampling keeps
    (arXiv 2503.14476, section 3.2).

    Args:
      scores_NG: scores of N groups of G >= 2 completions; NaN, where a reward function does not apply, is left out of
        the comparison.

    Raises:
      ValueError: fewer than 2 completions per group.
    """
    scores_NG = jnp.asarray(scores_NG)
    _refuse_other_shapes("scores", scores_NG)
    return jnp.nanmax(scores_NG, 1) > jnp.nanmin(scores_NG, 1)  # of NaN alone both are NaN


def _refuse_other_shapes(what: str, numbers_NG: jax.Array) -> None:
    if numbers_NG.ndim != 2 or numbers_NG.shape[1] < 2:
        alone = "; advantages of single completions are for an `advantage_fn` of your own" if what == "rewards" else ""
        raise ValueError(f"{what} must be [N, G] with num_generations G >= 2, got {numbers_NG.shape}{alone}")
