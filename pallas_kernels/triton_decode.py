"""The Triton kernels' decoding: codes and scales of a unit of KernelWeight bytes to 16-bit numbers, in registers."""

import triton
import triton.language as tl

from .layout import DECODINGS


def decoding_constants(dtype: str, wide: bool) -> dict[str, object]:
    """Compile-time arguments of a kernel that decodes: PAIRS, the turn and the two masks of each pair, and SCALE, the
    shift and the steps of a scale (`layout.Decoding`); WIDE gives float32, for Triton's interpreter."""
    decoding = DECODINGS[dtype]
    pairs = tuple((decoding.turns[i], decoding.turned_mask(i), decoding.direct_mask(i)) for i in range(4))
    scale = (decoding.scale_shift, *map(decoding.power_of_two, decoding.scale_steps))
    return {"PAIRS": pairs, "SCALE": scale, "FLOAT16": dtype == "float16", "WIDE": wide}


@triton.jit
def _times(a, b, FLOAT16: tl.constexpr):
    """Products of two 16-bit numbers in a word. A multiplication alone is an instruction from sm_90 on."""
    if FLOAT16:
        product: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.f16x2 $0, $1, $2, z; }"
    else:
        product: tl.constexpr = "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }"
    return tl.inline_asm_elementwise(product, "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _number(bits, FLOAT16: tl.constexpr):
    """The number with these 16 bits."""
    bits = bits.to(tl.uint16)
    return bits.to(tl.float16, bitcast=True) if FLOAT16 else bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _wide_number(bits, FLOAT16: tl.constexpr):
    """The same in float32, for the interpreter, which takes bfloat16 bits for integers."""
    if FLOAT16:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _pair(words, PAIRS: tl.constexpr, index: tl.constexpr):
    """Bits of two codes of each word, at their places in 16-bit numbers."""
    turn: tl.constexpr = PAIRS[index][0]
    turned: tl.constexpr = PAIRS[index][1]
    direct: tl.constexpr = PAIRS[index][2]
    bits = ((words << turn) | (words >> (32 - turn))) & turned
    return bits | (words & direct) if direct else bits


@triton.jit
def _scale(byte, SCALE: tl.constexpr, FLOAT16: tl.constexpr, WIDE: tl.constexpr):
    """e4m3 bytes as factors of decoded codes, twice in a word, with an axis for a lane's words."""
    shift: tl.constexpr = SCALE[0]
    scale = byte << shift
    scale = _wide_number(scale, FLOAT16) if WIDE else scale * 0x10001
    for i in tl.static_range(1, len(SCALE)):
        step = tl.full([1, 1], SCALE[i], tl.uint32)
        scale = scale * _wide_number(step & 0xFFFF, FLOAT16) if WIDE else _times(scale, step, FLOAT16)
    return tl.broadcast_to(scale[:, :, None], [scale.shape[0], 32, 4])


@triton.jit
def _values(pairs, scale, FLOAT16: tl.constexpr, WIDE: tl.constexpr):
    """code * scale * 2^-7 of the two codes, exactly."""
    if WIDE:
        low = _wide_number(pairs & 0xFFFF, FLOAT16) * scale
        return tl.join(low, _wide_number(pairs >> 16, FLOAT16) * scale)
    products = _times(pairs, scale, FLOAT16)
    return tl.join(_number(products & 0xFFFF, FLOAT16), _number(products >> 16, FLOAT16))


@triton.jit
def weights_of_unit(
    quad_ptr,
    UNIT: tl.constexpr,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    FLOAT16: tl.constexpr,
    WIDE: tl.constexpr,
):
    """W * global_scale / 128 of one unit of a quad of each of TILES row tiles; the quads begin at quad_ptr [TILES, 1].

    The axes are tile, g, t, step, column of a pair, pair, half of the rows (layout.py): row 8 half + g, column
    16 t + 4 step + 2 pair + column of the unit. The last four are a lane's own.
    """
    words = tl.load(quad_ptr + UNIT * 128 + tl.arange(0, 128)[None, :])
    words = tl.reshape(words, [TILES, 32, 4])  # tile, lane, step
    scales = tl.load(quad_ptr + 512 + UNIT // 2 * 32 + tl.arange(0, 32)[None, :]) >> (UNIT % 2 * 16)
    upper = _scale(scales & 0xFF, SCALE, FLOAT16, WIDE)
    lower = _scale((scales >> 8) & 0xFF, SCALE, FLOAT16, WIDE)
    w00 = _values(_pair(words, PAIRS, 0), upper, FLOAT16, WIDE)
    w10 = _values(_pair(words, PAIRS, 1), lower, FLOAT16, WIDE)
    w01 = _values(_pair(words, PAIRS, 2), upper, FLOAT16, WIDE)
    w11 = _values(_pair(words, PAIRS, 3), lower, FLOAT16, WIDE)
    return tl.reshape(tl.join(tl.join(w00, w01), tl.join(w10, w11)), [TILES, 8, 4, 4, 2, 2, 2])
