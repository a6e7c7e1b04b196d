"""Memory of `qerl quantize --method awq`: a network with few layers, with many, and with wide ones.

    python -m benchmarks.quantize_memory --work /tmp/quantize_memory \\
        --output benchmarks/results/cpu/quantize_memory.json

Anonymous memory above what the process holds once JAX has started, at its highest (see `benchmarks.load_model`); the
allocator is told to give back what is freed (MALLOC_MMAP_THRESHOLD_), or its own hoard is what one measures. What does
not depend on the number of layers: a layer in several forms, activations and Gram matrices, embeddings, and compiled
programs. `layer_counts` is how many times a layer's bytes in BF16 count, from the slope between narrow and wide ones.
Each run is a process of its own; checkpoints are random bytes, calibrated on arithmetic.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.load_model import Peak, make
from benchmarks.report import versions, write
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.params import PROJECTIONS, projection_shape
from qerl_jax.policies.tokenizer import save_tokenizer
from qerl_jax.quantization import quantize_folder
from qerl_jax.quantization.observation import GROUPS

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
WIDE = SHAPE | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
SEQUENCES = 64


def quantize(folder: Path) -> dict[str, Any]:
    """Quantizes the checkpoint in this process."""
    jax.block_until_ready(jax.numpy.zeros(1))
    watch = Peak()
    watch.start()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        report = quantize_folder(
            folder, Path(scratch, "out"), method="awq", calibration="arithmetic", sequences=SEQUENCES
        )
        peak = watch.stop()
    return {"peak_bytes": peak, "calibration": report["calibration"]}


def sizes(shape: dict[str, int]) -> dict[str, float]:
    """Bytes, in millions, of one layer in bfloat16 and of the Gram matrices of both texts in float32."""
    config = ModelConfig.from_hf({"model_type": "qwen2", "rms_norm_eps": 1e-6, "num_hidden_layers": 1, **shape})
    outputs_inputs = [projection_shape(config, name) for name in PROJECTIONS]
    grams = [projection_shape(config, group)[1] ** 2 for group in GROUPS]
    layer = 2 * sum(N * K for N, K in outputs_inputs)
    return {"layer_mb": round(layer / 1e6, 2), "gram_mb": round(2 * 4 * sum(grams) / 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where the checkpoints are made, and kept")
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 64])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", type=Path, metavar="DIR", help="quantize this folder here and print what it took")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(quantize(arguments.measure)))
        return
    if arguments.work is None:
        parser.error("--work is missing")
    rows = []
    few_layers, many_layers = arguments.layers
    for layers, shape in ((few_layers, SHAPE), (many_layers, SHAPE), (2, WIDE)):
        folder = arguments.work / f"{layers}-layers-{shape['hidden_size']}"
        if not (folder / "config.json").exists():
            make(folder, shape | {"num_hidden_layers": layers, "rope_theta": 1e4}, 2_000_000_000)
            save_tokenizer(folder, shape["max_position_embeddings"])
        command = [sys.executable, "-m", "benchmarks.quantize_memory", "--measure", str(folder)]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        row = {"layers": layers, "hidden_size": shape["hidden_size"], "file_mb": round(size / 1e6, 1)}
        rows.append(row | sizes(shape) | {"peak_mb": round(found["peak_bytes"] / 1e6, 1)})
        print(json.dumps(rows[-1]), flush=True)
    few, many, wide = rows

    def above_grams(row: dict[str, Any]) -> float:
        return row["peak_mb"] - row["gram_mb"]

    result = {
        "device": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": versions("jax", "jaxlib", "numpy"),
        "shapes": [SHAPE, WIDE],
        "calibration": {key: value for key, value in found["calibration"].items() if key != "sha256"},
        "rows": rows,
        "growth_mb": round(many["peak_mb"] - few["peak_mb"], 1),
        "growth_of_file_mb": round(many["file_mb"] - few["file_mb"], 1),
        "layer_counts": round((above_grams(wide) - above_grams(few)) / (wide["layer_mb"] - few["layer_mb"]), 1),
    }
    write(arguments.output, result)


if __name__ == "__main__":
    main()
