"""Shared test set-up: full float32 matmuls, a compilation cache that outlives the run, the order of files, and the file
of the last result on a GPU."""

import json
import os
import signal
import time
from importlib import metadata
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

OUTCOMES = ("passed", "failed", "error", "skipped")
START = time.time()
CACHE = Path(__file__).parent.parent / ".cache"

# XLA's newer emitters of loops for a CPU set up a pipeline of MLIR passes for each loop: two thirds of the time that is
# left where little is optimized, see `pytest_collectstart`. JAX 0.12 has no others.
# XLA_FLAGS=--xla_backend_extra_options=xla_none tests with them.
OPTIONS = "--xla_backend_extra_options"
OLDER_EMITTERS = f" {OPTIONS}=xla_cpu_disable_new_fusion_emitters"
if OPTIONS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + OLDER_EMITTERS

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax")))
# Small programs too: thousands of one operation each, which most files share, and which `few_memory_maps` lets go of.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# Programs that tests start need not compile 2,000 modules each, which takes 5 seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(CACHE / "python"))

# What a script starts with & ignores Ctrl-C, and so would what the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share a GPU: none takes three quarters of its memory for itself.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Files that take minutes, see `pytest --durations`. One of the trainer's files comes long before the others: begun side
# by side, two of them would compile the same programs.
LONG = (
    "trainer_steps", "quickstart", "packs", "update", "examples", "resume", "float16", "engine", "command_line_runs",
    "tail", "wide_program", "trainer_stops", "trainer_failures", "update_ratio", "step", "families",
    "trainer_dynamic_sampling",
)  # fmt: skip

# Linux gives a process 65,530 memory maps. XLA takes some 20 for each program, and crashes when there are none left.
MANY_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Lets go of the programs of the files so far before their maps run out."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MANY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def cache_restored():
    """For files behind which another folder of compiled programs would be set: all files after them would compile
    everything again, once JAX opens it."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def compiled_for_users():
    """For files that compare bits of slots, compute for longer than they compile, or start programs as a user does: XLA
    compiles as for a user, but for the emitters in this process."""
    quickly = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(OLDER_EMITTERS, ""))
        yield
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.clear_caches()


@pytest.fixture
def no_cache():
    """No folder of compiled programs, for tests that choose one."""
    old = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", old)


def pytest_collectstart():
    """Numbers are compared within tolerances, or with those of programs compiled alike: XLA takes half as long for
    programs of a CPU that it optimizes less."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


def pytest_collection_modifyitems(items):
    """Long files first: at the end, one worker would be left alone with one of them (see `make test`)."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


def pytest_addoption(parser):
    parser.addoption("--result", type=Path, help="write how many tests passed, and on what, to this JSON file")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    path = config.getoption("result")
    if hasattr(config, "workerinput"):  # xdist's worker, which knows its own part alone
        return
    if not path or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    reports = {outcome: terminalreporter.stats.get(outcome, []) for outcome in OUTCOMES}
    result = {
        # without the folders of the machine that it ran on
        "command": "python -m pytest " + " ".join(config.invocation_params.args).replace(str(path), path.name),
        "device": jax.devices()[0].device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        **{outcome: len(found) for outcome, found in reports.items()},
        "seconds": round(time.time() - START, 1),
        "not passed": sorted({report.nodeid for outcome in OUTCOMES[1:] for report in reports[outcome]}),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
