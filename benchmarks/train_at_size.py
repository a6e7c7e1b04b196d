"""`qerl train` at the size of a real model, on random NVFP4 weights: is it finite, how fast, how much memory.

    python -m benchmarks.train_at_size --model qwen2.5-7b --folder /tmp/qwen2.5-7b --steps 3 --completion 2048 \\
        --output benchmarks/results/h200/train_qwen2.5-7b.json

FOLDER/MODEL is written once: a compressed-tensors NVFP4 folder like any other, with the quickstart's tokenizer in front
of a vocabulary of the real size. FOLDER/run is a new run of the quickstart's recipe with what the command line says and
a reward that random weights can earn. Seconds of each phase are those of its metrics.jsonl; the first step compiles.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.report import versions, write
from benchmarks.shapes import MODELS, compute_dtype, random_model
from qerl_jax import cli, run_files, save_model
from qerl_jax.models.dtypes import DTYPES
from qerl_jax.models.safetensors import read_safetensors

_REWARD = Path(__file__).with_name("even_share.py")
_PHASES = ("perf/rollout_time", "perf/reward_time", "perf/update_time", "step_time")
_VALUES = ("loss", "grad_norm", "entropy", "reward", "aqn/sigma", "completions/mean_length", "nonfinite")


def write_model(name: str, folder: Path) -> None:
    model = random_model(MODELS[name], compute_dtype())
    save_model(model, folder, tokenizer_from="builtin:quickstart", weight_format="nvfp4")


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The run as changes to the quickstart's recipe."""
    functions = [{"function": f"{_REWARD}:even_share", "weight": 1.0}, {"function": "accuracy", "weight": 0.0}]
    values = {
        "model.model_name_or_path": str(arguments.folder / arguments.model),
        "model.dtype": arguments.dtype,
        "lora.lora_r": arguments.lora_rank,
        "lora.lora_alpha": 2 * arguments.lora_rank,
        "generation.num_generations": arguments.num_generations,
        "generation.max_completion_length": arguments.completion,
        "reward.functions": json.dumps(functions),
        "optimizer.learning_rate": 1e-4,
        "optimizer.warmup_ratio": 0.0,
        "optimizer.max_steps": arguments.steps,
        "optimizer.per_device_train_batch_size": arguments.micro_batch,
        "optimizer.gradient_accumulation_steps": arguments.num_generations * arguments.prompts // arguments.micro_batch,
        "optimizer.gradient_checkpointing": str(arguments.gradient_checkpointing).lower(),
        "noise.num_stages": arguments.steps,
        "evaluation.num_problems": arguments.num_generations,
        "evaluation.batch_size": arguments.num_generations,
        "run.output_dir": str(arguments.folder / "run"),
    }
    return [f"{option}={value}" for option, value in values.items()]


def result_of(run: Path) -> dict[str, Any]:
    """What a finished run's own files say."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: row[name] for name in (*_VALUES, *_PHASES)} for row in rows if "loss" in row]
    adapter = read_safetensors(run / run_files.ADAPTER / "adapter_model.safetensors")
    changes = [float(np.abs(np.asarray(b, np.float32)).max()) for name, b in adapter.items() if "lora_B" in name]
    return {
        "steps": steps,
        "peak_memory_gb": max(row["perf/peak_memory"] for row in rows if "loss" in row),
        "finite": all(np.isfinite([s["loss"], s["grad_norm"]]).all() and s["nonfinite"] == 0 for s in steps),
        "smallest_largest_entry_of_a_lora_B": min(changes),  # they begin as zeros
    }


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path, required=True, help="for the model and the run")
    parser.add_argument("--dtype", choices=DTYPES, default=compute_dtype().name, help="of the run, not of the model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1, help="of a step")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--completion", type=int, default=2048, help="tokens of a completion")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    if arguments.steps < 2:
        parser.error("--steps is less than 2; the first is without noise")
    completions = arguments.prompts * arguments.num_generations
    if completions % arguments.micro_batch:
        parser.error(f"--micro-batch is {arguments.micro_batch}; allowed: what divides the {completions} completions")
    if (arguments.folder / "run").exists():
        parser.error(f"{arguments.folder}/run is there already, and only a new run is timed; remove it")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = arguments_of(words)
    began = time.perf_counter()
    if not (arguments.folder / arguments.model).is_dir():
        write_model(arguments.model, arguments.folder / arguments.model)
    written = time.perf_counter()
    code = cli.main(["train", "quickstart", *overrides(arguments)])
    if code:
        return code
    result = {
        "model": arguments.model,
        "settings": {n: v for n, v in vars(arguments).items() if n not in ("model", "folder", "output")},
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "flax", "optax", "numpy"),
        "seconds_to_write_the_model": written - began,
        "seconds_of_the_run": time.perf_counter() - written,
    } | result_of(arguments.folder / "run")
    print(json.dumps(result, indent=1))
    write(arguments.output, result)
    return 0 if result["finite"] else 1


if __name__ == "__main__":
    sys.exit(main())
