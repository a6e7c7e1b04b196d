"""The quickstart over several seeds, with true rewards and with permuted ones, each run as a user would run it.

    python -m benchmarks.quickstart --seeds 0 1 2 3 4 --permuted-seeds 0 1 \\
        --output benchmarks/results/cpu/quickstart.json

Held-out accuracy before and after, at temperature 1 and greedy; seconds of the whole process. `--jobs 4` runs four at a
time, each held to `--cores` cores of its own.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import versions, write

_FILE = Path(__file__).with_name("permuted_rewards.py")
_PERMUTED = (
    f"reward.functions=[{{function: '{_FILE}:accuracy', weight: 1.0}}, {{function: '{_FILE}:format', weight: 0.2}}]"
)


def run(seed: int, permuted: bool, cores: list[int], overrides: list[str]) -> dict[str, Any]:
    """One quickstart in a process of its own; returns a result row."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.seed={seed}", f"run.output_dir={folder}/run", *overrides, *([_PERMUTED] if permuted else [])]
        command = [sys.executable, "-m", "qerl_jax", "train", "quickstart", *words]
        began = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        seconds = time.perf_counter() - began
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    row = {"seed": seed, "permuted": permuted, "seconds": round(seconds, 1), "steps": summary["steps"]}
    row["peak_memory_gb"] = round(max(r["perf/peak_memory"] for r in rows), 2)
    for mode in ("sampled", "greedy"):
        before, after = summary["before"][mode], summary["after"][mode]
        row |= {f"{mode}_before": before["accuracy"], f"{mode}_after": after["accuracy"]}
        row[f"{mode}_gain_points"] = round(100 * (after["accuracy"] - before["accuracy"]), 1)
    row["well_formed_before"] = summary["before"]["sampled"]["format"]
    print(json.dumps(row), flush=True)
    return row


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--permuted-seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2, help="cores of each run")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.option=value")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    free: queue.Queue[list[int]] = queue.Queue()
    cores = sorted(os.sched_getaffinity(0))
    if arguments.jobs * arguments.cores > len(cores):
        parser.error(f"--jobs {arguments.jobs} with --cores {arguments.cores} each; allowed: {len(cores)} cores in all")
    for job in range(arguments.jobs):
        free.put(cores[job * arguments.cores : (job + 1) * arguments.cores])

    def one(job: tuple[int, bool]) -> dict[str, Any]:
        mine = free.get()
        try:
            return run(*job, mine, arguments.set)
        finally:
            free.put(mine)

    jobs = [(seed, False) for seed in arguments.seeds] + [(seed, True) for seed in arguments.permuted_seeds]
    rows: list[dict[str, Any]] = []
    result = {
        "device": f"CPU, {arguments.cores} cores a run, {arguments.jobs} at a time, {platform.machine()}",
        "versions": versions("jax", "jaxlib", "optax", "numpy"),
        "settings": arguments.set,
        "rows": rows,
    }
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(one, jobs):
            rows.append(row)
            write(arguments.output, result)


if __name__ == "__main__":
    main()
