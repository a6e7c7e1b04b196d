"""Memory and speed of loading: a synthetic sharded checkpoint in BF16, quantized on the way, and the packed one.

    python -m benchmarks.load_model --work /tmp/load_model --output benchmarks/results/cpu/load_model.json

Makes a checkpoint of Qwen2.5-3B's shapes (6.2 GB, random bytes) below --work, loads it as NVFP4, writes that as a
packed folder (2.2 GB), loads that, and writes it merged with an adapter. Both are loaded with the page cache emptied
of the files and with them in it, beside plain reading of the same files. Each load is a process of its own.

Memory is anonymous memory (RssAnon of /proc/self/status, every 2 ms) above what the process holds once everything is
imported and JAX has started: pages of the mapped files also count as resident, but the kernel takes them back at will.

--shape small makes a checkpoint of 0.5 GB.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from benchmarks.report import versions, write

_SHAPES = {
    "qwen2.5-3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "small": {
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
}
_PLAIN, _PACKED = "plain", "packed"


def make(folder: Path, shape: dict[str, Any], shard_bytes: int) -> None:
    """Writes a checkpoint of random finite weights, one tensor in memory at a time."""
    from qerl_jax.models.config import ModelConfig
    from qerl_jax.models.loading import tensor_table
    from qerl_jax.models.saving import write_json
    from qerl_jax.models.shards import Stored, write_shards
    from qerl_jax.models.source import CONFIG

    hf = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "dtype": "bfloat16", **shape}
    rng = np.random.default_rng(0)

    def stored(shape: tuple[int, ...]) -> Stored:
        def array() -> np.ndarray:
            bits = np.frombuffer(rng.bytes(2 * int(np.prod(shape))), np.uint16).copy()
            bits &= 0x81FF  # sign, mantissa and two bits of the exponent: magnitudes from 2^-7 to 2^-3
            bits |= 0x3C00
            return bits.view(ml_dtypes.bfloat16).reshape(shape)

        return Stored(jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16), array)

    folder.mkdir(parents=True, exist_ok=True)
    table = tensor_table(ModelConfig.from_hf(hf))
    write_shards(folder, {name: stored(slot.shape) for name, slot in table.items()}, shard_bytes)
    write_json(folder / CONFIG, hf)  # last: a folder without it is made anew


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Watches the anonymous memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = self.baseline = anonymous()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.002):
            self.bytes = max(self.bytes, anonymous())

    def stop(self) -> int:
        """Bytes above the baseline, at most."""
        self._stopped.set()
        self.join()
        return self.bytes - self.baseline


def measure(folder: Path, save_to: Path | None, merge_to: Path | None) -> dict[str, float]:
    """Loads `folder` as NVFP4 in this process; then writes the packed model, or a merged one."""
    from qerl_jax.models.init import init_adapter
    from qerl_jax.models.loading import load_model
    from qerl_jax.models.saving import save_merged, save_model

    jax.block_until_ready(jax.numpy.zeros(1))
    watch = Peak()
    watch.start()
    began = time.perf_counter()
    model = jax.block_until_ready(load_model(folder, "nvfp4"))
    seconds = time.perf_counter() - began
    peak = watch.stop()
    packed = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    result = {"seconds": seconds, "peak_bytes": peak, "model_bytes": packed}
    if save_to is not None:
        save_model(model, save_to, weight_format="nvfp4")
    if merge_to is not None:
        adapter = jax.block_until_ready(init_adapter(jax.random.key(0), model))
        watch = Peak()
        watch.start()
        began = time.perf_counter()
        save_merged(model, adapter, merge_to)
        result |= {"merge_seconds": time.perf_counter() - began, "merge_peak_bytes": watch.stop()}
        shutil.rmtree(merge_to)
    return result


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Empties the page cache of the weights, so that they come from the disk."""
    for path in weight_files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def plain_reading(folder: Path, keep: bool) -> float:
    """Seconds for reading every weight file: into memory of its own (`keep`), or again and again into 8 MB."""
    began = time.perf_counter()
    for path in weight_files(folder):
        space = memoryview(np.empty(path.stat().st_size if keep else 8 << 20, np.uint8))
        with path.open("rb", buffering=0) as file:
            at = 0
            while count := file.readinto(space[at : at + (8 << 20)]):
                at += count if keep else 0
    return time.perf_counter() - began


def largest_tensors(folder: Path) -> Iterator[int]:
    """Bytes of the stored tensors, largest first."""
    from qerl_jax.models.source import open_tensors

    yield from sorted((array.nbytes for _, array in open_tensors(folder).values()), reverse=True)


def loads(folder: Path, repeats: int, save_to: Path | None = None, merge_to: Path | None = None) -> dict[str, Any]:
    """Plain reading and loading, from disk and from the page cache: the quickest of `repeats`, taken in turn,
    and the highest peak."""
    size = sum(path.stat().st_size for path in weight_files(folder))
    first, second = list(largest_tensors(folder))[:2]
    row: dict[str, Any] = {"file_gb": round(size / 1e9, 3), "repeats": repeats}
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {"reading": [], "reading_into_new_memory": [], "load": []}
        peaks = []
        for _ in range(repeats):
            for kind in seconds:
                if state == "cold":
                    forget(folder)
                if kind != "load":
                    seconds[kind].append(plain_reading(folder, keep=kind == "reading_into_new_memory"))
                    continue
                command = [sys.executable, "-m", "benchmarks.load_model", "--measure", str(folder)]
                if save_to is not None and not save_to.exists():
                    command += ["--save-to", str(save_to)]
                if merge_to is not None and state == "warm" and "merged_export" not in row:
                    command += ["--merge-to", str(merge_to)]
                # Stderr passes: it shows the progress of the load.
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(done.stdout)
                seconds["load"].append(found["seconds"])
                peaks.append(found["peak_bytes"])
                if "merge_seconds" in found:
                    row["merged_export"] = {
                        "seconds": round(found["merge_seconds"], 1),
                        "peak_anonymous_above_packed_model_gb": round(found["merge_peak_bytes"] / 1e9, 3),
                    }
        bound = found["model_bytes"] + first + second
        row[state] = {f"{kind}_mb_s": round(size / min(each) / 1e6) for kind, each in seconds.items()}
        row[state] |= {f"{kind}_seconds": [round(value, 2) for value in each] for kind, each in seconds.items()}
        row[state] |= {
            "peak_anonymous_gb": round(max(peaks) / 1e9, 3),
            "packed_model_gb": round(found["model_bytes"] / 1e9, 3),
            "two_largest_tensors_gb": round((first + second) / 1e9, 3),
            "peak_above_model_gb": round((max(peaks) - found["model_bytes"]) / 1e9, 3),
            "within_bound": max(peaks) < bound,
        }
        print(folder.name, state, json.dumps(row[state]), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where the checkpoints are made, and kept")
    parser.add_argument("--shape", choices=_SHAPES, default="qwen2.5-3b")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", type=Path, metavar="DIR", help="load this folder here and print what it took")
    parser.add_argument("--save-to", type=Path, metavar="DIR", help="with --measure: write the packed model here")
    parser.add_argument("--merge-to", type=Path, metavar="DIR", help="with --measure: write a merged model here")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.save_to, arguments.merge_to)))
        return
    if arguments.work is None:
        parser.error("--work is missing")
    plain, packed = (arguments.work / f"{arguments.shape}-{kind}" for kind in (_PLAIN, _PACKED))
    if not (plain / "config.json").exists():
        make(plain, _SHAPES[arguments.shape], 2_000_000_000)
    result = {
        "device": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": versions("jax", "jaxlib", "numpy"),
        "shape": arguments.shape,
        "bf16_to_nvfp4": loads(plain, 1, packed),
        "packed": loads(packed, 3, merge_to=arguments.work / "merged"),
    }
    write(arguments.output, result)


if __name__ == "__main__":
    main()
