"""The program of a run's updates, compiled before anything is sampled: whether it fits in memory is known then."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.config import Config
from qerl_jax.errors import UserError
from qerl_jax.rl.assembly import Experiment
from qerl_jax.rl.update import Batch, TrainState, update_step
from qerl_jax.rollout import Prompts, Rollout


def compiled_update(experiment: Experiment, state: TrainState, assemble: Callable[..., Batch]) -> jax.stages.Compiled:
    """`update_step` of a run, (state, model, batch) -> (state, metrics), which takes the state's arrays over.

    Args:
      experiment: the run's.
      state: what training begins with, or goes on from.
      assemble: (prompts, completions, rewards [B], step) -> batch, as the run makes its batches.

    Raises:
      UserError: the device has less memory than it needs.
    """
    config = experiment.config
    update = functools.partial(update_step, optimizer=experiment.optimizer, settings=experiment.settings.update)
    batch = jax.eval_shape(assemble, *_shapes_of_an_update(config), state.step)
    program = jax.jit(update, donate_argnums=0).lower(state, experiment.policy.model, batch).compile()
    refuse_what_does_not_fit(program, config)
    return program


def _shapes_of_an_update(config: Config) -> tuple[Prompts, Rollout, Any]:
    """Shapes and dtypes of one update's prompts, completions and rewards."""
    P, C, B = config.data.max_prompt_length, config.generation.max_completion_length, config.completions_per_update
    N = B // config.generation.num_generations
    shape: Any = jax.ShapeDtypeStruct
    prompts = Prompts(shape((N, P), jnp.int32), shape((N,), jnp.int32), shape((N,), jnp.int32))
    completions = Rollout(
        tokens=shape((B, C), jnp.int32),
        lengths=shape((B,), jnp.int32),
        terminated=shape((B,), jnp.bool),
        logps=shape((B, C), jnp.float32),
        truncated_logps=None,
    )
    return prompts, completions, shape((B,), jnp.float32)


def refuse_what_does_not_fit(program: jax.stages.Compiled, config: Config) -> None:
    """Holds the compiled update against the device's limit, where both say what they take and have.

    Raises:
      UserError: it needs more, with the numbers and the options that change them.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    sizes = program.memory_analysis()
    if limit is None or sizes is None:
        return
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    if kept + sizes.temp_size_in_bytes <= limit:
        return
    optimizer = config.optimizer
    size = optimizer.per_device_train_batch_size
    fewer = size * (limit - kept) // sizes.temp_size_in_bytes  # as if all of it went with the rows
    divisor = max((n for n in range(1, size) if size % n == 0 and n <= fewer), default=None)
    ways = [] if divisor is None else [f"{_in_smaller_parts(config, divisor)}, which is the same step and may fit"]
    ways += [] if optimizer.gradient_checkpointing else ["optimizer.gradient_checkpointing=true"]
    ways.append("a lower generation.max_completion_length")
    raise UserError(
        f"an update does not fit in memory: weights, adapter and optimizer need {kept / 1e9:.1f} GB, and "
        f"{size} {'row' if size == 1 else 'rows'} of {config.row_tokens} tokens at once "
        f"(optimizer.per_device_train_batch_size) {sizes.temp_size_in_bytes / 1e9:.1f} GB; the device has "
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
