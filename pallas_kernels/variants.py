"""Which program computes a shape: a committed table, written by benchmarks/fp4_sweep.py, never a trial at run time.

fp4_table.json holds, for (K, sum of N) and the largest M of a range (8, 16, 32, 64), the configuration of the streaming
kernel that was fastest on an H200 (`us` is its time; null where the configuration was chosen from a neighbouring shape
and not timed yet). Shapes outside it get the first default that fits. All M of one range use one
configuration, so a row's result does not depend on M within 1-8, 9-16, 17-32, 33-64 (and 65-256, in steps of 64 rows).
"""

import functools
import importlib.resources
import json

import jax

from .stream_plan import RESIDENT, StreamConfig, make_plan

RANGES = (8, 16, 32, 64)
BACKENDS = ("mosaic", "triton", "dequantize-mosaic", "dequantize", "reference")
# Up to this many rows the streaming kernel runs 64 rows at a time; above, dequantize + dot.
MAX_STREAM_ROWS = 256


def _load() -> dict[tuple[int, int, int], StreamConfig]:
    text = importlib.resources.files(__package__).joinpath("fp4_table.json").read_text()
    return {(e["k"], e["n"], e["m"]): StreamConfig(*e["config"]) for e in json.loads(text)}


TABLE = _load()


def capability() -> int:
    """Compute capability of the default device, times ten; 0 without a CUDA device."""
    if jax.default_backend() != "gpu":
        return 0
    return round(float(jax.devices()[0].compute_capability) * 10)


def describe() -> str:
    """Which kernel family this process uses, for the program's log."""
    at = capability()
    if at == 90:
        return f"NVFP4 kernels: Mosaic GPU (sm_90) up to {MAX_STREAM_ROWS} rows, dequantize + dot above"
    return "NVFP4 kernels: dequantize + dot" if at else "NVFP4 kernels: reference path (no CUDA device)"


def has_kernels() -> bool:
    """Whether the default device runs kernels that are better than dequantize + dot in plain XLA."""
    return capability() == 90


@functools.cache
def config_for(m: int, k: int, n: tuple[int, ...]) -> StreamConfig:
    """The streaming kernel's configuration for a shape; raises ValueError naming the constraint when none fits."""
    m = next((r for r in RANGES if m <= r), RANGES[-1])  # the whole range must fit, and so share one configuration
    entry = TABLE.get((k, sum(n), m))
    if entry is not None:
        try:
            make_plan(m, k, n, entry)
            return entry
        except ValueError:  # another split of the same N into matrices may need more row tiles
            pass
    all_tiles = sum(-(-n_i // 16) for n_i in n)
    reason = None
    for cluster in (1, 2, 4, 8):
        per_cta = -(-all_tiles // min(RESIDENT[cluster], all_tiles))
        for tiles, warps_k in ((1, 2), (1, 1), (2, 2), (2, 1), (3, 1), (4, 1)):
            entry = StreamConfig(cluster, -(-per_cta // tiles), warps_k, tiles, 2, 2)
            try:
                make_plan(m, k, n, entry)
            except ValueError as error:
                reason = error
                continue
            return entry
    raise ValueError(f"no configuration of the streaming kernel takes M = {m}, K = {k}, N = {n}: {reason}")


def choose(m: int, k: int, n: tuple[int, ...], backend: str | None = None) -> str | StreamConfig:
    """A path's name, or the streaming kernel's configuration."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {BACKENDS}, got {backend!r}")
    if backend == "mosaic":
        return config_for(m, k, n)
    if backend is not None:
        return backend
    at = capability()
    if at == 90 and m <= MAX_STREAM_ROWS:
        try:
            return config_for(m, k, n)
        except ValueError:
            return "dequantize-mosaic"
    return choose_dx()


def choose_dx(backend: str | None = None) -> str:
    """A path's name for dx = dy W, and for the forward product with many rows."""
    if backend == "mosaic":
        return "dequantize-mosaic"
    if backend == "triton":  # its kernel is for the forward product
        return "dequantize"
    if backend is not None:
        return backend
    at = capability()
    return "dequantize-mosaic" if at == 90 else "dequantize" if at else "reference"
