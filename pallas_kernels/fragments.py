"""The decoding of a lane's codes and scales in PTX; layout.decode_word is the same in NumPy.

Instructions for 8 codes (one word): 4 shifts or rotations (two of them run as multiplications on the other pipe), 5
logic operations, 4 packed multiplications; and for the 32 codes of a unit 4 for the two scales: 1.75 a weight in all.
"""

from . import ptx as p
from .layout import SCALE_STEP_1, SCALE_STEP_2, VALUE_MASK

# Pairs lo and hi of the scales of rows g and g + 8, the halves of one register: a multiplication can read one half for
# both of its elements, so that these moves are no instructions.
EACH_TWICE = ".reg .b16 l, h;\n.reg .b32 lo, hi;\nmov.b32 {{l, h}}, {};\nmov.b32 lo, {{l, l}};\nmov.b32 hi, {{h, h}};\n"


def decode_codes(word, scales, in_place: bool = False):
    """8 codes -> the four A registers of one m16n8k16; `scales` of rows g and g + 8 as `decode_scales` leaves them.

    `in_place` keeps it where it stands: before a wgmma fence, which pure arithmetic could otherwise cross.
    """
    return p.ptx(
        f"{{ .reg .b32 t0, t1, t2, t3, u;\n{EACH_TWICE.format('$5')}"
        "shl.b32 t0, $4, 2;\nshl.b32 t1, $4, 6;\n"
        "shf.l.wrap.b32 t2, $4, $4, 28;\nshf.l.wrap.b32 t3, $4, $4, 24;\n"
        f"and.b32 t0, t0, {VALUE_MASK:#x};\nand.b32 t1, t1, {VALUE_MASK:#x};\nand.b32 t2, t2, {VALUE_MASK:#x};\n"
        "and.b32 u, $4, 0x01000100;\nlop3.b32 t3, t3, 0x80c080c0, u, 0xea;\n"
        "mul.rn.bf16x2 $0, t0, lo;\nmul.rn.bf16x2 $1, t1, hi;\n"
        "mul.rn.bf16x2 $2, t2, lo;\nmul.rn.bf16x2 $3, t3, hi;\n}",
        word,
        scales,
        results=[p.i32_t()] * 4,
        effects=in_place,
    )


def decode_scales(word, which):
    """Two scale bytes of a word (rows g, g + 8) -> a pair of bfloat16, each scale * 2^119.

    `which` picks the bytes: 0x4140 the lower two, 0x4342 the upper two.
    """
    step_1 = (127 + SCALE_STEP_1) << 7
    step_2 = (127 + SCALE_STEP_2) << 7
    return p.ptx(
        "{ .reg .b32 s;\n"
        "prmt.b32 s, $1, 0, $4;\nshl.b32 s, s, 4;\n"
        "mul.rn.bf16x2 s, s, $2;\nmul.rn.bf16x2 $0, s, $3;\n}",
        word,
        p.i32(step_1 << 16 | step_1),
        p.i32(step_2 << 16 | step_2),
        which,
        results=[p.i32_t()],
    )[0]
