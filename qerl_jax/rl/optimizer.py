"""AdamW with warm-up, decay and global-norm clipping, built from optax."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from qerl_jax.errors import check_fields, settle_fields
from qerl_jax.models.params import Adapter
from qerl_jax.option_names import LRSchedulerType


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """TRL's names.

    `total_steps` are updates, of which a rollout may have several; behind them the rate is 0, or still `learning_rate`
    where it is constant (and, for one step, where all of them are warm-up). `warmup_ratio` is the share of them, as
    transformers rounds it up, spent rising linearly to `learning_rate`: of w steps the first has a w-th of it, where
    transformers begins with 0. As there, `constant` has no warm-up, whatever the ratio, and `constant_with_warmup` has
    one.

    Raises:
      ValueError: a value outside its range, by name.
    """

    learning_rate: float
    total_steps: int
    lr_scheduler_type: LRSchedulerType = "cosine"
    warmup_ratio: float = 0.1
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 0.2

    def __post_init__(self) -> None:
        settle_fields(self)
        check_fields(
            self,
            ("learning_rate", 0 < self.learning_rate < math.inf, "above 0"),
            ("total_steps", self.total_steps >= 1, "1 or more"),
            ("warmup_ratio", 0 <= self.warmup_ratio <= 1, "0 to 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("adam_beta1", 0 <= self.adam_beta1 < 1, "0 to below 1"),
            ("adam_beta2", 0 <= self.adam_beta2 < 1, "0 to below 1"),
            ("adam_epsilon", 0 < self.adam_epsilon < math.inf, "above 0"),
            ("max_grad_norm", self.max_grad_norm > 0, "above 0 (infinity clips nothing)"),
        )


def learning_rate_schedule(spec: OptimizerSpec) -> optax.Schedule:
    """Learning rate of 0-based step t: linear warm-up, whose first step is already above 0, then the decay; either only
    where the scheduler has it."""
    kind = spec.lr_scheduler_type
    warmup = 0 if kind == "constant" else math.ceil(spec.warmup_ratio * spec.total_steps)
    rest = max(1, spec.total_steps - warmup)

    def schedule(step: jax.Array) -> jax.Array:
        rising = (step + 1) / max(1, warmup)
        done = jnp.clip((step - warmup) / rest, 0, 1)
        falling = {
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * done)),
            "linear": 1 - done,
            "constant": jnp.ones_like(done),
            "constant_with_warmup": jnp.ones_like(done),
        }[kind]
        return spec.learning_rate * jnp.where(step < warmup, rising, falling)

    return schedule


def decay_mask(adapter: Adapter) -> Adapter:
    """True for LoRA matrices, False for norm scales, which are never decayed."""
    decayed = jax.tree.map(lambda _: True, adapter)
    return decayed.replace(norms=jax.tree.map(lambda _: False, adapter.norms))


def make_optimizer(spec: OptimizerSpec) -> optax.GradientTransformation:
    """Clip to `max_grad_norm`, then AdamW (Loshchilov & Hutter, arXiv 1711.05101); moments are float32."""
    return optax.chain(
        optax.clip_by_global_norm(spec.max_grad_norm),
        optax.adamw(
            learning_rate_schedule(spec),
            b1=spec.adam_beta1,
            b2=spec.adam_beta2,
            eps=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            mask=decay_mask,
        ),
    )
