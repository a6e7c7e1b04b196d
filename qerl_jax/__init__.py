"""qerl_jax: reinforcement learning of language models with 4-bit frozen weights, on one GPU, in JAX.

The functions that scripts need. What computes is pure over explicit pytrees: usable under `jax.jit`, `jax.vmap` and,
where it means something, `jax.grad`; beside it what loads and saves. `Model` is the frozen base, `Adapter` what is
trained, `TrainState` what an update changes. A run as the command line makes it is `train`, of a `Config`, which
`load_config` reads.

Each name is imported from its module on first use, so that `import qerl_jax` and the command line start at once.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "qerl_jax.checkpoints": (
        "restore_checkpoint",
        "save_checkpoint",
    ),
    "qerl_jax.config": ("Config",),
    "qerl_jax.config_files": ("load_config",),
    "qerl_jax.data.dataset": ("load_dataset",),
    "qerl_jax.data.prompts": ("encode_prompts",),
    "qerl_jax.errors": ("UserError",),
    "qerl_jax.export": ("export_model",),
    "qerl_jax.models.config": ("ModelConfig",),
    "qerl_jax.models.flash_attention": ("deterministic_jit",),
    "qerl_jax.models.loading": ("load_model",),
    "qerl_jax.models.init": (
        "init_adapter",
        "init_model",
        "quantize",
    ),
    "qerl_jax.models.linear": ("linear",),
    "qerl_jax.models.params": (
        "Adapter",
        "LoRA",
        "Model",
        "Norms",
        "norms_of",
    ),
    "qerl_jax.models.peft": (
        "load_adapter",
        "save_adapter",
    ),
    "qerl_jax.models.saving": (
        "merge_adapter",
        "save_merged",
        "save_model",
    ),
    "qerl_jax.models.tokenizer": (
        "load_generation_config",
        "load_tokenizer",
    ),
    "qerl_jax.models.transformer": ("logits",),
    "qerl_jax.noise": (
        "NoiseSchedule",
        "perturb_norms",
        "sigma_at",
    ),
    "qerl_jax.rl.advantages": (
        "group_advantages",
        "informative_groups",
    ),
    "qerl_jax.rl.correction": ("SamplerCorrection",),
    "qerl_jax.rl.logprobs": ("per_token_logps",),
    "qerl_jax.rl.losses": (
        "LossSpec",
        "policy_loss",
    ),
    "qerl_jax.rl.optimizer": (
        "OptimizerSpec",
        "make_optimizer",
    ),
    "qerl_jax.rl.step": (
        "StepSettings",
        "grpo_step",
        "make_batch",
        "reward_metrics",
        "sample_rollout",
        "with_policies",
    ),
    "qerl_jax.rl.state": (
        "Batch",
        "TrainState",
        "UpdateSettings",
        "init_state",
    ),
    "qerl_jax.rl.trainer": ("train",),
    "qerl_jax.rl.update": ("update_step",),
    "qerl_jax.rollout": (
        "Completion",
        "Engine",
        "Prompts",
        "Request",
        "Rollout",
        "SamplingSettings",
        "generate",
        "join_rows",
    ),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
