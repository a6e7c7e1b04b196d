"""AWQ beside round-to-nearest: errors of what trained networks compute, and the perplexity of held-out text.

    python -m benchmarks.awq --text-model 26M=runs/26M --sequences 256 --output benchmarks/results/cpu/awq_text_26M.json
    python -m benchmarks.awq --model builtin:quickstart=arithmetic --output benchmarks/results/cpu/awq_quickstart.json

--length 512 (26M) and 256 (3M) are what the text models are trained on; beyond it their perplexity is another matter.

A text model is trained first where its folder has none (`benchmarks.text_model`); any other is given with its
calibration text. The model goes through `qerl quantize --method awq`, whose report has both methods on the same text.
The first command took 26 minutes on two cores; the model had been trained in 28 s on an H200.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import versions, write
from benchmarks.text_model import SIZES, make_model
from qerl_jax.models.source import resolve
from qerl_jax.quantization import quantize_folder
from qerl_jax.quantization.report import table

OUTPUT_ERRORS = ("output_error_calibration", "output_error_held_out")


def rounded(tree: Any) -> Any:
    """The tree with its floats to six significant digits."""
    return jax.tree.map(lambda leaf: float(f"{leaf:.6g}") if isinstance(leaf, float) else leaf, tree)


def measure(model: str, text: str, sequences: int, length: int | None) -> dict[str, Any]:
    """Quantizes the model into a temporary folder and returns what is to be kept of the report."""
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        report = quantize_folder(
            model,
            Path(scratch, "out"),
            method="awq",
            calibration=text,
            sequences=sequences,
            length=length,
            say=lambda line: print(line, flush=True),
        )
        seconds = time.perf_counter() - began
    print(table(report), flush=True)
    rows = [
        (f"layer {layer['layer']} {name}", row)
        for layer in report["layers"]
        for name, row in layer["projections"].items()
    ]
    training = resolve(model) / "training.json"
    gains = [gain for layer in report["layers"] for gain in layer["aqn_gain"].values()]
    return {
        "model": model if model.startswith("builtin:") else Path(model).parent.name,
        "training": json.loads(training.read_text()) if training.is_file() else None,
        "calibration": {key: value for key, value in report["calibration"].items() if key != "source"},
        "computed_in": report["computed_in"],
        "seconds": round(seconds, 1),
        "mean": rounded(report["mean"]),
        "not_lower_with_awq": {
            kind: [where for where, row in rows if row[kind]["awq"] >= row[kind]["rtn"]] for kind in OUTPUT_ERRORS
        },
        "text": rounded(report["text"]),
        "aqn_gain": rounded({"smallest": min(gains), "largest": max(gains)}),
        "layers": rounded(report["layers"]),
    }


def main(words: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--text-model", metavar="SIZE=FOLDER", help=f"SIZE is one of {', '.join(SIZES)}")
    chosen.add_argument("--model", metavar="MODEL=TEXT")
    parser.add_argument("--sequences", type=int, default=768)
    parser.add_argument("--length", type=int)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    began = time.perf_counter()
    if arguments.model is not None:
        model, _, text = arguments.model.rpartition("=")
    else:
        size, _, folder = arguments.text_model.partition("=")
        if size not in SIZES or not folder:
            parser.error(f"--text-model {arguments.text_model}: SIZE is one of {', '.join(SIZES)}, then =FOLDER")
        make_model(SIZES[size], Path(folder))
        model, text = f"{folder}/model", f"{folder}/calibration.jsonl"
    result = {
        "command": " ".join(["python -m benchmarks.awq", *words]),
        "device": f"{jax.default_backend()}, {jax.devices()[0].device_kind}",
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions("jax", "jaxlib", "numpy"),
    } | measure(model, text, arguments.sequences, arguments.length)
    result["seconds_with_training"] = round(time.perf_counter() - began, 1)
    write(arguments.output, result)


if __name__ == "__main__":
    main(sys.argv[1:])
