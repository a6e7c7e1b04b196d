"""Shared test set-up: full float32 matmuls, and a compilation cache that outlives the run."""

import os
from pathlib import Path

import jax

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
