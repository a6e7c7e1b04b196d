"""The sampler correction: detached weights exp(learner - sampled) on the policy gradient.

The sampler differs from the learner by AQN's noise and by rounding in other kernels; a truncated importance weight
removes the bias this brings (TRL's `vllm_importance_sampling_correction`). Dimension letters: B rows, C slots.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SamplerCorrection:
    """How much of exp(learner - sampled) is applied.

    Attributes:
      level: `none`; `token`, a weight per token; `sequence`, one per row from its summed difference.
      mode: a weight above `cap` is cut to it (`truncate`) or its tokens are dropped (`mask`).
      cap: largest weight.
    """

    level: Literal["none", "token", "sequence"] = "none"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: float = 2.0


def correction_weights(
    correction: SamplerCorrection, learner_BC: jax.Array, sampled_BC: jax.Array, mask_BC: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weights [B, C] (constants, 1 at level none) and the metrics of the gap between learner and sampler.

    Args:
      correction: see `SamplerCorrection`.
      learner_BC, sampled_BC: full-vocabulary log-probabilities at the sampling temperature.
      mask_BC: active tokens.
    """
    active = jnp.maximum(mask_BC.sum(), 1)
    gap_BC = jax.lax.stop_gradient(jnp.where(mask_BC, learner_BC - sampled_BC, 0.0))
    metrics = {
        "sampling/sampling_logp_difference/mean": jnp.abs(gap_BC).sum() / active,
        "sampling/sampling_logp_difference/max": jnp.abs(gap_BC).max(),
    }
    if correction.level == "none":
        return jnp.ones_like(gap_BC), metrics
    if correction.level == "sequence":
        gap_BC = jnp.broadcast_to(gap_BC.sum(1, keepdims=True), gap_BC.shape)
    ratio_BC = jnp.exp(gap_BC)
    above_BC = (ratio_BC > correction.cap) & mask_BC
    capped_BC = jnp.minimum(ratio_BC, correction.cap)
    weights_BC = capped_BC if correction.mode == "truncate" else jnp.where(above_BC, 0.0, ratio_BC)
    metrics |= {
        "sampling/importance_sampling_ratio/mean": jnp.where(mask_BC, ratio_BC, 0.0).sum() / active,
        f"sampling/{'masked' if correction.mode == 'mask' else 'truncated'}_fraction": above_BC.sum() / active,
    }
    return weights_BC, metrics
