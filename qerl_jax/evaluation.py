"""Held-out evaluation: the clean policy, sampled and greedy, on problems that training never sees.

Its randomness is a stream of its own, so that evaluating more or less often changes nothing in training. The same seed
before and after a run gives the same problems and the same draws.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import run_folder
from qerl_jax.config import Config
from qerl_jax.config_files import load_config
from qerl_jax.data.prompts import encode_prompts
from qerl_jax.errors import UserError
from qerl_jax.models.params import Adapter
from qerl_jax.models.peft import load_adapter
from qerl_jax.models.source import read_json
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.assembly import (
    Policy,
    configured_policy,
    decode_completions,
    evaluation_data,
    held_out,
    sampling_engine,
    sampling_settings,
)
from qerl_jax.rollout import Prompts

_SAMPLES = 3
# As TRL calls it. A slash without a colon is in no name of a reward function, so none has this one.
_MEAN_LENGTH = "completions/mean_length"
# The stream of a run's root key that evaluation draws from; training uses others.
STREAM = 2


def evaluate(config: Config, policy: Policy, adapter: Adapter, rewards: RewardFunctions, seed: int) -> dict[str, Any]:
    """Means of every reward function over the held-out problems, one completion each, sampled and greedy.

    Args:
      config: `evaluation`, `generation` (lengths) and `data` (prompt limit) are read.
      policy, adapter: what is measured; no noise.
      rewards: scores the completions; `accuracy` and `format` are among them in the shipped recipes.
      seed: of the sampling, and of the problems of a generated data set; of a file the first rows are taken.

    Returns:
      {"sampled": {name: mean}, "greedy": {name: mean}, "samples": the first greedy completions with their prompts}.
      Beside the functions' names stands "completions/mean_length", in tokens.
    """
    options = config.evaluation
    key = jax.random.fold_in(jax.random.key(seed), STREAM)
    examples = held_out(config, evaluation_data(config, seed))
    prompts, lengths = encode_prompts(policy.tokenizer, [e["prompt"] for e in examples], config.data.max_prompt_length)
    batch = Prompts(jnp.asarray(prompts), jnp.asarray(lengths), jnp.arange(len(examples)))
    results: dict[str, Any] = {}
    modes = (
        ("sampled", {"temperature": options.temperature, "top_p": options.top_p}),
        ("greedy", {"temperature": 0.0, "top_p": 1.0}),
    )
    for mode, sampling in modes:
        settings = sampling_settings(config, policy, top_k=0, min_p=0.0, kv_cache_dtype="auto", **sampling)
        # One rollout does not give back what compiling programs for its last samples takes.
        engine = sampling_engine(config, policy, settings, options.batch_size, tail_sizes=())
        out = engine.rollout(adapter, batch, key, 1)
        texts, ids = decode_completions(policy.tokenizer, out)
        scores = rewards(examples, texts, ids, 1)
        results[mode] = scores.means | {_MEAN_LENGTH: float(np.mean([len(row) for row in ids]))}
    results["samples"] = [
        {"prompt": example["prompt"], "completion": text}
        for example, text in zip(examples[:_SAMPLES], texts, strict=False)
    ]
    return results


def evaluate_run(run: Path, seed: int) -> dict[str, Any]:
    """Measures a finished run's adapter anew, on the problems and draws of `seed`; the run is not changed.

    The seed of the run itself gives the numbers of its summary.json again.

    Raises:
      UserError: the run has no adapter yet, or something it names is gone.
    """
    config = load_config(str(run / run_folder.CONFIG))
    with RewardFunctions(config.reward, config.generation.max_completion_length) as rewards:
        rewards.check(held_out(config, evaluation_data(config, seed)), config.evaluation.eval_dataset)
        policy = configured_policy(config)
        measured = evaluate(config, policy, trained_adapter(run, policy), rewards, seed)
    return {f"{mode}/{name}": value for mode in ("sampled", "greedy") for name, value in measured[mode].items()}


def trained_adapter(run: Path, policy: Policy) -> Adapter:
    """The adapter that a finished run left, for the base that it was trained on.

    Raises:
      UserError: there is none yet, or the base is another one now.
    """
    if not (run / run_folder.SUMMARY).is_file():  # which is written last
        raise UserError(
            f"{run}: holds no {run_folder.ADAPTER}/ yet, which is written when a run ends; "
            f"`{run_folder.continuing(run)}` continues it"
        )
    trained_on = read_json(run / run_folder.SUMMARY).get("identity", {})
    run_folder.refuse_changed_identity(run, trained_on, {"base weights": policy.fingerprint})
    return load_adapter(run / run_folder.ADAPTER, policy.model)
