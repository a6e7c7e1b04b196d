"""The programs of a run's updates, compiled before anything is sampled: whether they fit in memory is known then."""

import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.config import Config
from qerl_jax.errors import UserError
from qerl_jax.models.flash_attention import deterministic_jit
from qerl_jax.models.params import Adapter, Model
from qerl_jax.rl.assembly import Experiment
from qerl_jax.rl.losses import Metrics
from qerl_jax.rl.micro_batches import in_stretch, sizes_of, stretches
from qerl_jax.rl.update import Batch, Gathered, Given, TrainState, accumulate_part, begin_update, end_update


class Update:
    """`update_step` of a run as programs of their own: its beginning, the micro-batches of each width, its end.

    As one program the copies of the network, one for each width, would be compiled one after the other: 103 s for four
    of 28 layers on an H200's host, and 40 for one.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Nothing is compiled yet."""
        self.experiment, self.settings = experiment, experiment.settings.update
        optimizer, settings = experiment.optimizer, self.settings
        self._begin = deterministic_jit(functools.partial(begin_update, settings=settings))
        accumulate = self._accumulate_stretch
        self._accumulate = deterministic_jit(accumulate, static_argnames="width", donate_argnames="gathered")
        end = functools.partial(end_update, optimizer=optimizer, settings=settings)
        self._end = deterministic_jit(end, donate_argnames="state")

    def _accumulate_stretch(
        self,
        gathered: Gathered,
        adapter: Adapter,
        model: Model,
        given: Given,
        places: jax.Array,
        first: jax.Array,
        number: jax.Array,
        width: int,
    ) -> Gathered:
        def body(gathered: Gathered, part: Given, places_R: jax.Array, width: int) -> Gathered:
            return accumulate_part(gathered, adapter, model, part, places_R, width, self.settings)

        return in_stretch(body, gathered, given, places, first, number, width=width)

    def _cut(self) -> dict[str, int]:
        config, settings = self.experiment.config, self.settings
        return {"size": settings.micro_batch_size, "longest": config.row_tokens, "buckets": settings.length_buckets}

    def lowered(self, state: TrainState, batch: Batch) -> Iterator[jax.stages.Lowered]:
        """The programs of an update, the largest first; what is compiled of them is ready for a call.

        Args:
          state: what training begins with, or goes on from.
          batch: shapes and dtypes of an optimizer batch.
        """
        model = self.experiment.policy.model
        begin = self._begin.lower(state, model, batch)
        given, gathered = begin.out_info
        B = batch.completion.shape[0]
        for width, rows in sizes_of(B, **self._cut()).items():
            places = jax.ShapeDtypeStruct((B + rows,), jnp.int32)
            yield self._accumulate.lower(gathered, state.adapter, model, given, places, 0, 1, width=width)
        yield self._end.lower(state, given, gathered)
        yield begin

    def __call__(self, state: TrainState, model: Model, batch: Batch) -> tuple[TrainState, Metrics]:
        """The next state, and metrics. The state's arrays are taken over."""
        given, gathered = self._begin(state, model, batch)
        lengths_B = np.sum(jax.device_get((batch.prompt_lengths, batch.completion_lengths)), axis=0)
        for width, places, first, number in stretches(lengths_B, **self._cut()):
            gathered = self._accumulate(gathered, state.adapter, model, given, places, first, number, width=width)
        return self._end(state, given, gathered)


def refuse_what_does_not_fit(programs: Iterable[jax.stages.Compiled], kept: int, config: Config) -> None:
    """Holds an update against the device's limit, where it and the compiled programs say what they have and need.

    Args:
      programs: those of the update, one of which runs at a time.
      kept: bytes that stay on the device beside what a program makes.
      config: the run's.

    Raises:
      UserError: it needs more, with the numbers and the options that change them.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    sizes = [found for program in programs if (found := program.memory_analysis()) is not None]
    if limit is None or not sizes:
        return
    temporary = max(s.temp_size_in_bytes + s.output_size_in_bytes - s.alias_size_in_bytes for s in sizes)
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
