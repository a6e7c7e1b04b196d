"""Every option of a run: frozen dataclasses, one per section of the YAML file, which check themselves.

Names are TRL's where TRL has the option. A dataclass field is one option; its annotation says what is allowed and its
default is what a file that leaves it out gets. `config_files.load_config` reads a file and command-line overrides;
`Config(...)` makes one in a script. Batch sizes count completions. A `~` at the beginning of a path is the home folder.
"""

import dataclasses
import fractions
import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import pydantic
from pydantic.dataclasses import dataclass

from qerl_jax.config_checks import conflicts
from qerl_jax.errors import UserError
from qerl_jax.json_mapping import JsonMapping
from qerl_jax.models.dtypes import DtypeOption
from qerl_jax.option_names import (
    CorrectionLevel,
    CorrectionMode,
    FormatName,
    ImportanceSamplingLevel,
    KVCacheDtype,
    LossType,
    LRSchedulerType,
    NoiseDecay,
    OldLogprobs,
    Projection,
    ScaleRewards,
    Service,
)

# The step is an int32.
Count = Annotated[int, pydantic.Field(strict=True, ge=1, lt=2**31), "a whole number from 1 to 2^31 - 1"]
CountOrZero = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**31), "a whole number from 0 to 2^31 - 1"]
Seed = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**32), "a whole number from 0 to 2^32 - 1"]
Switch = Annotated[bool, pydantic.Field(strict=True), "true or false"]
Text = Annotated[str, pydantic.Field(strict=True, pattern=r"^[^\x00]+$"), "a text that is not empty, without NUL"]
# What may be a path. A shell expands no ~ in `run.output_dir=~/runs`, nor in a YAML file.
Location = Annotated[Text, pydantic.AfterValidator(os.path.expanduser)]
Real = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False), "a finite number"]
# float32, in which runs compute, makes 0 or infinity of numbers far beyond, and of logits / temperature sooner.
Positive = Annotated[float, pydantic.Field(strict=True, ge=1e-30, le=1e30), "a number from 1e-30 to 1e30"]
Seconds = Annotated[
    float, pydantic.Field(strict=True, gt=0, le=1e7), "a number of seconds above 0 and at most 1e7, which is 115 days"
]
NotNegative = Annotated[float, pydantic.Field(strict=True, ge=0, le=1e30), "a number from 0 to 1e30"]
Fraction = Annotated[float, pydantic.Field(strict=True, ge=0, le=1), "a number from 0 to 1"]
PositiveFraction = Annotated[float, pydantic.Field(strict=True, ge=1e-30, le=1), "a number from 1e-30 to 1"]
Decay = Annotated[float, pydantic.Field(strict=True, ge=0, lt=1), "a number from 0 to below 1"]
Group = Annotated[int, pydantic.Field(strict=True, ge=2), "a whole number >= 2 (advantages compare completions)"]


def _json_mapping(value: Any) -> JsonMapping | None:
    """The mapping as a config keeps it, None for an empty one, which says the same."""
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return JsonMapping(value) or None


TemplateVariables = Annotated[
    JsonMapping,
    pydantic.PlainValidator(_json_mapping),
    "a mapping of variables of the chat template to JSON values (texts, numbers, true, false, null, lists, mappings)",
]

_FROZEN = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_FROZEN)
class ModelOptions:
    """The frozen base: a Hugging Face folder, a hub name or a shipped policy, and how its linear weights are held."""

    model_name_or_path: Location = "builtin:quickstart"
    weight_format: FormatName = "nvfp4"
    # auto: float32 on CPU, bfloat16 on GPU. float16: sampler and learner agree 8 times better than in bfloat16, in a
    # range that ends at 65504; a network whose activations go beyond is refused at its first update.
    dtype: DtypeOption = "auto"


@dataclass(frozen=True, config=_FROZEN)
class LoraOptions:
    """The trained part. An `adapter` (a PEFT folder to start from) brings its own rank, alpha and modules."""

    lora_r: Count = 16
    lora_alpha: Positive = 32.0
    lora_target_modules: tuple[Projection, ...] = get_args(Projection)
    use_rslora: Switch = False  # scaling alpha / sqrt(r) instead of alpha / r
    train_norms: Switch = False
    adapter: Location | None = None


@dataclass(frozen=True, config=_FROZEN)
class DataOptions:
    """Prompts: `arithmetic` (generated) or a local .jsonl or .ndjson file. A prompt beyond the limit is an error.
    `chat_template_kwargs` are for the tokenizer's chat template, which prompts of messages pass, in evaluations too."""

    train_dataset: Location = "arithmetic"
    max_prompt_length: Count = 48
    chat_template_kwargs: TemplateVariables | None = None  # {enable_thinking: false}: Qwen3 answers without thinking
    shuffle: Switch = True


@dataclass(frozen=True, config=_FROZEN)
class GenerationOptions:
    """Sampling of rollouts. top_p 1, top_k 0 and min_p 0 switch the respective truncation off. More completions than
    `max_slots`, or than memory holds, are sampled one after the other as slots become free. `kv_cache_dtype` auto keeps
    keys and values in model.dtype, as evaluation always does, fp8_values keeps values, fp8 keys too, in 8 bits."""

    num_generations: Group = 8
    max_completion_length: Count = 64
    temperature: Positive = 1.0
    top_p: PositiveFraction = 1.0
    top_k: CountOrZero = 0
    min_p: Fraction = 0.0
    kv_cache_dtype: KVCacheDtype = "auto"
    max_slots: Count | None = None  # completions decoded at once; null: all, or as many as fit
    kv_cache_gb: Positive | None = None  # for their keys and values; null: what the device has left, 4 on a CPU


@dataclass(frozen=True, config=_FROZEN)
class RewardFunction:
    """`function`: a built-in name, `module:function` or `path/to/file.py:function`. Weight 0 only logs it."""

    function: Location
    weight: Real = 1.0


@dataclass(frozen=True, config=_FROZEN)
class RewardOptions:
    """The reward is the weighted sum of the functions that apply; `timeout` is the deadline of one call, in seconds.
    `soft_punish_cache` belongs to soft_overlong_punishment: it acts on so many last tokens of max_completion_length."""

    functions: tuple[RewardFunction, ...] = (RewardFunction("accuracy", 1.0), RewardFunction("format", 0.2))
    timeout: Seconds = 30.0
    soft_punish_cache: Count | None = None


@dataclass(frozen=True, config=_FROZEN)
class SamplerCorrectionOptions:
    """The detached weight exp(learner - sampler log-probability), cut at `cap` or, above it, masked."""

    level: CorrectionLevel = "none"
    mode: CorrectionMode = "truncate"
    cap: Positive = 2.0


@dataclass(frozen=True, config=_FROZEN)
class DynamicSamplingOptions:
    """DAPO's (arXiv 2503.14476, section 3.2): groups whose completions all score the same on the reward function
    `metric`, named as in metrics, are replaced by groups of the next prompts, in at most `max_rounds` rounds of
    sampling. metric null replaces none; max_rounds 1 only measures."""

    metric: Location | None = None
    max_rounds: Count = 8


@dataclass(frozen=True, config=_FROZEN)
class GrpoOptions:
    """The policy-gradient objective and how often a rollout is used. `beta` weighs the KL divergence from the base
    without any adapter, also where `lora.adapter` is what a run starts from."""

    loss_type: LossType = "dapo"
    importance_sampling_level: ImportanceSamplingLevel = "token"  # sequence: GSPO's, with loss_type grpo
    beta: NotNegative = 0.0
    epsilon: PositiveFraction = 0.2
    epsilon_high: Positive = 0.28  # cispo: the largest ratio itself, usually 5
    delta: Positive | None = None  # cuts the ratio at negative advantages too, above 1 + epsilon_high
    top_entropy_quantile: PositiveFraction = 1.0  # 0.2: a policy loss for the fifth of tokens of highest entropy alone
    scale_rewards: ScaleRewards = "group"
    mask_truncated_completions: Switch = False
    num_iterations: Count = 1
    steps_per_generation: Count | None = None  # None: gradient_accumulation_steps
    old_logprobs: OldLogprobs = "learner"
    sampler_correction: SamplerCorrectionOptions = dataclasses.field(default_factory=SamplerCorrectionOptions)
    dynamic_sampling: DynamicSamplingOptions = dataclasses.field(default_factory=DynamicSamplingOptions)


@dataclass(frozen=True, config=_FROZEN)
class OptimizerOptions:
    """AdamW, its schedule and the length of the run: exactly one of max_steps and num_train_epochs."""

    learning_rate: Positive = 1e-5
    lr_scheduler_type: LRSchedulerType = "cosine"
    warmup_ratio: Fraction = 0.1
    weight_decay: NotNegative = 0.1
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.99
    adam_epsilon: Positive = 1e-8
    max_grad_norm: Positive = 0.2
    max_steps: Count | None = None
    num_train_epochs: Positive | None = None
    per_device_train_batch_size: Count = 32  # rows of the greatest length at once, of shorter ones as many more
    gradient_accumulation_steps: Count = 4
    gradient_checkpointing: Switch = False


@dataclass(frozen=True, config=_FROZEN)
class NoiseOptions:
    """Adaptive quantization noise (QeRL, arXiv 2510.11696): stage 0 without, then from sigma_start to sigma_end."""

    num_stages: Count = 10  # 1: never any noise
    sigma_start: Positive = 1e-2
    sigma_end: Positive = 5e-4
    schedule: NoiseDecay = "exponential"
    final_norm: Switch = False


@dataclass(frozen=True, config=_FROZEN)
class EvaluationOptions:
    """Accuracy on held-out problems, sampled and greedy: before and after the run, and every eval_steps if given. With
    several sampled completions of each problem, pass@k too."""

    eval_dataset: Location = "arithmetic"
    num_problems: Count = 512  # the first of them; all, where there are fewer
    num_generations_eval: Count = 1  # completions sampled of each
    eval_steps: Count | None = None
    temperature: Positive = 1.0
    top_p: PositiveFraction = 1.0
    batch_size: Count = 128


@dataclass(frozen=True, config=_FROZEN)
class RunOptions:
    """Where the run is kept and what is written. save_steps null: checkpoints only before the first step, where the
    run stops early (Ctrl-C, a reward function that fails, updates that are not finite) and after the last step."""

    output_dir: Location | None = None  # None: runs/<name of the config>
    seed: Seed = 0
    save_steps: Count | None = 10
    save_total_limit: Count = 3
    log_completions: Switch = True
    report_to: tuple[Service, ...] = ()
    max_nonfinite_steps: Count = 3


@dataclass(frozen=True, config=_FROZEN)
class Config:
    """All sections. Raises pydantic.ValidationError (a ValueError) for values that do not go together."""

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    lora: LoraOptions = dataclasses.field(default_factory=LoraOptions)
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    generation: GenerationOptions = dataclasses.field(default_factory=GenerationOptions)
    reward: RewardOptions = dataclasses.field(default_factory=RewardOptions)
    grpo: GrpoOptions = dataclasses.field(default_factory=GrpoOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    noise: NoiseOptions = dataclasses.field(default_factory=NoiseOptions)
    evaluation: EvaluationOptions = dataclasses.field(default_factory=EvaluationOptions)
    run: RunOptions = dataclasses.field(default_factory=RunOptions)

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches that one rollout fills."""
        return self.grpo.steps_per_generation or self.optimizer.gradient_accumulation_steps

    @property
    def completions_per_rollout(self) -> int:
        """Completions of one rollout: per_device_train_batch_size x steps_per_generation."""
        return self.optimizer.per_device_train_batch_size * self.steps_per_generation

    @property
    def completions_per_update(self) -> int:
        """Completions of one optimizer step: per_device_train_batch_size x gradient_accumulation_steps."""
        return self.optimizer.per_device_train_batch_size * self.optimizer.gradient_accumulation_steps

    @property
    def row_tokens(self) -> int:
        """The most tokens that a prompt and its completion have together."""
        return self.data.max_prompt_length + self.generation.max_completion_length

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout, each with num_generations completions."""
        return self.completions_per_rollout // self.generation.num_generations

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps made with one rollout."""
        return self.steps_per_generation // self.optimizer.gradient_accumulation_steps * self.grpo.num_iterations

    def total_steps(self, dataset_length: int) -> int:
        """T, the optimizer steps of the run: max_steps, or enough whole rollouts for num_train_epochs.

        Raises:
          UserError: the epochs give fewer rollouts than noise.num_stages, or 2^31 steps and more.
        """
        if self.optimizer.max_steps is not None:
            return self.optimizer.max_steps
        assert self.optimizer.num_train_epochs is not None
        epochs = self.optimizer.num_train_epochs
        decimal = fractions.Fraction(repr(float(epochs)))  # 1.1 as it was written
        exact = decimal * dataset_length / self.prompts_per_rollout
        rollouts = math.ceil(min(max(fractions.Fraction(1), exact), fractions.Fraction(10**18)))
        steps = rollouts * self.updates_per_rollout
        if steps >= 2**31:
            raise UserError(
                f"optimizer.num_train_epochs is {epochs:g}, which gives {steps:.0e} optimizer "
                f"steps on {dataset_length} prompts; allowed: fewer than 2^31 steps"
            )
        if self.noise.num_stages > rollouts:
            raise UserError(
                f"noise.num_stages is {self.noise.num_stages}; allowed: at most the {rollouts} rollouts that "
                f"optimizer.num_train_epochs {epochs:g} gives on {dataset_length} prompts"
            )
        return steps

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> "Config":
        problems = conflicts(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self
