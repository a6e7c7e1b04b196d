"""Prefill alone: milliseconds of the engine's program that puts prompts into its pool, by how long they are.

    python -m benchmarks.prefill --case 32 384 150 --case 32 384 384 --output benchmarks/results/h200/prefill.json
    python -m benchmarks.prefill --model quickstart --lora-rank 16 --case 16 48 40   # on a CPU

A case is the number of prompts, data.max_prompt_length, and the prompts' mean length: all of them have it where it is
the greatest, and otherwise lengths are drawn evenly from 1 to twice the mean, or from where the greatest leaves that
mean. Random NVFP4 weights in the real shapes, LoRA on all seven linears. The program is compiled once for a shape, and
called with a pool to overwrite, as the engine calls it; `ms` are its times by the host's clock after a first call.
floor_ms is the time of the frozen weights' products for the tokens that prompts have, at the rate of a product of
8192^3 in that run; temporary_gb is what XLA says that the program needs beside the pool.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import versions, write
from benchmarks.shapes import MODELS, compute_dtype, random_adapter, random_model
from benchmarks.update import layers_flops, product_rate
from pallas_kernels import has_kernels
from qerl_jax.models.params import Adapter, Model, norms_of
from qerl_jax.rollout import SamplingSettings
from qerl_jax.rollout.prepared import made, prepared
from qerl_jax.rollout.programs import programs

_SETTINGS = SamplingSettings(1, (), 0)


def drawn(prompts: int, longest: int, mean: int) -> np.ndarray:
    """Lengths of this mean, see the module."""
    if not 1 <= mean <= longest:
        raise SystemExit(f"a mean of {mean} tokens; allowed with a greatest length of {longest}: 1 to that")
    low, high = max(1, 2 * mean - longest), min(longest, 2 * mean - 1)
    return np.random.default_rng(0).integers(low, high + 1, prompts)


def measure(model: Model, adapter: Adapter, lengths: np.ndarray, longest: int, repeats: int) -> dict[str, Any]:
    """`model` and `adapter` are prepared."""
    A, key = len(lengths), jax.random.key(0)
    tokens = jax.random.randint(jax.random.key(4), (A, longest), 0, model.config.vocab_size)
    slots = programs().empty_slots(model, _SETTINGS, key, rows=A, max_prompt_length=longest, slots=2, used=2)
    operands = model, adapter, norms_of(model, adapter), tokens, jnp.asarray(lengths, jnp.int32), jnp.arange(A)
    compiled = programs().admit.lower(slots, *operands).compile()
    ms = []
    for _ in range(1 + repeats):
        jax.block_until_ready(slots)
        began = time.perf_counter()
        slots = jax.block_until_ready(compiled(slots, *operands))
        ms.append((time.perf_counter() - began) * 1e3)
    median = statistics.median(ms[1:])
    return {
        "tokens": int(lengths.sum()),
        "median_ms": median,
        "tokens_per_s": float(lengths.sum() / median * 1e3),
        "ms": ms[1:],
        "first_ms": ms[0],
        "temporary_gb": compiled.memory_analysis().temp_size_in_bytes / 1e9,
        "finite": bool(jnp.isfinite(slots.prompt_hidden_RD).all()),
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument(
        "--case", type=int, nargs=3, action="append", required=True, metavar=("PROMPTS", "LONGEST", "MEAN")
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    cases = [(longest, drawn(prompts, longest, mean)) for prompts, longest, mean in arguments.case]
    config, dtype = MODELS[arguments.model], compute_dtype()
    model = random_model(config, dtype, kernels=has_kernels())
    adapter = random_adapter(model, arguments.lora_rank)
    model, adapter = prepared(model, adapter, made(model, adapter))
    rate = product_rate(256 if jax.default_backend() == "cpu" else 8192, dtype)
    rows: list[dict[str, Any]] = []
    result = {
        "model": arguments.model,
        "settings": {"format": "nvfp4", "lora_rank": arguments.lora_rank, "repeats": arguments.repeats},
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib"),
        "product_tflop_per_s": rate * 1e-12,
        "rows": rows,
    }
    for longest, lengths in cases:
        row = {"prompts": len(lengths), "max_prompt_length": longest, "mean_length": float(lengths.mean())}
        row |= measure(model, adapter, lengths, longest, arguments.repeats)
        row["floor_ms"] = layers_flops(config, row["tokens"]) / rate * 1e3
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        rows.append(row)
        write(arguments.output, result)
    return 0 if all(row["finite"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
