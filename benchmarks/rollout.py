"""Decoding at size: milliseconds a step of the rollout that `qerl train` runs, beside what its bytes alone would take.

    python -m benchmarks.rollout --model qwen2.5-7b --format nvfp4 --lora-rank 32 --batch 1 8 32 64 128 256 \\
        --prompt 256 --new 512 --output benchmarks/results/h200/rollout.json
    python -m benchmarks.rollout --model qwen2.5-7b --batch 8 --profile 8
    python -m benchmarks.rollout --model quickstart --batch 128 --prompt 40 --new 48 --lora-rank 16   # on a CPU

Random weights in the real shapes, LoRA on all seven linears with a B that is not zero, temperature 1 over the whole
vocabulary, log-probabilities recorded, noise on the norm scales; no token ends a completion. What is timed is
`Engine.rollout` from call to result, the same compiled program with two limits: the first token alone, which is the
prefill, and all tokens; their difference over the tokens between is `step_ms`, steady decoding. Medians of --repeats.

floor_ms is what a step must read (packed weights, LoRA, the output matrix, live keys and values with a group's prompt
once) over the read bandwidth measured in the same run. logp_difference is the mean absolute difference, in nats, of
recorded log-probabilities and those of the learner's forward pass over the same tokens with the same noise;
logp_difference_to_clean is that to the learner without noise, which a training run logs. --output is written after
every row, and rows of other models, formats, ranks, batches and dtypes that it holds already stay, if they are of the
same device and versions; a row names its dtype where that is not the device's own.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.report import versions, write
from benchmarks.shapes import MODELS, compute_dtype, random_adapter, random_model
from pallas_kernels import compiling_for, describe, has_kernels
from qerl_jax.formats import FORMATS
from qerl_jax.models.dtypes import DTYPES
from qerl_jax.models.params import Adapter, Model, Norms, norms_of
from qerl_jax.noise import perturb_norms
from qerl_jax.option_names import KV_CACHE_DTYPES, KVCacheDtype
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rollout import Engine, Prompts, Rollout, SamplingSettings
from qerl_jax.rollout.attention import cache_dtypes
from qerl_jax.rollout.prepared import prepared
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.slots import decode

# tokens/s with NVFP4 and with BF16 weights of vLLM 0.22.1 on an H200: Qwen2.5 shapes, dummy weights, LoRA rank 32 on
# all linears, 256 prompt tokens, steady decoding; one engine start each, steady steps agree within 1%. None: not run.
PEER_DEVICE = "NVIDIA H200"
PEER: dict[str, dict[int, tuple[float, float | None]]] = {
    "qwen2.5-7b": {
        1: (204, 159), 8: (1717, 1318), 32: (5997, 5047), 64: (8749, 9197), 128: (10019, 13237), 256: (13455, 19120)
    },
    "qwen2.5-14b": {1: (120, 88), 8: (998, 717), 32: (3169, 2686), 64: (4466, 4667), 128: (5426, 6640)},
    "qwen2.5-32b": {1: (69, 45), 8: (578, 367), 32: (1821, 1390), 64: (2535, None), 128: (2886, None)},
}  # fmt: skip
_KEYS = ("model", "format", "lora_rank", "batch", "prompt", "new", "num_generations")
_SIGMA = 1e-2
_REPLAYED = 8  # rows whose tokens go through the learner
_PROFILED = 4  # decode steps under the profiler, and twice as many


class Case(NamedTuple):
    """What one row is measured on."""

    model: Model
    adapter: Adapter
    noisy: Norms
    prompts: Prompts
    num_generations: int
    new: int
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def batch(self) -> int:
        return self.prompts.tokens.shape[0] * self.num_generations

    @property
    def settings(self) -> SamplingSettings:
        """No id ends a completion."""
        return SamplingSettings(self.new, (), 0, kv_cache_dtype=self.kv_cache_dtype)


def make_case(
    model: Model,
    rank: int,
    batch: int,
    num_generations: int,
    prompt: int,
    new: int,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> Case:
    G = math.gcd(batch, num_generations)
    adapter = random_adapter(model, rank)
    noisy = perturb_norms(norms_of(model, adapter), _SIGMA, jax.random.key(3))
    N = batch // G
    tokens = jax.random.randint(jax.random.key(4), (N, prompt), 0, model.config.vocab_size)
    return Case(model, adapter, noisy, Prompts(tokens, jnp.full(N, prompt), jnp.arange(N)), G, new, kv_cache_dtype)


def step_bytes(case: Case) -> int:
    """Bytes that a step must read on average, weights as they are stored."""
    config, itemsize = case.model.config, case.model.base.embed.dtype.itemsize
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(case.model.base.layers))
    head = config.vocab_size * config.hidden_size * itemsize
    lora = sum(pair.a.size + pair.b.size for layer in case.adapter.lora for pair in layer.values()) * itemsize
    kept = sum(dtype.itemsize for dtype in cache_dtypes(case.model, case.kv_cache_dtype))
    position = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * kept
    N, P = case.prompts.tokens.shape
    return weights + head + lora + (N * P + case.batch * case.new // 2) * position


def read_bandwidth(nbytes: int) -> float:
    """Bytes a second of reading an array of this size, from the host's clock over ten reads in a row."""
    big = jnp.ones(nbytes // 4, jnp.float32)
    read = jax.jit(jnp.sum)
    read(big).block_until_ready()
    began = time.perf_counter()
    jax.block_until_ready([read(big) for _ in range(10)])
    return 10 * big.nbytes / (time.perf_counter() - began)


def replayed_difference(case: Case, out: Rollout, norms: Norms | None) -> float:
    """Mean absolute difference in nats between recorded log-probabilities and the learner's, on some of the rows."""
    rows = np.linspace(0, case.batch - 1, _REPLAYED).astype(int)
    prompts, tokens = rows // case.num_generations, out.tokens[rows]
    model = case.model if norms is None else with_norms(case.model, norms)
    at = case.prompts.tokens[prompts], case.prompts.lengths[prompts]
    logps, _ = _learner(model, case.adapter, *at, tokens, out.lengths[rows], 1.0)
    return float(jnp.abs(logps - out.logps[rows]).mean())


_learner = jax.jit(completion_logps)


def with_norms(model: Model, norms: Norms) -> Model:
    layers = tuple(
        layer.replace(input_norm=before, post_attention_norm=after)
        for layer, before, after in zip(model.base.layers, norms.input, norms.post_attention, strict=True)
    )
    return model.replace(base=model.base.replace(layers=layers, final_norm=norms.final))


def measure(case: Case, repeats: int, bandwidth: float) -> dict[str, Any]:
    """The measured part of a row."""
    N, P = case.prompts.tokens.shape
    engine = Engine(case.model, case.settings, max_prompt_length=P)
    slots = engine.plan(case.batch, N, case.adapter).slots
    if slots < case.batch:
        raise MemoryError(f"{slots} of {case.batch} completions fit at once")

    def run(limit: int, key: int) -> tuple[float, Rollout]:
        began = time.perf_counter()
        out = engine.rollout(
            case.adapter, case.prompts, jax.random.key(key), case.num_generations, case.noisy, [limit] * N
        )
        jax.block_until_ready(out)
        return time.perf_counter() - began, out

    run(2, 0)  # what is compiled or made at the first call
    first, whole = [], []
    for i in range(repeats):
        first.append(run(1, i)[0])
        seconds, out = run(case.new, i)
        whole.append(seconds)
    prefill = statistics.median(first)
    steps_ms = [1e3 * (seconds - prefill) / (case.new - 1) for seconds in whole]
    step_ms = statistics.median(steps_ms)
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "step_ms": step_ms,
        "tokens_per_s": 1e3 * case.batch / step_ms,
        "floor_ms": 1e3 * step_bytes(case) / bandwidth,
        "logp_difference": replayed_difference(case, out, case.noisy),
        "logp_difference_to_clean": replayed_difference(case, out, None),
        "prefill_ms": 1e3 * prefill,
        "prefill_tokens_per_s": N * P / prefill,
        "step_ms_of_repeats": steps_ms,
        "peak_memory_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
    }


def compile_ahead(cases: list[Case]) -> None:
    """Compiles the programs of all cases in threads, into the cache from which the calls then take them."""

    def limits(case: Case) -> np.ndarray:
        return np.full(case.prompts.tokens.shape[0], case.new, np.int32)

    def of(case: Case) -> tuple[Any, ...]:
        G = case.num_generations
        return case.model, case.adapter, case.prompts, jax.random.key(0), case.settings, G, case.noisy, limits(case)

    def replay(case: Case) -> jax.stages.Lowered:
        rows, tokens = np.zeros(_REPLAYED, int), jnp.zeros((case.batch, case.new), jnp.int32)
        at = case.prompts.tokens[rows], case.prompts.lengths[rows], tokens[rows], jnp.zeros(case.batch, jnp.int32)[rows]
        return _learner.lower(with_norms(case.model, case.noisy), case.adapter, *at, 1.0)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        tasks = [pool.submit(replay(cases[0]).compile)]
        begun = [pool.submit(programs().begun.lower(*of(case)).compile) for case in cases]
        for case, task in zip(cases, begun, strict=True):
            task.result()
            slots, new = programs().begun(*of(case))
            ready = prepared(case.model, case.adapter, new)
            lowered = programs().finished.lower(
                slots, *ready, case.noisy, case.new, 0, case.settings, group=case.num_generations
            )
            tasks.append(pool.submit(lowered.compile))
        for task in tasks:
            task.result()


def kernel_times(case: Case) -> list[dict[str, Any]]:
    """Device microseconds of each kind of kernel in one decode step, the longest first (see `per_step`)."""
    N, G = case.prompts.tokens.shape[0], case.num_generations
    of = case.model, case.adapter, case.prompts, jax.random.key(0), case.settings, G, case.noisy
    slots, new = programs().begun(*of, np.full(N, case.new, np.int32))
    model, adapter = prepared(case.model, case.adapter, new)
    # not donated, since it runs twice: what is copied for that is in both measurements, if both have steps
    steps = jax.jit(functools.partial(decode, leave=0, settings=case.settings, group=G))

    def times(count: int) -> list[tuple[str, float]]:
        return profiler.measure(steps, aggregate=False)(slots, model, adapter, case.noisy, count)[1] or []

    return per_step(times(_PROFILED), times(2 * _PROFILED), _PROFILED)


def per_step(fewer: Iterable[tuple[str, float]], more: Iterable[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """Kernels of a step from (name, milliseconds) of two runs, of which the second has `steps` more: what it has more
    of, over the steps. Kernels whose names differ in a number at the end alone, as XLA gives them, count together."""

    def totals(kernels: Iterable[tuple[str, float]]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(2))
        for name, ms in kernels:
            found[re.sub(r"[._]\d+$", "", name)] += (1, 1e3 * ms)
        return found

    before, after = totals(fewer), totals(more)
    rows = ((name, *(sums - before[name]) / steps) for name, sums in after.items())
    found = [{"kernel": name, "count": float(count), "us": float(us)} for name, count, us in rows if count > 0]
    return sorted(found, key=lambda row: -row["us"])


HEADER = "model        format rank batch   step ms  floor ms  of floor  tokens/s     peer  ratio  prefill/s  logp diff"


def line(row: dict[str, Any], device: str) -> str:
    """A row as text: `peer` is its NVFP4 rate on this device up to batch 32, beyond that the better of its formats."""
    known = PEER.get(row["model"], {}).get(row["batch"]) if device == PEER_DEVICE else None
    versus = f"{'-':>8} {'-':>6}"
    if known is not None:
        peer = known[0] if row["batch"] <= 32 else max(rate for rate in known if rate is not None)
        versus = f"{peer:8.0f} {row['tokens_per_s'] / peer:6.2f}"
    return (
        f"{row['model']:12} {row['format']:6} {row['lora_rank']:4} {row['batch']:5} {row['step_ms']:9.3f} "
        f"{row['floor_ms']:9.3f} {row['floor_ms'] / row['step_ms']:9.0%} {row['tokens_per_s']:9.0f} {versus} "
        f"{row['prefill_tokens_per_s']:10.0f} {row['logp_difference']:10.4f}"
    )


class Results:
    """The result file: rows by what they were measured on, written anew with each one."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path is not None and path.is_file():
            old = json.loads(path.read_text())
            for what in ("device", "versions"):
                if old[what] != about[what]:
                    raise SystemExit(f"{path} holds results of {old[what]}; this is {about[what]}: name another file")
            self.rows = {self._name(row): row for row in old["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[self._name(row)] = row
        write(self.path, self.about | {"rows": list(self.rows.values())})

    @staticmethod
    def _name(row: dict[str, Any]) -> tuple[Any, ...]:
        return (*(row[key] for key in _KEYS), *(row.get(key, "auto") for key in ("kv_cache_dtype", "dtype")))


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["nvfp4"])
    parser.add_argument("--lora-rank", type=int, nargs="+", default=[32])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="completions at once")
    parser.add_argument("--num-generations", type=int, default=8, help="completions of a prompt, or all of a batch")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--dtype", choices=DTYPES, default=compute_dtype().name, help="that models are computed in")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, help="default: where there are some")
    parser.add_argument(
        "--compute-capability", type=int, metavar="80", help="compile what a GPU of this one would run, for this one"
    )
    parser.add_argument(
        "--profile", type=int, nargs="+", default=[], metavar="BATCH", help="also kernels' device times"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    if arguments.new < 2:
        parser.error("--new is less than 2; steady decoding begins with the second token")
    if not {*arguments.profile} <= {*arguments.batch}:
        parser.error(f"--profile is {arguments.profile}; allowed: batches of --batch, {arguments.batch}")
    if arguments.profile and jax.default_backend() != "gpu":
        parser.error("--profile reads a GPU's counters, and there is no GPU here")
    if arguments.profile and len(arguments.format) > 1:
        parser.error("--profile goes with one --format: its counters may disturb timings that come after")
    return arguments


def main(words: list[str] | None = None, show: Callable[[str], None] = print) -> int:
    arguments = arguments_of(words)
    with compiling_for(arguments.compute_capability) if arguments.compute_capability else contextlib.nullcontext():
        return run(arguments, show)


def run(arguments: argparse.Namespace, show: Callable[[str], None]) -> int:
    kernels = has_kernels() if arguments.kernels is None else arguments.kernels
    config = MODELS[arguments.model]
    on_cpu = jax.default_backend() == "cpu"
    dtype = compute_dtype(arguments.dtype)
    bandwidth = read_bandwidth(2**28 if on_cpu else 2**32)
    about = {
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "flax", "numpy"),
        "settings": {
            "repeats": arguments.repeats,
            "kernels": kernels and describe(),
            "dtype": str(dtype),
            "sigma": _SIGMA,
        },
        "read_tb_per_s": bandwidth * 1e-12,
    }
    results, failed = Results(arguments.output, about), 0
    compiled = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", compiled.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    show(f"{about['device']}, reads {bandwidth * 1e-12:.2f} TB/s\n{HEADER}")
    for weight_format in arguments.format:
        model = random_model(config, dtype, weight_format, kernels)
        done: list[tuple[dict[str, Any], Case]] = []
        sizes = list(itertools.product(arguments.lora_rank, arguments.batch))
        rest = arguments.num_generations, arguments.prompt, arguments.new, arguments.kv_cache_dtype
        cases = [make_case(model, *size, *rest) for size in sizes]
        began = time.perf_counter()
        compile_ahead(cases)
        show(f"compiled in {time.perf_counter() - began:.0f} s")
        for (rank, batch), case in zip(sizes, cases, strict=True):
            of = arguments.model, weight_format, rank, batch, arguments.prompt, arguments.new, case.num_generations
            row: dict[str, Any] = dict(zip(_KEYS, of, strict=True))
            if arguments.kv_cache_dtype != "auto":
                row["kv_cache_dtype"] = arguments.kv_cache_dtype
            if dtype != compute_dtype():
                row["dtype"] = dtype.name
            try:
                row |= measure(case, arguments.repeats, bandwidth)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                failed += 1
                show(f"{' '.join(map(str, of))}: {str(error)[:300]}")
                continue
            results.add(row)
            show(line(row, about["device"]))
            done.append((row, case))
        for row, case in done:  # behind all timings, which the counters may disturb
            if case.batch not in arguments.profile:
                continue
            row["kernels"] = kernel_times(case)
            results.add(row)
            show(f"{row['format']} rank {row['lora_rank']} batch {row['batch']}, a step:")
            show("\n".join(f"{k['us']:9.1f} us {k['count']:6.1f} x {k['kernel']}" for k in row["kernels"]))
            show(f"{sum(k['us'] for k in row['kernels']):9.1f} us in kernels of {1e3 * row['step_ms']:.1f} us")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
