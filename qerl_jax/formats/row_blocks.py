"""Work on a matrix a block of rows at a time, so that its temporaries are those of a block.

A quantizer's float32 and float64 intermediates are several times the matrix itself: [152064, 8192] in bfloat16 is
2.5 GB and would need 5 GB beside it. Blocks of a million elements need 5 MB, and cost no speed: they fit the cache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ELEMENTS = 1 << 20


def in_row_blocks(f: Callable[[jax.Array], Any], w_NK: jax.Array, multiple: int = 1) -> Any:
    """`f(w_NK)`, computed a block of rows at a time inside one loop (under jit; `f` is traced once).

    Args:
      f: maps any [n, K], n a multiple of `multiple`, to a pytree of arrays whose first axis has r entries for every
        `multiple` rows, in order; these depend on those rows only.
      w_NK: [N, K], N a multiple of `multiple`.
      multiple: rows that must stay together.
    """
    N, K = w_NK.shape
    rows = max(1, ELEMENTS // (K * multiple)) * multiple
    if rows >= N:
        return f(w_NK)
    block = jax.eval_shape(f, jax.ShapeDtypeStruct((rows, K), w_NK.dtype))

    def entries(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
        return leaf.shape[0] // (rows // multiple)

    whole = jax.tree.map(lambda leaf: jnp.zeros((N // multiple * entries(leaf), *leaf.shape[1:]), leaf.dtype), block)

    def step(i: jax.Array, done: Any) -> Any:
        # The last block ends with the matrix: it repeats rows of the one before it, which come out the same.
        first = jnp.minimum(i * rows, N - rows)
        part = f(jax.lax.dynamic_slice_in_dim(w_NK, first, rows))

        def put(out: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(out, new, first // multiple * entries(new), 0)

        return jax.tree.map(put, done, part)

    return jax.lax.fori_loop(0, -(-N // rows), step, whole)
