"""AWQ beside round-to-nearest: errors of what trained networks compute, and the perplexity of held-out text.

    python -m benchmarks.awq --model builtin:quickstart=arithmetic \\
        --model text_model/model=text_model/calibration.jsonl --output benchmarks/results/h200/awq.json

Each model is given with its calibration text; `benchmarks.text_model` trains one and makes the other. Every model goes
through `qerl quantize --method awq`, whose report has both methods on the same text; the result holds its means.
"""

import argparse
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qerl_jax.models.source import resolve
from qerl_jax.quantization import quantize_folder
from qerl_jax.quantization.report import table


def measure(model: str, text: str, sequences: int) -> dict[str, Any]:
    """Quantizes one model into a temporary folder and returns its row."""
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        report = quantize_folder(
            model, Path(scratch, "out"), method="awq", calibration=text, sequences=sequences, say=print
        )
        seconds = time.perf_counter() - began
    print(table(report), flush=True)
    rows = [row for layer in report["layers"] for row in layer["projections"].values()]
    lower = {
        kind: sum(row[kind]["awq"] < row[kind]["rtn"] for row in rows)
        for kind in ("output_error_calibration", "output_error_held_out")
    }
    training = resolve(model) / "training.json"
    gains = [gain for layer in report["layers"] for gain in layer["aqn_gain"].values()]
    return {
        "model": Path(model).name,
        "training": json.loads(training.read_text()) if training.is_file() else None,
        "calibration": {key: value for key, value in report["calibration"].items() if key != "source"},
        "computed_in": report["computed_in"],
        "seconds": round(seconds, 1),
        "mean": report["mean"],
        "projections": {
            name: {
                kind: {
                    method: float(np.mean([layer["projections"][name][kind][method] for layer in report["layers"]]))
                    for method in methods
                }
                for kind, methods in row.items()
            }
            for name, row in report["layers"][0]["projections"].items()
        },
        "lower_with_awq": {kind: f"{count} of {len(rows)}" for kind, count in lower.items()},
        "stream_error_held_out": [layer["stream_error_held_out"] for layer in report["layers"]],
        "aqn_gain": {"smallest": min(gains), "largest": max(gains)},
        "text": report["text"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="MODEL=TEXT")
    parser.add_argument("--sequences", type=int, default=768)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pairs = [pair.rpartition("=")[::2] for pair in arguments.model]
    result = {
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "rows": [measure(model, text, arguments.sequences) for model, text in pairs],
    }
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
