"""x A^T as every kernel that makes it computes and stores it: fragments of 16 ranks x 8 rows, by m16n8k16.

Lane (g, t) has the same columns, in one order, of rows g and g + 8 of A and of row g of x: 16 bytes of each, or more.
Which columns these are is nothing to the sum.
"""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem


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
