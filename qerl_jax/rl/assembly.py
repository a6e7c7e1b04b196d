"""From a `Config` to the objects of a run: model, tokenizer, data, static settings, optimizer."""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from qerl_jax.config import Config, EvaluationOptions
from qerl_jax.data.dataset import Dataset, load_dataset
from qerl_jax.data.prompts import check_prompts, encode_prompts, reads_clock
from qerl_jax.errors import UserError
from qerl_jax.models.init import init_adapter
from qerl_jax.models.params import Adapter, Model
from qerl_jax.models.peft import adapter_fingerprint, load_adapter
from qerl_jax.noise import NoiseSchedule
from qerl_jax.policy import Policy, load_policy, model_identity
from qerl_jax.quantization.adapters import check_adapter, warn_of_other_format, warn_of_scaled_base
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.losses import LossSpec
from qerl_jax.rl.optimizer import OptimizerSpec, make_optimizer
from qerl_jax.rl.own_functions import NO_FUNCTIONS, OwnFunctions
from qerl_jax.rl.state import UpdateSettings
from qerl_jax.rl.step import StepSettings
from qerl_jax.rollout import Engine, SamplingSettings
from qerl_jax.rollout.attention import cache_dtypes

_log = logging.getLogger(__name__)


def configured_policy(config: Config) -> Policy:
    """The policy that a config names; refuses lengths that the network has no positions for, and a cache that its keys
    do not fit."""
    path = config.model.model_name_or_path
    policy = load_policy(path, config.model.weight_format, config.model.dtype)
    positions = policy.model.config.positions
    if config.row_tokens > positions:
        raise UserError(
            f"data.max_prompt_length {config.data.max_prompt_length} + generation.max_completion_length "
            f"{config.generation.max_completion_length} is {config.row_tokens}; {path} has {positions} positions "
            "(max_position_embeddings, or what yarn makes of them)"
        )
    cache_dtypes(policy.model, config.generation.kv_cache_dtype)
    return policy


def sampling_settings(config: Config, policy: Policy, **changes: Any) -> SamplingSettings:
    """The rollout's sampling; `changes` overrides fields (evaluation has a temperature and a top_p of its own)."""
    ends: dict[str, Any] = {"eos_token_ids": policy.eos_token_ids, "pad_token_id": policy.pad_token_id}
    return _by_name(SamplingSettings, config.generation, **(ends | changes))


def _by_name[Spec: (SamplingSettings, LossSpec, SamplerCorrection, NoiseSchedule, OptimizerSpec)](
    kind: type[Spec], options: Any, **others: Any
) -> Spec:
    """A `kind` of a section's options of the same names, and of `others`, which are not the section's."""
    names = {field.name for field in dataclasses.fields(kind)} - others.keys()
    return kind(**{name: getattr(options, name) for name in names}, **others)


def sampling_engine(
    config: Config,
    policy: Policy,
    settings: SamplingSettings,
    max_slots: int | None,
    tail_sizes: Sequence[int] | None = None,
) -> Engine:
    """An engine for the config's prompts, within its cache: of a run, and of its evaluations made again, whose numbers
    are the same in as many slots."""
    cache = config.generation.kv_cache_gb
    return Engine(
        policy.model,
        settings,
        max_prompt_length=config.data.max_prompt_length,
        max_slots=max_slots,
        cache_bytes=None if cache is None else cache * 1e9,
        tail_sizes=tail_sizes,
    )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything of a run that does not change while it runs."""

    config: Config
    policy: Policy
    dataset: Dataset
    evaluation_data: Dataset
    settings: StepSettings
    optimizer_spec: OptimizerSpec
    optimizer: optax.GradientTransformation
    total_steps: int
    longest_prompt: int
    own: OwnFunctions = NO_FUNCTIONS

    def identity(self) -> dict[str, Any]:
        """What a checkpoint belongs to, besides its config: a run on anything else must not continue it.

        Not in it are the sources of reward functions, since one that fails may be corrected amid a run.
        """
        policy, adapter = self.policy, self.config.lora.adapter
        initial = {} if adapter is None else {"initial adapter": adapter_fingerprint(adapter)}
        return initial | {
            **model_identity(self.config.model.model_name_or_path, policy.fingerprint),
            "training data": self.dataset.fingerprint,
            "evaluation data": self.evaluation_data.fingerprint,
            "total optimizer steps": self.total_steps,
            **self.own.identity(),
        }


def initial_adapter(config: Config, model: Model, key: jax.Array) -> Adapter:
    """The adapter that a run begins with: a fresh LoRA adapter, or the one that lora.adapter names."""
    lora = config.lora
    if lora.adapter is not None:
        return load_adapter(lora.adapter, model, train_norms=lora.train_norms)
    modules = lora.lora_target_modules
    return init_adapter(key, model, lora.lora_r, lora.lora_alpha, modules, lora.train_norms, lora.use_rslora)


def optimizer_spec(config: Config, total_steps: int) -> OptimizerSpec:
    """The optimizer that a config describes; the shape of its state does not depend on `total_steps`."""
    return _by_name(OptimizerSpec, config.optimizer, total_steps=total_steps)


def evaluation_data(config: Config, seed: int) -> Dataset:
    """The data set of an evaluation; `seed` is for one that is generated."""
    return load_dataset(config.evaluation.eval_dataset, split="eval", seed=seed)


def held_out(config: Config, dataset: Dataset) -> list[dict[str, Any]]:
    """The problems of an evaluation: the first rows of its data set."""
    return [dataset[i] for i in range(min(config.evaluation.num_problems, len(dataset)))]


def check_held_out(config: Config, rewards: RewardFunctions, examples: list[dict[str, Any]]) -> None:
    """Refuses problems of an evaluation that `rewards` cannot score; the UserError names the option and the data."""
    rewards.check(examples, f"evaluation.eval_dataset {config.evaluation.eval_dataset}")


def check_configured_prompts(
    config: Config, policy: Policy, examples: list[dict[str, Any]], where: Callable[[int], str]
) -> int:
    """Refuses prompts that become no tokens or too many with the options of the config; the tokens of the longest (see
    `check_prompts`)."""
    data = config.data
    return check_prompts(
        policy.tokenizer, examples, where, data.max_prompt_length, chat_template_kwargs=data.chat_template_kwargs
    )


def configured_ids(config: Config, policy: Policy, examples: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The prompts of rows as tokens, with the options of the config (see `encode_prompts`)."""
    data, prompts = config.data, [example["prompt"] for example in examples]
    return encode_prompts(
        policy.tokenizer, prompts, data.max_prompt_length, chat_template_kwargs=data.chat_template_kwargs
    )


def _refuse_variables_that_no_prompt_reads(config: Config, examples: list[dict[str, Any]]) -> None:
    data = config.data
    if data.chat_template_kwargs and not any(isinstance(example["prompt"], list) for example in examples):
        raise UserError(
            f"data.chat_template_kwargs has no effect in this run: the prompts of {data.train_dataset} and "
            f"{config.evaluation.eval_dataset} are texts, which pass no chat template; leave it out, or write prompts "
            "as lists of messages"
        )


def _warn_of_clock(config: Config, policy: Policy, examples: list[dict[str, Any]]) -> None:
    has_messages = any(isinstance(example["prompt"], list) for example in examples)
    if has_messages and reads_clock(policy.tokenizer, config.data.chat_template_kwargs):
        _log.warning(
            "the tokenizer's chat template reads the date (strftime_now): prompts change from day to day, and a run "
            "that is continued on another day differs from one that was not stopped; where the template has the "
            "variable, data.chat_template_kwargs={date_string: '26 Jul 2024'} keeps them the same"
        )


def _warn_of_problems_trained_on(trained: list[dict[str, Any]], evaluated: list[dict[str, Any]], name: str) -> None:
    known = {json.dumps(example["prompt"], sort_keys=True) for example in trained}
    both = sum(json.dumps(example["prompt"], sort_keys=True) in known for example in evaluated)
    if both:
        _log.warning(
            "%d of the %d problems of the evaluation (%s) are training data too: they are not held out, whatever they "
            "are called",
            both,
            len(evaluated),
            name,
        )


def _warn_of_evaluation_on_other_data(config: Config) -> None:
    trained, evaluated = config.data.train_dataset, config.evaluation.eval_dataset
    if evaluated == EvaluationOptions().eval_dataset != trained:
        _log.warning(
            "the run is trained on %s, but evaluated on %s, the default of evaluation.eval_dataset; name a file of "
            "held-out rows there. An evaluation is always made before and after a run; evaluation.num_problems=1 keeps "
            "it short",
            trained,
            evaluated,
        )


def assemble(config: Config, rewards: RewardFunctions, own: OwnFunctions = NO_FUNCTIONS) -> Experiment:
    """Loads and builds what the config names, to go with functions of a user's `own`. Data that `rewards` cannot score,
    and an adapter that cannot be used with the model, are refused before the model is loaded.

    Raises:
      UserError: whatever is missing or does not fit, by name.
    """
    dataset = load_dataset(config.data.train_dataset, split="train")
    of_evaluation = evaluation_data(config, config.run.seed)
    trained, evaluated = [dataset[i] for i in range(len(dataset))], held_out(config, of_evaluation)
    rewards.check(trained, f"data.train_dataset {config.data.train_dataset}")
    check_held_out(config, rewards, evaluated)
    _refuse_variables_that_no_prompt_reads(config, trained + evaluated)
    _warn_of_evaluation_on_other_data(config)
    own.warn_of_options(config)
    _warn_of_problems_trained_on(trained, evaluated, config.evaluation.eval_dataset)
    total_steps = config.total_steps(len(dataset))
    adapter, base = config.lora.adapter, config.model.model_name_or_path
    if adapter is not None:
        check_adapter(adapter, base, config.lora.train_norms)
        warn_of_scaled_base(adapter, base)
        warn_of_other_format(adapter, base, config.model.weight_format, "model.weight_format")
    policy = configured_policy(config)
    longest_prompt = max(
        check_configured_prompts(config, policy, examples, rows.where)
        for rows, examples in ((dataset, trained), (of_evaluation, evaluated))
    )
    _warn_of_clock(config, policy, trained + evaluated)
    grpo, noise, optimizer = config.grpo, config.noise, config.optimizer
    update = UpdateSettings(
        num_generations=config.generation.num_generations,
        temperature=config.generation.temperature,
        micro_batch_size=optimizer.per_device_train_batch_size,
        old_logprobs=grpo.old_logprobs,
        loss=_by_name(LossSpec, grpo),
        correction=_by_name(SamplerCorrection, grpo.sampler_correction),
        gradient_checkpointing=optimizer.gradient_checkpointing,
    )
    schedule = _by_name(NoiseSchedule, noise, total_steps=total_steps) if noise.num_stages > 1 else None
    settings = StepSettings(sampling_settings(config, policy), update, schedule, grpo.mask_truncated_completions)
    spec = optimizer_spec(config, total_steps)
    trained_by = spec, make_optimizer(spec), total_steps
    return Experiment(config, policy, dataset, of_evaluation, settings, *trained_by, longest_prompt, own)
