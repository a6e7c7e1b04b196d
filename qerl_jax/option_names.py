"""What options may be, by name, for what must not import JAX; what names a number format is in `format_names`.

`qerl_jax.config` and the modules that use an option both read them here.
"""

from typing import Literal

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
ScaleRewards = Literal["group", "batch", "none"]
OldLogprobs = Literal["learner", "sampler"]
CorrectionLevel = Literal["none", "token", "sequence"]
CorrectionMode = Literal["truncate", "mask"]
LRSchedulerType = Literal["cosine", "linear", "constant"]
NoiseDecay = Literal["exponential", "linear", "cosine", "logarithmic"]
Service = Literal["tensorboard", "wandb"]
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
