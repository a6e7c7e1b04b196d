"""Shared test set-up: full float32 matmuls, a compilation cache that outlives the run, and the order of files."""

import os
from pathlib import Path

import jax

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

FEW_AND_LONG = {"test_quickstart.py", "test_examples.py", "test_resume.py", "test_benchmark_update.py"}


def pytest_collection_modifyitems(items):
    """Files of few, long tests first: at the end, one worker would be left alone with them (see `make test`)."""
    items.sort(key=lambda item: item.path.name not in FEW_AND_LONG)
