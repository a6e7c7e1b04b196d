"""The Mosaic kernels of a program, each as a program of its own that can be compiled before it.

XLA compiles the kernels of a program one after the other, by the thread that emits its code, after all of its passes
(`InstantiateResources` in jaxlib/mosaic/gpu/custom_call.cc). What that makes is found again by the kernel's hash, in
the whole process: a kernel that is compiled in a thread of its own meanwhile is ready by then.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

_TARGET = "mosaic_gpu_v2"


def mosaic_kernels(program: jax.stages.Lowered) -> dict[str, dict[str, Any]]:
    """What XLA is told of each different Mosaic kernel of a program, by a name that is made of its hash."""
    found = {}

    def look(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and ir.StringAttr(op.attributes["call_target_name"]).value == _TARGET:
            told = {named.name: _value(named.attr) for named in op.attributes["mhlo.backend_config"]}
            found[f"mosaic_{told['kernel_hash'].hex()}"] = told
        return ir.WalkResult.ADVANCE

    module: Any = program.compiler_ir()
    module.operation.walk(look)
    return found


def alone(name: str, told: dict[str, Any]) -> jax.stages.Lowered:
    """A program of this name that is one kernel of `mosaic_kernels`: to be compiled, never called."""

    def kernel() -> jax.Array:
        # Operands do not count in compiling it.
        call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32))
        result: jax.Array = call(**told)
        return result

    kernel.__name__ = name
    return jax.jit(kernel).lower()


def _value(attribute: ir.Attribute) -> bytes | bool:
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    return bool(attribute.value)
