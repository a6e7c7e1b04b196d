"""What a rollout trains on: prompts of the data order, their completions, and how these score.

With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) a rollout has several rounds of as many prompts each, with
the same policy and noise, until it has enough groups whose completions differ on a metric. What is sampled in a round
depends on (key, place in the data order) alone, so a rollout that is made again after a kill is bitwise the same.

Dimension letters: N prompts of a rollout's batch, G completions per prompt, B = N * G, R rounds, P prompt slots, C
completion slots.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.config import Config
from qerl_jax.data.dataset import Dataset, prompt_indices
from qerl_jax.models.params import Adapter, Norms
from qerl_jax.policy import decode_completions
from qerl_jax.rewards.combine import RewardFunctions, Scores, joined
from qerl_jax.rl.advantages import informative_groups
from qerl_jax.rl.assembly import Experiment, configured_ids, sampling_engine
from qerl_jax.rl.state import TrainState
from qerl_jax.rl.step import DRAWS, reward_metrics, rollout_norms
from qerl_jax.rollout import Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Experience:
    """One rollout.

    Attributes:
      prompts, completions, rewards: what is trained on, N prompts and B completions, in data order.
      metrics: of all that was sampled, R rounds: rewards, lengths, sigma and, with dynamic sampling, the rounds.
      examples, texts, scores: all that was sampled, R * N rows of the data set and R * B completions.
      chosen: groups of all that was sampled which are trained on, increasing; None where no choice was to be made.
      cursor: prompts of the data order that the run has used up with this rollout.
      num_tokens, completion_tokens: of all that was sampled, with the prompts and without.
      rollout_time, reward_time: seconds.
    """

    prompts: Prompts
    completions: Rollout
    rewards: jax.Array
    metrics: dict[str, float]
    examples: list[dict[str, Any]]
    texts: list[str]
    scores: Scores
    chosen: np.ndarray | None
    cursor: int
    num_tokens: int
    completion_tokens: int
    rollout_time: float
    reward_time: float

    def rows(self) -> Iterator[dict[str, Any]]:
        """What completions.jsonl says of every completion sampled, in data order."""
        group_size = len(self.texts) // len(self.examples)
        for i, text in enumerate(self.texts):
            group = i // group_size
            kept = {} if self.chosen is None else {"trained_on": group in self.chosen}
            yield {"prompt": self.examples[group]["prompt"], "completion": text, **self.scores.row(i), **kept}


@dataclasses.dataclass(frozen=True)
class _Round:
    """N prompts sampled and scored: `informative_N` is all True without dynamic sampling."""

    examples: list[dict[str, Any]]
    prompts: Prompts
    completions: Rollout
    texts: list[str]
    scores: Scores
    informative_N: np.ndarray
    reward_time: float


class Collector:
    """Samples and scores the rollouts of a run, with its programs compiled once."""

    def __init__(self, experiment: Experiment, rewards: RewardFunctions) -> None:
        """Nothing is sampled or compiled yet.

        Args:
          experiment: the run's.
          rewards: scores the completions.
        """
        config, settings = experiment.config, experiment.settings
        self.experiment, self.rewards = experiment, rewards
        self.metric = config.grpo.dynamic_sampling.metric
        self.max_rounds = 1 if self.metric is None else config.grpo.dynamic_sampling.max_rounds
        self.engine = sampling_engine(config, experiment.policy, settings.sampling, config.generation.max_slots)
        self.norms_fn = jax.jit(functools.partial(rollout_norms, settings=settings))
        self.informative_fn = jax.jit(informative_groups)
        self.metrics_fn = jax.jit(reward_metrics)

    def lowered(self, state: TrainState, key: jax.Array) -> Iterator[jax.stages.Lowered]:
        """The programs that `collect` samples with, for arguments like these; see `Engine.lowered`."""
        config, model = self.experiment.config, self.experiment.policy.model
        noise = self.norms_fn.lower(model, state.adapter, key, state.step)
        N, G = config.prompts_per_rollout, config.generation.num_generations
        yield from self.engine.lowered(state.adapter, N, key, G, noise.out_info[0])
        yield noise

    def collect(self, state: TrainState, key: jax.Array, cursor: int) -> Experience:
        """The rollout of `key` by the policy of `state`, from the prompt `cursor` of the data order on.

        Raises:
          UserError: a reward function failed.
        """
        config, began = self.experiment.config, time.perf_counter()
        N, G = config.prompts_per_rollout, config.generation.num_generations
        norms, sigma = self.norms_fn(self.experiment.policy.model, state.adapter, key, state.step)
        rounds: list[_Round] = []
        while len(rounds) < self.max_rounds and sum(int(part.informative_N.sum()) for part in rounds) < N:
            rounds.append(self._round(state.adapter, key, cursor + len(rounds) * N, norms))
        sampled_and_scored = time.perf_counter()

        informative = np.concatenate([part.informative_N for part in rounds])
        groups, used = choose_groups(informative, N)
        scores = joined([part.scores for part in rounds])
        prompts, completions = _stacked([(part.prompts, part.completions) for part in rounds])
        found = self.metrics_fn(jnp.asarray(scores.total).reshape(-1, G), completions)
        metrics = {name: float(value) for name, value in jax.device_get(found).items()}
        metrics |= {f"rewards/{name}/mean": mean for name, mean in scores.means.items()}
        metrics |= {f"rewards/{name}/std": std for name, std in scores.stds.items()}
        metrics |= {"aqn/sigma": float(sigma)}
        if self.metric is not None:
            metrics |= {
                "dynamic_sampling/rounds": float(len(rounds)),
                "dynamic_sampling/informative": float(informative.mean()),
            }
        completion_tokens = int(np.sum(jax.device_get(completions.lengths)))
        prompt_tokens = int(np.sum(jax.device_get(prompts.lengths)))
        samples = (groups[:, None] * G + np.arange(G)).reshape(-1)
        reward_time = sum(part.reward_time for part in rounds)
        return Experience(
            prompts=_rows(prompts, groups),
            completions=_rows(completions, samples),
            rewards=_rows(scores.total, samples),
            metrics=metrics,
            examples=[example for part in rounds for example in part.examples],
            texts=[text for part in rounds for text in part.texts],
            scores=scores,
            chosen=None if self.metric is None else groups,
            cursor=cursor + used,
            num_tokens=completion_tokens + G * prompt_tokens,
            completion_tokens=completion_tokens,
            rollout_time=sampled_and_scored - began - reward_time,
            reward_time=reward_time,
        )

    def _round(self, adapter: Adapter, key: jax.Array, cursor: int, norms: Norms) -> _Round:
        config, tokenizer = self.experiment.config, self.experiment.policy.tokenizer
        G = config.generation.num_generations
        places, examples = next_examples(self.experiment.dataset, config, cursor)
        tokens, lengths = configured_ids(config, self.experiment.policy, examples)
        prompts = Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(places, jnp.int32))
        completions = self.engine.rollout(adapter, prompts, jax.random.fold_in(key, DRAWS), G, norms)
        texts, ids = decode_completions(tokenizer, completions)
        sampled = time.perf_counter()
        scores = self.rewards(examples, texts, ids, G)
        reward_time = time.perf_counter() - sampled
        informative_N = np.ones(len(examples), bool)
        if self.metric is not None:
            informative_N = np.asarray(self.informative_fn(scores.each[self.metric].reshape(-1, G)))
            # The next round has the device's memory to itself, as the first one.
            prompts, completions = jax.device_get((prompts, completions))
        return _Round(examples, prompts, completions, texts, scores, informative_N, reward_time)


def shapes_of_a_rollout(config: Config) -> tuple[Prompts, Rollout, jax.Array]:
    """Shapes and dtypes of what a rollout leaves to an update: prompts, completions and rewards."""
    P, C, G = config.data.max_prompt_length, config.generation.max_completion_length, config.generation.num_generations
    N, shape = config.prompts_per_rollout, cast(Any, jax.ShapeDtypeStruct)
    prompts = Prompts(shape((N, P), jnp.int32), shape((N,), jnp.int32), shape((N,), jnp.int32))
    completions = Rollout(
        tokens=shape((N * G, C), jnp.int32),
        lengths=shape((N * G,), jnp.int32),
        terminated=shape((N * G,), jnp.bool),
        logps=shape((N * G, C), jnp.float32),
        truncated_logps=None,
    )
    return prompts, completions, shape((N * G,), jnp.float32)


def choose_groups(informative: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """Which groups a rollout trains on: the first `count` informative ones, filled up with the first of the others.

    Args:
      informative: [R * N] bool, of the groups in data order, at least `count`.
      count: N.

    Returns:
      The numbers [N] of the groups, increasing, and how many prompts are used up with them: those up to the last one
      chosen, since what lies behind it can be sampled again later; all of them where others had to fill up.
    """
    chosen = np.flatnonzero(informative)[:count]
    if len(chosen) == count:
        return chosen, int(chosen[-1]) + 1
    others = np.flatnonzero(~informative)[: count - len(chosen)]
    return np.sort(np.concatenate([chosen, others])), len(informative)


def next_examples(dataset: Dataset, config: Config, cursor: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Places in the data order and rows of the next round's prompts: a function of (seed, cursor)."""
    order = prompt_indices(
        config.run.seed, cursor, config.prompts_per_rollout, len(dataset), shuffle=config.data.shuffle
    )
    return [place for place, _ in order], [dataset[index] for _, index in order]


def _stacked(parts: list[Any]) -> Any:
    """Pytrees of arrays one behind the other along the leading axis; a single one as it is."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _rows(tree: Any, indices: np.ndarray) -> Any:
    """These rows of every leaf, on the device; arrays of which all are taken stay as they are."""
    whole = np.array_equal(indices, np.arange(len(jax.tree.leaves(tree)[0])))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf if whole else np.take(leaf, indices, axis=0)), tree)
