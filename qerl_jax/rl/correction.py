"""The sampler correction: detached weights exp(learner - sampled) on the policy gradient.

The sampler differs from the learner by AQN's noise and by rounding in other kernels; a truncated importance weight
removes the bias this brings (TRL's `vllm_importance_sampling_correction`). Dimension letters: B rows, C slots.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.errors import check_fields, settle_fields
from qerl_jax.option_names import CorrectionLevel, CorrectionMode


@dataclasses.dataclass(frozen=True)
class SamplerCorrection:
    """How much of exp(learner - sampled) is applied.

    Attributes:
      level: `none`; `token`, a weight per token; `sequence`, one per row from its summed difference.
      mode: a weight above `cap` is cut to it (`truncate`) or its tokens are dropped (`mask`).
      cap: largest weight.

    Raises:
      ValueError: an unknown level or mode, or a cap that is not above 0.
    """

    level: CorrectionLevel = "none"
    mode: CorrectionMode = "truncate"
    cap: float = 2.0

    def __post_init__(self) -> None:
        settle_fields(self)
        check_fields(self, ("cap", self.cap > 0, "above 0"))


def gap_metrics(learner_BC: jax.Array, sampled_BC: jax.Array, mask_BC: jax.Array) -> dict[str, jax.Array]:
    """How far the learner's log-probabilities [B, C] are from the recorded ones, in nats, over active tokens."""
    gap_BC = jnp.abs(jnp.where(mask_BC, learner_BC - sampled_BC, 0.0))
    return {
        "sampling/sampling_logp_difference/mean": gap_BC.sum() / jnp.maximum(jnp.sum(mask_BC, dtype=gap_BC.dtype), 1),
        "sampling/sampling_logp_difference/max": gap_BC.max(),
    }


def correction_weights(
    correction: SamplerCorrection, learner_BC: jax.Array, sampled_BC: jax.Array, mask_BC: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weights [B, C] (constants, 1 at level none) and, at other levels, TRL's metrics of them.

    The metrics are the mean, min and max of what is applied, over active tokens or, at level sequence, over rows that
    have some (TRL counts other rows as 1), and 0 where there are none; and the share of active tokens above the cap.

    Args:
      correction: see `SamplerCorrection`.
      learner_BC, sampled_BC: full-vocabulary log-probabilities at the sampling temperature.
      mask_BC: active tokens.
    """
    gap_BC = jax.lax.stop_gradient(jnp.where(mask_BC, learner_BC - sampled_BC, 0.0))
    if correction.level == "none":
        return jnp.ones_like(gap_BC), {}
    if correction.level == "sequence":
        gap_BC = jnp.broadcast_to(gap_BC.sum(1, keepdims=True), gap_BC.shape)
    ratio_BC = jnp.exp(gap_BC)
    masks, above_BC = correction.mode == "mask", ratio_BC > correction.cap
    weights_BC = jnp.where(above_BC, 0.0 if masks else correction.cap, ratio_BC)
    counted_BC = mask_BC
    if correction.level == "sequence":  # once for each row
        counted_BC = mask_BC & (jnp.cumsum(mask_BC, 1) == 1)
    ratio = "sampling/importance_sampling_ratio"
    any_counted = counted_BC.any()
    return weights_BC, {
        f"{ratio}/mean": jnp.where(counted_BC, weights_BC, 0.0).sum()
        / jnp.maximum(jnp.sum(counted_BC, dtype=gap_BC.dtype), 1),
        f"{ratio}/min": jnp.where(any_counted, jnp.where(counted_BC, weights_BC, jnp.inf).min(), 0.0),
        f"{ratio}/max": jnp.where(counted_BC, weights_BC, 0.0).max(),
        f"sampling/{'masked' if masks else 'truncated'}_fraction": jnp.sum(above_BC & mask_BC, dtype=gap_BC.dtype)
        / jnp.maximum(jnp.sum(mask_BC, dtype=gap_BC.dtype), 1),
    }
