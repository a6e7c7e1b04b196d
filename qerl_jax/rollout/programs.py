"""The engine's compiled programs, shared by all engines of a process, and by `generate` outside of jit.

On a CPU, XLA by default hands sums and matrix products to a library (YNNPACK) that adds in another order for 3 rows
than for 32, so that a sample's numbers would depend on how many slots there are. The programs of slots that are
refilled do without it: there a sample is bitwise the same in any slot of any number of slots. For products this depends
on the processor and on their size: what XLA uses instead of the library keeps the order in small ones with AVX-512, and
not with AVX2, where the library does. So both are tried on several sizes, and the first whose products all come out the
same is taken. The programs of a whole rollout keep the library: their decode loop is a third faster with it, and their
numbers are the same up to rounding.
"""

import functools
import itertools
import logging
from typing import Any, NamedTuple

import jax
import numpy as np

from qerl_jax.models.linear import matmul_rows
from qerl_jax.rollout.begun import begun
from qerl_jax.rollout.prepared import made
from qerl_jax.rollout.queued import admit, decode_queue, empty_slots
from qerl_jax.rollout.slots import decode

# On a GPU XLA records a program's kernels into CUDA graphs, and again whenever an array has moved since the last call.
# That pays in a loop. Where each of a thousand kernels runs once, it is only work before the first of them starts: with
# graphs a prompt of 256 tokens took 32 ms and one of 2048 took 71 ms, of which kernels took 9 and 47.
_NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
# A loop stays outside of the graphs unless asked for: after each turn the host waits to learn whether there is another,
# and the GPU waits for the next turn's graph, 0.02 to 0.1 ms of steps of 1.8 to 3.3 ms. All kinds but collectives are
# listed, because a program's option replaces XLA's own list.
_LOOP_IN_GRAPH = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CONVOLUTION,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    )
}
# What is left to the library: nothing, since no program of the engine has a convolution; or products alone.
_ROW_STABLE = tuple(
    {"xla_cpu_experimental_ynn_fusion_type": f"LIBRARY_FUSION_TYPE_INDIVIDUAL_{kind}"}
    for kind in ("CONVOLUTION", "DOT")
)
_PROBED = (2, 4, 8, 16, 64)  # rows
# Inputs and outputs: a small model's, and in the order of time sizes at which what XLA uses itself has lost the order.
_PROBED_SIZES = ((64, 64), (896, 128), (32, 385), (128, 4096))


class Programs(NamedTuple):
    """Jitted functions; slots are donated."""

    begun: Any
    finished: Any
    made: Any
    empty_slots: Any
    admit: Any
    decode_queue: Any


@functools.cache
def programs() -> Programs:
    """The programs for the default backend."""
    options = _compiler_options()
    once, loop = (_NO_GRAPH, _LOOP_IN_GRAPH) if jax.default_backend() == "gpu" else ({}, {})
    return Programs(
        begun=jax.jit(begun, static_argnames=("settings", "num_generations"), compiler_options=once),
        finished=jax.jit(decode, static_argnames=("settings", "group"), donate_argnames="slots", compiler_options=loop),
        made=jax.jit(made, compiler_options=once),
        empty_slots=jax.jit(
            empty_slots,
            static_argnames=("settings", "rows", "max_prompt_length", "slots", "used"),
            compiler_options=once,
        ),
        admit=jax.jit(admit, donate_argnames="slots", compiler_options=options | once),
        decode_queue=jax.jit(
            decode_queue,
            static_argnames=("settings", "log_steps"),
            donate_argnames="slots",
            compiler_options=options | loop,
        ),
    )


@functools.cache
def _compiler_options() -> dict[str, str]:
    """What makes a row's numbers independent of the rows beside it."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        found = next((options for options in _ROW_STABLE if _keeps_rows(options)), None)
    except jax.errors.JaxRuntimeError as error:
        _warn(f"this version of jaxlib does not take the option {next(iter(_ROW_STABLE[0]))} ({error})")
        return {}
    if found is None:
        _warn("no option keeps this processor's products the same")
    return found or _ROW_STABLE[0]


def _warn(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "log-probabilities may differ in their last bits with the number of slots: %s", reason
    )


def _keeps_rows(options: dict[str, str]) -> bool:
    """Whether rows of products are bitwise the same with fewer and with more rows beside them."""
    product = jax.jit(matmul_rows, compiler_options=options)

    def keeps(K: int, N: int) -> bool:
        x, w = np.split(np.random.default_rng(0).standard_normal((_PROBED[-1] + N, K), np.float32), [_PROBED[-1]])
        rows = [np.asarray(product(x[:M], w)) for M in _PROBED]
        return all(np.array_equal(y, rows[-1][: len(y)]) for y in rows)

    return all(itertools.starmap(keeps, _PROBED_SIZES))
