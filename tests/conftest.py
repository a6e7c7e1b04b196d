"""Shared test set-up: full float32 matmuls, a compilation cache that outlives the run, and the order of files."""

import os
from pathlib import Path

import jax
import pytest

CACHE = Path(__file__).parent.parent / ".cache"

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax")))
# Small programs too: thousands of one operation each, which most files share, and which `few_memory_maps` lets go of.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# Programs that tests start need not compile 2,000 modules each, which takes 5 seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(CACHE / "python"))

# Files that take minutes, see `pytest --durations`.
LONG = (
    "quickstart", "examples", "resume", "update", "packs", "float16", "command_line_runs", "tail", "wide_program",
    "trainer_stops", "trainer_steps", "trainer_dynamic_sampling",
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


@pytest.fixture
def no_cache():
    """No folder of compiled programs, for tests that choose one."""
    old = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", old)


def pytest_collection_modifyitems(items):
    """Long files first: at the end, one worker would be left alone with one of them (see `make test`)."""
    long = {f"test_{name}.py" for name in LONG}
    items.sort(key=lambda item: item.path.name not in long)
