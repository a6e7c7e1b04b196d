"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2; TRL's `scale_rewards`).

Dimension letters: N prompts, G completions per prompt.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

ScaleRewards = Literal["group", "batch", "none"]
AdvantageFn = Callable[[jax.Array], jax.Array]

_EPSILON = 1e-4  # TRL's: keeps a group of nearly equal rewards from being blown up


def group_advantages(rewards_NG: jax.Array, scale_rewards: ScaleRewards = "group") -> jax.Array:
    """(r - group mean) / (std + 1e-4), [N, G] float32.

    Args:
      rewards_NG: rewards of N groups of G >= 2 completions.
      scale_rewards: divide by the group's unbiased standard deviation, by that of all N * G, or not at all (Dr. GRPO).

    Returns:
      Advantages; exactly 0 in a group whose rewards are all equal.

    Raises:
      ValueError: fewer than 2 completions per group, or an unknown `scale_rewards`.
    """
    if rewards_NG.ndim != 2 or rewards_NG.shape[1] < 2:
        raise ValueError(f"rewards must be [N, G] with num_generations G >= 2, got {rewards_NG.shape}")
    centred_NG = rewards_NG - rewards_NG.mean(1, keepdims=True)
    if scale_rewards == "group":
        centred_NG /= rewards_NG.std(1, ddof=1, keepdims=True) + _EPSILON
    elif scale_rewards == "batch":
        centred_NG /= rewards_NG.std(ddof=1) + _EPSILON
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards is {scale_rewards!r}; allowed: group, batch, none")
    # A mean of equal numbers may be off by an ulp, and a division by 1e-4 would make a signal of it.
    equal_N1 = rewards_NG.max(1, keepdims=True) == rewards_NG.min(1, keepdims=True)
    return jnp.where(equal_N1, 0.0, centred_NG)


def advantages_by(scale_rewards: ScaleRewards) -> AdvantageFn:
    """The advantage function [N, G] -> [N, G] of a configured run."""
    return functools.partial(group_advantages, scale_rewards=scale_rewards)
