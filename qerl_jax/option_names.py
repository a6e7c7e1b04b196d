"""What options may be, by name, for what must not import JAX.

`qerl_jax.config` and the modules that use an option both read them here. What the formats of weights are is said by
`qerl_jax.formats.PACKED`, what those of keys and values by `qerl_jax.rollout.SamplingSettings`.
"""

from typing import Literal, get_args

from qerl_jax.errors import UserError, nearest

FormatName = Literal["nvfp4", "mxfp4", "nf4", "nf4_double_quant", "bf16"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
# Of a model's weights as they are written, and of whatever is exported.
SAVED_FORMATS: tuple[FormatName, ...] = ("bf16", "nvfp4")
EXPORT_FORMATS = ("peft", *SAVED_FORMATS)
KVCacheDtype = Literal["auto", "fp8_values", "fp8"]
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
ScaleRewards = Literal["group", "batch", "none"]
OldLogprobs = Literal["learner", "sampler"]
CorrectionLevel = Literal["none", "token", "sequence"]
CorrectionMode = Literal["truncate", "mask"]
LRSchedulerType = Literal["cosine", "linear", "constant", "constant_with_warmup"]  # transformers' names
NoiseDecay = Literal["exponential", "linear", "cosine", "logarithmic"]
Service = Literal["tensorboard", "wandb"]
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def clashing_bounds(loss_type: str, epsilon_high: float, delta: float | None, section: str = "") -> str | None:
    """Which bound of the ratio does not go with the others, and what is allowed; None if all go together."""
    if loss_type == "cispo":
        if epsilon_high >= 1:
            return None
        return (
            f"{section}epsilon_high is {epsilon_high}; allowed with {section}loss_type cispo: a number >= 1, the "
            "largest ratio itself (5 is usual)"
        )
    if delta is None or delta > 1 + epsilon_high:
        return None
    none = "null" if section else "None"
    bound = f"1 + {section}epsilon_high, which is {1 + epsilon_high:g}"
    return f"{section}delta is {delta}; allowed: above {bound}, or {none}"


def check_format(weight_format: str | None) -> None:
    """Raises UserError for a name that no format of weights has; None, where a folder's own is meant, is no name."""
    if weight_format is not None and weight_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"weight_format is {weight_format!r}; allowed: {known}{nearest(weight_format, FORMATS)}")
