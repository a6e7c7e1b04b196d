"""Whether a run's update fits in memory: known from its compiled program, before anything is sampled."""

import jax

from qerl_jax.config import Config
from qerl_jax.errors import UserError


def refuse_what_does_not_fit(program: jax.stages.Compiled, kept: int, config: Config) -> None:
    """Holds an update against the device's limit, where it and the compiled program say what they have and need.

    Args:
      program: the update's.
      kept: bytes that stay on the device beside what the program makes.
      config: the run's.

    Raises:
      UserError: it needs more, with the numbers and the options that change them.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    sizes = program.memory_analysis()
    if limit is None or sizes is None:
        return
    temporary = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    if kept + temporary <= limit:
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
