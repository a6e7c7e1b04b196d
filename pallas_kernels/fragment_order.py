"""The order in which the streaming kernel's wgmma variant reads x, and the kernel that brings x into it.

Rows of x stand side by side in it: M x 256 inputs of a quad become [unit][step j][half h][row][t][c], of which each 8
rows x 8 columns are 128 contiguous bytes, as wgmma reads them. In a unit, step j's k index 2 t + c + 8 h (t = 0..3,
c, h = 0..1) is column 16 t + 4 j + 2 h + c, which is how the packed weights lie (layout.py).

Not left to XLA: its program has a CTA for each 64 numbers and, fused with a SwiGLU that makes x, took 21 us for 64 x
18944 (10 for 32 rows), most of it latency. The kernel here has 16 times fewer CTAs, and reads and writes whole sectors.
"""

import functools

import jax
import jax.numpy as jnp

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from .layout import COLS, UNIT

WARPS, WARP_ROWS, WARP_UNITS = 8, 4, 2


def in_fragment_order(x: jax.Array, rows: int) -> jax.Array:
    """x [M, Q * 256] in 16 bits -> [Q, rows * 256]; what is in the rows behind M has no meaning."""
    return build(x.shape[0], rows, x.shape[1] // COLS, x.dtype.name)(x)


def reference(x: jax.Array, rows: int) -> jax.Array:
    """The same in plain JAX, with zeros in the rows behind M."""
    x = jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))).reshape(rows, -1, 4, 4, 4, 2, 2)  # rows Q unit t j h c
    x = x.transpose(1, 2, 4, 5, 0, 3, 6)  # Q unit j h rows t c
    return x.reshape(x.shape[0], rows * COLS)


def in_unit_order(x: jax.Array) -> jax.Array:
    """x [M, K] -> the same columns, those of each unit in the order of the wide kernel's `units`: as they lie in packed
    weights, so that a lane's 16 codes of a unit are its part of four steps' left operands."""
    M, K = x.shape
    return x.reshape(M, K // UNIT, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(M, K)  # unit t j h c -> unit j h t c


def from_unit_order(x: jax.Array) -> jax.Array:
    """The inverse of `in_unit_order`."""
    M, K = x.shape
    return x.reshape(M, K // UNIT, 4, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5).reshape(M, K)


def unit_place(column):
    """The place in a row in unit order of an even column; its neighbour's is the next."""
    inside = p.and_(column, UNIT - 1)
    t, j, h = p.shr(inside, 4), p.and_(p.shr(inside, 2), 3), p.and_(p.shr(inside, 1), 1)
    return p.add(p.sub(column, inside), p.add(p.add(p.mul(j, 16), p.mul(h, 8)), p.mul(t, 2)))


def from_unit_place(place):
    """The column at an even place; its neighbour is at the next."""
    inside = p.and_(place, UNIT - 1)
    j, h, t = p.shr(inside, 4), p.and_(p.shr(inside, 3), 1), p.and_(p.shr(inside, 1), 3)
    return p.add(p.sub(place, inside), p.add(p.add(p.mul(t, 16), p.mul(j, 4)), p.mul(h, 2)))


def _body(m: int, rows: int, quads: int, x_ref, out_ref):
    """One warp's program: 4 rows x 2 units. Eight lanes read a row's 128 bytes of a unit; a lane's 16 bytes are four
    pairs of columns, of one t, for four of the unit's eight (j, h); so a store of the warp fills eight sectors."""
    x, out = mem.global_address(x_ref), mem.global_address(out_ref)
    tid = p.sreg("tid.x")
    lane = p.and_(tid, 31)
    warp = p.add(p.mul(p.sreg("ctaid.x"), WARPS), p.shr(tid, 5))
    row_groups, piece = rows // WARP_ROWS, p.and_(lane, 7)
    row = p.add(p.mul(p.rem(warp, row_groups), WARP_ROWS), p.shr(lane, 3))
    unit = p.mul(p.div(warp, row_groups), WARP_UNITS)
    known = p.minimum(row, m - 1)  # rows behind M repeat the last one

    def move():
        source = mem.wide_offset(x, known, quads * COLS * 2)
        source = mem.offset(source, p.add(p.mul(unit, UNIT * 2), p.mul(piece, 16)))
        words = [mem.load_global_v4(source, UNIT * 2 * u) for u in range(WARP_UNITS)]
        t, half = p.shr(piece, 1), p.and_(piece, 1)
        for u in range(WARP_UNITS):
            first = p.add(p.mul(p.add(unit, u), 8), p.mul(half, 4))
            for i, word in enumerate(words[u]):
                place = p.add(p.mul(p.add(first, i), rows * 16), p.add(p.mul(row, 16), p.mul(t, 4)))
                mem.store_global_b32(mem.offset(out, place), word)

    p.when(p.lt(unit, quads * COLS // UNIT), move)


def ctas(rows: int, quads: int) -> int:
    warps = rows // WARP_ROWS * (quads * COLS // UNIT // WARP_UNITS)
    return -(-warps // WARPS)


@functools.cache
def build(m: int, rows: int, quads: int, dtype: str = "bfloat16"):
    """The kernel as a function of x [M, Q * 256] of a dtype of 16 bits; `rows` is a multiple of 8."""

    def fragment_order(_, x_ref, out_ref):
        _body(m, rows, quads, x_ref, out_ref)

    out = jax.ShapeDtypeStruct((quads, rows * COLS), jnp.dtype(dtype))
    return jax.jit(lane_level.kernel(fragment_order, out, dtype, grid=ctas(rows, quads), warps=WARPS))
