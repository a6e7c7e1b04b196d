"""B of LoRA for the block kernel's outputs (block_outputs.py): what a warp holds of it through a part's products, and
what comes after them.

A warp asks for B of the first entry that it finishes before x is there, in registers: beside the stream of weights a
load takes 2 us. For many ranks there are not enough of them. What is *late* the L2 fetches while weights stream, not
before, where x would wait behind it; and the warp loads it when its products are done.
"""

import itertools
from typing import Any, NamedTuple

from . import ptx as p
from . import ptx_memory as mem
from .block_plan import PANEL, BlockPlan
from .layout import ROWS
from .pick import pick


class OutputWeight(NamedTuple):
    """What outputs need of their weight: its scale, bias, B and LoRA's scaling (or anything where it has none); where
    they are stored; place of its x A^T, number of its 16 ranks, whether it is biased, and number of its outputs."""

    scale: Any
    bias: Any
    b: Any
    lora_scale: Any
    out: Any
    h: Any
    rank_tiles: Any
    is_biased: Any
    n: Any


class LoraOutputs:
    """The part of a CTA's program that loads B. The CTA's class sets the attributes before."""

    plan: BlockPlan

    def entry_of(self, i: int, n):
        """The n-th of the CTA's entries that it finishes: all, or, with slices, those that its turn is for."""
        slices = self.plan.parts[i].slices
        return n if slices == 1 else p.add(p.mul(n, slices), self.shares[i].slice)

    def finished_by(self, i: int):
        """How many entries this CTA finishes."""
        part, share = self.plan.parts[i], self.shares[i]
        return p.div(p.sub(p.add(share.entries, part.slices - 1), share.slice), part.slices)

    def each(self, count, most: int, body):
        """body(n, which of this warp's it is) for n < count, warp after warp."""
        for turn, first in enumerate(range(0, most, self.plan.warps)):
            n = p.add(self.warp, first)
            p.when(p.lt(n, count), lambda n=n, turn=turn: body(n, turn))

    def place_of(self, i: int, n):
        """Of the n-th entry that this CTA finishes among all CTAs' entries, or, where there is none, of any."""
        return p.minimum(p.add(self.shares[i].first, self.entry_of(i, n)), self.plan.parts[i].entries - 1)

    def weights_at(self, i: int, at):
        """The weights that have outputs of tile (or pair of tiles) `at`, and the tile in each."""
        part = self.plan.parts[i]
        weights = [self.output_weight(i, w) for w in range(len(self.weights[i]))]
        if part.paired:
            return [(weight, at) for weight in weights]
        values, tile = pick(part.tiles_of, at, weights)
        return [(OutputWeight(*values), tile)]

    def output_weight(self, i: int, w: int):
        part, weight = self.plan.parts[i], self.weights[i][w]
        out = self.outs.get(f"y{w}" if i + 1 == len(self.plan.parts) and not part.joins else f"x{i + 1}", weight.scale)
        optional = [weight.scale if v is None else v for v in (weight.bias, weight.b, weight.lora_scale)]
        numbers = sum(part.rank_tiles[:w]) * PANEL * ROWS * 2, part.rank_tiles[w], int(part.biased[w]), part.n[w]
        return OutputWeight(weight.scale, *optional, out, *map(p.i32, numbers))

    def held_b(self, i: int, n, weight: OutputWeight, tile):
        """B of a weight of the n-th entry, of the ranks that registers are held for."""
        part = self.plan.parts[i]
        held = range(min(part.held_tiles, max(part.rank_tiles)))
        if part.late_tiles:  # with few ranks it costs more to ask than to load it for nothing
            weight = weight._replace(rank_tiles=p.select(p.lt(n, self.finished_by(i)), weight.rank_tiles, 0))
        return self.b_words(weight, tile, held)

    def late_b(self, i: int, n):
        """The rest of B, of each weight of the n-th entry."""
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

    def b_words(self, weight: OutputWeight, tile, rank_tiles: range):
        """This lane's words of so many times 16 ranks, zeros of those that the adapter has not."""
        low, high = self.rows_of_b(weight, tile, 8)
        zeros = [p.i32(0)] * 4

        def load(j: int):
            a, c = mem.load_global_v2(low, j * 32), mem.load_global_v2(high, j * 32)
            return [a[0], c[0], a[1], c[1]]

        return [p.if_values(p.lt(j, weight.rank_tiles), lambda j=j: load(j), zeros) for j in rank_tiles]

    def rows_of_b(self, weight: OutputWeight, tile, piece: int):
        """Where this lane's pieces, of so many bytes, lie in its two rows of a tile, of the first ranks."""
        row, stride = p.add(p.mul(tile, ROWS), self.g), p.mul(weight.rank_tiles, 32)
        low = mem.offset(weight.b, p.add(p.mul(row, stride), p.mul(self.t, piece)))
        return low, mem.offset(low, p.mul(stride, 8))
