"""Policy-gradient losses on per-token log-probabilities.

The loss is data: a frozen `LossSpec` read by one function, `policy_loss`. Any other function of the same signature,
`loss_fn(logp, old_logp, ref_logp, advantages, mask) -> (loss, metrics)`, can stand in its place; it always sees the
whole optimizer batch, however many micro-batches the network's passes are cut into.

Dimension letters: B rows of the optimizer batch, C completion slots.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo"]
Metrics = dict[str, jax.Array]
LossFn = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """Which loss. Names and meaning are TRL's.

    Attributes:
      loss_type: how token losses are averaged. `grpo`: mean over a row's tokens, then over rows (GRPO, arXiv
        2402.03300). `bnpo` and `dapo`: mean over all active tokens of the optimizer batch (DAPO, arXiv 2503.14476;
        TRL's bnpo takes the mean per micro-batch, which is the same thing at one micro-batch; TRL's dapo also counts
        the tokens of truncated completions that are masked, which are not active here). `dr_grpo`: sum over tokens /
        (B * max_completion_length) (Dr. GRPO, arXiv 2503.20783).
      beta: weight of the KL penalty towards the reference policy; 0 needs no reference.
      epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
    """

    loss_type: LossType = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.28

    def __post_init__(self) -> None:
        if self.loss_type not in ("grpo", "bnpo", "dapo", "dr_grpo"):
            raise ValueError(f"loss_type is {self.loss_type!r}; allowed: grpo, bnpo, dapo, dr_grpo")


def token_weights(mask_BC: jax.Array, loss_type: LossType) -> jax.Array:
    """[B, C] weights w such that the loss is sum(w * token loss); they depend on the mask alone."""
    mask_BC = mask_BC.astype(jnp.float32)
    B, C = mask_BC.shape
    if loss_type == "grpo":
        return mask_BC / (jnp.maximum(mask_BC.sum(1, keepdims=True), 1.0) * B)
    if loss_type == "dr_grpo":
        return mask_BC / (B * C)
    return mask_BC / jnp.maximum(mask_BC.sum(), 1.0)


def policy_loss(
    spec: LossSpec,
    logp_BC: jax.Array,
    old_logp_BC: jax.Array,
    ref_logp_BC: jax.Array | None,
    advantages_BC: jax.Array,
    mask_BC: jax.Array,
    weights_BC: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Clipped surrogate -min(r A, clip(r) A) with r = exp(logp - old_logp), plus beta times the k3 estimate of KL.

    Args:
      spec: the loss.
      logp_BC: the learner's log-probabilities, differentiated.
      old_logp_BC, ref_logp_BC: the old and the reference policy's, constants. The reference is needed if beta != 0.
      advantages_BC: per token (a row's advantage times the sampler correction); [B, 1] broadcasts.
      mask_BC: true for sampled completion tokens that count.
      weights_BC: `token_weights` of the batch of which these are some rows; None where they are the batch.

    Returns:
      The scalar loss, and the metrics kl (if beta != 0), clip_ratio/low_mean, clip_ratio/high_mean,
      clip_ratio/region_mean: means over active tokens.

    Raises:
      ValueError: advantages that are neither [B, C] nor [B, 1], or a missing reference.
    """
    B, C = mask_BC.shape
    if advantages_BC.shape not in ((B, C), (B, 1)):
        raise ValueError(f"advantages have the shape {advantages_BC.shape}; allowed: {(B, C)} or {(B, 1)}")
    mask_BC = mask_BC.astype(bool)
    # Padding may hold anything, and 0 * inf is NaN: it is selected away, here and in the gradient.
    log_ratio_BC = jnp.where(mask_BC, logp_BC - old_logp_BC, 0.0)
    ratio_BC = jnp.exp(log_ratio_BC)
    clipped_BC = jnp.clip(ratio_BC, 1 - spec.epsilon, 1 + spec.epsilon_high)
    token_loss_BC = -jnp.minimum(ratio_BC * advantages_BC, clipped_BC * advantages_BC)

    def mean(values_BC: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask_BC, values_BC, 0.0)) / jnp.maximum(mask_BC.sum(), 1)

    low_BC = (ratio_BC < 1 - spec.epsilon) & (advantages_BC < 0)
    high_BC = (ratio_BC > 1 + spec.epsilon_high) & (advantages_BC > 0)
    metrics = {
        "clip_ratio/low_mean": mean(low_BC),
        "clip_ratio/high_mean": mean(high_BC),
        "clip_ratio/region_mean": mean(low_BC | high_BC),
    }
    if spec.beta != 0:
        if ref_logp_BC is None:
            raise ValueError(
                "beta is not 0, so the loss needs ref_logp, the reference policy's log-probabilities, which "
                "`with_policies` adds to a batch"
            )
        gap_BC = jnp.where(mask_BC, ref_logp_BC - logp_BC, 0.0)
        kl_BC = jnp.exp(gap_BC) - gap_BC - 1
        token_loss_BC += spec.beta * kl_BC
        metrics["kl"] = mean(kl_BC)
    if weights_BC is None:
        weights_BC = token_weights(mask_BC, spec.loss_type)
    return jnp.sum(weights_BC * token_loss_BC), metrics
