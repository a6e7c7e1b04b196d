"""The RL step, top to bottom: noise -> rollout -> reward -> advantages -> update.

`sample_rollout` and `make_batch` are the halves that the trainer runs around Python reward functions; `grpo_step`
joins them under one jit when the reward itself is a JAX function.

Dimension letters: N prompts, G completions per prompt, B = N * G, P prompt slots, C completion slots.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax.errors import check_kind
from qerl_jax.keys import check_key
from qerl_jax.models.params import Adapter, Model, Norms, check_fits, check_kinds, norms_of
from qerl_jax.noise import NoiseSchedule, perturb_norms, sigma_at
from qerl_jax.rewards.calling import LARGEST
from qerl_jax.rl.advantages import AdvantageFn, advantages_of, deviation, informative_groups
from qerl_jax.rl.losses import LossFn, Metrics
from qerl_jax.rl.state import Batch, TrainState, UpdateSettings
from qerl_jax.rl.update import joined_metrics, score, update_step
from qerl_jax.rollout import Prompts, Rollout, SamplingSettings, generate
from qerl_jax.rollout.batch import of_arrays
from qerl_jax.tracing import is_traced

# Streams of a rollout's key.
_NOISE, DRAWS = 0, 1

RewardFn = Callable[[Prompts, Rollout], jax.Array]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Static choices of one RL step.

    Attributes:
      sampling: how completions are drawn.
      update: the optimizer step.
      noise: AQN's schedule; None is no noise ever.
      mask_truncated_completions: completions without an EOS get no loss; their rewards still count in their group.

    Raises:
      ValueError: an update at another temperature than that of the log-probabilities which sampling records.
      TypeError: settings of another kind.
    """

    sampling: SamplingSettings
    update: UpdateSettings
    noise: NoiseSchedule | None = None
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        check_kind("sampling", self.sampling, SamplingSettings)
        check_kind("update", self.update, UpdateSettings)
        if self.noise is not None:
            other = ", or None (noise of your own: `perturb_norms`, and `generate` with the norms that it gives)"
            check_kind("noise", self.noise, NoiseSchedule, other)
        recorded = self.sampling.temperature or 1.0  # greedy ones are recorded at 1
        if self.update.temperature != recorded:
            raise ValueError(
                f"update.temperature is {self.update.temperature}; allowed: {recorded}, at which sampling.temperature "
                f"{self.sampling.temperature} records log-probabilities"
            )


def rollout_norms(
    model: Model, adapter: Adapter | None, key: jax.Array, step: jax.Array, settings: StepSettings
) -> tuple[Norms, jax.Array]:
    """The norm scales that the rollout of `key` samples with, and sigma. They depend on nothing else: a group that is
    sampled again for the same rollout meets the same noise."""
    norms = norms_of(model, adapter)
    if settings.noise is None:
        return norms, jnp.float32(0)
    sigma = sigma_at(settings.noise, step)
    noise_key = jax.random.fold_in(key, _NOISE)
    return perturb_norms(norms, sigma, noise_key, final_norm=settings.noise.final_norm), sigma


def sample_rollout(
    model: Model, adapter: Adapter | None, prompts: Prompts, key: jax.Array, step: jax.Array, settings: StepSettings
) -> tuple[Rollout, jax.Array]:
    """Samples num_generations completions per prompt from the policy with this step's noise on its norms.

    Args:
      step: 0-based optimizer step at which the rollout starts; it selects sigma and may be traced.
      key: this rollout's key, for the noise and for the draws.

    Returns:
      The completions and sigma.

    Raises:
      UserError, ValueError: an id in settings.sampling is beyond the vocabulary, prompts that cannot be, or what else
        `qerl_jax.rollout.generate` refuses, such as what is no PRNG key. TypeError: other settings.
    """
    check_kind("settings", settings, StepSettings)
    check_key(key)
    norms, sigma = rollout_norms(model, adapter, key, step, settings)
    sample_key = jax.random.fold_in(key, DRAWS)
    out = generate(model, adapter, prompts, sample_key, settings.sampling, settings.update.num_generations, norms)
    return out, sigma


def make_batch(
    prompts: Prompts,
    completions: Rollout,
    rewards_B: jax.Array | Sequence[float | None],
    step: jax.Array,
    settings: StepSettings,
    advantage_fn: AdvantageFn | None = None,
) -> Batch:
    """Joins completions and rewards: any N * G numbers, NaN or (outside of jit) None where a completion cannot be
    scored. The loss mask goes by length, never by the pad id. With `advantage_fn`, which may give an advantage for each
    token (see `update_step`) and is given NaN as it is, advantages are computed here, over all these completions, and
    stay as they are however the batch is cut into parts. `step` is that of the state which is to be updated, as it was
    when the completions were sampled (`state.step`, not a count of the loop's own).

    As it is, the batch serves the first update after the rollout, and a loss without a reference. `with_policies` adds
    what other updates and losses need; without it `update_step` refuses further updates (its metric nonfinite is 1).

    Raises:
      ValueError: prompts whose rows differ in length or whose places are no int32, not num_generations completions of
        each prompt, not one reward for each completion, advantages that are neither one for each completion nor one for
        each of its slots, rewards that are no numbers, or rewards beyond +-1e15 (unless they are traced, or there is an
        `advantage_fn`).
    """
    check_kind("completions", completions, Rollout, " (the first of what `sample_rollout` gives)")
    check_kind("settings", settings, StepSettings)
    prompts, G = of_arrays(prompts), settings.update.num_generations
    N, (B, C) = prompts.tokens.shape[0], completions.tokens.shape
    if N * G != B:
        raise ValueError(f"{N} prompts with num_generations {G} have {N * G} completions; there are {B}")
    if isinstance(rewards_B, Sequence):
        rewards_B = [np.nan if reward is None else reward for reward in rewards_B]
    rewards_B = _numbers(rewards_B, limited=advantage_fn is None)
    if rewards_B.shape != completions.lengths.shape:
        of_all = completions.lengths.shape
        raise ValueError(f"rewards have the shape {rewards_B.shape}; allowed: {of_all}, one for each completion")
    mask_BC = jnp.arange(C) < completions.lengths[:, None]
    if settings.mask_truncated_completions:
        mask_BC &= completions.terminated[:, None]
    return Batch(
        prompt=jnp.repeat(prompts.tokens, G, axis=0),
        prompt_lengths=jnp.repeat(prompts.lengths, G),
        completion=completions.tokens,
        completion_lengths=completions.lengths,
        mask=mask_BC,
        rewards=rewards_B,
        sampled_logps=completions.logps,
        rollout_step=jnp.array(step, jnp.int32),  # a copy: the step may be that of a state which an update is donated
        advantages=None if advantage_fn is None else advantages_of(advantage_fn, rewards_B.reshape(-1, G), C),
    )


def _numbers(rewards: Any, limited: bool) -> jax.Array:
    """Rewards in float32; `limited` refuses those whose squares a group's deviation could not hold."""
    if isinstance(rewards, Sequence) and any(isinstance(reward, jax.Array) for reward in rewards):
        rewards = jnp.stack([jnp.asarray(reward) for reward in rewards])
    found = rewards if isinstance(rewards, jax.Array) else np.asarray(rewards)
    if found.dtype == object:  # with None, fractions, or whole numbers beyond int64
        try:
            found = found.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"rewards are {rewards!r:.60}; expected numbers, NaN or None") from None
    if not any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise ValueError(f"rewards are of the dtype {found.dtype}; expected numbers, NaN or None")
    if limited and not isinstance(found, jax.core.Tracer):
        known = np.asarray(found, np.float64).reshape(-1)
        if (beyond := np.flatnonzero(~np.isnan(known) & ~(np.abs(known) <= LARGEST))).size:
            raise ValueError(
                f"reward {beyond[0]} is {known[beyond[0]]:g}; allowed: -{LARGEST:g} to {LARGEST:g}, whose squares a "
                "group's deviation can hold"
            )
    return jnp.asarray(found, jnp.float32)


def with_policies(
    model: Model,
    adapter: Adapter,
    batch: Batch,
    settings: UpdateSettings,
    several_updates: bool,
    *,
    reference: bool | None = None,
) -> Batch:
    """Adds log-probabilities of the old policy and of the reference to a batch, where they are needed.

    Args:
      model: the frozen network, which without an adapter is the reference. With another network of the same vocabulary,
        and `several_updates` false, the batch gets those of a teacher in the place of the reference's.
      adapter: as it was at the rollout.
      batch: of `make_batch`.
      settings: static choices.
      several_updates: whether more than one will be made with the batch. If so it gets the old policy's
        log-probabilities (unless settings.old_logprobs is `sampler`), without which `update_step` refuses all updates
        but the first.
      reference: whether it gets the reference's log-probabilities; a loss of your own may need them. None adds them
        where settings.loss.beta is not 0.

    Raises:
      TypeError: arguments of another kind. ValueError: an adapter of another network, or a token that the vocabulary
        does not have, where it is known.
    """
    check_kind("settings", settings, UpdateSettings, " (`StepSettings.update`)")
    check_kind("batch", batch, Batch, " (`make_batch` gives one)")
    check_kinds(model, adapter)
    if adapter is not None:
        check_fits(model, adapter)
    if not is_traced(batch):
        for name in ("prompt", "completion"):
            tokens, lengths = (np.asarray(getattr(batch, part)) for part in (name, f"{name}_lengths"))
            if (unknown := model.config.unknown_id(tokens, lengths)) is not None:
                size = model.config.vocab_size
                raise ValueError(f"the batch's {name} has the token {unknown}; the model's vocabulary has {size}")
    if several_updates and settings.old_logprobs == "learner":
        batch = batch.replace(old_logps=score(model, adapter, batch, settings))
    if reference is None:
        reference = settings.loss.beta != 0
    if reference:
        batch = batch.replace(ref_logps=score(model, None, batch, settings))
    return batch


def reward_metrics(rewards_NG: jax.Array, completions: Rollout) -> Metrics:
    """TRL's metrics of a rollout: the reward, its standard deviation over all completions whatever `scale_rewards` is,
    the share of groups whose rewards are all equal (groups of one completion are), and the completions' lengths. A
    reward that is NaN counts for none of them, so a group with one other reward or none is one of equal rewards."""
    lengths_B, terminated_B = completions.lengths, completions.terminated
    ended = jnp.maximum(terminated_B.sum(), 1)
    return {
        "reward": jnp.nanmean(rewards_NG),
        "reward_std": deviation(rewards_NG),
        "frac_reward_zero_std": jnp.mean(~informative_groups(rewards_NG)) if rewards_NG.shape[1] > 1 else jnp.ones(()),
        "completions/mean_length": lengths_B.mean(),
        "completions/min_length": lengths_B.min(),
        "completions/max_length": lengths_B.max(),
        "completions/mean_terminated_length": jnp.where(terminated_B, lengths_B, 0).sum() / ended,
        "completions/min_terminated_length": jnp.where(
            terminated_B.any(), jnp.where(terminated_B, lengths_B, lengths_B.max()).min(), 0
        ),
        "completions/max_terminated_length": jnp.where(terminated_B, lengths_B, 0).max(),
        "completions/clipped_ratio": (~terminated_B).mean(),
    }


def grpo_step(
    state: TrainState,
    model: Model,
    prompts: Prompts,
    key: jax.Array,
    *,
    reward_fn: RewardFn,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    loss_fn: LossFn | None = None,
    advantage_fn: AdvantageFn | None = None,
    reference: bool | None = None,
) -> tuple[TrainState, Metrics]:
    """A whole on-policy RL step as one pure function: jit it with the keyword arguments bound, or vmap it over seeds.

    Args:
      state: adapter, optimizer state and step; donate it.
      model: the frozen network; sampler and learner read the same arrays.
      prompts: N prompts.
      key: this step's PRNG key.
      reward_fn: (prompts, completions) -> rewards [N * G], a JAX function, as `make_batch` takes them.
      optimizer, loss_fn, advantage_fn: see `update_step`.
      reference: see `with_policies`.
      settings: static choices.

    Raises:
      UserError, ValueError: as `sample_rollout`, `make_batch` and `update_step`; or metrics of a loss whose names the
        step has itself.
      TypeError: arguments of another kind, or in another order.
    """
    check_kind("state", state, TrainState, " (`init_state` gives one)")
    check_kind("model", model, Model, " (`load_model` gives one)")
    check_kind("settings", settings, StepSettings)
    completions, sigma = sample_rollout(model, state.adapter, prompts, key, state.step, settings)
    rewards_B = reward_fn(prompts, completions)
    batch = make_batch(prompts, completions, rewards_B, state.step, settings)
    batch = with_policies(model, state.adapter, batch, settings.update, several_updates=False, reference=reference)
    metrics = reward_metrics(batch.rewards.reshape(-1, settings.update.num_generations), completions)
    state, update_metrics = update_step(
        state,
        model,
        batch,
        optimizer=optimizer,
        settings=settings.update,
        loss_fn=loss_fn,
        advantage_fn=advantage_fn,
    )
    return state, joined_metrics(metrics | {"aqn/sigma": sigma}, update_metrics, "the step")
