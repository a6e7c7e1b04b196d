"""Sampling one token per row from logits, with temperature, top-k, top-p and min-p.

Dimension letters: B rows, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError
from qerl_jax.rollout.thresholds import kth_largest, nucleus_floor


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn; hashable, static under jit.

    Attributes:
      max_completion_length: most tokens of a completion, the EOS included.
      eos_token_ids: any of them ends a completion.
      pad_token_id: fills the slots after the end.
      temperature: 0 is greedy; its log-probabilities are those at temperature 1.
      top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. Applied in that order, as transformers does.
    """

    max_completion_length: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("max_completion_length", self.max_completion_length >= 1, "1 or more"),
            ("eos_token_ids", len(self.eos_token_ids) >= 1, "one id or more"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
        ):
            if not fine:
                raise UserError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")
        if self.temperature == 0 and self.truncated:
            raise UserError("temperature 0 is greedy: top_k, top_p and min_p would have no effect; leave them out")

    @property
    def truncated(self) -> bool:
        """Whether some tokens are excluded, so that the sampled distribution differs from the full one."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def truncate(scaled_BV: jax.Array, settings: SamplingSettings) -> jax.Array:
    """Sets excluded tokens' logits to -inf. `scaled_BV` is logits / temperature, float32. Ties at a threshold stay."""
    V = scaled_BV.shape[-1]
    if 0 < settings.top_k < V:
        scaled_BV = jnp.where(scaled_BV < kth_largest(scaled_BV, settings.top_k), -jnp.inf, scaled_BV)
    if settings.top_p < 1:
        scaled_BV = jnp.where(scaled_BV < nucleus_floor(scaled_BV, settings.top_p), -jnp.inf, scaled_BV)
    if settings.min_p > 0:
        floor = scaled_BV.max(-1, keepdims=True) + jnp.log(settings.min_p)
        scaled_BV = jnp.where(scaled_BV < floor, -jnp.inf, scaled_BV)
    return scaled_BV


def sample(
    logits_BV: jax.Array, keys_B: jax.Array, settings: SamplingSettings
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Draws one token per row by Gumbel-argmax, each row from a key of its own.

    Returns:
      tokens_B int32; logps_B, the token's log_softmax(logits / temperature) over the full vocabulary; and, where
      sampling is truncated, the same renormalised over the tokens that could be drawn (else None).
    """

    def pick(logs_BV: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logs_BV, tokens_B[:, None], axis=-1)[:, 0]

    logits_BV = logits_BV.astype(jnp.float32)
    if settings.temperature == 0:
        tokens_B = jnp.argmax(logits_BV, axis=-1)
        return tokens_B, pick(jax.nn.log_softmax(logits_BV)), None
    scaled_BV = logits_BV / settings.temperature
    allowed_BV = truncate(scaled_BV, settings)
    gumbel_BV = jax.vmap(lambda key: jax.random.gumbel(key, scaled_BV.shape[-1:], jnp.float32))(keys_B)
    tokens_B = jnp.argmax(allowed_BV + gumbel_BV, axis=-1)
    renormalised_B = pick(jax.nn.log_softmax(allowed_BV)) if settings.truncated else None
    return tokens_B, pick(jax.nn.log_softmax(scaled_BV)), renormalised_B
