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


class AttentionTiles(AttentionInputs):
    """One warp's share of the context. Its state: each sample's maximum and sum of weights, then the weighted sums."""

    def copy_places(self):
        """Where this lane's 16-byte pieces of a tile lie: `pieces` of a row, so every `32 / pieces`-th row."""
        self.pieces = self.plan.row_bytes // 16
        self.rows_at_once = 32 // self.pieces
        self.piece, self.row = p.rem(self.lane, self.pieces), p.div(self.lane, self.pieces)

    def fetch(self, index, wanted, slot):
        """Starts the copies of one tile into a slot of the ring. Past the end the last key is repeated."""
        plan = self.plan

        def copy():
            _, sources, length, first = self.region(index)
            to = p.add(self.ring, p.mul(slot, plan.tile_bytes))
            for i in range(KEYS // self.rows_at_once):
                row = p.add(self.row, i * self.rows_at_once)
                key = p.minimum(p.add(first, row), p.sub(length, 1))
                at = p.add(p.mul(key, plan.K * plan.row_bytes), p.mul(self.piece, 16))
                places = self._key_piece(row, self.piece), self._value_piece(row, self.piece)
                for which in range(2):
                    target = p.add(p.add(to, which * KEYS * plan.row_bytes), places[which])
                    mem.copy_async_16(target, mem.offset(sources[which], at))

        p.when(wanted, copy)

    def _key_piece(self, row, piece):
        """Neighbouring rows swap halves of 128 bytes, so that two rows' loads of 64 bytes fall in different banks."""
        return p.add(p.mul(row, self.plan.row_bytes), p.mul(p.xor(piece, p.mul(p.and_(row, 1), 4)), 16))

    def _value_piece(self, row, piece):
        """The pieces of 8 rows that ldmatrix reads together fall in different banks."""
        return p.add(p.mul(row, self.plan.row_bytes), p.mul(p.xor(piece, p.and_(row, 7)), 16))

    def newest(self, state):
        """This step's own key and value: as key i of a tile for sample i, straight from registers; and to the cache."""
        plan, c = self.plan, self.plan.config
        keys, values = [], []
        for i, sample in enumerate(self.samples):
            row = p.add(p.mul(sample, plan.K), self.head)
            at_k, at_v = (mem.wide_offset(self.at[name], row, plan.row_bytes) for name in "kv")
            words = self.prepared(self.row_of(at_k), "k_norm", self.angles[i])
            keys.append(words)
            values.append([mem.load_global_u16(mem.offset(at_v, p.mul(self.g, 2)), 16 * d) for d in range(plan.E // 8)])

            def write(i=i, words=words, at_v=at_v):
                place = p.mul(self.own_lengths[i], plan.K * plan.row_bytes)
                to_k, to_v = (mem.offset(mem.offset(a, place), p.mul(self.t, 16)) for a in self.regions[1 + i])
                for chunk in range(plan.E // 32):
                    mem.store_global_v4(to_k, words[chunk], 64 * chunk)
                    raw = mem.load_global_v4(mem.offset(at_v, p.mul(self.t, 16)), 64 * chunk)
                    mem.store_global_v4(to_v, raw, 64 * chunk)

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
            scores = p.mma_bf16(scores, self.queries[step], *pair)
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
            sums[4 * d : 4 * d + 4] = p.mma_bf16(sums[4 * d : 4 * d + 4], [*weights[0], zero, zero], b[d], zero)
        return [*state[: 2 * c.slots], *sums]

    # ---- one tile -----------------------------------------------------------------------------------------------

    def tile(self, index, slot, state):
        """Scores of 16 keys, their weights, and the values under them."""
        plan, c = self.plan, self.plan.config
        which, _, length, first = self.region(index)
        keys_at = p.add(self.ring, p.mul(slot, plan.tile_bytes))
        values_at = p.add(keys_at, KEYS * plan.row_bytes)
        swap = p.mul(p.and_(self.g, 1), 64)
        row = p.add(p.add(keys_at, p.mul(self.g, plan.row_bytes)), p.mul(self.t, 16))
        even, odd = p.add(row, swap), p.sub(row, swap)
        scores = []
        for j in range(2):
            halves = [[p.f32(0.0)] * 4 for _ in range(2)]  # two chains of additions, for half the latency
            for chunk in range(plan.E // 32):
                b = mem.load_shared_v4(odd if chunk % 2 else even, 8 * j * plan.row_bytes + 64 * chunk)
                for half in range(2):
                    query = self.queries[2 * chunk + half]
                    halves[half] = p.mma_bf16(halves[half], query, b[2 * half], b[2 * half + 1])
            scores.append([arith.addf(x, y) for x, y in zip(*halves, strict=True)])
        left = p.sub(length, first)
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
        matrix, in_row = p.shr(self.lane, 3), p.and_(self.lane, 7)
        key = p.add(p.mul(p.and_(matrix, 1), 8), in_row)
        row = p.add(values_at, p.mul(key, plan.row_bytes))
        places = [
            p.add(row, p.mul(p.xor(p.add(2 * d, p.shr(matrix, 1)), in_row), 16)) for d in range(min(4, plan.E // 16))
        ]
        for d in range(plan.E // 16):
            b = mem.load_matrices_transposed(places[d % 4], 128 * (d // 4))
            for half in range(2):
                at = slice(8 * d + 4 * half, 8 * d + 4 * half + 4)
                sums[at] = p.mma_bf16(sums[at], a, b[2 * half], b[2 * half + 1])
        return [*state[: 2 * c.slots], *sums]

    def soften(self, scores, masks, state):
        """Scores of tiles of 8 keys -> their weights relative to the new running maximum, as BF16 pairs [tile][sample],
        and the state with its sums scaled to that maximum.

        `masks[tile][sample][e]` says whether the sample sees key 2 t + e of the tile.
        """
        plan, slots = self.plan, self.plan.config.slots
        factor = p.f32(math.log2(math.e) / math.sqrt(plan.E))
        lowest = p.f32(LOWEST)
        state = list(state)
        words = [[p.i32(0), p.i32(0)] for _ in scores]
        scales = []
        for i in range(slots):
            highest, total = state[2 * i], state[2 * i + 1]
            values = [[arith.mulf(tile[2 * i + e], factor) for e in range(2)] for tile in scores]
            seen = [mask[i] for mask in masks]
            values = [
                [arith.select(*of, lowest) for of in zip(*pair, strict=True)] for pair in zip(seen, values, strict=True)
            ]
            top = functools.reduce(arith.maximumf, [v for pair in values for v in pair])
            top = arith.maximumf(highest, p.over_quad(arith.maximumf, top))
            scale = p.exp2(arith.subf(highest, top))
            weights = [
                [arith.select(m, p.exp2(arith.subf(v, top)), p.f32(0.0)) for m, v in zip(*pair, strict=True)]
                for pair in zip(seen, values, strict=True)
            ]
            for tile, pair in enumerate(weights):
                words[tile][i] = p.pack_bf16(*pair)
            total = arith.addf(
                arith.mulf(total, scale), functools.reduce(arith.addf, [w for pair in weights for w in pair])
            )
            state[2 * i], state[2 * i + 1] = top, total
            scales.append(scale)
        for d in range(plan.E // 8):
            for i in range(slots):
                for e in range(2):
                    at = 2 * slots + 4 * d + 2 * i + e
                    state[at] = arith.mulf(state[at], scales[i])
        return words, state
