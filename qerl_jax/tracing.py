"""Whether a function is called while JAX traces another."""

from typing import Any

import jax
import jax.numpy as jnp


def is_traced(tree: Any) -> bool:
    """Whether a function that is called with these arrays is called inside of jax.jit, vmap or grad: one of them has no
    numbers yet, or a new array has none, as inside of jit where all of them are closed over."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((tree, jnp.zeros(()))))
