"""What a run takes of the device, known from its compiled programs before anything is sampled."""

import dataclasses
from collections.abc import Iterator

import jax

from qerl_jax.compiled import compiled_together
from qerl_jax.config import Config
from qerl_jax.config_files import settled_config
from qerl_jax.errors import UserError
from qerl_jax.evaluation import lowered_evaluation
from qerl_jax.metrics import check_services
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.assembly import Experiment, assemble, held_out, initial_adapter
from qerl_jax.rl.experience import Collector
from qerl_jax.rl.learner import Learner
from qerl_jax.rl.state import TrainState
from qerl_jax.rollout.memory import nbytes


@dataclasses.dataclass(frozen=True)
class RunMemory:
    """Memory in bytes: what stays, and what a rollout and an update have beside it, one after the other.

    Attributes:
      weights: the frozen model's.
      trained: adapter, its gradients and the optimizer's state.
      slots, samples: completions decoded at once, and of a round of a rollout.
      rollout: slots and prompts, with what decoding works with.
      update: what its program makes; None where XLA does not say.
      limit: what the device has; None where it does not say, as a CPU.
    """

    weights: int
    trained: int
    slots: int
    samples: int
    rollout: int
    update: int | None
    limit: int | None

    def __str__(self) -> str:
        at_once = f"all {self.slots}" if self.slots == self.samples else f"{self.slots} of {self.samples}"
        update = "" if self.update is None else f", and an update, {_size(self.update)}"
        most = _size(self.weights + self.trained + max(self.rollout, self.update or 0))
        has = "what the device has is not known" if self.limit is None else f"the device has {_size(self.limit)}"
        return (
            f"memory: weights {_size(self.weights)}, adapter with gradient and optimizer {_size(self.trained)}; "
            f"beside them by turns a rollout, {at_once} completions at once, {_size(self.rollout)}{update}: "
            f"{most} at most; {has}"
        )


def plan_run(config: Config) -> str:
    """What a run that `config` begins will do and take: its steps, and its memory on this device, evaluations aside.

    All is loaded and compiled as for the run; its folder is not looked at, and nothing is sampled or written.

    Raises:
      UserError: what `qerl_jax.rl.trainer.train` would refuse of options, data, rewards, model and memory.
    """
    config = settled_config(config)
    check_services(config.run.report_to)
    with RewardFunctions(config.reward, config.generation.max_completion_length) as rewards:
        experiment = assemble(config, rewards)
        collector, learner, key = Collector(experiment, rewards), Learner(experiment), jax.random.key(config.run.seed)
        state = learner.begin(initial_adapter(config, experiment.policy.model, key))
        memory = compiled_run(experiment, collector, learner, state, key)
    steps, problems = experiment.total_steps, len(experiment.dataset)
    rollouts, prompts = -(-steps // config.updates_per_rollout), config.prompts_per_rollout
    return (
        f"steps: {steps:,} of {config.completions_per_update:,} completions; {rollouts:,} rollouts of {prompts:,} x "
        f"{config.generation.num_generations} completions (prompts x num_generations): "
        f"{rollouts * prompts / problems:.2f} epochs of {problems:,} prompts\n{memory}"
    )


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
      UserError: not one completion, or an update, does not fit in memory.
    """
    config = experiment.config
    (update, _), *_ = compiled_together(
        learner.lowered(state), collector.lowered(state, key), evaluation_programs(experiment, state)
    )
    of_rollout = collector.engine.plan(config.completions_per_rollout, config.prompts_per_rollout, state.adapter)
    memory = RunMemory(
        weights=nbytes(experiment.policy.model),
        trained=nbytes((state, state.adapter)),  # once more for its gradients
        slots=of_rollout.slots,
        samples=config.completions_per_rollout,
        rollout=of_rollout.nbytes,
        update=_made_by(update),
        limit=(jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
    )
    refuse_what_does_not_fit(memory, config)
    return memory


def evaluation_programs(experiment: Experiment, state: TrainState) -> Iterator[jax.stages.Lowered]:
    """The programs of a run's evaluations."""
    problems = len(held_out(experiment.config, experiment.evaluation_data))
    return lowered_evaluation(experiment.config, experiment.policy, state.adapter, problems)


def _made_by(program: jax.stages.Compiled) -> int | None:
    sizes = program.memory_analysis()
    if sizes is None:
        return None
    made: int = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return made


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def refuse_what_does_not_fit(memory: RunMemory, config: Config) -> None:
    """Holds an update against the device's limit, where both are known.

    Raises:
      UserError: it needs more, with the numbers and the options that change them.
    """
    kept, temporary, limit = memory.weights + memory.trained, memory.update, memory.limit
    if limit is None or temporary is None or kept + temporary <= limit:
        return
    optimizer = config.optimizer
    size = optimizer.per_device_train_batch_size
    fewer = size * (limit - kept) // temporary  # as if all of it went with the rows
    divisor = max((n for n in range(1, size) if size % n == 0 and n <= fewer), default=None)
    ways = [] if divisor is None else [f"{_in_smaller_parts(config, divisor)}, which is the same step and may fit"]
    ways += [] if optimizer.gradient_checkpointing else ["optimizer.gradient_checkpointing=true"]
    ways.append("a lower generation.max_completion_length")
    raise UserError(
        f"an update does not fit in memory: weights, adapter and optimizer need {kept / 1e9:.1f} GB, and "
        f"{size} {'row' if size == 1 else 'rows'} of {config.row_tokens} tokens at once "
        f"(optimizer.per_device_train_batch_size) {temporary / 1e9:.1f} GB; the device has "
        f"{limit / 1e9:.1f} GB. Try {'; or '.join(ways)}"
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
