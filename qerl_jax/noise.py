"""Adaptive quantization noise (AQN): a schedule of sigma, and Gaussian noise on RMSNorm scales.

QeRL (arXiv 2510.11696, section 3.3): Z ~ N(0, sigma^2) is added to a norm's scale, w + Z. That equals scaling the
input channels of every weight that reads the norm by (1 + Z / w): q, k, v share one draw, gate and up another.
Everything is a pure function of (key, step), in float32: in bfloat16 a sigma of 5e-4 would change 0.01% of the scales.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from qerl_jax.errors import check_fields, check_kind, settle_fields
from qerl_jax.keys import of_threefry
from qerl_jax.models.params import Norms
from qerl_jax.option_names import NoiseDecay
from qerl_jax.tracing import is_traced


@dataclasses.dataclass(frozen=True)
class NoiseSchedule:
    """Sigma by stage. Stage 0 is free of noise; stages 1..K-1 go from sigma_start to sigma_end, both included.

    Attributes:
      num_stages: K; 1 means never any noise, 2 one noisy stage at sigma_start.
      sigma_start, sigma_end: standard deviations of the first and the last noisy stage.
      schedule: how sigma decays between them.
      total_steps: T, the optimizer steps of the whole run; at least K.
      final_norm: whether the final norm gets noise too.

    Raises:
      ValueError: total_steps < num_stages, or a value outside its range.
    """

    num_stages: int
    sigma_start: float
    sigma_end: float
    total_steps: int
    schedule: NoiseDecay = "exponential"
    final_norm: bool = False

    def __post_init__(self) -> None:
        settle_fields(self)
        if self.num_stages < 1 or self.total_steps < self.num_stages:
            raise ValueError(
                f"num_stages is {self.num_stages} and total_steps {self.total_steps}; "
                "allowed: 1 <= num_stages <= total_steps, so that every stage lasts a step or more"
            )
        check_fields(
            self,
            ("sigma_start", 0 < self.sigma_start < math.inf, "above 0 and finite"),
            ("sigma_end", 0 < self.sigma_end < math.inf, "above 0 and finite"),
        )

    def stage_sigmas(self) -> list[float]:
        """Sigma of each of the K stages (paper, equation 8, with an exponent that reaches sigma_end)."""
        K, start, end = self.num_stages, self.sigma_start, self.sigma_end
        sigmas = [0.0]
        for k in range(1, K):
            p = (k - 1) / (K - 2) if K > 2 else 0.0
            sigmas.append(
                {
                    "exponential": start * (end / start) ** p,
                    "linear": start + (end - start) * p,
                    "cosine": end + (start - end) * (1 + math.cos(math.pi * p)) / 2,
                    "logarithmic": start + (end - start) * (math.log(k) / math.log(K - 1) if K > 2 else 0.0),
                }[self.schedule]
            )
        return sigmas


def sigma_at(schedule: NoiseSchedule, step: jax.Array) -> jax.Array:
    """float32 sigma of 0-based optimizer step `step` (traced), of several their shape: stage
    min(K - 1, floor(step * K / T))."""
    # Integer boundaries instead of step * K, which overflows int32 on long runs: stage k begins at ceil(k T / K).
    K, T = schedule.num_stages, schedule.total_steps
    starts = jnp.asarray([-(-k * T // K) for k in range(1, K)], jnp.int32)
    stage = jnp.sum(jnp.asarray(step, jnp.int32)[..., None] >= starts, axis=-1)
    return jnp.asarray(schedule.stage_sigmas(), jnp.float32)[stage]


def perturb_norms(norms: Norms, sigma: jax.Array | float, key: jax.Array, *, final_norm: bool = False) -> Norms:
    """Noisy norm scales w + Z, Z ~ N(0, sigma^2).

    Args:
      norms: clean scales, float32 (float64 where x64 is enabled); each layer's two norms get draws of their own.
      sigma: standard deviation, may be traced; 0 returns the scales unchanged.
      key: PRNG key; the same key gives the same noise.
      final_norm: also perturb the final norm.

    Raises:
      TypeError: a scale in 16 bits, in which small noise would vanish, or arguments of another kind.
      ValueError: not one sigma, or one that is negative or not finite, where it is known.
    """
    check_kind("norms", norms, Norms, " (`norms_of` gives one)")
    if jnp.shape(sigma) != ():
        raise ValueError(f"sigma has the shape {jnp.shape(sigma)}; expected one number")
    if not (is_traced(sigma) or 0 <= float(sigma) < math.inf):
        raise ValueError(f"sigma is {float(sigma)}; allowed: 0 or more, and finite")
    scales = [*norms.input, *norms.post_attention, norms.final]
    if (narrow := next((w.dtype for w in scales if w.dtype not in (jnp.float32, jnp.float64)), None)) is not None:
        raise TypeError(f"norm scales must be float32 when noise is added, got {narrow}")
    # One draw for all places: a draw for each took most of the compilation, 12 s for 57 norms on an H200's host.
    L, w_D = len(norms.input), norms.final
    keys = jax.vmap(jax.random.fold_in, (None, 0))(of_threefry(key), jnp.arange(2 * L + 1))
    z_ND = jax.vmap(lambda key: jax.random.normal(key, w_D.shape, w_D.dtype))(keys)

    def noisy(w_D: jax.Array, place: int) -> jax.Array:
        return w_D + jnp.asarray(sigma, w_D.dtype) * z_ND[place].astype(w_D.dtype)

    return Norms(
        input=tuple(noisy(w, 2 * i) for i, w in enumerate(norms.input)),
        post_attention=tuple(noisy(w, 2 * i + 1) for i, w in enumerate(norms.post_attention)),
        final=noisy(norms.final, 2 * L) if final_norm else norms.final,
    )
