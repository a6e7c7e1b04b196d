"""What a rollout's experience becomes: optimizer batches, and a step for each."""

import functools
from collections.abc import Iterator

import jax

from qerl_jax.errors import UserError
from qerl_jax.models.flash_attention import deterministic_jit
from qerl_jax.models.params import Adapter
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.assembly import Experiment
from qerl_jax.rl.experience import Experience, shapes_of_a_rollout
from qerl_jax.rl.optimizer import learning_rate_schedule
from qerl_jax.rl.state import Batch, TrainState, init_state
from qerl_jax.rl.step import make_batch, with_policies
from qerl_jax.rl.update import apply_gradients, gather_gradients

# Names of a row of metrics.jsonl that the update does not give, and beginnings of such names.
_OF_RUN = {
    "step", "rollout", "epoch", "num_tokens", "learning_rate", "step_time", "reward", "reward_std",
    "frac_reward_zero_std",
}  # fmt: skip
_PARTS_OF_RUN = "rewards/", "completions/", "perf/", "eval/", "dynamic_sampling/", "aqn/"


class Learner:
    """Makes batches of a run's rollouts and takes its optimizer steps, with its programs compiled once."""

    def __init__(self, experiment: Experiment) -> None:
        """Nothing is compiled yet."""
        config, settings = experiment.config, experiment.settings
        self.experiment = experiment
        self.learning_rate = jax.jit(learning_rate_schedule(experiment.optimizer_spec))
        loss_fn, advantage_fn = experiment.own
        advantage_fn = advantage_fn or functools.partial(group_advantages, scale_rewards=config.grpo.scale_rewards)
        self.batch_fn = jax.jit(functools.partial(make_batch, settings=settings, advantage_fn=advantage_fn))
        several = config.updates_per_rollout > 1
        self.policies_fn = jax.jit(functools.partial(with_policies, settings=settings.update, several_updates=several))
        gather = functools.partial(gather_gradients, settings=settings.update, loss_fn=loss_fn)
        apply = functools.partial(
            apply_gradients, optimizer=experiment.optimizer, settings=settings.update, loss_fn=loss_fn
        )
        self.gather_fn = deterministic_jit(gather)
        self.apply_fn = deterministic_jit(apply, donate_argnames="state")

    def begin(self, adapter: Adapter) -> TrainState:
        """The state before the first step."""
        return init_state(adapter, self.experiment.optimizer)

    def lowered(self, state: TrainState) -> tuple[jax.stages.Lowered, jax.stages.Lowered, jax.stages.Lowered]:
        """The two programs of `step` and, but for what is small, that of `batch`, for a state like this one."""
        model = self.experiment.policy.model
        batch = self.batch_fn.lower(*shapes_of_a_rollout(self.experiment.config), state.step).out_info
        of_batch = self.policies_fn.lower(model, state.adapter, batch)
        part = jax.eval_shape(lambda batch: next(self.parts(batch)), of_batch.out_info)
        gather = self.gather_fn.lower(state, model, part)
        apply = self.apply_fn.lower(state, part, gather.out_info)
        for name, metric in apply.out_info[1].items():
            if metric.shape:
                raise UserError(f"loss_fn gave the metric {name!r} of the shape {metric.shape}; a run logs numbers: ()")
        # Before anything is sampled, while another loss may still take its place.
        if taken := [name for name in apply.out_info[1] if name in _OF_RUN or name.startswith(_PARTS_OF_RUN)]:
            raise UserError(f"loss_fn gave metrics whose names the run has itself: {', '.join(sorted(taken))}")
        return gather, apply, of_batch

    def batch(self, state: TrainState, found: Experience) -> Batch:
        """All that a rollout by the policy of `state` trains on."""
        batch = self.batch_fn(found.prompts, found.completions, found.rewards, state.step)
        whole: Batch = self.policies_fn(self.experiment.policy.model, state.adapter, batch)
        return whole

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """The optimizer batches of one rollout: its slices, num_iterations times over."""
        config = self.experiment.config
        size, rows = config.completions_per_update, batch.completion.shape[0]
        for _ in range(config.grpo.num_iterations):
            for low in range(0, rows, size):
                yield jax.tree.map(lambda leaf, low=low: leaf[low : low + size] if leaf.ndim else leaf, batch)

    def step(self, state: TrainState, part: Batch) -> tuple[TrainState, dict[str, float]]:
        """`update_step`. The memory of `state` is the next state's."""
        gathered = self.gather_fn(state, self.experiment.policy.model, part)
        state, metrics = self.apply_fn(state, part, gathered)
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}
