"""W * global_scale / 128 in 16 bits [N, K] from the kernel's layout: the first half of the path for many rows.

Every product e2m1 * scale has at most 6 significant bits, so 16 bits hold it exactly (also the factor 2^-7 that the
decoding leaves); the global scale goes to the float32 sums. A warp decodes quads of 16 x 256; a lane stores 32
contiguous bytes in each of two rows, four lanes a full line of 128 bytes.
"""

import functools

import jax
import jax.numpy as jnp

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from .fragments import decode_codes, decode_scales
from .layout import CODE_BYTES, COLS, QUAD_BYTES, QUAD_WORDS, ROWS

WARPS, CTAS = 16, 132 * 4


def _body(quads: int, tiles: int, data_ref, out_ref):
    """One warp's program: it takes quads in turn."""
    data, out = mem.global_address(data_ref), mem.global_address(out_ref)
    tid = p.sreg("tid.x")
    lane = p.and_(tid, 31)
    first = p.add(p.mul(p.sreg("ctaid.x"), WARPS), p.shr(tid, 5))
    g, t = p.shr(lane, 2), p.and_(lane, 3)
    row_bytes = quads * COLS * 2

    def quad(index, _):
        tile, q = p.div(index, quads), p.rem(index, quads)
        source = mem.wide_offset(data, index, QUAD_BYTES)
        codes, scales = mem.offset(source, p.mul(lane, 16)), mem.offset(source, p.mul(lane, 4))
        target = mem.wide_offset(out, p.add(p.mul(tile, ROWS), g), row_bytes)
        target = mem.offset(target, p.add(p.mul(q, COLS * 2), p.mul(t, 32)))
        words = [mem.load_global_v4(codes, u * 512) for u in range(4)]
        scale = [mem.load_global_b32(scales, CODE_BYTES + pair * 128) for pair in range(2)]
        for u in range(4):
            scales = decode_scales(scale[u // 2], p.i32(0x4342 if u % 2 else 0x4140))
            a = [decode_codes(word, scales) for word in words[u]]
            for row_half in range(2):
                values = [a[j][2 * pair_half + row_half] for j in range(4) for pair_half in range(2)]
                for half in range(2):
                    at = row_half * 8 * row_bytes + u * 128 + 16 * half
                    mem.store_global_v4(target, values[4 * half : 4 * half + 4], at)
        return []

    p.for_range(first, tiles * quads, CTAS * WARPS, [], quad)


@functools.cache
def build(tiles: int, quads: int, dtype: str):
    """data uint32 [tiles, quads, 576] -> numbers of `dtype` [16 * tiles, 256 * quads]."""

    def nvfp4_dequantize(_, data_ref, out_ref):
        _body(quads, tiles, data_ref, out_ref)

    out = jax.ShapeDtypeStruct((tiles * ROWS, quads * COLS), jnp.dtype(dtype))
    return jax.jit(lane_level.kernel(nvfp4_dequantize, out, dtype, grid=CTAS, warps=WARPS))


def dequantize(data: jax.Array, dtype: str = "bfloat16") -> jax.Array:
    """The padded matrix in `dtype`, that of its layout, times global_scale / 128."""
    tiles, quads, words = data.shape
    if words != QUAD_WORDS or data.dtype != jnp.uint32:
        raise ValueError(f"data must be uint32 [T, Q, {QUAD_WORDS}], got {data.dtype} {data.shape}")
    return build(tiles, quads, dtype)(data)
