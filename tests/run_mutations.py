"""Damages model and adapter folders in hundreds of ways and loads them: a program, so that it can be limited.

    python tests/run_mutations.py --seed 1 --cases 600

Each case copies a small folder, damages it in one way (`mutations.py`), and loads it. In order is a `UserError` of one
short line that names the folder, or the very model that was there before (some damage is harmless); anything else is a
failure: another exception, other weights or another configuration, more than `_SECONDS`, or memory beyond the limit,
which the process sets itself (a crash ends it, and the caller sees that). Printed: a JSON object with the outcomes and
the failures.
"""

import argparse
import collections
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from folders import NVFP4, V4, V5, packed_arrays, random_arrays, write_folder
from mutations import MUTATIONS

from qerl_jax.errors import UserError
from qerl_jax.models.init import init_adapter
from qerl_jax.models.loading import load_model
from qerl_jax.models.peft import load_adapter, save_adapter

_SECONDS = 5.0  # of the processor, for others may be using it
_WAIT = 60.0  # seconds, which only something that waits for ever needs
_MEMORY = 512 << 20  # address space beyond that of the warm process


def make_folders(root: Path) -> dict[str, Path]:
    """An undamaged folder of every kind."""
    folders = {
        "plain": write_folder(root / "plain", random_arrays(), V4),
        "sharded": write_folder(root / "sharded", random_arrays(), V5, shards=3),
        "packed": write_folder(root / "packed", packed_arrays(), V5 | {"quantization_config": NVFP4}),
        "modelopt": shutil.copytree(Path(__file__).parent / "oracles/quantized/modelopt_w4a16", root / "modelopt"),
        "adapter": root / "adapter",
    }
    adapter = init_adapter(jax.random.key(0), load_model(folders["plain"]), 4, 8, ("q_proj", "down_proj"), True)
    save_adapter(adapter, folders["adapter"], "base")
    return folders


class TooSlow(Exception):
    """A case took longer than it may."""


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


def outcome(load: Callable[[Path], Any], folder: Path, right: Any) -> str:
    """`refused`, `harmless`, or what is wrong."""
    began = time.process_time()
    try:
        found = load(folder)
    except UserError as error:
        text = str(error)
        if not text.isprintable() or len(text) > 1500 + len(str(folder)):
            return f"a message of {len(text)} characters, or several lines: {text[:300]!r}"
        if str(folder) not in text:
            return f"a message that names no file: {text[:300]!r}"
        return "refused"
    except Exception as error:  # a failure, to be told with the others
        return f"{type(error).__name__}: {str(error)[:300]}"
    seconds = time.process_time() - began
    if seconds > _SECONDS:
        return f"{seconds:.1f} s"
    return "harmless" if same(found, right) else "accepted, and other than it was"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=600)
    arguments = parser.parse_args()

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    failures: list[dict[str, Any]] = []
    counts: collections.Counter[str] = collections.Counter()
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = make_folders(root)
        model = load_model(folders["plain"])
        loads: dict[str, Callable[[Path], Any]] = {
            "plain": load_model,
            "sharded": load_model,
            "packed": load_model,
            "modelopt": load_model,
            "adapter": lambda folder: load_adapter(folder, model),
        }
        right = {kind: load(folders[kind]) for kind, load in loads.items()}
        for kind in folders:
            assert outcome(loads[kind], folders[kind], right[kind]) == "harmless"
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        plan = [(kind, mutation) for kind, mutations in MUTATIONS.items() for mutation in mutations]
        for number in range(arguments.cases):
            kind, mutation = plan[number % len(plan)]
            rng = np.random.default_rng([arguments.seed, number])
            folder = root / f"case{number}"
            shutil.copytree(folders[kind], folder)
            what = mutation(rng, folder)
            print(f"{number} {kind} {mutation.__name__}: {what!a}", file=sys.stderr, flush=True)
            signal.setitimer(signal.ITIMER_REAL, _WAIT)
            signal.setitimer(signal.ITIMER_PROF, 2 * _SECONDS)
            result = outcome(loads[kind], folder, right[kind])
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            counts[mutation.__name__] += 1
            outcomes[result if result in ("refused", "harmless") else "failed"] += 1
            if result not in ("refused", "harmless"):
                failures.append({"case": number, "mutation": f"{kind} {mutation.__name__}: {what}", "outcome": result})
            shutil.rmtree(folder)
    print(json.dumps({"outcomes": outcomes, "mutations": counts, "failures": failures}))


if __name__ == "__main__":
    main()
