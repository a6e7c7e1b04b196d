"""Whether an update fits in the device's memory, known before anything is sampled for it."""

import jax

from qerl_jax.config import Config
from qerl_jax.errors import UserError


def refuse_what_does_not_fit(program: jax.stages.Compiled, config: Config) -> None:
    """Holds the compiled update against the limit of the device, where it has one.

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
    size, tokens = optimizer.per_device_train_batch_size, config.data.max_prompt_length
    tokens += config.generation.max_completion_length
    ways = []
    if size > 1:
        ways.append(
            f"lower optimizer.per_device_train_batch_size, and raise gradient_accumulation_steps (now "
            f"{optimizer.gradient_accumulation_steps}) as much: the step stays the same"
        )
    if not optimizer.gradient_checkpointing:
        ways.append("set optimizer.gradient_checkpointing=true")
    ways.append("shorten generation.max_completion_length")
    raise UserError(
        f"an update does not fit in memory: weights, adapter and optimizer need {kept / 1e9:.1f} GB, and "
        f"{size} {'row' if size == 1 else 'rows'} of {tokens} tokens at once (optimizer.per_device_train_batch_size) "
        f"{sizes.temp_size_in_bytes / 1e9:.1f} GB; the device has {limit / 1e9:.1f} GB. To change that, "
        + ", or ".join(ways)
    )
