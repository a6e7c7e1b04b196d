"""Keys and values as the cache keeps them, in 16 bits or in 8 (E4M3): how the attention kernel writes a new one,
where pieces of a tile lie in shared memory, and what the tensor cores get.

A row is a head's E numbers. Of a row of queries or keys, lane 4 g + t holds numbers 8 t .. 8 t + 7 of each chunk of 32.
E4M3 numbers are multiplied as FP16, which holds them exactly; what they meet, queries or weights, is FP16 too.
"""

import abc

from . import ptx as p
from . import ptx_fp8 as fp8
from . import ptx_memory as mem


class Kept(abc.ABC):
    """What keys and values have in common: a row's bytes, where a tile has them, and the tensor cores' product."""

    number_bytes: int

    def __init__(self, E: int):
        self.E, self.row_bytes = E, E * self.number_bytes
        self.product = p.mma_half if self.number_bytes == 2 else fp8.mma_f16

    @abc.abstractmethod
    def turn(self, row):
        """What the numbers of a row's pieces of 16 bytes are exchanged by, so that rows that are read together fall in
        different banks."""

    def place(self, row, piece):
        """Where a piece of a row lies in a tile."""
        return p.add(p.mul(row, self.row_bytes), p.mul(p.xor(piece, self.turn(row)), 16))

    def write(self, address, t, words):
        """A row, words of 16-bit numbers [chunk][4], to the cache."""
        to = mem.offset(address, p.mul(t, 8 * self.number_bytes))
        for chunk, four in enumerate(words):
            if self.number_bytes == 2:
                mem.store_global_v4(to, four, 64 * chunk)
            else:
                mem.store_global_v2(to, fp8.row_in_e4m3(four), 32 * chunk)


class Keys(Kept):
    """Keys in 16 bits."""

    number_bytes = 2

    def turn(self, row):
        """Halves of 128 bytes for neighbouring rows, of which 64 bytes are read together."""
        return p.mul(p.and_(row, 1), 4)

    def chunks(self, tile, g, t):
        """This lane's address of each chunk of row g."""
        row = p.add(p.add(tile, p.mul(g, self.row_bytes)), p.mul(t, 16))
        swap = p.mul(p.and_(g, 1), 64)
        even, odd = p.add(row, swap), p.sub(row, swap)
        return [(odd if chunk % 2 else even, 64 * chunk) for chunk in range(self.E // 32)]

    def load(self, chunk, rows: int):
        """A chunk's numbers so many rows further on: the B operands of two steps, two words each."""
        address, offset = chunk
        return mem.load_shared_v4(address, offset + rows * self.row_bytes)

    def operand(self, word):
        """Two numbers of a query, or of a new key as it will be read back, for the product."""
        return word

    rounded = operand


class NarrowKeys(Keys):
    """Keys in E4M3."""

    number_bytes = 1

    def _chunks_turned(self, row):
        """Chunks of 32 bytes, which are read of 4 rows together."""
        return p.and_(row, 3) if self.E == 128 else p.and_(p.shr(row, 1), 1)

    def turn(self, row):
        return p.mul(self._chunks_turned(row), 2)

    def chunks(self, tile, g, t):
        row = p.add(p.add(tile, p.mul(g, self.row_bytes)), p.mul(t, 8))
        return [(p.add(row, p.mul(p.xor(self._chunks_turned(g), chunk), 32)), 0) for chunk in range(self.E // 32)]

    def load(self, chunk, rows: int):
        address, offset = chunk
        return [
            half for word in mem.load_shared_v2(address, offset + rows * self.row_bytes)
            for half in fp8.f16_of_e4m3(word)
        ]  # fmt: skip

    def operand(self, word):
        return fp8.f16_of_half(word)

    def rounded(self, word):
        return fp8.f16_of_e4m3(fp8.e4m3_of_half(word))[0]


class Values(Kept):
    """Values in 16 bits. The 16 outputs of a block are two tensor-core tiles: the first 8 and the last 8."""

    number_bytes = 2

    def turn(self, row):
        """ldmatrix reads 8 rows together."""
        return p.and_(row, 7)

    def blocks(self, tile, lane):
        """This lane's address of each block's matrices: keys 0-7 and 8-15 of the first tile, and of the second."""
        matrix, in_row = p.shr(lane, 3), p.and_(lane, 7)
        row = p.add(tile, p.mul(p.add(p.mul(p.and_(matrix, 1), 8), in_row), self.row_bytes))
        places = [
            p.add(row, p.mul(p.xor(p.add(2 * d, p.shr(matrix, 1)), in_row), 16)) for d in range(min(4, self.E // 16))
        ]
        return [(places[d % 4], 128 * (d // 4)) for d in range(self.E // 16)]

    def load(self, blocks):
        """The B operands of all tiles, two words each."""
        for address, offset in blocks:
            b = mem.load_matrices_transposed(address, offset)
            yield b[:2]
            yield b[2:]

    def new_row(self, address, g):
        """Of a 16-bit row this lane's number of each tile, as it will be read back, in the lower half of a word."""
        at = mem.offset(address, p.mul(g, 2))
        return [mem.load_global_u16(at, 16 * tile) for tile in range(self.E // 8)]

    def pack(self, lo, hi):
        """Two weights."""
        return p.pack_half(lo, hi)

    def leave(self, row, t, block: int, first, second):
        """A block's sums of one row, two of each tile, to a float32 row in shared memory."""
        at = p.add(row, p.mul(t, 8))
        mem.store_shared_f32x2(p.add(at, 64 * block), first)
        mem.store_shared_f32x2(p.add(at, 64 * block + 32), second)

    def pieces(self, address, t):
        """This lane's share of a 16-bit row in memory, for `write`."""
        at = mem.offset(address, p.mul(t, 16))
        return [mem.load_global_v4(at, 64 * chunk) for chunk in range(self.E // 32)]


class NarrowValues(Values):
    """Values in E4M3. ldmatrix moves pairs of them, so that the tiles of a block are its even and its odd outputs."""

    number_bytes = 1

    def turn(self, row):
        return p.and_(row, 7) if self.E == 128 else p.and_(p.shr(row, 1), 3)

    def blocks(self, tile, lane):
        """Keys 0-7 and 8-15 of a block and of the next one: a load is two blocks."""
        matrix, in_row = p.shr(lane, 3), p.and_(lane, 7)
        row = p.add(tile, p.mul(p.add(p.mul(p.and_(matrix, 1), 8), in_row), self.row_bytes))
        return [
            (p.add(row, p.mul(p.xor(p.add(d, p.shr(matrix, 1)), self.turn(in_row)), 16)), 0)
            for d in range(0, self.E // 16, 2)
        ]

    def load(self, blocks):
        for address, offset in blocks:
            words = mem.load_matrices_transposed(address, offset)
            even_odd = [fp8.f16_of_e4m3(fp8.columns_together(word)) for word in words]
            for low, high in (even_odd[:2], even_odd[2:]):
                yield low[0], high[0]
                yield low[1], high[1]

    def new_row(self, address, g):
        at, tiles = mem.offset(address, p.mul(g, 4)), []
        for block in range(self.E // 16):
            pair = fp8.f16_of_e4m3(fp8.e4m3_of_half(mem.load_global_b32(at, 32 * block)))[0]
            tiles += [pair, p.shr(pair, 16)]
        return tiles

    def pack(self, lo, hi):
        return fp8.pack_f16(lo, hi)

    def leave(self, row, t, block: int, first, second):
        at = p.add(row, p.mul(t, 16))
        mem.store_shared_f32x4(at, [first[0], second[0], first[1], second[1]], 64 * block)
