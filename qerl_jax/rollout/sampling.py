"""Sampling one token per row from logits, with temperature, top-k, top-p and min-p.

Dimension letters: B rows, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError
from qerl_jax.format_names import KV_CACHE_DTYPES, KVCacheDtype
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
      kv_cache_dtype: "auto" keeps keys and values in the model's compute dtype; "fp8_values" keeps values, "fp8" both,
        in 8 bits (E4M3, unscaled), which draws from a slightly other distribution than the learner's.
    """

    max_completion_length: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    kv_cache_dtype: KVCacheDtype = "auto"

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("max_completion_length", self.max_completion_length >= 1, "1 or more"),
            ("eos_token_ids", len(self.eos_token_ids) >= 1, "one id or more"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            ("kv_cache_dtype", self.kv_cache_dtype in KV_CACHE_DTYPES, ", ".join(KV_CACHE_DTYPES)),
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
    scaled_BV = logits_BV.astype(jnp.float32)
    allowed_BV = noisy_BV = scaled_BV
    if settings.temperature > 0:
        scaled_BV = scaled_BV / settings.temperature
        allowed_BV = truncate(scaled_BV, settings)
        gumbel_BV = jax.vmap(lambda key: jax.random.gumbel(key, scaled_BV.shape[-1:], jnp.float32))(keys_B)
        noisy_BV = allowed_BV + gumbel_BV
    chosen: tuple[jax.Array, jax.Array, jax.Array | None] = jax.lax.platform_dependent(
        noisy_BV, scaled_BV, allowed_BV if settings.truncated else None, cuda=chosen_in_one_pass, default=chosen_in_turn
    )
    return chosen


def chosen_in_turn(
    noisy_BV: jax.Array, scaled_BV: jax.Array, allowed_BV: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`sample`'s results from logits with and without noise, and, where sampling is truncated, those of allowed tokens
    (-inf for the others), by one pass for each of them, as a CPU likes it."""
    tokens_B = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)

    def pick(logs_BV: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logs_BV, tokens_B[:, None], axis=-1)[:, 0]

    renormalised_B = None if allowed_BV is None else pick(jax.nn.log_softmax(allowed_BV))
    return tokens_B, pick(jax.nn.log_softmax(scaled_BV)), renormalised_B


def chosen_in_one_pass(
    noisy_BV: jax.Array, scaled_BV: jax.Array, allowed_BV: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The same in a single reduction: two kernels on a GPU, where one pass for each takes six and reads the logits
    three times."""

    def joined(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> list[jax.Array]:
        """Of two parts of a row: the largest logit with noise, its token, that one's own logit, the largest logit, and
        sums of exponentials beside it."""
        noisy, token, scaled, largest, *sums = zip(one, other, strict=True)
        better = (noisy[0] > noisy[1]) | jnp.isnan(noisy[0])
        first = better | ((noisy[0] == noisy[1]) & (token[0] < token[1]))
        larger, shrink = largest[0] > largest[1], jnp.exp(-jnp.abs(largest[0] - largest[1]))
        return [
            jnp.where(better, *noisy),
            jnp.where(first, *token),
            jnp.where(first, *scaled),
            jnp.maximum(*largest),
            *(jnp.where(larger, a + b * shrink, a * shrink + b) for a, b in sums),
        ]

    lowest = jnp.finfo(jnp.float32).min  # finite, so that the difference of two excluded ones is not NaN
    tokens_BV = jax.lax.broadcasted_iota(jnp.int32, scaled_BV.shape, 1)
    counted = [jnp.ones_like(scaled_BV)]
    if allowed_BV is not None:
        counted.append((allowed_BV > -jnp.inf).astype(jnp.float32))
    values = (noisy_BV, tokens_BV, scaled_BV, jnp.maximum(scaled_BV, lowest), *counted)
    of_nothing = (-jnp.inf, scaled_BV.shape[1], 0, lowest, *(0 for _ in counted))
    inits = tuple(jnp.asarray(init, value.dtype) for init, value in zip(of_nothing, values, strict=True))
    _, tokens_B, chosen_B, largest_B, *sums = jax.lax.reduce(values, inits, joined, (1,))
    logps_B, *renormalised = (chosen_B - largest_B - jnp.log(total_B) for total_B in sums)
    return tokens_B, logps_B, renormalised[0] if renormalised else None
