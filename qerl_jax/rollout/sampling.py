"""Sampling one token per row from logits, with temperature, top-k, top-p and min-p.

Dimension letters: B rows, V vocabulary, C groups of W tokens, N numbers drawn.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError, check_fields, is_whole, settle_fields
from qerl_jax.option_names import KVCacheDtype
from qerl_jax.rollout.thresholds import kth_largest, nucleus_floor

GROUP = 128  # tokens; it divides Qwen's vocabularies


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn; hashable, static under jit.

    Attributes:
      max_completion_length: most tokens of a completion, the EOS included.
      eos_token_ids: any of them ends a completion; one number, or any sequence, is kept as a tuple. With () every
        completion goes on to its limit.
      pad_token_id: fills the slots after the end.
      temperature: 0 is greedy; its log-probabilities are those at temperature 1. Below about 1e-4, draws among nearly
        equal tokens no longer follow their probabilities: the noise is added to logits / temperature, and numbers of
        that size round it away.
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
        ids = tuple(self.eos_token_ids) if isinstance(self.eos_token_ids, Iterable) else (self.eos_token_ids,)
        object.__setattr__(self, "eos_token_ids", ids)
        settle_fields(self)
        check_fields(
            self,
            ("max_completion_length", self.max_completion_length >= 1, "1 or more"),
            ("eos_token_ids", all(map(_is_id, ids)), "token ids, or () for none"),
            ("pad_token_id", _is_id(self.pad_token_id), "a token id"),
            ("temperature", self.temperature == 0 or self.temperature >= 1e-30, "0 (greedy), or 1e-30 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 1e-30 <= self.top_p <= 1, "1e-30 to 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
        )
        if self.temperature == 0 and self.truncated:
            raise UserError("temperature 0 is greedy: top_k, top_p and min_p would have no effect; leave them out")

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError for an id that is beyond this vocabulary."""
        below = f"below the vocabulary's {vocab_size}"
        check_fields(
            self,
            ("eos_token_ids", all(id < vocab_size for id in self.eos_token_ids), f"ids {below}, or () for none"),
            ("pad_token_id", self.pad_token_id < vocab_size, f"an id {below}"),
        )

    @property
    def truncated(self) -> bool:
        """Whether some tokens are excluded, so that the sampled distribution differs from the full one."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _is_id(value: Any) -> bool:
    return is_whole(value) and value >= 0


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
    """Draws one token per row, each row from a key of its own, by Gumbel-argmax: first a group of neighbouring tokens
    by the sums of their probabilities, then one of the group. So C + W numbers of a row are hashed instead of V.

    Returns:
      tokens_B int32; logps_B, the token's log_softmax(logits / temperature) over the full vocabulary; and, where
      sampling is truncated, the same renormalised over the tokens that could be drawn (else None). For a row that has
      a NaN or +inf, as where the network overflows, the log-probabilities are NaN and the token says nothing.
    """
    scaled_BV = allowed_BV = logits_BV.astype(jnp.float32)
    if settings.temperature > 0:
        scaled_BV = scaled_BV / settings.temperature
        allowed_BV = truncate(scaled_BV, settings)
    scaled_BCW, allowed_BCW = _grouped(scaled_BV), _grouped(allowed_BV)
    _, C, W = scaled_BCW.shape
    counted = [jnp.ones_like(scaled_BCW)]
    if settings.truncated:
        counted.append((allowed_BCW > -jnp.inf).astype(jnp.float32))
    # finite, so that the difference of two excluded ones is not NaN
    largest_BC, *sums_BC = _joined(jnp.maximum(scaled_BCW, jnp.finfo(jnp.float32).min), *counted)
    score_BC, noise_BW = largest_BC, jnp.float32(0)
    if settings.temperature > 0:
        noise_BN = jax.vmap(lambda key: jax.random.gumbel(key, (W + C,), jnp.float32))(keys_B)
        score_BC, noise_BW = largest_BC + jnp.log(sums_BC[-1]) + noise_BN[:, W:], noise_BN[:, :W]
    group_B1 = jnp.argmax(score_BC, axis=-1, keepdims=True)
    scaled_BW, allowed_BW = (
        jnp.take_along_axis(of_BCW, group_B1[..., None], axis=1)[:, 0] for of_BCW in (scaled_BCW, allowed_BCW)
    )
    place_B1 = jnp.argmax(allowed_BW + noise_BW, axis=-1, keepdims=True)
    chosen_B = jnp.take_along_axis(scaled_BW, place_B1, axis=-1)[:, 0]
    largest_B, *sums_B = _joined(largest_BC, *sums_BC)
    logps_B, *renormalised = (chosen_B - largest_B - jnp.log(total_B) for total_B in sums_B)
    tokens_B = (group_B1 * W + place_B1)[:, 0].astype(jnp.int32)
    return tokens_B, logps_B, renormalised[0] if renormalised else None


def _grouped(logits_BV: jax.Array) -> jax.Array:
    """[B, C, W]: in groups of up to `GROUP` tokens; what fills the last one cannot be drawn."""
    B, V = logits_BV.shape
    W = min(V, GROUP)
    return jnp.pad(logits_BV, ((0, 0), (0, -V % W)), constant_values=-jnp.inf).reshape(B, -1, W)


def _joined(largest: jax.Array, *sums: jax.Array) -> list[jax.Array]:
    """Joins the parts of rows that lie along the last axis. A part is given by a logit that none of its logits exceeds,
    and by sums of exponentials relative to that logit; the whole row is returned in the same form."""
    whole: list[jax.Array] = jax.lax.platform_dependent(largest, *sums, cuda=joined_at_once, default=joined_by_passes)
    return whole


def joined_by_passes(largest: jax.Array, *sums: jax.Array) -> list[jax.Array]:
    """`_joined` as a CPU likes it."""
    whole = jnp.max(largest, axis=-1)
    shrink = jnp.exp(largest - whole[..., None])
    return [whole, *(jnp.sum(part * shrink, axis=-1) for part in sums)]


def joined_at_once(*parts: jax.Array) -> list[jax.Array]:
    """`_joined` for a GPU: one kernel that reads the parts once, where two passes are two that read them twice."""

    def join(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> list[jax.Array]:
        largest, *sums = zip(one, other, strict=True)
        larger, shrink = largest[0] > largest[1], jnp.exp(-jnp.abs(largest[0] - largest[1]))
        return [jnp.maximum(*largest), *(jnp.where(larger, a + b * shrink, a * shrink + b) for a, b in sums)]

    of_nothing = tuple(jnp.float32(value) for value in (jnp.finfo(jnp.float32).min, *(0 for _ in parts[1:])))
    return list(jax.lax.reduce(parts, of_nothing, join, (parts[0].ndim - 1,)))
