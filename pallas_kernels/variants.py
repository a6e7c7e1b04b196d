"""Which program computes a shape: a committed table, written from benchmarks/fp4_sweep.py, never a trial at run time.

A key is (K, sum of N, largest M); the entry with the smallest M that is enough is used.
Shapes outside the table get the first default configuration that fits.
"""

import functools

import jax

from .stream_plan import RESIDENT, StreamConfig, make_plan

# From this many rows on, dequantize + dot.
MAX_DECODE_ROWS = 64

TABLE: dict[tuple[int, int, int], StreamConfig] = {}


def capability() -> int:
    """Compute capability of the default device, times ten; 0 without a CUDA device."""
    if jax.default_backend() != "gpu":
        return 0
    return int(float(jax.devices()[0].compute_capability) * 10)


def describe() -> str:
    """Which kernel family this process uses, for the program's log."""
    at = capability()
    if at == 90:
        return "NVFP4 kernels: Mosaic GPU (sm_90) up to 64 rows, dequantize + dot above"
    return "NVFP4 kernels: dequantize + dot" if at else "NVFP4 kernels: reference path (no CUDA device)"


@functools.lru_cache(maxsize=None)
def config_for(m: int, k: int, n: tuple[int, ...]) -> StreamConfig:
    """The decode configuration for a shape; raises ValueError naming the constraint when none fits."""
    for bound in (8, 16, 32, 64):
        entry = TABLE.get((k, sum(n), bound))
        if m <= bound and entry is not None:
            try:
                make_plan(m, k, n, entry)
            except ValueError:
                continue
            return entry
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
    raise ValueError(f"no decode configuration takes M = {m}, K = {k}, N = {n}: {reason}")


def choose(m: int, k: int, n: tuple[int, ...], backend: str | None = None) -> str | StreamConfig:
    """"reference", "dequantize", or the decode kernel's configuration."""
    if backend not in (None, "mosaic", "dequantize", "reference"):
        raise ValueError(f"backend must be None, 'mosaic', 'dequantize' or 'reference', got {backend!r}")
    if backend in ("reference", "dequantize"):
        return backend
    if backend == "mosaic":
        return config_for(m, k, n)
    at = capability()
    if at == 0:
        return "reference"
    if at == 90 and m <= MAX_DECODE_ROWS:
        try:
            return config_for(m, k, n)
        except ValueError:
            return "dequantize"
    return "dequantize"


def choose_dx(backend: str | None = None) -> str:
    if backend == "reference" or (backend is None and capability() == 0):
        return "reference"
    return "dequantize"
