"""B of LoRA for the block kernel's outputs (block_outputs.py): what a warp holds of it through a part's products, and
what comes after them.

A warp asks for B of the first entry that it finishes before x is there, in registers: beside the stream of weights a
load takes 2 us. For many ranks there are not enough of them. What is *late* the L2 fetches while weights stream, not
before, where x would wait behind it; and the warp loads it when its products are done.
"""

import itertools

from . import ptx as p
from . import ptx_memory as mem
from .block_plan import BlockPlan
from .layout import ROWS


class LoraWarps:
    """The part of a CTA's program that loads B. The CTA's class sets the attributes before; an entry's weights are what
    `OutputTiles.weights_at` gives."""

    plan: BlockPlan

    def held_b(self, i: int, n, weight, tile):
        """B of a weight of the n-th entry, of the ranks that registers are held for."""
        part = self.plan.parts[i]
        held = range(min(part.held_tiles, max(part.rank_tiles)))
        if part.late_tiles:  # with few ranks it costs more to ask than to load it for nothing
            weight = weight._replace(rank_tiles=p.select(p.lt(n, self.finished_by(i)), weight.rank_tiles, 0))
        return self.b_words(weight, tile, held)

    def late_b(self, i: int, n):
        """The rest of B, of each weight of the n-th entry; nothing where all of it is held."""
        part = self.plan.parts[i]
        if not part.late_tiles:
            return []
        weights = self.weights_at(i, self.place_of(i, p.opaque(n)))  # opaque: found again, or addresses would be held

        def load():
            words = [self.b_words(weight, tile, part.late_tiles) for weight, tile in weights]
            return list(itertools.chain(*itertools.chain(*words)))

        zeros = [p.i32(0)] * (4 * len(part.late_tiles) * len(weights))
        words = iter(p.if_values(p.lt(n, self.finished_by(i)), load, zeros))
        return [[[next(words) for _ in range(4)] for _ in part.late_tiles] for _ in weights]

    def prefetch_late_b(self, i: int):
        """Of all entries that this warp finishes, to the L2: a lane asks for 16 ranks of its rows at a time."""
        part = self.plan.parts[i]

        def prefetch(n, _):
            for weight, tile in self.weights_at(i, self.place_of(i, n)):
                places = self.rows_of_b(weight, tile, 32)
                for first in part.late_tiles[::4]:
                    has = p.lt(p.add(self.t, first), weight.rank_tiles)
                    p.when(has, lambda first=first, places=places: [mem.prefetch(at, first * 32) for at in places])

        if part.late_tiles:
            self.each(self.finished_by(i), part.most_finished, prefetch)

    def b_words(self, weight, tile, rank_tiles: range):
        """This lane's words of so many times 16 ranks, zeros of those that the adapter has not."""
        low, high = self.rows_of_b(weight, tile, 8)
        zeros = [p.i32(0)] * 4

        def load(j: int):
            a, c = mem.load_global_v2(low, j * 32), mem.load_global_v2(high, j * 32)
            return [a[0], c[0], a[1], c[1]]

        return [p.if_values(p.lt(j, weight.rank_tiles), lambda j=j: load(j), zeros) for j in rank_tiles]

    def rows_of_b(self, weight, tile, piece: int):
        """Where this lane's pieces, of so many bytes, lie in its two rows of a tile, of the first ranks."""
        row, stride = p.add(p.mul(tile, ROWS), self.g), p.mul(weight.rank_tiles, 32)
        low = mem.offset(weight.b, p.add(p.mul(row, stride), p.mul(self.t, piece)))
        return low, mem.offset(low, p.mul(stride, 8))
