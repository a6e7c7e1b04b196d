"""Small training runs for tests: made, started as programs, stopped at chosen instants, and compared bit by bit."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from qerl_jax.checkpoints import checkpoint_steps, restore_checkpoint
from qerl_jax.metrics import read_rows
from qerl_jax.models.safetensors import read_safetensors, write_safetensors
from qerl_jax.models.source import resolve

ROOT = Path(__file__).parent.parent
# A function of a user's own: every group of completions has a spread of rewards, so every update has a gradient.
REWARDS = """
def digits(prompts, completions, **columns):
    return [sum(character.isdigit() for character in text) / 10 + len(text) / 1000 for text in completions]
"""


def small_config(folder, policy="builtin:quickstart", **sections):
    """Writes a config of 6 rollouts with 2 updates each, noise in 3 stages, a save after every second rollout."""
    folder.mkdir(parents=True, exist_ok=True)
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS)
    values = {
        "model": {"model_name_or_path": str(policy)},
        "lora": {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]},
        "generation": {"num_generations": 4, "max_completion_length": 8},
        "reward": {"functions": [{"function": f"{rewards}:digits"}, {"function": "format", "weight": 0.2}]},
        "grpo": {"num_iterations": 2},
        "optimizer": {
            "learning_rate": 1e-2,
            "max_steps": 12,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
        },
        "noise": {"num_stages": 3, "sigma_start": 1e-2, "sigma_end": 1e-3},
        "evaluation": {"num_problems": 4, "batch_size": 4},
        "run": {"output_dir": str(folder / "run"), "save_steps": 4, "save_total_limit": 2},
    }
    for section, options in sections.items():
        values[section] = values.get(section, {}) | options
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML 1.2
    return path


class TrainingProcess:
    """`qerl train` as a program of its own, its output in `log`; a context manager that leaves no process behind."""

    def __init__(self, config, run, log, *words, programs=None, stdout=None):
        """Starts it on `run`; compiled programs are kept in the folder `programs`, compiled as by this process, or in
        the run folder; `stdout` takes standard output in place of the log."""
        self.run = Path(run)
        env = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
        if programs is not None:
            env |= {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.read("jax_disable_most_optimizations"))}
        env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "qerl_jax", "train", str(config), f"run.output_dir={run}", *words]
        self.log = Path(log)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env=env, stdout=output if stdout is None else stdout, stderr=output, cwd=self.log.parent
            )
        self.began = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def until(self, condition, timeout=240.0):
        """Waits until `condition()` holds or the process ends; says whether the process is still alive."""
        while self.process.poll() is None and not condition():
            assert time.monotonic() - self.began < timeout, f"nothing happened:\n{self.output()}"
            time.sleep(0.001)
        return self.process.poll() is None

    def kill(self):
        """SIGKILL, which no program can catch; the workers of reward functions must end by themselves."""
        workers = _children(self.process.pid)
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 20
        while any(map(_alive, workers)):
            assert time.monotonic() < deadline, f"workers {workers} outlive the run that started them"
            time.sleep(0.01)

    def interrupt(self):
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self, timeout=240.0):
        """The exit code."""
        return self.process.wait(timeout)

    def output(self):
        return self.log.read_text(errors="replace")


def train_to_the_end(config, run, log, *words, programs=None):
    """Runs the command to its end, which must be a good one; returns the seconds it took."""
    with TrainingProcess(config, run, log, *words, programs=programs) as process:
        assert process.wait() == 0, process.output()
        return time.monotonic() - process.began


def _children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += [int(child) for child in task.read_text().split()]
    return found


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def checkpoints(run):
    return checkpoint_steps(Path(run) / "checkpoints")


def half_saved(run):
    """Names of folders that a save in progress, or one that was killed, has in `checkpoints`."""
    folder = Path(run) / "checkpoints"
    return [name for name in (os.listdir(folder) if folder.is_dir() else ()) if name.startswith((".tmp-", ".old-"))]


def rows(run, name="metrics.jsonl"):
    """Rows of a JSONL file without the times; none where there is no file yet."""
    path = Path(run) / name
    if not path.exists():
        return []
    return [
        {key: value for key, value in row.items() if key != "step_time" and not key.startswith("perf/")}
        for row in read_rows(path)
    ]


def leaves(run, step=None):
    """Every array of a checkpoint (the newest whole one), by its place in the tree, and its progress."""
    folder = Path(run) / "checkpoints"
    newest = checkpoints(run)[-1] if step is None else step
    manifest = json.loads((folder / f"step_{newest:08d}" / "manifest.json").read_text())
    target = {
        name: jax.random.key(0) if leaf["prng"] else np.zeros(leaf["shape"], leaf["dtype"])
        for name, leaf in manifest["leaves"].items()
    }
    arrays, progress, _ = restore_checkpoint(folder, target, step=newest)
    return {
        name: np.asarray(jax.random.key_data(leaf) if manifest["leaves"][name]["prng"] else leaf)
        for name, leaf in arrays.items()
    }, progress


def differences(run, other):
    """Names everything in which two finished runs differ: files, rows, arrays bit by bit, progress."""
    found = []
    for name in ("metrics.jsonl", "completions.jsonl"):
        mine, theirs = rows(run, name), rows(other, name)
        if len(mine) != len(theirs):
            found.append(f"{name} has {len(mine)} rows, not {len(theirs)}")
        found += [f"{name}, row {i}: {a} and {b}" for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b]
    (mine, progress), (theirs, other_progress) = leaves(run), leaves(other)
    if mine.keys() != theirs.keys():
        found.append(f"leaves: {sorted(mine.keys() ^ theirs.keys())} are in one run only")
    for name in mine.keys() & theirs.keys():
        if mine[name].dtype != theirs[name].dtype or mine[name].tobytes() != theirs[name].tobytes():
            found.append(f"leaf {name} differs")
    if progress != other_progress:
        found.append(f"progress: {progress} and {other_progress}")
    for name in ("adapter/adapter_model.safetensors", "summary.json"):
        if (Path(run) / name).read_bytes() != (Path(other) / name).read_bytes():
            found.append(f"{name} differs")
    return found


def one_layer_policy(folder, source="builtin:quickstart"):
    """A network of the first layer of `source`, with its tokenizer: quick to compile, and fluent enough."""
    source = resolve(source)
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    arrays = read_safetensors(source / "model.safetensors")
    kept = {name: array for name, array in arrays.items() if ".layers." not in name or ".layers.0." in name}
    specs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in kept.items()}
    write_safetensors(folder / "model.safetensors", specs, kept.__getitem__)
    return folder
