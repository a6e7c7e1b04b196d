"""Kills training runs at random instants, starts them again, and compares how they end with runs left alone.

    python tests/random_kills.py --kills 20 --saves 5 --output benchmarks/results/cpu/resume.json

Prints the figures; the file holds every kill and every run besides.
"""

import argparse
import collections
import importlib.metadata
import itertools
import json
import os
import platform
import random
import tempfile
import time
from pathlib import Path

from run_harness import TrainingProcess, checkpoints, differences, half_saved, rows, small_config, train_to_the_end

LAST_STEP = 12


def random_kills(folder, kills=20, saves=5, kills_per_seed=6, seed=0):
    """Kills runs of one config until there were `kills`, of them `saves` during a save.

    Kills come by turns at an instant drawn uniformly from the length of an undisturbed run, and during a save chosen at
    random, after a random share of the time that a save takes. A run that ends before its kill comes is compared as it
    is, and another one begun; after `kills_per_seed` kills the next seed's turn comes, with a new undisturbed run.

    Returns:
      What happened: a row per kill and a row per run, with the differences of its end from the undisturbed one's.
    """
    draw = random.Random(seed)
    results = {"kills": [], "runs": []}
    config = small_config(folder, run={"save_steps": 2})

    def enough():
        during = [kill["phase"] == "saving" for kill in results["kills"]]
        return len(during) >= kills and sum(during) >= saves

    for run_seed in itertools.count():
        if enough():
            return results
        whole, log, words = folder / f"whole-{run_seed}", folder / f"log-{run_seed}", [f"run.seed={run_seed}"]
        length = train_to_the_end(config, whole, log, *words)
        hits = 0
        while hits < kills_per_seed and not enough():
            run, before = folder / f"killed-{len(results['runs'])}", hits
            while hits < kills_per_seed and not enough():
                kill = _kill_once(config, run, log, words, draw, length, aim_at_save=hits % 2 == 1)
                if kill is None:
                    break
                results["kills"].append({"run_seed": run_seed} | kill)
                print(results["kills"][-1], flush=True)
                hits += 1
            train_to_the_end(config, run, log, *words)
            found = differences(run, whole)
            ended = {"kills": hits - before, "bitwise_equal": not found, "differences": found}
            results["runs"].append({"run_seed": run_seed} | ended)
            print(results["runs"][-1], flush=True)


def _kill_once(config, run, log, words, draw, length, aim_at_save):
    """Starts the run and kills it; None if it reached its end first."""
    with TrainingProcess(config, run, log, *words) as process:
        if aim_at_save:
            for _ in range(draw.randint(1, 3)):
                process.until(lambda: not half_saved(run))
                process.until(lambda: half_saved(run))
            instant = time.monotonic() - process.began + draw.uniform(0, 0.1)
        else:
            instant = draw.uniform(0, length)
        if not process.until(lambda: time.monotonic() - process.began >= instant):
            assert process.wait() == 0, process.output()
            return None
        process.kill()
        return {"seconds": round(instant, 3), "aimed_at_save": aim_at_save} | _what_is_left(run)


def _what_is_left(run):
    """What a kill interrupted, as the disk tells it."""
    saved, logged = checkpoints(run), rows(run)
    newest = saved[-1] if saved else None
    lost = sum(row["step"] > (newest or 0) for row in logged)
    if half_saved(run):
        phase = "saving"
    elif newest is None:
        phase = "starting" if not (run / "metrics.jsonl").exists() else "before the first checkpoint"
    elif newest == LAST_STEP:
        phase = "after the last checkpoint"
    else:
        phase = "training, rows cut on resume" if lost else "training or starting again"
    return {"phase": phase, "checkpoint": newest, "rows_cut": lost}


def summary(results):
    """Figures of all kills together."""
    phases = collections.Counter(kill["phase"] for kill in results["kills"])
    return {
        "kills": len(results["kills"]),
        "kills_during_a_save": phases["saving"],
        "phases": dict(phases.most_common()),
        "rows_cut": sum(kill["rows_cut"] for kill in results["kills"]),
        "runs": len(results["runs"]),
        "run_seeds": sorted({run["run_seed"] for run in results["runs"]}),
        "bitwise_equal": all(run["bitwise_equal"] for run in results["runs"]),
    }


def _machine():
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((line.split(": ", 1)[1] for line in info.read_text().splitlines() if "model name" in line), model)
    libraries = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "machine": {"processor": model, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in libraries},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--saves", type=int, default=5, help="at least so many of them during a save")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = random_kills(Path(folder), options.kills, options.saves, seed=options.seed)
    report = summary(results) | {"seed_of_the_instants": options.seed, "seconds": round(time.monotonic() - began)}
    report |= _machine()
    print(json.dumps(report, indent=1))
    report |= {"each_kill": results["kills"], "each_run": results["runs"]}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["bitwise_equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
