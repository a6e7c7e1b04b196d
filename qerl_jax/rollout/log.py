"""What the steps of a loop draw, in one array: a step records its row with one kernel, whatever it holds.

Dimension letters: T steps, K kinds of numbers of 32 bits, S slots.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def empty(steps: int, kinds: int, slots: int) -> jax.Array:
    """A log of zeros, int32 [T, K, S]."""
    return jnp.zeros((steps, kinds, slots), jnp.int32)


def recorded(log_TKS: jax.Array, step: jax.Array, *kinds_S: jax.Array) -> jax.Array:
    """The log with a step's K arrays [S] of int32 or float32."""
    row_KS = jnp.stack([jax.lax.bitcast_convert_type(values_S, jnp.int32) for values_S in kinds_S])
    return jax.lax.dynamic_update_index_in_dim(log_TKS, row_KS, step, 0)


def read(log_TKS: jax.Array, dtypes: Sequence[DTypeLike]) -> list[jax.Array]:
    """The log's kinds [T, S], each in the dtype in which it was recorded."""
    return [jax.lax.bitcast_convert_type(log_TKS[:, kind], dtype) for kind, dtype in enumerate(dtypes)]
