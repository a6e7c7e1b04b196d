"""Held-out evaluation: the clean policy, sampled and greedy, on problems that training never sees.

Its randomness is a stream of its own, so that evaluating more or less often changes nothing in training. The same seed
before and after a run gives the same problems and the same draws.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import run_files, run_folder, run_options
from qerl_jax.compiled import compiled_together
from qerl_jax.config import Config
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.models.params import Adapter
from qerl_jax.policy import Policy, decode_completions, model_identity
from qerl_jax.rewards.combine import RewardFunctions, Scores, joined
from qerl_jax.rl.assembly import (
    check_configured_prompts,
    check_held_out,
    configured_ids,
    configured_policy,
    evaluation_data,
    held_out,
    sampling_engine,
    sampling_settings,
)
from qerl_jax.rl.saved import learned_adapter
from qerl_jax.rollout import Engine, Prompts
from qerl_jax.rollout.memory import Plan

_log = logging.getLogger(__name__)
_SAMPLES = 3
# As TRL calls it. No reward function has this name: one with a slash has a colon too.
_MEAN_LENGTH = "completions/mean_length"
# The stream of a run's root key that evaluation draws from; training uses others.
STREAM = 2


def evaluate(
    config: Config,
    policy: Policy,
    adapter: Adapter,
    rewards: RewardFunctions,
    examples: list[dict[str, Any]],
    seed: int,
) -> dict[str, Any]:
    """Means of every reward function over held-out problems, num_generations_eval completions of each sampled, and one
    greedy.

    Args:
      config: `evaluation`, `generation` (lengths, kv_cache_gb), `data` (prompt limit, variables of the chat template)
        and the completions of a rollout, as many as are scored at once, are read.
      policy, adapter: what is measured; no noise.
      rewards: scores the completions; `accuracy` and `format` are among them in the shipped recipes.
      examples: the problems, rows of a data set (see `rl.assembly.held_out`).
      seed: of the sampling.

    Returns:
      {"sampled": {name: mean}, "greedy": {name: mean}, "samples": the first greedy completions with their prompts}.
      Beside the functions' names stands "completions/mean_length", in tokens, and with several completions sampled
      and a function `accuracy`, whose scores are 0 and 1, "pass@k" for k = 2, 4, .. and all of them.
    """
    key = jax.random.fold_in(jax.random.key(seed), STREAM)
    prompts, lengths = configured_ids(config, policy, examples)
    batch = Prompts(jnp.asarray(prompts), jnp.asarray(lengths), jnp.arange(len(examples)))
    results: dict[str, Any] = {}
    for mode, engine, count in _engines(config, policy):
        out = engine.rollout(adapter, batch, key, count)
        texts, ids = decode_completions(policy.tokenizer, out)
        scores = _scores(config, rewards, examples, texts, ids, count)
        results[mode] = scores.means | {_MEAN_LENGTH: float(np.mean([len(row) for row in ids]))}
        if count > 1 and _right_or_wrong(scores.each.get("accuracy")):
            results[mode] |= pass_at_k(scores.each["accuracy"].reshape(-1, count))
    results["samples"] = [
        {"prompt": example["prompt"], "completion": text}
        for example, text in zip(examples[:_SAMPLES], texts, strict=False)
    ]
    return results


def _right_or_wrong(values: np.ndarray | None) -> bool:
    """Whether these scores are 0, 1 or none (NaN); a user's own function `accuracy` may give others."""
    return values is not None and bool(np.isin(values[~np.isnan(values)], (0, 1)).all())


def _engines(config: Config, policy: Policy) -> Iterator[tuple[str, Engine, int]]:
    """Of each mode the engine, and how many completions of a problem it samples."""
    options = config.evaluation
    modes: tuple[tuple[str, dict[str, float], int], ...] = (
        ("sampled", {"temperature": options.temperature, "top_p": options.top_p}, options.num_generations_eval),
        ("greedy", {"temperature": 0.0, "top_p": 1.0}, 1),
    )
    for mode, sampling, count in modes:
        settings = sampling_settings(config, policy, top_k=0, min_p=0.0, kv_cache_dtype="auto", **sampling)
        # One rollout does not save the time that compiling programs for its last samples takes.
        yield mode, sampling_engine(config, policy, settings, options.batch_size, tail_sizes=()), count


def lowered_evaluation(config: Config, policy: Policy, adapter: Adapter, problems: int) -> Iterator[jax.stages.Lowered]:
    """The programs that `evaluate` samples with for so many problems; see `Engine.lowered`."""
    for _, engine, count in _engines(config, policy):
        yield from engine.lowered(adapter, problems, jax.random.key(0), count)


def evaluation_plan(config: Config, policy: Policy, adapter: Adapter, problems: int) -> tuple[Plan, int]:
    """Slots and memory of an `evaluate` of so many problems, in the mode that takes the most, and how many completions
    that one samples.

    Raises:
      UserError: not one completion fits in memory.
    """
    plans = [
        (engine.plan(problems * count, problems, adapter), problems * count)
        for _, engine, count in _engines(config, policy)
    ]
    return max(plans, key=lambda found: found[0].nbytes)


def _scores(
    config: Config,
    rewards: RewardFunctions,
    examples: list[dict[str, Any]],
    texts: list[str],
    ids: list[list[int]],
    count: int,
) -> Scores:
    """Scores of `count` completions of each example, in calls no larger than training's (see reward.timeout)."""
    step, parts = max(1, config.completions_per_rollout // count), []
    for low in range(0, len(examples), step):
        some, rows = examples[low : low + step], slice(low * count, (low + step) * count)
        try:
            parts.append(rewards(some, texts[rows], ids[rows], count))
        except UserError as error:
            name, last = config.evaluation.eval_dataset, low + len(some) - 1
            raise UserError(f"the evaluation on {name}, rows {low} to {last} (from 0): {error}") from error
    return joined(parts)


def pass_at_k(scores_NG: np.ndarray) -> dict[str, float]:
    """The chance that one of k completions of a problem is right, k = 2, 4, .. and G: the unbiased estimate
    1 - C(G - c, k) / C(G, k) of c right ones (Chen et al., arXiv 2107.03374, equation 1), mean over problems.

    Args:
      scores_NG: 1 where a completion is right; a problem is left out if one of its completions has no score (NaN).
    """
    scores_NG = scores_NG[~np.isnan(scores_NG).any(1)]
    G = scores_NG.shape[1]
    wrong_N = G - np.sum(scores_NG == 1, 1)
    sizes = [k for k in (2**i for i in range(1, G.bit_length())) if k < G] + [G]
    if not len(wrong_N):
        return {}
    return {
        f"pass@{k}": float(np.mean([1 - math.comb(int(wrong), k) / math.comb(G, k) for wrong in wrong_N]))
        for k in sizes
    }


def evaluate_run(run: Path, seed: int, num_generations_eval: int | None = None) -> dict[str, Any]:
    """Measures anew what a run has learned, on the problems and draws of `seed`; the run is not changed.

    Of a run that is not finished the newest checkpoint is taken. The seed of the run itself gives the numbers of its
    summary.json, or of an evaluation at that step, again, unless `num_generations_eval` replaces the run's own.

    Raises:
      UserError: the run has saved nothing yet, something it names is gone or another model now, or its config says
        another model, or other options of the adapter, than it began with.
    """
    config = load_config(str(run / run_files.CONFIG))
    run_options.refuse_what_has_gone(
        config, run, "model.model_name_or_path", "evaluation.eval_dataset", "reward.functions"
    )
    began = run_folder.trained_on(run, config)
    if num_generations_eval is not None:
        options = dataclasses.replace(config.evaluation, num_generations_eval=num_generations_eval)
        config = dataclasses.replace(config, evaluation=options)
    with RewardFunctions(config.reward, config.generation.max_completion_length) as rewards:
        data = evaluation_data(config, seed)
        examples = held_out(config, data)
        check_held_out(config, rewards, examples)
        adapter = learned_adapter(run, config)
        policy = configured_policy(config)
        now = model_identity(config.model.model_name_or_path, policy.fingerprint)
        run_folder.refuse_another_model(run, began.identity, now)
        check_configured_prompts(config, policy, examples, data.where)
        # Another seed of a generated data set gives other problems; the run's own tells whether the data are the same.
        of_run = data if seed == config.run.seed else evaluation_data(config, config.run.seed)
        changed = [f"the source of reward function {name}" for name in began.changed_rewards(rewards.sources)]
        if began.identity.get("evaluation data") not in (None, of_run.fingerprint):
            changed.append(f"the evaluation data ({config.evaluation.eval_dataset})")
        _warn_of_changes(run, changed)
        compiled_together(lowered_evaluation(config, policy, adapter, len(examples)))
        measured = evaluate(config, policy, adapter, rewards, examples, seed)
    return {f"{mode}/{name}": value for mode in ("sampled", "greedy") for name, value in measured[mode].items()}


def _warn_of_changes(run: Path, changed: list[str]) -> None:
    for what in changed:
        _log.warning(
            "%s: %s has changed since the run: what is measured now may not compare with what it measured", run, what
        )
