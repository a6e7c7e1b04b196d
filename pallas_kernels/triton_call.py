"""The call of a Triton kernel from JAX."""

from typing import Any

from .triton_versions import missing
from .variants import capability


def call(
    kernel: Any,
    operands: Any,
    out: Any,
    grid: tuple[int, ...],
    constants: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """The kernel's results, of the shapes `out`. Its arguments are the operands (arrays, tuples of them, or `jax.Ref`s
    of what it writes in place), the results and the constants, which are known at compile time.

    Raises:
      ImportError: jax-triton and triton do not fit, or are not there.
    """
    if lacks := missing():
        raise ImportError(f"the Triton kernels cannot run: {lacks}")
    import jax_triton  # only where it is installed

    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_type=out,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability() or None,
        **constants,
    )
