"""Whether the Triton kernels can run here, and which jax-triton works with which triton and which JAX."""

import functools
import importlib
import re
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def missing() -> str | None:
    """What the Triton kernels lack, for the program's log; None where both packages are there and fit."""
    try:
        check_versions(version("jax-triton"), version("triton"), version("jax"))
        importlib.import_module("jax_triton")
        if not hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel"):
            return "jax-triton cannot be used: JAX has no CUDA plugin"
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    except ImportError as error:
        return f"jax-triton cannot be used: {error}"
    return None


def check_versions(jax_triton: str, triton: str, jax: str) -> None:
    """Raises ImportError for versions that are known not to work together.

    Before 0.4 jax-triton had no tuples of arrays, and its kernels could not be recorded into CUDA graphs. 0.4 imports
    names that triton has from 3.7 on: with an older triton it takes a stub for triton's CUDA backend and fails at the
    first kernel, where it compares a target that has no attributes. A rule of 0.4.1 has other arguments than JAX 0.12
    gives it.
    """
    if _release(jax_triton) < (0, 4):
        raise ImportError(f"jax-triton {jax_triton} is too old: take 0.4.1, with triton 3.7")
    if _release(triton) < (3, 7):
        raise ImportError(f"jax-triton {jax_triton} needs triton 3.7 or newer, found {triton}")
    if _release(jax) >= (0, 12) and _release(jax_triton) <= (0, 4, 1):
        raise ImportError(f"jax-triton {jax_triton} fails with JAX {jax}: take JAX 0.11, or a newer jax-triton")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
