"""Tensor-core operands of the wide kernel, decoded from the shared-memory copy of a weight block.

A block is what one CTA multiplies between two steps of its ring, 128 inputs of 128 outputs: 8 row tiles x one pair of
units of a quad, 9216 bytes of KernelWeight, as codes [8 tiles][1024 B] and then scales [8 tiles][128 B]. Forward,
x W^T, the row tiles are outputs and the units inputs; for dx = dy W the other way round.

Unlike the streaming kernel's x, the other operand comes in its own order, by the copy engine. So forward, a lane must
take the codes of columns 2 t, 2 t + 1 (and 8 more) of all four scale blocks of a unit, which lie with the four lanes of
its group: it loads each of their 16 bytes in turn (a broadcast) and takes the halves of two words that it needs. For dx
the operand is W^T: each 8 x 8 piece of decoded numbers is transposed by one instruction (movmatrix), and the order of
the outputs inside a unit is what `dx_row` says.
"""

from . import ptx as p
from . import ptx_memory as mem
from .fragments import EACH_TWICE, decode_codes, decode_scales, decoding
from .ptx_tensor import transpose_8x8

BLOCK = 128  # inputs
BLOCK_BYTES = 9216
SCALES_AT = 8192


class ForwardFragments:
    """W's rows as the left operand: warp `w` of warpgroup `group` has row tile 4 group + w of the block."""

    def __init__(self, lane, warp, group):
        g, t = p.shr(lane, 2), p.and_(lane, 3)
        tile = p.add(p.mul(group, 4), warp)
        self.codes_at = p.add(p.mul(tile, 1024), p.mul(g, 64))
        self.scales_at = p.add(p.add(p.mul(tile, 128), p.mul(g, 16)), SCALES_AT)
        self.second = p.eq(p.shr(t, 1), 1)
        odd = p.eq(p.and_(t, 1), 1)

        def by_parity(pair):
            even, odd_value = (value - 2**32 if value >= 2**31 else value for value in pair)
            return p.select(odd, p.i32(odd_value), p.i32(even))

        # Lane t takes of a word the pairs 0 and 1 where t is even, 2 and 3 where it is odd (see layout.py): a rotation
        # and a mask for row g; for row g + 8 a rotation, its mask, and a mask of the word as it stands.
        made = decoding()
        self.low_turn, self.low_mask = by_parity(made.turns[0::2]), made.turned_mask(0)
        self.high_turn = by_parity(made.turns[1::2])
        self.high_mask = by_parity([made.turned_mask(pair) for pair in (1, 3)])
        self.direct_mask = by_parity([made.direct_mask(pair) for pair in (1, 3)])
        self.row = lambda h: p.add(p.add(p.mul(warp, 16), g), 8 * h)

    def load(self, block, step: int):
        """What unit `step` of the pair needs, from shared memory: words of the four scale blocks, scale words."""
        at = p.add(block, self.codes_at)
        words = [mem.load_shared_v4(at, 512 * step + 16 * b) for b in range(4)]
        return words, mem.load_shared_v4(p.add(block, self.scales_at), 0)

    def decode(self, loaded, step: int):
        """Four left operands, one for each 16 columns."""
        words, scales = loaded
        which = p.i32(0x4342 if step else 0x4140)
        out = []
        for b in range(4):
            pair = decode_scales(scales[b], which)
            near = p.select(self.second, words[b][1], words[b][0])
            far = p.select(self.second, words[b][3], words[b][2])
            out.append([*self._pairs(near, pair), *self._pairs(far, pair)])
        return out

    def _pairs(self, word, scales):
        """Two columns of rows g and g + 8."""
        return p.ptx(
            f"{{ .reg .b32 a, b, c;\n{EACH_TWICE.format('$3')}"
            f"shf.l.wrap.b32 a, $2, $2, $4;\nand.b32 a, a, {self.low_mask:#x};\n"
            "shf.l.wrap.b32 b, $2, $2, $5;\nand.b32 c, $2, $7;\nlop3.b32 b, b, $6, c, 0xea;\n"
            f"mul.rn.{p.half()}x2 $0, a, lo;\nmul.rn.{p.half()}x2 $1, b, hi;\n}}",
            word,
            scales,
            self.low_turn,
            self.high_turn,
            self.high_mask,
            self.direct_mask,
            results=[p.i32_t()] * 2,
            effects=True,
        )


class UnitFragments:
    """The same with x in unit order (fragment_order.py): a lane's 16 bytes of a unit are all that it needs."""

    def __init__(self, lane, warp, group):
        tile = p.add(p.mul(group, 4), warp)
        self.codes_at = p.add(p.mul(tile, 1024), p.mul(lane, 16))
        self.scales_at = p.add(p.add(p.mul(tile, 128), p.mul(lane, 4)), SCALES_AT)
        self.row = lambda h: p.add(p.add(p.mul(warp, 16), p.shr(lane, 2)), 8 * h)

    def load(self, block, step: int):
        codes = mem.load_shared_v4(p.add(block, self.codes_at), 512 * step)
        return codes, mem.load_shared_b32(p.add(block, self.scales_at), 0)

    def decode(self, loaded, step: int):
        """Four left operands, one for each 16 columns in unit order."""
        words, scale = loaded
        pair = decode_scales(scale, p.i32(0x4342 if step else 0x4140))
        return [decode_codes(word, pair, in_place=True) for word in words]


class TransposedFragments:
    """W^T's rows as the left operand: warpgroup `group` has unit `group` of the pair, warp `w` the words w."""

    def __init__(self, lane, warp, group):
        g = p.shr(lane, 2)
        self.codes_at = p.add(p.mul(group, 512), p.add(p.mul(lane, 16), p.mul(warp, 4)))
        self.scales_at = p.add(p.mul(lane, 4), SCALES_AT)
        self.which = p.select(p.eq(group, 1), p.i32(0x4342), p.i32(0x4140))
        self.row = lambda h: dx_row(warp, g, h)

    def load(self, block, step: int):
        codes, scales = p.add(block, self.codes_at), p.add(block, self.scales_at)
        tiles = range(4 * step, 4 * step + 4)
        words = [mem.load_shared_b32(codes, tile * 1024) for tile in tiles]
        return words, [mem.load_shared_b32(scales, tile * 128) for tile in tiles]

    def decode(self, loaded, step: int):
        """Four left operands, one for each row tile: 16 inputs x 16 outputs of W, transposed."""
        out = []
        for word, scale in zip(*loaded, strict=True):
            pairs = decode_codes(word, decode_scales(scale, self.which), in_place=True)
            out.append([transpose_8x8(pairs[i]) for i in (0, 2, 1, 3)])
        return out


def dx_row(warp, g, h: int):
    """The column of W inside a unit that row 16 warp + 8 h + g of the transposed operand holds."""
    block = p.mul(p.shr(g, 1), 16)
    return p.add(p.add(block, p.mul(warp, 4)), p.add(p.and_(g, 1), 2 * h))
