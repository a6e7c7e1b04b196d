"""What tests of kernels share: fresh numbers, programs compiled ahead, what a program calls, other versions of JAX."""

import importlib.util
import os
import secrets

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.compiling import Programs


@pytest.fixture(scope="module")
def seed():
    """A fresh one in each run; `KERNEL_SEED=7 pytest`, with the same words, repeats one."""
    return int(os.environ.get("KERNEL_SEED") or secrets.randbits(32))


@pytest.fixture(scope="module")
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def seed_shown(request):
    """Where a test fails that draws numbers, or uses what others of its file have drawn."""
    if "rng" in request.fixturenames:
        print(f"KERNEL_SEED={request.getfixturevalue('seed')}")


@pytest.fixture(scope="module")
def programs(request):
    """Programs of a file's selected tests, being compiled (see ahead.py). Not through the compilation cache: it prints
    a program in the thread that compiles while others are traced, and a run on an H200 ended there with a segmentation
    fault."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once
    programs = Programs(max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    for item in request.session.items:
        if item.path != request.path:
            continue
        start = getattr(item.function, "start", None)
        if start:
            start(programs, **item.callspec.params if hasattr(item, "callspec") else {})
    yield programs
    programs.close()


@pytest.fixture
def calls():
    """A lowered program -> those of its instructions that ptxas makes calls of (see ptx.py)."""
    return lambda program: [name for name in ("div.rn", "rcp.rn", "sqrt.rn") if name in program]


@pytest.fixture
def wide_variants_with(monkeypatch):
    """A version of JAX, such as (0, 12) -> pallas_kernels.wide_variants, as it is with that."""

    def loaded(version):
        monkeypatch.setattr(jax, "__version_info__", version)
        spec = importlib.util.find_spec("pallas_kernels.wide_variants")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded
