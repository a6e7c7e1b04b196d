"""How much of the engine's rate is left when completions have very different lengths: slots that end are refilled.

    python -m benchmarks.refill --model qwen2.5-7b --slots 64 --output benchmarks/results/h200/refill.json

Random weights, LoRA and noise as in `benchmarks.rollout`. All completions of a prompt have its own length, drawn
from a distribution with a long tail (density ~ 1 / length^2, from --shortest to --longest); then, of as many prompts,
all have the mean length. Both go through the same compiled programs; ratio is the first rate over the second.

Slots are in long completions most of the time: of those at work at a moment the mean length is sum l^2 / sum l, five
times the mean. So full slots read more keys and values than with equal lengths, and are slower by that. A third run,
of four times as many completions as slots, gives all of them the mean length of those at work: as much to read on
average, and ratio_at_work is what slots of unequal lengths, refilled at unequal times, keep of that rate.

The ratio has the end in it, when no sample waits any more and slots run empty one by one. It lasts as long as what is
left of the longest sample in work, nearly --longest steps, however many prompts there were, and no order of samples
whose lengths are not known avoids it: with the defaults it is 3400 of 12800 steps, in which a third of the slots work.
By counting steps the ratio is 0.50 with 64 prompts of 8 completions, 0.82 with 256, 0.95 with 1024.
In the end decoding goes on in fewer slots, see `qerl_jax.rollout.tail`; --tail-sizes without a number leaves all.
`while_some_wait` leaves the end out: until the last look at the host at which some still waited; `end` is the rest.
Their rates count tokens as they are drawn, the whole run's those of completions that have ended, which are all in the
end. --output is written after each run.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.report import versions, write_text
from benchmarks.rollout import Case, make_case
from benchmarks.shapes import MODELS, compute_dtype, random_model
from pallas_kernels import has_kernels
from qerl_jax.option_names import KV_CACHE_DTYPES
from qerl_jax.rollout import Engine, Request, SamplingSettings
from qerl_jax.rollout.requests import Statistics
from qerl_jax.rollout.tail import WORTH, default_tail_sizes

_WAVES = 4


def long_tailed(count: int, shortest: int, longest: int) -> list[int]:
    """Lengths at the middles of `count` equal parts of the distribution, in an order of their own."""
    parts = (np.arange(count) + 0.5) / count
    lengths = np.minimum(shortest / (1 - parts), longest).astype(int)
    return np.random.default_rng(0).permutation(lengths).tolist()


def compiling(prompts: int, num_generations: int, slots: int, longest: int, tail_sizes: list[int]) -> list[int]:
    """Short lengths with which all programs run: as many samples as each of the sizes holds go on for a while, and one
    prompt's so long that every move is worth it, looked for a chunk late."""
    lengths, needed = np.full(prompts, 2), 2
    for i, size in enumerate(sorted(tail_sizes, reverse=True), 1):
        lengths[prompts - size // num_generations :] = min(longest, 10 * i)
        if 2 * size <= slots:
            needed, slots = max(needed, 10 * i + 160 + math.ceil(WORTH / (slots - size))), size
    lengths[-1] = max(lengths[-1], min(longest, needed))
    return lengths.tolist()


def run(engine: Engine, case: Case, lengths: list[int]) -> dict[str, Any]:
    """Draws all completions; rates and occupancy, as a whole and while some wait."""
    tokens = np.asarray(case.prompts.tokens)
    requests = [Request(tokens[i].tolist(), case.num_generations, i, length) for i, length in enumerate(lengths)]
    engine.statistics, full = Statistics(), None
    began = time.perf_counter()
    for _ in engine.generate(case.adapter, requests, jax.random.key(0), norms=case.noisy):
        if engine.statistics.started < case.num_generations * len(requests):
            full = dataclasses.replace(engine.statistics)
    seconds, done = time.perf_counter() - began, engine.statistics
    found = {"tokens_per_s": done.tokens / seconds, "occupancy": done.occupancy, "seconds": seconds}
    if full is None:
        found["while_some_wait"] = None
    else:
        found["while_some_wait"] = {
            "tokens_per_s": full.drawn / full.seconds,
            "occupancy": full.occupancy,
            "steps": full.steps,
            "seconds": full.seconds,
        }
        found["end"] = {
            "tokens_per_s": (done.drawn - full.drawn) / (done.seconds - full.seconds),
            "occupancy": (done.drawn - full.drawn) / max(1, done.slot_steps - full.slot_steps),
            "steps": done.steps - full.steps,
            "seconds": done.seconds - full.seconds,
        }
    counts = ("tokens", "steps", "chunks", "prompts", "prefills")
    return found | {name: getattr(done, name) for name in counts}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result, after each of its runs as far as it is."""
    config = MODELS[arguments.model]
    model = random_model(config, compute_dtype(), kernels=arguments.kernels)
    N, G = arguments.prompts, arguments.num_generations
    case = make_case(model, arguments.lora_rank, N * G, G, arguments.prompt, arguments.longest)
    settings = SamplingSettings(arguments.longest, (), 0, kv_cache_dtype=arguments.kv_cache_dtype)
    engine = Engine(
        model,
        settings,
        max_prompt_length=arguments.prompt,
        max_slots=arguments.slots,
        tail_sizes=arguments.tail_sizes,
    )
    lengths = long_tailed(N, arguments.shortest, arguments.longest)
    mean, at_work = round(float(np.mean(lengths))), round(float(np.sum(np.square(lengths)) / np.sum(lengths)))
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "flax", "numpy"),
        "settings": {name: value for name, value in vars(arguments).items() if name != "output"},
        "slots": engine.plan(N * G, N, case.adapter).slots,
        "lengths": {
            "median": float(np.median(lengths)),
            "mean": mean,
            "mean_at_work": at_work,
            "longest": max(lengths),
        },
    }
    run(engine, case, compiling(N, G, result["slots"], arguments.longest, arguments.tail_sizes))
    tail = result["long_tail"] = run(engine, case, lengths)
    yield result
    waiting = tail["while_some_wait"]
    equal = run(engine, case, [mean] * N)
    result |= {
        "equal": equal,
        "ratio": tail["tokens_per_s"] / equal["tokens_per_s"],
        "ratio_while_some_wait": waiting and waiting["tokens_per_s"] / equal["tokens_per_s"],
    }
    yield result
    fewer = min(N, _WAVES * result["slots"] // G)  # prompts; as many completions may need programs of their own
    run(engine, case, compiling(fewer, G, result["slots"], arguments.longest, arguments.tail_sizes))
    alike = run(engine, case, [at_work] * fewer)["while_some_wait"]
    yield result | {
        "equal_at_work": alike,
        "ratio_at_work": waiting and alike and waiting["tokens_per_s"] / alike["tokens_per_s"],
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--num-generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--shortest", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument(
        "--tail-sizes", type=int, nargs="*", default=default_tail_sizes(), help="slots of the last completions"
    )
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=has_kernels())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    for result in measure(arguments):
        text = json.dumps(result, indent=1, default=str)
        if arguments.output is not None:
            write_text(arguments.output, text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
