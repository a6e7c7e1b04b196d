"""The weight formats side by side on the shipped policy: error, size, and a short quickstart under each.

    python -m benchmarks.formats --runs /tmp/formats --output benchmarks/results/cpu/formats.json
    python -m benchmarks.formats                       # errors and sizes only

`entropy` is that of the first rollout (128 completions, before any update; no noise in that stage), in nats a token:
formats differ in it by their rounding, and what is drawn by it. Runs are kept in --runs; finished ones there are read,
not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import versions, write
from qerl_jax.formats import FORMATS, dequantize
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS, Model

SETTINGS = ["optimizer.max_steps=20", "optimizer.learning_rate=2e-3", "evaluation.num_problems=256"]


def errors(stored: Model, weight_format: str) -> dict[str, Any]:
    """Relative error (root of the mean squares, over all linear weights) against the stored bfloat16, and bytes."""
    model = load_model("builtin:quickstart", weight_format)
    squares, total, size, elements = 0.0, 0.0, 0, 0
    for layer, exact in zip(model.base.layers, stored.base.layers, strict=True):
        for name in PROJECTIONS:
            w = np.asarray(getattr(exact, name), np.float64)
            weight = getattr(layer, name)
            squares += ((np.asarray(dequantize(weight, jnp.float32), np.float64) - w) ** 2).sum()
            total += (w**2).sum()
            size += sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
            elements += w.size
    return {"relative_rmse": round(float(np.sqrt(squares / total)), 5), "bytes_a_weight": round(size / elements, 4)}


def trained(weight_format: str, folder: Path) -> dict[str, Any]:
    """A quickstart of `SETTINGS` in a process of its own."""
    if not (folder / "summary.json").is_file():
        words = [f"model.weight_format={weight_format}", f"run.output_dir={folder}", *SETTINGS]
        subprocess.run([sys.executable, "-m", "qerl_jax", "train", "quickstart", *words], check=True)
    summary = json.loads((folder / "summary.json").read_text())
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    row = {"entropy": round(first["entropy"], 4)}
    for mode in ("sampled", "greedy"):
        row |= {f"{mode}_{when}": round(summary[when][mode]["accuracy"], 4) for when in ("before", "after")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="train under each format, with run folders in DIR")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    stored = load_model("builtin:quickstart")
    rows = []
    for name in FORMATS:
        row = {"format": name} | errors(stored, name)
        if arguments.runs is not None:
            row |= trained(name, arguments.runs / name)
        print(json.dumps(row), flush=True)
        rows.append(row)
    result = {
        "device": f"{jax.default_backend()}, {jax.devices()[0].device_kind}",
        "versions": versions("jax", "jaxlib", "optax", "numpy"),
        "settings": SETTINGS,
        "rows": rows,
    }
    write(arguments.output, result)


if __name__ == "__main__":
    main()
