"""Policy-gradient losses on per-token log-probabilities.

The loss is data: a frozen `LossSpec` read by one function, `policy_loss`. Any other function of the same signature,
`loss_fn(logp, old_logp, ref_logp, advantages, mask) -> (loss, metrics)`, can stand in its place; it always sees the
whole optimizer batch, however many micro-batches the network's passes are cut into.

Dimension letters: B rows of the optimizer batch, C completion slots.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp

from qerl_jax.errors import check_fields, settle_fields
from qerl_jax.option_names import ImportanceSamplingLevel, LossType, clashing_bounds

_LARGEST_LOG_RATIO = 80.0  # exp of it is 5.5e34: above any bound, and finite in float32

Metrics = dict[str, jax.Array]
LossFn = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """Which loss. Names and meaning are TRL's.

    Attributes:
      loss_type: how token losses are averaged. `grpo`: mean over a row's tokens, then over rows (GRPO, arXiv
        2402.03300). `bnpo` and `dapo`: mean over all active tokens of the optimizer batch (DAPO, arXiv 2503.14476;
        TRL's bnpo takes the mean per micro-batch, which is the same thing at one micro-batch). `dr_grpo`: sum over
        tokens / (B * max_completion_length) (Dr. GRPO, arXiv 2503.20783). `cispo`: the mean of dapo, of another token
        loss, in which the ratio is a constant weight and no token loses its gradient (MiniMax-M1, arXiv 2506.13585).
      beta: weight of the KL penalty towards the reference policy; 0 needs no reference. The ratio does not multiply it,
        as with TRL's use_bias_correction_kl false.
      epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]. With cispo it is cut at
        epsilon_high itself, which is 1 or more (5 is usual), and epsilon is not read.
      importance_sampling_level: `token`, a ratio per token, or `sequence`, one per row, the geometric mean of its
        active tokens' ratios (GSPO, arXiv 2507.18071, which goes with the mean of grpo; by the others a row weighs as
        much as it has tokens).
      delta: the ratio is cut at it also where a negative advantage leaves it unclipped (INTELLECT-2, arXiv
        2505.07291); above 1 + epsilon_high, or None. Not with cispo.
      top_entropy_quantile: the share of the optimizer batch's tokens, those of the highest entropy, whose policy loss
        counts (0.2 in "Beyond the 80/20 Rule", arXiv 2506.01939; see `high_entropy`); 1 is all. The average stays that
        over all active tokens, and the KL penalty is of all. A row's ratio too is of all its active tokens.

    Raises:
      ValueError: a value that is not allowed, by name.
    """

    loss_type: LossType = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    importance_sampling_level: ImportanceSamplingLevel = "token"
    delta: float | None = None
    top_entropy_quantile: float = 1.0

    def __post_init__(self) -> None:
        settle_fields(self)
        check_fields(
            self,
            ("beta", 0 <= self.beta < math.inf, "0 or more"),
            ("epsilon", 0 < self.epsilon <= 1, "above 0, to 1"),
            ("epsilon_high", 0 < self.epsilon_high < math.inf, "above 0"),
            ("top_entropy_quantile", 0 < self.top_entropy_quantile <= 1, "above 0, to 1"),
        )
        if clash := clashing_bounds(self.loss_type, self.epsilon_high, self.delta):
            raise ValueError(clash)
        if self.loss_type == "cispo" and self.delta is not None:
            raise ValueError(f"delta is {self.delta}; allowed with loss_type cispo: None, its bound is epsilon_high")


def token_weights(mask_BC: jax.Array, loss_type: LossType) -> jax.Array:
    """[B, C] weights w such that the loss is sum(w * token loss); they depend on the mask alone."""
    mask_BC = mask_BC.astype(jnp.float32)
    B, C = mask_BC.shape
    if loss_type == "grpo":
        return mask_BC / (jnp.maximum(mask_BC.sum(1, keepdims=True), 1.0) * B)
    if loss_type == "dr_grpo":
        return mask_BC / (B * C)
    return mask_BC / jnp.maximum(mask_BC.sum(), 1.0)


def high_entropy(entropy_BC: jax.Array, mask_BC: jax.Array, quantile: float) -> jax.Array:
    """Which active tokens, bool [B, C], have an entropy of at least the (1 - quantile)-quantile of all active ones'.

    It is TRL's, between two entropies by linear interpolation. The lower of the two is below it wherever between them
    it lies, so the upper one serves as well: of n active tokens the 1 + floor(quantile (n - 1)) highest are chosen, and
    those that equal the last of these. (TRL, which rounds to float32, chooses one less for some n: of 0.4 for one in
    twenty.)

    Args:
      entropy_BC: of the whole optimizer batch; anything where the mask is false.
      mask_BC: true for tokens that count. Where there is none, none is chosen.
      quantile: above 0, to 1.
    """
    mask_BC = mask_BC.astype(bool)
    count = jnp.sum(mask_BC, dtype=jnp.int32)
    ordered = jnp.sort(jnp.where(mask_BC, entropy_BC, -jnp.inf), axis=None)  # the active ones last
    others = _floor_of(quantile, jnp.maximum(count - 1, 0))
    return mask_BC & (entropy_BC >= ordered[ordered.size - 1 - others])


def _floor_of(part: float, count: jax.Array) -> jax.Array:
    """floor(part * count) for a count of int32, exactly where the part has 6 decimals or less.

    In float32, 0.6 of 25 is more than 15. Here 0.6 is 3/5, and no product of such numbers is beyond int32.
    """
    share = Fraction(part).limit_denominator(10**6)
    whole, rest = jnp.divmod(count, share.denominator)
    high, low = jnp.divmod(rest, 1024)
    quotient, rest = jnp.divmod(share.numerator * high, share.denominator)
    return share.numerator * whole + 1024 * quotient + (1024 * rest + share.numerator * low) // share.denominator


def policy_loss(
    spec: LossSpec,
    logp_BC: jax.Array,
    old_logp_BC: jax.Array,
    ref_logp_BC: jax.Array | None,
    advantages_BC: jax.Array,
    mask_BC: jax.Array,
    weights_BC: jax.Array | None = None,
    chosen_BC: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """The policy-gradient loss, plus beta times the k3 estimate of KL.

    With r the ratio exp(logp - old_logp) of a token, or of its row (see `LossSpec`), and A the token's advantage, the
    loss of a token is

        -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)    (infinite for A < 0 and an r above exp(80))
        -min(r, epsilon_high) A logp, with a constant r                     for cispo

    Args:
      spec: the loss.
      logp_BC: the learner's log-probabilities, differentiated.
      old_logp_BC, ref_logp_BC: the old and the reference policy's, constants. The reference is needed if beta != 0.
      advantages_BC: per token (a row's advantage times the sampler correction); [B, 1] broadcasts.
      mask_BC: true for sampled completion tokens that count.
      weights_BC: `token_weights` of the batch of which these are some rows; None where they are the batch.
      chosen_BC: true for tokens whose policy loss counts, by `high_entropy`; needed if spec.top_entropy_quantile is
        below 1. Of the others it is 0, while weights, KL and metrics stay as they are. None is all.

    Returns:
      The scalar loss, and the metrics kl (if beta != 0), a mean over active tokens, and clip_ratio/low_mean,
      clip_ratio/high_mean, clip_ratio/region_mean or, for cispo, cispo_clip_ratio (TRL's: where A > 0). These are
      shares of active tokens or, at level sequence, of all B rows, where one is clipped that has such a token. A token
      with an advantage of 0, as the sampler correction's mode mask makes it, is not clipped.

    Raises:
      ValueError: advantages that are neither [B, C] nor [B, 1], or a missing reference or choice of tokens.
    """
    B, C = mask_BC.shape
    if advantages_BC.shape not in ((B, C), (B, 1)):
        raise ValueError(f"advantages have the shape {advantages_BC.shape}; allowed: {(B, C)} or {(B, 1)}")
    mask_BC = mask_BC.astype(bool)
    by_row = spec.importance_sampling_level == "sequence"
    # Padding may hold anything, and 0 * inf is NaN: it is selected away, here and in the gradient.
    log_ratio_BC = jnp.where(mask_BC, logp_BC - old_logp_BC, 0.0)
    if by_row:
        counts_B1 = jnp.sum(mask_BC, 1, keepdims=True, dtype=log_ratio_BC.dtype)
        means_B1 = log_ratio_BC.sum(1, keepdims=True) / jnp.maximum(counts_B1, 1)
        log_ratio_BC = jnp.broadcast_to(means_B1, (B, C))
    # Above 1 + epsilon_high a cut changes nothing of the clipped term. It also keeps exp from overflowing: the gradient
    # of a token that is clipped, or has no advantage, would be 0 * inf.
    largest = _LARGEST_LOG_RATIO if spec.delta is None else min(math.log(spec.delta), _LARGEST_LOG_RATIO)
    ratio_BC = jnp.exp(jnp.minimum(log_ratio_BC, largest))
    if spec.delta is None:  # nothing bounds a loss there: it is no gradient of 0
        beyond_BC = mask_BC & (log_ratio_BC > _LARGEST_LOG_RATIO) & (advantages_BC < 0)
        ratio_BC = jnp.where(beyond_BC, jnp.inf, ratio_BC)

    def mean(values_BC: jax.Array) -> jax.Array:
        values_BC = values_BC.astype(log_ratio_BC.dtype)  # or shares, which are bool
        return jnp.sum(jnp.where(mask_BC, values_BC, 0.0)) / jnp.maximum(jnp.sum(mask_BC, dtype=values_BC.dtype), 1)

    def share(of_BC: jax.Array) -> jax.Array:
        return jnp.mean(jnp.any(of_BC & mask_BC, 1)) if by_row else mean(of_BC)

    if spec.loss_type == "cispo":
        weight_BC = jax.lax.stop_gradient(jnp.minimum(ratio_BC, spec.epsilon_high))
        token_loss_BC = -weight_BC * advantages_BC * jnp.where(mask_BC, logp_BC, 0.0)
        metrics = {"cispo_clip_ratio": share((ratio_BC > spec.epsilon_high) & (advantages_BC > 0))}
    else:
        # Not jnp.clip, which halves the gradient at a bound: one may be so near to 1 that it is 1 in float32.
        low, high = 1 - spec.epsilon, 1 + spec.epsilon_high
        clipped_BC = jnp.where(ratio_BC < low, low, jnp.where(ratio_BC > high, high, ratio_BC))
        token_loss_BC = -jnp.minimum(ratio_BC * advantages_BC, clipped_BC * advantages_BC)
        low_BC = (ratio_BC < 1 - spec.epsilon) & (advantages_BC < 0)
        high_BC = (ratio_BC > 1 + spec.epsilon_high) & (advantages_BC > 0)
        metrics = {
            "clip_ratio/low_mean": share(low_BC),
            "clip_ratio/high_mean": share(high_BC),
            "clip_ratio/region_mean": share(low_BC | high_BC),
        }
    if chosen_BC is not None:
        token_loss_BC = jnp.where(chosen_BC, token_loss_BC, 0.0)
    elif spec.top_entropy_quantile < 1:
        raise ValueError(
            f"top_entropy_quantile is {spec.top_entropy_quantile}, so the loss needs chosen_BC, the tokens of high "
            "entropy, which an update gives to the loss of its settings alone"
        )
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
