"""What the tests on a GPU share: fresh numbers, programs compiled ahead, and the file of their last result."""

import json
import secrets
import time
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.compiling import Programs

OUTCOMES = ("passed", "failed", "error", "skipped")
START = time.time()


def pytest_addoption(parser):
    parser.addoption(
        "--result", type=Path, help="write how many of the GPU tests passed, and on what, to this JSON file"
    )


@pytest.fixture(scope="module")
def rng():
    """Fresh numbers in each run; the seed is shown where a test fails."""
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def programs(request):
    """Programs of all selected tests, being compiled (see ahead.py). Not through the compilation cache: it prints a
    program in the thread that compiles while others are traced, and a run on an H200 ended there with a segmentation
    fault."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once
    programs = Programs()
    for item in request.session.items:
        start = getattr(item.function, "start", None)
        if start:
            start(programs, **item.callspec.params if hasattr(item, "callspec") else {})
    yield programs
    programs.close()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    path = config.getoption("result", None)
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
