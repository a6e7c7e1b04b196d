"""Which program computes a shape: a committed table, written by benchmarks/fp4_sweep.py, never a trial at run time.

fp4_table.json holds, for (K, sum of N) and the largest M of a range (8, 16, 32, 64), the configuration of the streaming
kernel that was fastest on an H200, with `"lora": true` a better one for calls with adapters; `us` is its time without
(with) rank 32, from several runs. Without `us` it has not been measured as it stands: the fastest, with as much
promotion as cuBLAS's own error asks for. Shapes outside it get what an estimate says (stream_variants.py). All M of
one range use one configuration, so a row's result does not depend on M within 1-8, 9-16, 17-32, 33-64. More rows go to
the wide kernel (wide_variants.py), and from 17 on those of a few shapes, and of most with adapters or in a decode step;
or, where it does not take the shape, through the streaming kernel 64 at a time.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.resources
import itertools
import json
from collections.abc import Iterator

import jax

from .block_plan import MAX_ROWS
from .operands import padded_rank
from .stream_plan import RESIDENT, STREAM_ROWS, StreamConfig, make_plan
from .stream_variants import by_rule
from .triton_versions import missing
from .wide_plan import WideConfig
from .wide_variants import few_rows_config, makes_h_in_time, wide_config

RANGES = (8, 16, 32, STREAM_ROWS)
DEQUANTIZING = ("dequantize", "dequantize-mosaic", "dequantize-triton")
BACKENDS = ("mosaic", "wide", "triton", *DEQUANTIZING, "reference")
# What the wide kernel does not take goes through the streaming kernel up to this many rows, STREAM_ROWS at a time.
MAX_STREAM_ROWS = 256
# The Triton kernel multiplies up to so many rows, 64 at a time; with more it is sooner to dequantize.
MAX_TRITON_ROWS = 128
# Adapters of larger ranks are added outside of it: its product with B would ask for 64 KB of shared memory.
MAX_TRITON_RANK = 128


def _load() -> dict[tuple[int, int, int, bool], StreamConfig]:
    text = importlib.resources.files(__package__).joinpath("fp4_table.json").read_text()
    return {(e["k"], e["n"], e["m"], e.get("lora", False)): StreamConfig(*e["config"]) for e in json.loads(text)}


TABLE = _load()


_TARGET: contextvars.ContextVar[int | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """What is traced inside gets the kernels of a CUDA device of this compute capability (times ten) instead of the
    default device's: for programs that are lowered or compiled ahead of time. A function that
    `jax.jit` has traced before keeps its kernels. ValueError for a capability that is not times ten."""
    if not isinstance(capability, int) or 0 < capability < 50:
        raise ValueError(
            f"capability is {capability!r}; expected the compute capability times ten, such as 90 for Hopper"
        )
    token = _TARGET.set(capability)
    try:
        yield
    finally:
        _TARGET.reset(token)


def capability() -> int:
    """Compute capability of the device that is compiled for, times ten; 0 without a CUDA device."""
    target = _TARGET.get()
    if target is not None:
        return target
    if jax.default_backend() != "gpu":
        return 0
    device = jax.devices()[0]  # AMD's, a "gpu" too, has a name for it, such as gfx942
    return round(float(device.compute_capability) * 10) if "cuda" in device.client.platform_version else 0


def kernel_family() -> str:
    """Which kernels the device that is compiled for runs: "mosaic" (Hopper), "triton" (from Ampere on, where jax-triton
    is installed), "dequantize" (none: dequantize + dot in plain XLA) or, without a CUDA device, "reference"."""
    at = capability()
    if at == 90:
        return "mosaic"
    if at >= 80 and missing() is None:
        return "triton"
    return "dequantize" if at else "reference"


def describe() -> str:
    """Which kernel family this process uses, for the program's log."""
    at, kernels = capability(), kernel_family()
    if kernels == "mosaic":
        return (
            f"NVFP4 kernels: Mosaic GPU (sm_90), one between attentions up to {MAX_ROWS} rows, streaming up to "
            f"{STREAM_ROWS}, wide above, for gradients, and from 17 on in decoding, with adapters or small matrices"
        )
    if kernels == "triton":
        return f"NVFP4 kernels: Triton (sm_{at}) up to {MAX_TRITON_ROWS} rows, dequantize + dot above, for gradients"
    if kernels == "dequantize":
        return f"NVFP4 kernels: none, dequantize + dot (sm_{at}{f'; {missing()}' if at >= 80 else ''})"
    return "NVFP4 kernels: reference path (no CUDA device)"


def has_kernels() -> bool:
    """Whether the device that is compiled for runs kernels that are better than dequantize + dot in plain XLA."""
    return kernel_family() in ("mosaic", "triton")


def takes_lora(
    m: int, k: int, n: tuple[int, ...], config: StreamConfig, ranks: tuple[int, ...], swiglu: bool = False
) -> bool:
    """Whether the configuration also has room for adapters of these ranks, and its CTAs can wait for each other."""
    try:
        make_plan(_range(m), k, n, config, ranks, swiglu=swiglu)
    except ValueError:
        return False
    # a wave cannot wait for the next one's part of x A^T
    return not any(ranks) or (config.waves == 1 and has_room_for_a_wave())


def lora_inside(m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
    """Whether fp4_matmul adds adapters of these ranks (0: none) in the kernel that multiplies by the weights; without
    any, whether there is one."""
    padded = tuple(padded_rank(rank) for rank in ranks)
    variant = choose(m, k, n, None, padded)
    if variant == "triton":
        return triton_takes(padded)
    if isinstance(variant, WideConfig):
        return True  # adapters of any size
    if not isinstance(variant, StreamConfig):
        return False
    if not any(ranks):
        return True
    if m > STREAM_ROWS:
        return False
    return takes_lora(m, k, n, variant, padded) or apart(m, k, n, variant, padded)


def triton_takes(ranks: tuple[int, ...]) -> bool:
    """Whether the Triton kernel itself adds adapters of these padded ranks (0, or nothing at all: none)."""
    return max(ranks, default=0) <= MAX_TRITON_RANK


def joins_gate_and_up() -> bool:
    """Whether fp4_mlp's kernels make silu(gate) * up: all but Triton's."""
    return kernel_family() != "triton"


def spare_ctas_make_h(
    m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...], config: WideConfig, swiglu: bool = False
) -> bool:
    """Whether the wide kernel itself makes x A^T of adapters of these padded ranks, by CTAs that have no tile."""
    return has_room_for_a_wave() and makes_h_in_time(m, k, n, ranks, config, swiglu)


def apart(m: int, k: int, n: tuple[int, ...], config: StreamConfig, ranks: tuple[int, ...]) -> bool:
    """Whether weights of a call are better multiplied one by one: where together they are more than one wave, which
    leaves adapters outside, and each alone takes its own inside. Gate and up of 5120 x 55296 at 64 rows took 105 us
    together on an H200, of which 27 are for adapters, and one of them with its adapter 42."""
    if config.waves == 1 or len(n) == 1 or not any(ranks):
        return False
    return all(not rank or lora_inside(m, k, (n_i,), (rank,)) for n_i, rank in zip(n, ranks, strict=True))


def has_room_for_a_wave() -> bool:
    """Whether all CTAs of a wave have a multiprocessor: a CTA cannot wait for one that has none yet."""
    return multiprocessors() >= RESIDENT[1]


def multiprocessors() -> int:
    """Of the default device; where there is none, or another is compiled for, an H200's."""
    is_for_this = _TARGET.get() is None and jax.default_backend() == "gpu"
    return jax.devices()[0].core_count if is_for_this else RESIDENT[1]


def _range(m: int) -> int:
    return next((r for r in RANGES if m <= r), RANGES[-1])


@functools.cache
def config_for(m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...] = (), swiglu: bool = False) -> StreamConfig:
    """The streaming kernel's configuration for a shape; raises ValueError naming the constraint when none fits."""
    m = _range(m)  # the whole range must fit, and so share one configuration
    entries = [TABLE.get((k, sum(n), m, lora)) for lora in ((True, False) if any(ranks) else (False,))]
    # another split of the same N into matrices may need more row tiles; without room, LoRA is added outside the kernel
    for tried in (ranks, ()):
        for entry in entries:
            if entry is not None and takes_lora(m, k, n, entry, tried, swiglu):
                return entry
    for config in by_rule(m, k, n, ranks, swiglu):
        if takes_lora(m, k, n, config, ranks, swiglu):
            return config
    if any(ranks):
        return config_for(m, k, n, swiglu=swiglu)
    make_plan(m, k, n, StreamConfig(), ranks, swiglu=swiglu)  # says why, where that is the shape
    raise ValueError(f"no configuration of the streaming kernel takes M = {m}, K = {k}, N = {n}")


def choose(
    m: int, k: int, n: tuple[int, ...], backend: str | None = None, ranks: tuple[int, ...] = ()
) -> str | StreamConfig | WideConfig:
    """A path's name, or the configuration of the streaming kernel, with room for LoRA if it can, or the wide kernel."""
    _check_backend(backend)
    if backend == "mosaic":
        return config_for(m, k, n, ranks)
    if backend == "wide":
        return _wide("forward", m, k, n, ranks)
    if backend is not None:
        return backend
    kernels = kernel_family()
    if kernels == "triton" and m > MAX_TRITON_ROWS:
        return "dequantize-triton"
    if kernels != "mosaic":
        return kernels
    stream, wide = functools.partial(config_for, m, k, n, ranks), functools.partial(_wide, "forward", m, k, n, ranks)
    if m <= STREAM_ROWS:
        few = functools.partial(few_rows_config, m, k, n, ranks)
        return _first([few, stream, wide] if has_room_for_a_wave() else [stream, wide])
    return _first([wide, stream] if m <= MAX_STREAM_ROWS else [wide])


def choose_dx(m: int, k: int, n: tuple[int, ...], backend: str | None = None) -> str | WideConfig:
    """The same for dx, the sum of dy W over weights of so many outputs."""
    _check_backend(backend)
    if backend in ("mosaic", "wide"):
        return _wide("dx", m, k, n)
    kernels = backend or kernel_family()
    if kernels != "mosaic":
        return "dequantize-triton" if kernels == "triton" else kernels
    return _first([functools.partial(_wide, "dx", m, k, n)])


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {BACKENDS}, got {backend!r}")


def choose_prepared(
    m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...], swiglu: bool = False
) -> StreamConfig | WideConfig:
    """The kernel for rows whose inputs another kernel has made (inputs_kernel.py), unless the wide kernel makes x A^T
    itself: x A^T costs the streaming kernel nothing then, so what is fastest without adapters is, with shorter rings
    where it must, or for shapes outside the table the next best that has room; and where none has, with B late. Raises
    ValueError naming the constraint when none takes the shape."""
    if m > STREAM_ROWS:
        # before gate and up there is a launch, for their norm, which makes x A^T too
        return _wide("forward", m, k, n, () if swiglu else ranks)
    with contextlib.suppress(ValueError):
        return few_rows_config(m, k, n, ranks, prepared=True)
    entry = config_for(m, k, n, swiglu=swiglu)
    is_measured = entry == TABLE.get((k, sum(n), _range(m), False))
    # shared row tiles take more room
    measured = (entry, dataclasses.replace(entry, shares=False)) if entry.shares else (entry,)
    configs = measured if is_measured else by_rule(_range(m), k, n, swiglu=swiglu)
    for late_b, config in itertools.product((False, True), configs):
        rings = itertools.product(range(config.depth, 1, -1), range(config.x_depth, 1, -1))
        for depth, x_depth in rings:  # which have the room that B and x A^T need
            with contextlib.suppress(ValueError):
                fitting = dataclasses.replace(config, depth=depth, x_depth=x_depth, late_b=late_b)
                make_plan(_range(m), k, n, fitting, ranks, prepared=True, swiglu=swiglu)
                return fitting
    raise ValueError(f"no configuration has room for adapters of the ranks {ranks} at M = {m}, K = {k}, N = {n}")


def _wide(op: str, m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...] = ()) -> WideConfig:
    """The wide kernel's configuration for this GPU: CTAs that split D wait for each other."""
    config = wide_config(op, m, k, n, ranks)
    return config if has_room_for_a_wave() else dataclasses.replace(config, split=1)


def _first(tries) -> str | StreamConfig | WideConfig:
    """The first configuration that takes the shape, else dequantize + dot."""
    for configuration in tries:
        try:
            return configuration()
        except ValueError:
            continue
    return "dequantize-mosaic"
