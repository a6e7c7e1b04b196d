"""The engine's compiled programs, shared by all engines of a process.

On a CPU, XLA by default hands sums and matrix products to a library (YNNPACK) that adds in another order for 3 rows
than for 32, so that a sample's numbers would depend on how many slots there are. The programs of slots that are
refilled do without it: there a sample is bitwise the same in any slot of any number of slots. Those of a whole rollout
keep it: their decode loop is a third faster with it, and their numbers are those of the others up to rounding.
"""

import functools
import logging
from typing import Any, NamedTuple

import jax

from qerl_jax.rollout.generate import begun
from qerl_jax.rollout.prepared import made
from qerl_jax.rollout.queued import admit, decode_queue
from qerl_jax.rollout.slots import decode

# On a GPU XLA records a program's kernels into CUDA graphs, anew wherever an array has moved since the last call. That
# pays in a loop. Where each of a thousand kernels runs once it is work before the first of them starts: with it a
# prompt of 256 tokens took 32 ms, and one of 2048 71, of which kernels took 9 and 47.
_NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
_ROW_STABLE = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"}


class Programs(NamedTuple):
    """Jitted functions; slots are donated."""

    begun: Any
    finished: Any
    made: Any
    admit: Any
    decode_queue: Any


@functools.cache
def programs() -> Programs:
    """The programs for the default backend."""
    options = _compiler_options()
    once = _NO_GRAPH if jax.default_backend() == "gpu" else {}
    return Programs(
        begun=jax.jit(begun, static_argnames=("settings", "num_generations"), compiler_options=once),
        finished=jax.jit(decode, static_argnames=("settings", "group"), donate_argnames="slots"),
        made=jax.jit(made, compiler_options=once),
        admit=jax.jit(admit, donate_argnames="slots", compiler_options=options | once),
        decode_queue=jax.jit(
            decode_queue, static_argnames=("settings", "log_steps"), donate_argnames="slots", compiler_options=options
        ),
    )


@functools.cache
def _compiler_options() -> dict[str, str]:
    """What makes a row's numbers independent of the rows beside it."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=_ROW_STABLE)(0)
    except jax.errors.JaxRuntimeError as error:
        logging.getLogger(__name__).warning(
            "this version of jaxlib has no option %s (%s): log-probabilities may differ in their last bits with the "
            "number of slots",
            *_ROW_STABLE,
            error,
        )
        return {}
    return _ROW_STABLE
