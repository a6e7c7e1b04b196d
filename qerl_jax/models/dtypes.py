"""The dtype in which a model computes.

float16 has three bits more than bfloat16, so that sampler and learner, which round independently, are an eighth as far
apart; and its numbers end at 65504 (where networks have outliers at a million, see `pallas_kernels.range_scale`),
beyond which an activation becomes infinite and the step is refused.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

from qerl_jax.errors import UserError, nearest

if TYPE_CHECKING:
    import numpy as np

DtypeName = Literal["float32", "bfloat16", "float16"]
DtypeOption = Literal["auto", DtypeName]
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)


def network_dtype(dtype: Any) -> "np.dtype[Any]":
    """A dtype of `DTYPES`, given as such or by its name.

    Raises:
      UserError: any other.
    """
    import jax.numpy as jnp  # on use: the configuration, which must not import JAX, has its names from here

    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        hint = nearest(dtype, DTYPES) if isinstance(dtype, str) else ""
        raise UserError(f"dtype is {name or f'{dtype!r:.60}'}; allowed: {', '.join(DTYPES)}{hint}")
    return jnp.dtype(name)


def settled_dtype(name: DtypeOption) -> DtypeName:
    """What `auto` means here: bfloat16 on a GPU, float32 on a CPU, which has no fast bfloat16."""
    if name != "auto":
        return name
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
