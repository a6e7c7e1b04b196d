"""What a run takes of the device, known from its compiled programs before anything is sampled."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax

from qerl_jax import run_folder
from qerl_jax.compiled import compiled_together
from qerl_jax.config import Config
from qerl_jax.config_files import settled_config
from qerl_jax.errors import UserError, check_kind
from qerl_jax.evaluation import evaluation_plan, lowered_evaluation
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.advantages import AdvantageFn
from qerl_jax.rl.assembly import Experiment, assemble, held_out, initial_adapter
from qerl_jax.rl.experience import Collector
from qerl_jax.rl.learner import Learner
from qerl_jax.rl.losses import LossFn
from qerl_jax.rl.own_functions import OwnFunctions
from qerl_jax.rl.state import TrainState
from qerl_jax.rollout.memory import nbytes, sized


class Sampling(NamedTuple):
    """Completions decoded at once, of how many in all, and the bytes of slots and prompts with what decoding and
    prefill work with, dequantized weights too."""

    slots: int
    samples: int
    nbytes: int

    def __str__(self) -> str:
        at_once = f"all {self.slots}" if self.slots == self.samples else f"{self.slots} of {self.samples}"
        return f"{at_once} completions at once, {sized(self.nbytes)}"


@dataclasses.dataclass(frozen=True)
class RunMemory:
    """Memory in bytes: what stays, and what a rollout, an evaluation and an update have beside it, one after the other.

    An evaluation may take more than a rollout: its cache is never of 8 bits, and it has its own number of completions.

    Attributes:
      weights: the frozen model's.
      trained: adapter and the optimizer's state.
      rollout: of a round of it.
      evaluation: of completions that are sampled, of which there are no fewer than of greedy ones.
      update: what its programs make, the adapter's gradients with it; None where XLA does not say.
      limit: what the device has; None where it does not say, as a CPU.
      longest_prompt: tokens of the data's longest prompt.
      max_prompt_length: for which all have room.
    """

    weights: int
    trained: int
    rollout: Sampling
    evaluation: Sampling
    update: int | None
    limit: int | None
    longest_prompt: int
    max_prompt_length: int

    def __str__(self) -> str:
        parts = [f"a rollout, {self.rollout}", f"an evaluation, {self.evaluation}"]
        parts += [] if self.update is None else [f"an update, {sized(self.update)}"]
        most = self.weights + self.trained + max(self.rollout.nbytes, self.evaluation.nbytes, self.update or 0)
        has = "what the device has is not known" if self.limit is None else f"the device has {sized(self.limit)}"
        if 2 * self.longest_prompt <= self.max_prompt_length:
            has += (
                f". No prompt has more than {self.longest_prompt:,} tokens, and each takes the memory of "
                f"{self.max_prompt_length:,}: a lower data.max_prompt_length saves it"
            )
        return (
            f"memory: weights {sized(self.weights)}, adapter and optimizer {sized(self.trained)}; "
            f"beside them by turns {', '.join(parts[:-1])}, and {parts[-1]}: {sized(most)} at most; {has}"
        )


def plan_run(
    config: Config, *, loss_fn: LossFn | None = None, advantage_fn: AdvantageFn | None = None
) -> tuple[str, bool]:
    """What a run of `config` will do and take: its steps, and its memory on this device. If the run has begun, a line
    in front says whether it would be continued or refused, or is finished. The functions are those of `train`.

    All is loaded and compiled as for the run; nothing is sampled or written.

    Returns:
      (the lines, whether the run would be refused for what lies in its folder).

    Raises:
      UserError: what `qerl_jax.rl.trainer.train` would refuse of options, data, rewards, model and memory.
    """
    check_kind("config", config, Config, " (`load_config` reads one)")
    config = run_folder.as_begun(settled_config(config))
    run_folder.refuse_missing_services(config)
    with RewardFunctions(config.reward, config.generation.max_completion_length) as rewards:
        experiment = assemble(config, rewards, OwnFunctions(loss_fn, advantage_fn))
        collector, learner, key = Collector(experiment, rewards), Learner(experiment), jax.random.key(config.run.seed)
        state = learner.begin(initial_adapter(config, experiment.policy.model, key))
        memory = compiled_run(experiment, collector, learner, state, key)
    steps, problems = experiment.total_steps, len(experiment.dataset)
    begun = run_folder.standing(config, experiment.identity())
    rollouts, prompts = -(-steps // config.updates_per_rollout), config.prompts_per_rollout
    plan = (
        f"steps: {steps:,} of {config.completions_per_update:,} completions; {rollouts:,} rollouts of {prompts:,} x "
        f"{config.generation.num_generations} completions (prompts x num_generations): "
        f"{rollouts * prompts / problems:.2f} epochs of {problems:,} prompts\n{memory}"
    )
    return (plan, False) if begun is None else (f"{begun.said}\n{plan}", begun.refused)


def compiled_run(
    experiment: Experiment, collector: Collector, learner: Learner, state: TrainState, key: jax.Array
) -> RunMemory:
    """Compiles what a run will call.

    Args:
      experiment: the run's.
      collector, learner: whose programs are then ready.
      state: as they get it; it is not changed.
      key: the run's root key.

    Raises:
      UserError: not one completion, or a rollout, an evaluation or an update, does not fit in memory.
    """
    config = experiment.config
    (gather, apply, _), *_ = compiled_together(
        learner.lowered(state), collector.lowered(state, key), evaluation_programs(experiment, state)
    )
    samples = config.completions_per_rollout
    rollout = collector.engine.plan(samples, config.prompts_per_rollout, state.adapter)
    evaluation, evaluated = evaluation_plan(config, experiment.policy, state.adapter, _problems(experiment))
    memory = RunMemory(
        weights=nbytes(experiment.policy.model),
        trained=nbytes(state),
        rollout=Sampling(rollout.slots, samples, rollout.nbytes),
        evaluation=Sampling(evaluation.slots, evaluated, evaluation.nbytes),
        update=_made_by(gather, apply),
        limit=(jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
        longest_prompt=experiment.longest_prompt,
        max_prompt_length=config.data.max_prompt_length,
    )
    refuse_what_does_not_fit(memory, config)
    return memory


def evaluation_programs(experiment: Experiment, state: TrainState) -> Iterator[jax.stages.Lowered]:
    """The programs of a run's evaluations."""
    return lowered_evaluation(experiment.config, experiment.policy, state.adapter, _problems(experiment))


def _problems(experiment: Experiment) -> int:
    return len(held_out(experiment.config, experiment.evaluation_data))


def _made_by(gather: jax.stages.Compiled, apply: jax.stages.Compiled) -> int | None:
    """The most that one of an update's programs and the results of the first take together."""
    first, second = gather.memory_analysis(), apply.memory_analysis()
    if first is None or second is None:
        return None
    of_second = second.temp_size_in_bytes + second.output_size_in_bytes - second.alias_size_in_bytes
    made: int = first.output_size_in_bytes + max(first.temp_size_in_bytes, of_second)
    return made


def refuse_what_does_not_fit(memory: RunMemory, config: Config) -> None:
    """Holds an update, a rollout and an evaluation against the device's limit, where that is known.

    Raises:
      UserError: one of them needs more, with the numbers and the options that change them.
    """
    if memory.limit is not None:
        _refuse_update(memory, memory.limit, config)
        if config.generation.kv_cache_gb is not None:  # else slots are planned for what there is
            _refuse_sampling(memory, memory.limit, config.generation.kv_cache_gb)


def _refuse_sampling(memory: RunMemory, limit: int, cache: float) -> None:
    kept = memory.weights + memory.trained
    sizes = {
        "a rollout": (memory.rollout, "generation.max_slots"),
        "an evaluation": (memory.evaluation, "evaluation.batch_size"),
    }
    for what, (sampling, slots) in sizes.items():
        if kept + sampling.nbytes > limit:
            raise UserError(
                f"{what} does not fit in memory: weights, adapter and optimizer need {sized(kept)}, and {sampling} "
                f"with generation.kv_cache_gb {cache:g}; the device has {sized(limit)}. Try a lower {slots}; or "
                "generation.kv_cache_gb=null, which takes what the device has left"
            )


def _refuse_update(memory: RunMemory, limit: int, config: Config) -> None:
    kept, temporary = memory.weights + memory.trained, memory.update
    if temporary is None or kept + temporary <= limit:
        return
    optimizer = config.optimizer
    size = optimizer.per_device_train_batch_size
    fewer = size * (limit - kept) // temporary  # as if all of it went with the rows
    divisor = max((n for n in range(1, size) if size % n == 0 and n <= fewer), default=None)
    ways = [] if divisor is None else [f"{_in_smaller_parts(config, divisor)}, which is the same step and may fit"]
    ways += [] if optimizer.gradient_checkpointing else ["optimizer.gradient_checkpointing=true"]
    ways.append("a lower generation.max_completion_length")
    raise UserError(
        f"an update does not fit in memory: weights, adapter and optimizer need {sized(kept)}, and "
        f"{size} {'row' if size == 1 else 'rows'} of {config.row_tokens} tokens at once "
        f"(optimizer.per_device_train_batch_size) {sized(temporary)}; the device has "
        f"{sized(limit)}. Try {'; or '.join(ways)}"
    )


def _in_smaller_parts(config: Config, size: int) -> str:
    """The options that make the same step of micro-batches of `size`."""
    times = config.optimizer.per_device_train_batch_size // size
    options = {
        "optimizer.per_device_train_batch_size": size,
        "optimizer.gradient_accumulation_steps": times * config.optimizer.gradient_accumulation_steps,
        "grpo.steps_per_generation": times * config.steps_per_generation,
    }
    return " ".join(f"{name}={value}" for name, value in options.items())
