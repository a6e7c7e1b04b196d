"""Whole GRPO steps at the shape of a real model with random NVFP4 weights: is it finite, how fast, how much memory.

    python -m benchmarks.grpo_step --model qwen2.5-3b --steps 3 --output benchmarks/results/h200/grpo_step.json

Times are seconds per phase after compilation (the first step compiles and is reported apart); the reward is the share
of even token ids, so that every group has a signal. Memory is the device's own peak.
"""

import argparse
import functools
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import MODELS, compute_dtype, random_model
from pallas_kernels import has_kernels
from qerl_jax.models.init import init_adapter
from qerl_jax.noise import NoiseSchedule
from qerl_jax.rl.optimizer import OptimizerSpec, make_optimizer
from qerl_jax.rl.step import StepSettings, make_batch, reward_metrics, sample_rollout
from qerl_jax.rl.update import UpdateSettings, init_state, update_step
from qerl_jax.rollout import Prompts, SamplingSettings


def even_share(completions: Any) -> jax.Array:
    live = jnp.arange(completions.tokens.shape[1]) < completions.lengths[:, None]
    return jnp.sum(live & (completions.tokens % 2 == 0), axis=1) / completions.lengths


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the steps and returns the result row."""
    config = MODELS[arguments.model]
    model = random_model(config, compute_dtype(), kernels=arguments.kernels)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    optimizer = make_optimizer(OptimizerSpec(1e-4, arguments.steps, warmup_ratio=0.0))
    state = init_state(
        init_adapter(jax.random.key(1), model, arguments.lora_rank, 2.0 * arguments.lora_rank), optimizer
    )
    first_adapter = jax.tree.map(np.asarray, state.adapter)
    G, N = arguments.num_generations, arguments.prompts
    settings = StepSettings(
        SamplingSettings(arguments.completion, (config.vocab_size - 1,), 0),
        UpdateSettings(G, 1.0, arguments.micro_batch, gradient_checkpointing=True),
        NoiseSchedule(2, 1e-2, 1e-2, max(2, arguments.steps)),
    )
    tokens = jax.random.randint(jax.random.key(2), (N, arguments.prompt), 1, config.vocab_size - 1)
    prompts = Prompts(tokens, jnp.full(N, arguments.prompt, jnp.int32), jnp.arange(N))
    sample = jax.jit(functools.partial(sample_rollout, settings=settings))
    join = jax.jit(functools.partial(make_batch, settings=settings))
    update = jax.jit(functools.partial(update_step, optimizer=optimizer, settings=settings.update), donate_argnums=0)

    steps = []
    for i in range(arguments.steps):
        began = time.perf_counter()
        completions, sigma = jax.block_until_ready(sample(model, state.adapter, prompts, jax.random.key(i), state.step))
        sampled = time.perf_counter()
        batch = join(prompts, completions, even_share(completions), jnp.copy(state.step))
        state, metrics = jax.block_until_ready(update(state, model, batch))
        ended = time.perf_counter()
        metrics |= reward_metrics(batch.rewards.reshape(N, G), completions)
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        steps.append(
            {"rollout_s": sampled - began, "update_s": ended - sampled, "sigma": float(sigma)}
            | {name: values[name] for name in ("loss", "grad_norm", "entropy", "reward", "nonfinite")}
            | {"sampling_logp_difference": values["sampling/sampling_logp_difference/mean"]}
        )
        print(json.dumps(steps[-1]), flush=True)
    change = jax.tree.map(lambda now, was: float(np.abs(np.asarray(now) - was).max()), state.adapter, first_adapter)
    memory = jax.devices()[0].memory_stats() or {}
    new_tokens = N * G * arguments.completion
    return {
        "model": arguments.model,
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("output", "model")},
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "dtype": str(compute_dtype()),
        "weights_gb": weights / 1e9,
        "peak_memory_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
        "steps": steps,
        "rollout_tokens_per_s": new_tokens / steps[-1]["rollout_s"],
        "finite": all(np.isfinite([s["loss"], s["grad_norm"]]).all() and s["nonfinite"] == 0 for s in steps),
        "smallest_largest_change_of_an_adapter_array": min(jax.tree.leaves(change)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-3b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=has_kernels())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    text = json.dumps(result, indent=1, default=str)
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
