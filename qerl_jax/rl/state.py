"""What an optimizer step goes by: the state that it changes, the batch that it is given, and its static choices.

Dimension letters: B rows of the optimizer batch, groups of G completions, P prompt slots, C completion slots.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from qerl_jax.errors import check_fields, settle_fields
from qerl_jax.models.params import Adapter
from qerl_jax.option_names import OldLogprobs
from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.losses import LossSpec
from qerl_jax.trees import Tree


class TrainState(Tree):
    """Everything an update changes: the 0-based count of optimizer steps done, the adapter, the optimizer's state."""

    step: jax.Array
    adapter: Adapter
    opt_state: Any


class Batch(flax.struct.PyTreeNode):
    """Completions of whole groups, prompt-major, with what the loss needs.

    prompt [B, P] int32 padded on the right, prompt_lengths [B]; completion [B, C], completion_lengths [B] (EOS
    included); mask [B, C], tokens that count; rewards [B]; sampled_logps [B, C], as the rollout recorded them;
    old_logps [B, C] or None, where the batch serves one update only; ref_logps [B, C] or None, where beta is 0;
    advantages [B] or, for each token, [B, C] (anything where the mask is false), or None, which has them computed from
    this batch's rewards: one cut from a larger batch brings that one's; rollout_step, the optimizer step at which the
    completions were drawn, [], or [B] where rows of several rollouts stand together.
    """

    prompt: jax.Array
    prompt_lengths: jax.Array
    completion: jax.Array
    completion_lengths: jax.Array
    mask: jax.Array
    rewards: jax.Array
    sampled_logps: jax.Array
    rollout_step: jax.Array
    old_logps: jax.Array | None = None
    ref_logps: jax.Array | None = None
    advantages: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """Static choices of an update.

    Attributes:
      num_generations: G.
      temperature: the sampling temperature, at which all log-probabilities are taken.
      micro_batch_size: rows that go through the network at once if all are as long as rows can be
        (per_device_train_batch_size); of shorter rows more, up to the same number of tokens. Under `vmap` every batch
        takes as many packs as the one that needs most.
      old_logprobs: `learner`, the clean policy at the time of the rollout (the first update has a ratio of exactly 1),
        or `sampler`, what the rollout recorded.
      loss, correction: see there.
      gradient_checkpointing: keep one activation per layer instead of all, and run each layer forward twice. If one
        row's activations fit (about 5 MB a token at 7B), a smaller micro-batch without it takes less time.
    """

    num_generations: int
    temperature: float
    micro_batch_size: int
    old_logprobs: OldLogprobs = "learner"
    loss: LossSpec = dataclasses.field(default_factory=LossSpec)
    correction: SamplerCorrection = dataclasses.field(default_factory=SamplerCorrection)
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        settle_fields(self)
        check_fields(
            self,
            ("num_generations", self.num_generations >= 1, "1 or more"),
            ("temperature", self.temperature >= 1e-30, "1e-30 or more"),
            ("micro_batch_size", self.micro_batch_size >= 1, "1 or more"),
            ("loss", isinstance(self.loss, LossSpec), "a LossSpec"),
            ("correction", isinstance(self.correction, SamplerCorrection), "a SamplerCorrection"),
        )
        if self.old_logprobs == "sampler" and self.correction.level != "none":
            raise ValueError(
                f"correction.level is {self.correction.level!r}; allowed with old_logprobs 'sampler': 'none', since "
                "the ratio itself holds the gap, and the correction would be exactly 1"
            )


def init_state(adapter: Adapter, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0 of training `adapter`. The state has arrays of its own, so that an update which is donated it leaves
    `adapter` as it is. (What is kept of a later state, such as an opponent, has to be copied likewise.)

    Raises:
      ValueError: the adapter has no array to train.
    """
    if not jax.tree.leaves(adapter):
        raise ValueError("the adapter has no LoRA pair and no norms, so there is nothing to train")
    # Of the optimizer's too: some keep the parameters that they begin with, and no array can be donated twice.
    return TrainState(jnp.int32(0), *jax.tree.map(jnp.copy, (adapter, optimizer.init(adapter))))
