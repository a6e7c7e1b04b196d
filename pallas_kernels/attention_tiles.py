"""The arithmetic of the attention kernel (see attention_kernel.py): tiles of keys and values through a ring to the
tensor cores, under a running maximum."""

import functools
import math

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .attention_inputs import AttentionInputs
from .attention_plan import KEYS

LOWEST = -1e30  # finite: the difference of two is 0, not NaN
MARGIN = 8.0  # binary orders by which weights may exceed 1 before the maximum that they are relative to is raised


class AttentionTiles(AttentionInputs):
    """One warp's share of the context. Its state: each sample's maximum and sum of weights, then the weighted sums."""

    def fetch(self, turn, wanted, slot):
        """Starts the copies of one tile into a slot of the ring. Past the end the last key is repeated."""
        plan = self.plan

        def copy():
            _, sources, length, first = self.region(turn)
            to = p.add(self.lane_ring, p.mul(slot, plan.tile_bytes))
            for kept, source in zip((self.keys, self.values), sources, strict=True):
                pieces = kept.row_bytes // 16  # of a row, so a lane has every `32 / pieces`-th row
                piece, its_row = p.rem(self.lane, pieces), p.div(self.lane, pieces)
                for i in range(0, KEYS, 32 // pieces):
                    row = p.add(its_row, i)
                    key = p.minimum(p.add(first, row), p.sub(length, 1))
                    at = p.add(p.mul(key, plan.K * kept.row_bytes), p.mul(piece, 16))
                    place = p.add(to, kept.place(row, piece))
                    mem.copy_async_16(place, mem.offset(source, at), policy=self.policy)
                to = p.add(to, KEYS * kept.row_bytes)

        p.when(wanted, copy)

    def newest(self, state):
        """This step's own key and value: as key i of a tile for sample i, straight from registers; and to the cache."""
        plan, c = self.plan, self.plan.config
        keys, values = [], []
        for i, sample in enumerate(self.samples):
            row = p.add(p.mul(sample, plan.K), self.head)
            at_k, at_v = (mem.wide_offset(self.at[name], row, plan.row_bytes) for name in "kv")
            words = self.prepared(self.row_of(at_k), "k_norm", self.angles[i])
            row = self.values.new_row(at_v, self.g)
            marked = self.infinite(at_v) if p.half_dtype() == "float16" else None  # see `attention.marked`
            if marked is not None:
                words = [[p.select(marked, 0x7FFF7FFF, word) for word in chunk] for chunk in words]
                row = [p.select(marked, 0, word) for word in row]
            keys.append([[self.keys.rounded(word) for word in chunk] for chunk in words])
            values.append(row)

            def write(i=i, words=words, at_v=at_v, marked=marked):
                pieces = self.values.pieces(at_v, self.t)
                if marked is not None:
                    pieces = [[p.select(marked, 0, word) for word in piece] for piece in pieces]
                new = (words, pieces)
                for kept, start, row in zip((self.keys, self.values), self.regions[1 + i], new, strict=True):
                    kept.write(mem.offset(start, p.mul(self.own_lengths[i], plan.K * kept.row_bytes)), self.t, row)

            p.when(p.eq(p.add(p.xor(self.live[i], 1), self.g), 0), write)
        scores = [p.f32(0.0)] * 4
        for step in range(plan.E // 16):
            pair = [
                functools.reduce(
                    lambda other, i, w=w: p.select(p.eq(self.g, i), keys[i][step // 2][2 * (step % 2) + w], other),
                    range(c.slots),
                    p.i32(0),
                )
                for w in range(2)
            ]
            scores = self.keys.product(scores, self.queries[step], *pair)
        # Row g may see key 0, which lane t = 0 holds first; row g + 8 key 1, its second.
        first = p.eq(self.t, 0)
        never = p.eq(self.lane, 32)
        masks = [
            [arith.andi(first, p.eq(alive, 1)) if e == i else never for e in range(2)]
            for i, alive in enumerate(self.live)
        ]
        weights, state = self.soften([scores], [masks], state)
        zero = p.i32(0)
        b = [
            p.select(first, p.pack_halves(v, values[1][d] if c.slots > 1 else zero), 0) for d, v in enumerate(values[0])
        ]
        sums = state[2 * c.slots :]
        for d in range(plan.E // 8):
            at = slice(4 * d, 4 * d + 4)
            sums[at] = self.values.product(sums[at], [*weights[0], zero, zero], b[d], zero)
        return [*state[: 2 * c.slots], *sums]

    def infinite(self, address):
        """Whether a float16 row in memory has a number that is not finite; lanes look at a share each, and all know."""
        words = self.plan.E // 64  # of a lane
        at = mem.offset(address, p.mul(self.lane, 4 * words))
        found = [
            p.eq(p.and_(mem.load_global_b32(at, 4 * i), exponent), exponent)
            for i in range(words) for exponent in (0x7C00, 0x7C000000)
        ]  # fmt: skip
        return p.any_lane(functools.reduce(arith.ori, found))

    # ---- one tile -----------------------------------------------------------------------------------------------

    def scores(self, tile):
        """Of 16 keys, as two tiles of 8; `tile` is where they lie."""
        chunks = self.keys.chunks(tile, self.g, self.t)
        scores = []
        for j in range(2):
            halves = [[p.f32(0.0)] * 4 for _ in range(2)]  # two chains of additions, for half the latency
            for i, chunk in enumerate(chunks):
                b = self.keys.load(chunk, 8 * j)
                for half in range(2):
                    query = self.queries[2 * i + half]
                    halves[half] = self.keys.product(halves[half], query, b[2 * half], b[2 * half + 1])
            scores.append([arith.addf(x, y) for x, y in zip(*halves, strict=True)])
        return scores

    def weigh(self, tile, which, left, scores, state):
        """The state with a tile's values under the weights that its scores give. The tile is of region `which`, of
        whose keys so many are `left` from its first on."""
        c = self.plan.config
        masks = []
        for j in range(2):
            inside = [p.lt(p.add(p.mul(self.t, 2), 8 * j + e), left) for e in range(2)]
            seen = [
                arith.andi(arith.ori(p.eq(which, 0), p.eq(which, 1 + i)), p.eq(self.live[i], 1)) for i in range(c.slots)
            ]
            masks.append([[arith.andi(seen[i], inside[e]) for e in range(2)] for i in range(c.slots)])
        weights, state = self.soften(scores, masks, state)
        a = [weights[0][0], weights[0][1], weights[1][0], weights[1][1]]
        sums = state[2 * c.slots :]
        blocks = self.values.blocks(p.add(tile, KEYS * self.keys.row_bytes), self.lane)
        for d, (b0, b1) in enumerate(self.values.load(blocks)):
            at = slice(4 * d, 4 * d + 4)
            sums[at] = self.values.product(sums[at], a, b0, b1)
        return [*state[: 2 * c.slots], *sums]

    def soften(self, scores, masks, state):
        """Scores of tiles of 8 keys -> their weights relative to the maximum in the state, in pairs [tile][sample], and
        the state, whose maximum has grown, and its sums shrunk, where a weight would be more than 2^MARGIN.

        `masks[tile][sample][e]` says whether the sample sees key 2 t + e of the tile.
        """
        slots = self.plan.config.slots
        factor, lowest = p.f32(math.log2(math.e) / math.sqrt(self.plan.E)), p.f32(LOWEST)
        words = [[p.i32(0), p.i32(0)] for _ in scores]
        for i in range(slots):
            seen = [mask[i] for mask in masks]
            values = [
                [arith.select(m, arith.mulf(tile[2 * i + e], factor), lowest) for e, m in enumerate(mask)]
                for mask, tile in zip(seen, scores, strict=True)
            ]
            top = functools.reduce(arith.maximumf, [v for pair in values for v in pair])
            enough = arith.addf(state[2 * i], p.f32(MARGIN))
            above = arith.cmpf(arith.CmpFPredicate.OGT, top, enough)
            raised = functools.partial(self.raised, i, top, state)
            state = p.if_values(p.any_lane(above), raised, state)
            weights = [
                [arith.select(m, p.exp2(arith.subf(v, state[2 * i])), p.f32(0.0)) for m, v in zip(*pair, strict=True)]
                for pair in zip(seen, values, strict=True)
            ]
            for tile, pair in enumerate(weights):
                words[tile][i] = self.values.pack(*pair)
            total = functools.reduce(arith.addf, [w for pair in weights for w in pair])
            state[2 * i + 1] = arith.addf(state[2 * i + 1], total)
        return words, state

    def raised(self, i: int, top, state):
        """The state with sample i's maximum at least each row's `top` of any lane, and its sums relative to that."""
        state, slots = list(state), self.plan.config.slots
        highest = arith.maximumf(state[2 * i], p.over_quad(arith.maximumf, top))
        scale = p.exp2(arith.subf(state[2 * i], highest))
        state[2 * i] = highest
        sums = [2 * slots + 4 * d + 2 * i + e for d in range(self.plan.E // 8) for e in range(2)]
        for at in (2 * i + 1, *sums):
            state[at] = arith.mulf(state[at], scale)
        return state
