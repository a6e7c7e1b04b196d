"""PTX for numbers of 8 bits (E4M3: sign, 4 bits of exponent, 3 of mantissa), which become FP16 to be multiplied."""

from .ptx import half, i32_t, mma, pack_halves, ptx, unpack_half


def e4m3_of_half(word):
    """A word's two 16-bit numbers as E4M3, in its lower half; what is too large becomes the largest, 448."""
    code = "{ .reg .b16 h;\ncvt.rn.satfinite.e4m3x2.f32 h, $2, $1;\ncvt.u32.u16 $0, h; }"
    return ptx(code, *unpack_half(word), results=[i32_t()])[0]


def row_in_e4m3(words):
    """Four words of 16-bit numbers as two of E4M3."""
    narrow = [e4m3_of_half(word) for word in words]
    return [pack_halves(*narrow[:2]), pack_halves(*narrow[2:])]


def f16_of_e4m3(word):
    """A word's four E4M3 numbers as two words of FP16, exactly."""
    code = "{ .reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.rn.f16x2.e4m3x2 $0, l;\ncvt.rn.f16x2.e4m3x2 $1, h; }"
    return ptx(code, word, results=[i32_t()] * 2)


def f16_of_half(word):
    """A word's two 16-bit numbers as FP16: BF16 exactly from 2^-14 up to 65504."""
    return word if half() == "f16" else pack_f16(*unpack_half(word))


def pack_f16(lo, hi):
    return ptx("cvt.rn.f16x2.f32 $0, $2, $1;", lo, hi, results=[i32_t()])[0]


def columns_together(word):
    """Bytes 0, 2, 1, 3 of a word: of two rows of two bytes, two columns."""
    return ptx("prmt.b32 $0, $1, $1, 0x3120;", word, results=[i32_t()])[0]


def mma_f16(acc, a, b0, b1):
    """`mma_half` of FP16 numbers, whatever the program's are."""
    return mma("f16", acc, a, b0, b1)
