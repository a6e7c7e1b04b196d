"""x A^T as every kernel that makes it computes and stores it: fragments of 16 ranks x 8 rows, by m16n8k16.

Lane (g, t) has the same columns, in one order, of rows g and g + 8 of A and of row g of x: 16 bytes of each, or more.
Which columns these are is nothing to the sum.

What is left to be added up over *parts* of K lies as these fragments do, float32 [part, R / 16, panels of 8 rows, 32
lanes, 4 elements].
"""

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .block_plan import PANEL
from .layout import ROWS


def add_products(acc, low, high, x):
    """acc + A x^T over a lane's words of A's rows g (`low`) and g + 8 (`high`) and of x: two words a step."""
    for i in range(0, len(x), 2):
        acc = p.mma_half(acc, (low[i], high[i], low[i + 1], high[i + 1]), x[i], x[i + 1])
    return acc


def store_hidden(h, m: int, ranks: int, lane, tile, first_row, values):
    """A fragment to h [M, ranks], of the `tile`-th 16 ranks and the eight rows from `first_row` on, as far as they
    exist: ranks g (elements 0, 1) and g + 8 (2, 3) of rows 2 t (0, 2) and 2 t + 1 (1, 3)."""
    g, t = p.shr(lane, 2), p.and_(lane, 3)
    row, rank = p.add(first_row, p.mul(t, 2)), p.add(p.mul(tile, 16), g)
    for e, value in enumerate(values):
        here, column = p.add(row, e % 2), p.add(rank, 8 * (e // 2))
        to = mem.offset(h, p.mul(p.add(p.mul(here, ranks), column), 2))
        exists = arith.andi(p.lt(here, m), p.lt(tile, ranks // 16))
        p.when(exists, lambda to=to, value=value: mem.store_global_half(to, value))


def hidden_shape(parts: int, ranks: int, m: int) -> jax.ShapeDtypeStruct:
    """Of so many parts of K, for m rows."""
    return jax.ShapeDtypeStruct((parts, ranks // ROWS, -(-m // PANEL), 32, 4), jnp.float32)


def hidden_parts(x: jax.Array, a: jax.Array, parts: int) -> jax.Array:
    """x A^T of x [M, K] and A [R, K], over equal parts of K, in plain JAX; zeros in the rows behind M."""
    (M, K), R = x.shape, a.shape[0]
    x, a = (v.astype(jnp.float32).reshape(-1, parts, K // parts) for v in (x, a))
    sums = jnp.einsum("mpk,rpk->pmr", x, a, precision="highest")
    sums = jnp.pad(sums, ((0, 0), (0, -M % PANEL), (0, 0))).reshape(parts, -1, 4, 2, R // ROWS, 2, 8)
    # part panel t row tile half g -> part tile panel (g t) (half row)
    return sums.transpose(0, 4, 1, 6, 2, 5, 3).reshape(hidden_shape(parts, R, M).shape)


def sum_hidden(h: jax.Array, m: int) -> jax.Array:
    """The float32 x A^T [m, R] of what `hidden_parts` gives."""
    tiles, panels = h.shape[1:3]
    sums = h.sum(0).reshape(tiles, panels, 8, 4, 2, 2).transpose(1, 3, 5, 0, 4, 2)  # panel t row tile half g
    return sums.reshape(panels * PANEL, tiles * ROWS)[:m]
