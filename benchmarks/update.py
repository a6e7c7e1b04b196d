"""An optimizer step at size: seconds, beside what its products alone would take, and memory, by micro-batch.

    python -m benchmarks.update --model qwen2.5-7b --completion 2048 --micro-batch 1 2 --checkpointed 4 8 \\
        --output benchmarks/results/h200/update_qwen2.5-7b.json
    python -m benchmarks.update --rows 64 --long-tail --micro-batch 2 --checkpointed
    python -m benchmarks.update --micro-batch 1 --checkpointed --profile

Random NVFP4 weights in the real shapes, LoRA on all seven linears with a B that is not zero, random tokens.
What is timed are the two halves of `update_step`, compiled as a run's are and given a state to overwrite, as there (a
program that finds its arrays where they were is faster), from call to result; `seconds` is the median of --repeats
after a first one (`first_seconds`), and `numbers_that_differ` says how many of the next state are not the same in all
of them. floor_seconds is the time of the frozen weights' products, forward and for dx (with gradient checkpointing
forward once more), and of the output matrix's two, for the tokens that rows have, at the rate of a product of 8192^3 in
that run. temporary_gb is what the first half needs beside weights, adapter and optimizer state, gradients included.
compile_seconds are each half's, beside all other programs; XLA_FLAGS sets options for all. With --profile `kernels` has
the milliseconds of each kernel of one more step, which leaves the state as it is, by XLA's names; those of frames that
are not chosen count, with none.
"""

import argparse
import collections
import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.compiling import Programs
from benchmarks.refill import long_tailed
from benchmarks.report import versions, write
from benchmarks.shapes import MODELS, compute_dtype, random_adapter, random_model
from pallas_kernels import has_kernels
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.dtypes import DTYPES
from qerl_jax.models.flash_attention import deterministic_jit
from qerl_jax.models.params import PROJECTIONS, Model, projection_shape
from qerl_jax.rl.losses import Metrics
from qerl_jax.rl.optimizer import OptimizerSpec, make_optimizer
from qerl_jax.rl.state import Batch, TrainState, UpdateSettings, init_state
from qerl_jax.rl.update import apply_gradients, gather_gradients

_OPTIMIZER = make_optimizer(OptimizerSpec(1e-5, 100))
_RECORDED = ("dtype", "lora_rank", "rows", "prompt", "completion", "long_tail", "repeats")  # arguments in the result


class Update(NamedTuple):
    """The two programs of an optimizer step."""

    gather: jax.stages.Compiled
    apply: jax.stages.Compiled

    def __call__(self, state: TrainState, model: Model, batch: Batch) -> tuple[TrainState, Metrics]:
        step: tuple[TrainState, Metrics] = self.apply(state, batch, self.gather(state, model, batch))
        return step


def random_batch(config: ModelConfig, rows: int, prompt: int, completion: int, lengths: Sequence[int]) -> Batch:
    """One prompt's completions of these lengths, whose rewards are all different."""
    tokens = jax.random.randint(jax.random.key(3), (rows, prompt + completion), 0, config.vocab_size)
    completion_lengths = jnp.array(lengths, jnp.int32)
    return Batch(
        prompt=tokens[:, :prompt],
        prompt_lengths=jnp.full(rows, prompt),
        completion=tokens[:, prompt:],
        completion_lengths=completion_lengths,
        mask=jnp.arange(completion) < completion_lengths[:, None],
        rewards=jnp.arange(rows) / rows,
        sampled_logps=jnp.zeros((rows, completion)),
        rollout_step=jnp.int32(0),
    )


def products_flops(config: ModelConfig, tokens: int, completion_tokens: int, checkpoints: bool) -> float:
    """Of the frozen weights and of the output matrix, forward and for dx: no gradient of a weight is taken."""
    head = 2.0 * completion_tokens * config.vocab_size * config.hidden_size
    return layers_flops(config, tokens) * (3 if checkpoints else 2) + 2 * head


def layers_flops(config: ModelConfig, tokens: int) -> float:
    """Of the products of all layers' frozen weights, once."""
    sizes = (projection_shape(config, name) for name in PROJECTIONS)
    return 2.0 * tokens * config.num_hidden_layers * sum(N * K for N, K in sizes)


def product_rate(size: int, dtype: jnp.dtype) -> float:
    """FLOPs a second of a product of `size`^3 in `dtype`, by the host's clock over ten in a row."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    began = time.perf_counter()
    jax.block_until_ready([product(x, x) for _ in range(10)])
    return 10 * 2.0 * size**3 / (time.perf_counter() - began)


@jax.jit
def number_of_differences(a: TrainState, b: TrainState) -> jax.Array:
    """How many numbers of two states are not the same."""
    return sum((x != y).sum() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def to_overwrite(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of an update, which may keep its result in the place of the state."""
    state, *others = operands
    return jax.tree.map(jnp.copy, state), *others


def measure(update: Update, operands: tuple[Any, ...], repeats: int) -> dict[str, Any]:
    seconds, differences, first = [], [], None
    for _ in range(1 + repeats):
        own = jax.block_until_ready(to_overwrite(operands))
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(update(*own))
        seconds.append(time.perf_counter() - began)
        first = state if first is None else first
        differences.append(int(number_of_differences(state, first)))
    made = update.gather.memory_analysis()
    return {
        "numbers_that_differ": max(differences),
        "seconds": statistics.median(seconds[1:]),
        "seconds_of_repeats": seconds[1:],
        "first_seconds": seconds[0],
        "temporary_gb": (made.temp_size_in_bytes + made.output_size_in_bytes) / 1e9,
        "grad_norm": float(metrics["grad_norm"]),
        "nonfinite": int(metrics["nonfinite"]),
    }


def kernel_times(update: Update, operands: tuple[Any, ...]) -> list[dict[str, Any]]:
    """How often each kernel runs in a step, and its milliseconds in all, the longest first. Each half runs twice, and
    so must leave its operands."""
    state, _, batch = operands
    gathered, kernels = profiler.measure(update.gather, aggregate=False)(*operands)
    _, others = profiler.measure(update.apply, aggregate=False)(state, batch, gathered)
    found: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(2))
    for name, ms in (kernels or []) + (others or []):
        found[name] += (1, ms)
    rows = [{"kernel": name, "count": int(count), "ms": float(ms)} for name, (count, ms) in found.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--dtype", choices=DTYPES, default=compute_dtype().name, help="that models are computed in")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8, help="completions of a step, one group")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=2048, help="tokens of a completion")
    parser.add_argument("--micro-batch", type=int, nargs="*", default=[1, 2], help="without gradient checkpointing")
    parser.add_argument("--checkpointed", type=int, nargs="*", default=[4], help="micro-batches with it")
    parser.add_argument(
        "--long-tail",
        action="store_true",
        help="lengths ~ 1 / length^2 from a 64th of --completion, instead of all full",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also kernels' device times")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    if arguments.profile and jax.default_backend() != "gpu":
        parser.error("--profile reads a GPU's counters, and there is no GPU here")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = arguments_of(words)
    config, B = MODELS[arguments.model], arguments.rows
    dtype = compute_dtype(arguments.dtype)
    model = random_model(config, dtype, kernels=has_kernels())
    state = init_state(random_adapter(model, arguments.lora_rank), _OPTIMIZER)
    cases = [(size, False) for size in arguments.micro_batch] + [(size, True) for size in arguments.checkpointed]
    lengths = [arguments.completion] * B
    if arguments.long_tail:
        lengths = long_tailed(B, max(1, arguments.completion // 64), arguments.completion)
    batch = random_batch(config, B, arguments.prompt, arguments.completion, lengths)
    operands = state, model, batch
    rate = product_rate(256 if jax.default_backend() == "cpu" else 8192, dtype)

    programs = Programs()
    for case in cases:
        settings = UpdateSettings(B, 1.0, case[0], gradient_checkpointing=case[1])
        gather = functools.partial(gather_gradients, settings=settings)
        apply = functools.partial(apply_gradients, optimizer=_OPTIMIZER, settings=settings)
        rest = state, batch, jax.eval_shape(gather, *operands)
        programs.start((case, "gather"), gather, *operands, jit=deterministic_jit)
        programs.start((case, "apply"), apply, *rest, jit=functools.partial(deterministic_jit, donate_argnums=0))
        if arguments.profile:
            programs.start((case, "apply, profiled"), apply, *rest, jit=deterministic_jit)
    programs.wait()
    rows: list[dict[str, Any]] = []
    result = {
        "model": arguments.model,
        "settings": {name: getattr(arguments, name) for name in _RECORDED},
        "mean_length": statistics.mean(lengths),
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "optax"),
        "product_tflop_per_s": rate * 1e-12,
        "rows": rows,
    }
    for case in cases:
        size, checkpoints = case
        flops = products_flops(config, B * arguments.prompt + sum(lengths), sum(lengths), checkpoints)
        row = {"micro_batch": size, "gradient_checkpointing": checkpoints, "floor_seconds": flops / rate}
        gather = programs.get((case, "gather"))
        row |= measure(Update(gather, programs.get((case, "apply"))), operands, arguments.repeats)
        row["compile_seconds"] = {half: programs.compile_seconds[case, half] for half in ("gather", "apply")}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        if arguments.profile:
            row["kernels"] = kernel_times(Update(gather, programs.get((case, "apply, profiled"))), operands)
            for kernel in row["kernels"][:20]:
                print(f"  {kernel['ms']:8.2f} ms {kernel['count']:6} {kernel['kernel']}", flush=True)
        rows.append(row)
        write(arguments.output, result)
    return 1 if any(row["nonfinite"] or row["numbers_that_differ"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
