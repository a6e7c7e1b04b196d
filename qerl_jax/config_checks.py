"""Checks between options: which do not go together, and which would have no effect."""

from typing import TYPE_CHECKING

from qerl_jax.errors import nearest
from qerl_jax.option_names import clashing_bounds
from qerl_jax.rewards.loading import titles

if TYPE_CHECKING:
    from qerl_jax.config import Config

_PUNISHMENT = "soft_overlong_punishment"


def conflicts(config: "Config") -> list[str]:
    """One line for each pair of options that do not go together: field, value, what is allowed."""
    problems: list[str] = []
    optimizer, group = config.optimizer, config.generation.num_generations
    accumulation, steps = optimizer.gradient_accumulation_steps, config.steps_per_generation
    for name, values in (
        ("lora.lora_target_modules", config.lora.lora_target_modules),
        ("run.report_to", config.run.report_to),
        ("reward.functions", [f.function for f in config.reward.functions]),
    ):
        if len(set(values)) < len(values):
            problems.append(f"{name} is {list(values)}; allowed: each name once")
    if not config.lora.lora_target_modules:
        problems.append("lora.lora_target_modules is []; allowed: one projection or more")
    if not config.reward.functions:
        problems.append("reward.functions is []; allowed: one function or more")
    elif not any(f.weight for f in config.reward.functions):
        problems.append("reward.functions have weight 0 each, and nothing would be learned; allowed: another for one")
    problems += _of_rewards(config)
    if (optimizer.max_steps is None) == (optimizer.num_train_epochs is None):
        problems.append(
            f"optimizer.max_steps is {optimizer.max_steps or 'null'} and optimizer.num_train_epochs is "
            f"{optimizer.num_train_epochs or 'null'}; allowed: exactly one of them, the other one null"
        )
    grpo = config.grpo
    if clash := clashing_bounds(grpo.loss_type, grpo.epsilon_high, grpo.delta, "grpo."):
        problems.append(clash)
    batch = config.completions_per_update
    if batch % group:
        problems.append(
            f"generation.num_generations is {group}; allowed: a divisor of the {batch} completions of an optimizer "
            f"step (optimizer.per_device_train_batch_size {optimizer.per_device_train_batch_size} x "
            f"gradient_accumulation_steps {accumulation}), which takes whole groups"
        )
    problems += _beyond_int32(config)
    if steps % accumulation:
        problems.append(
            f"grpo.steps_per_generation is {steps}; allowed: a multiple of optimizer.gradient_accumulation_steps "
            f"{accumulation}"
        )
        return problems
    updates = config.updates_per_rollout
    for name, value in (
        ("optimizer.max_steps", optimizer.max_steps),
        ("run.save_steps", config.run.save_steps),
        ("evaluation.eval_steps", config.evaluation.eval_steps),
    ):
        if value is not None and value % updates:
            problems.append(
                f"{name} is {value}; allowed: a multiple of the {updates} optimizer steps that follow each rollout "
                f"(steps_per_generation {steps} / gradient_accumulation_steps {accumulation} x num_iterations "
                f"{config.grpo.num_iterations})"
            )
    if optimizer.max_steps is not None and config.noise.num_stages > optimizer.max_steps // updates:
        rollouts = f" / the {updates} steps that follow each rollout" if updates > 1 else ""
        problems.append(
            f"noise.num_stages is {config.noise.num_stages}; allowed: at most optimizer.max_steps "
            f"{optimizer.max_steps}{rollouts}, so that every stage has a rollout or more"
        )
    return problems


def _beyond_int32(config: "Config") -> list[str]:
    """Options whose product or sum is a number of tokens or completions that an int32 does not count."""
    problems = []
    optimizer, most = config.optimizer, 2**31 - 1
    rows, tokens = optimizer.per_device_train_batch_size, config.row_tokens
    if tokens > most:
        lengths = {
            "data.max_prompt_length": config.data.max_prompt_length,
            "generation.max_completion_length": config.generation.max_completion_length,
        }
        (longer, length), (other, rest) = sorted(lengths.items(), key=lambda named: -named[1])
        problems.append(f"{longer} is {length} and {other} is {rest}; allowed: a sum below 2^31, which int32 counts")
    elif rows * tokens > most:
        problems.append(
            f"optimizer.per_device_train_batch_size is {rows}; allowed: at most {most // tokens} rows of {tokens} "
            "tokens (data.max_prompt_length and generation.max_completion_length), which int32 counts"
        )
    for name, count, unit in (
        ("optimizer.gradient_accumulation_steps", optimizer.gradient_accumulation_steps, "an optimizer step"),
        ("grpo.steps_per_generation", config.grpo.steps_per_generation, "a rollout"),
    ):
        if count is not None and rows * count > most:  # null is as many as of an optimizer step
            problems.append(
                f"{name} is {count}; allowed: at most {most // rows} with optimizer.per_device_train_batch_size "
                f"{rows}, so that {unit} has fewer than 2^31 completions, which int32 counts"
            )
    return problems


def _of_rewards(config: "Config") -> list[str]:
    """Conflicts of what takes its meaning from the configured reward functions."""
    problems = []
    specs = [entry.function for entry in config.reward.functions]
    metric, cache = config.grpo.dynamic_sampling.metric, config.reward.soft_punish_cache
    if metric is not None and metric not in titles(specs):
        problems.append(
            f"grpo.dynamic_sampling.metric is {metric!r}{nearest(metric, titles(specs))}; allowed: the name of a "
            f"function of reward.functions ({', '.join(titles(specs))}) or null"
        )
    longest = config.generation.max_completion_length
    if _PUNISHMENT in specs and (cache is None or cache >= longest):
        problems.append(
            f"reward.soft_punish_cache is {'null' if cache is None else cache}; allowed with {_PUNISHMENT} in "
            f"reward.functions: a whole number >= 1 and below generation.max_completion_length {longest}"
        )
    return problems


def options_without_effect(config: "Config") -> dict[str, tuple[str, tuple[str, ...]]]:
    """{option: (why it has no effect in this run, the options that make it so)}."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}

    def add(why: str, causes: tuple[str, ...], *options: str) -> None:
        found.update({option: (why, causes) for option in options})

    if config.data.train_dataset == config.evaluation.eval_dataset == "arithmetic":
        why = "the prompts of arithmetic are texts, which pass no chat template"
        add(why, ("data.train_dataset", "evaluation.eval_dataset"), "data.chat_template_kwargs")
    stages = config.noise.num_stages
    cause = ("noise.num_stages",)
    if stages == 1:
        add("with noise.num_stages 1 there is never any noise", cause, "noise.sigma_start", "noise.final_norm")
    if stages <= 2:
        add(f"with noise.num_stages {stages} no stage reaches it", cause, "noise.sigma_end")
    if stages <= 3:
        add(f"with noise.num_stages {stages} nothing lies between the two ends", cause, "noise.schedule")
    kind, level = "grpo.loss_type", config.grpo.sampler_correction.level
    cispo = config.grpo.loss_type == "cispo"
    if config.updates_per_rollout == 1 and config.grpo.old_logprobs == "learner":
        why = "with one update per rollout and grpo.old_logprobs learner the ratio is exactly 1"
        rest = ("grpo.steps_per_generation", "optimizer.gradient_accumulation_steps")
        causes = ("grpo.old_logprobs", "grpo.num_iterations", *rest)
        add(f"{why} and is never clipped", causes, "grpo.epsilon", "grpo.delta")
        if not cispo:  # which is refused at the default: there epsilon_high has to be set, with an effect or without
            add(f"{why} and is never clipped", (*causes, kind), "grpo.epsilon_high")
        # The gradient of a row's ratio is the mean over the row's tokens, and the same as by tokens unless the
        # correction weighs them one by one, or some have no policy loss. In cispo's loss the ratio has no gradient.
        if cispo or (level != "token" and config.grpo.top_entropy_quantile == 1):
            why += ", of tokens and of rows, and the gradient of a completion's one advantage is the same"
            tokens = "grpo.sampler_correction.level", "grpo.top_entropy_quantile"
            add(why, (*causes, kind, *tokens), "grpo.importance_sampling_level")
    if cispo:
        add(f"with {kind} cispo only grpo.epsilon_high bounds the ratio", (kind,), "grpo.epsilon", "grpo.delta")
    prefix = "grpo.sampler_correction."
    if level == "none":
        why = f"with {prefix}level none there is no correction"
        add(why, (f"{prefix}level",), f"{prefix}mode", f"{prefix}cap")
    elif config.grpo.old_logprobs == "sampler":
        why = "with grpo.old_logprobs sampler the ratio itself holds the gap, and the correction is exactly 1"
        add(why, ("grpo.old_logprobs",), f"{prefix}level", f"{prefix}mode", f"{prefix}cap")
    if config.grpo.dynamic_sampling.metric is None:
        why, cause = "with grpo.dynamic_sampling.metric null no group is replaced", ("grpo.dynamic_sampling.metric",)
        add(why, cause, "grpo.dynamic_sampling.max_rounds")
    if _PUNISHMENT not in [entry.function for entry in config.reward.functions]:
        add(f"{_PUNISHMENT} is not in reward.functions", ("reward.functions",), "reward.soft_punish_cache")
    if config.lora.adapter is not None:
        why = f"it comes from lora.adapter {config.lora.adapter!r}"
        add(why, ("lora.adapter",), "lora.lora_r", "lora.lora_alpha", "lora.lora_target_modules", "lora.use_rslora")
    if config.optimizer.lr_scheduler_type == "constant":
        kind = "optimizer.lr_scheduler_type"
        has_one = "constant_with_warmup, which earlier versions called constant, has one"
        add(f"{kind} constant has no warm-up ({has_one})", (kind,), "optimizer.warmup_ratio")
    slots, completions = config.generation.max_slots, config.completions_per_rollout
    if slots is not None and slots >= completions:
        size = ("optimizer.per_device_train_batch_size", "optimizer.gradient_accumulation_steps")
        why = f"a rollout has {completions} completions"
        add(why, (*size, "grpo.steps_per_generation"), "generation.max_slots")
    if config.run.save_steps is None:
        why = "with run.save_steps null only the first state, that where it stops early and the last are saved"
        add(why, ("run.save_steps",), "run.save_total_limit")
    return found
