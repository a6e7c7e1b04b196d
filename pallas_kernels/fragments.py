"""The decoding of a lane's codes and scales in PTX; layout.decode_word is the same in NumPy.

Instructions for 8 codes (one word): 4 shifts or rotations (two of them, with float16 three, run as multiplications on
the other pipe), 5 (6) logic operations, 4 packed multiplications; and for the 32 codes of a unit 4 (3) for the two
scales: 1.75 (1.84) a weight in all.
"""

from . import ptx as p
from .layout import DECODINGS, Decoding

# Pairs lo and hi of the scales of rows g and g + 8, the halves of one register: a multiplication can read one half for
# both of its elements, so that these moves are no instructions.
EACH_TWICE = ".reg .b16 l, h;\n.reg .b32 lo, hi;\nmov.b32 {{l, h}}, {};\nmov.b32 lo, {{l, l}};\nmov.b32 hi, {{h, h}};\n"


def decoding() -> Decoding:
    """Of the numbers that the program which is traced multiplies."""
    return DECODINGS[p.half_dtype()]


def _pair(made: Decoding, i: int) -> str:
    """A pair's bits of the word $4, in t{i}."""
    turn, mask, direct = made.turns[i], made.turned_mask(i), made.direct_mask(i)
    moved = [bit for bit in range(4) if bit not in made.direct[i]]
    wraps = any(made.source_bit(i, half, bit) + turn > 31 for half in range(2) for bit in moved)
    move = f"shf.l.wrap.b32 t{i}, $4, $4, {turn};" if wraps else f"shl.b32 t{i}, $4, {turn};"
    keep = f"and.b32 t{i}, t{i}, {mask:#x};"
    if direct:
        keep = f"and.b32 u, $4, {direct:#x};\nlop3.b32 t{i}, t{i}, {mask:#x}, u, 0xea;"
    return f"{move}\n{keep}\n"


def decode_codes(word, scales, in_place: bool = False):
    """8 codes -> the four A registers of one m16n8k16; `scales` of rows g and g + 8 as `decode_scales` leaves them.

    `in_place` keeps it where it stands: before a wgmma fence, which pure arithmetic could otherwise cross.
    """
    made, kind = decoding(), p.half()
    return p.ptx(
        f"{{ .reg .b32 t0, t1, t2, t3, u;\n{EACH_TWICE.format('$5')}"
        f"{''.join(_pair(made, i) for i in range(4))}"
        f"mul.rn.{kind}x2 $0, t0, lo;\nmul.rn.{kind}x2 $1, t1, hi;\n"
        f"mul.rn.{kind}x2 $2, t2, lo;\nmul.rn.{kind}x2 $3, t3, hi;\n}}",
        word,
        scales,
        results=[p.i32_t()] * 4,
        effects=in_place,
    )


def decode_scales(word, which):
    """Two scale bytes of a word (rows g, g + 8) -> a pair of numbers, each scale * 2^119, or with float16 2^7.

    `which` picks the bytes: 0x4140 the lower two, 0x4342 the upper two.
    """
    made = decoding()
    steps = "".join(f"mul.rn.{p.half()}x2 s, s, ${3 + i};\n" for i in range(len(made.scale_steps)))
    return p.ptx(
        f"{{ .reg .b32 s;\nprmt.b32 s, $1, 0, $2;\nshl.b32 s, s, {made.scale_shift};\n{steps}mov.b32 $0, s; }}",
        word,
        which,
        *(p.i32(made.power_of_two(step)) for step in made.scale_steps),
        results=[p.i32_t()],
    )[0]
