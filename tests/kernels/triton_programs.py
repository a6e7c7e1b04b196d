"""Triton's kernels without a GPU: compiled for one, and run by Triton's interpreter on NumPy arrays, in a process of
its own, since it is chosen as triton is imported."""

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


class Array:
    """What the interpreter asks of a tensor, over NumPy memory."""

    def __init__(self, array: np.ndarray, dtype: str):
        self.array, self.dtype = array, dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Array(self.array, self.dtype)

    def set_(self, *_):
        return self

    def copy_(self, _):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return (1,)


def compiled_for(architecture: int, kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], **options: int):
    """The kernel for a compute capability; `arguments` are Triton's types, of tuples too."""
    import triton
    from triton.backends.compiler import GPUTarget

    paths = [
        (i, *more)
        for i, kind in enumerate(arguments.values())
        for more in ([(j,) for j in range(len(kind))] if isinstance(kind, tuple) else [()])
    ]
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=arguments | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={path: [["tt.divisibility", 16]] for path in paths},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def run_interpreted(program: str) -> list[str]:
    """The lines that the program prints; its argument is a fresh seed."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    seed = str(secrets.randbits(32))
    command = [sys.executable, "-c", program, seed]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    return done.stdout.splitlines()
