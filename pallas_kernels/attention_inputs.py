"""What a warp of the attention kernel reads (see attention_kernel.py): its samples' lengths, where their context lies,
and the queries and the new key, normed and rotated on the way."""

import functools

from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from .attention_cache import Keys, NarrowKeys, NarrowValues, Values
from .attention_plan import KEYS, AttentionPlan


class AttentionInputs:
    """One warp's view of the kernel's arguments."""

    def __init__(self, plan: AttentionPlan, refs, eps: float):
        self.plan, self.eps = plan, eps
        c = plan.config
        self.keys = (Keys if plan.key_bytes == 2 else NarrowKeys)(plan.E)
        self.values = (Values if plan.value_bytes == 2 else NarrowValues)(plan.E)
        self.of_a = Keys(plan.E)  # a head's columns of A lie as keys do
        *named, shared = refs
        names = ["q", "k", "v", "cos", "sin", "prompt_k", "prompt_v", "prompt_of", "prompt_lengths", "own_lengths"]
        names += ["q_norm", "k_norm"] * plan.has_norms + ["a"] * bool(plan.ranks) + ["own_k", "own_v", "out"]
        names += ["hidden"] * bool(plan.ranks)
        self.at = at = {name: mem.global_address(ref) for name, ref in zip(names, named, strict=True)}
        self.base = mem.shared_address(shared)
        self.tid = p.sreg("tid.x")
        self.lane = p.and_(self.tid, 31)
        self.warp = p.uniform(p.shr(self.tid, 5))
        self.g, self.t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        self.team, self.unit = p.div(self.warp, c.units), p.rem(self.warp, c.units)
        cta = p.sreg("ctaid.x")
        self.rank, cluster = p.rem(cta, c.cluster), p.div(cta, c.cluster)
        self.head = p.rem(cluster, plan.K)
        self.first_sample = p.mul(p.div(cluster, plan.K), plan.samples)
        first = p.add(self.first_sample, p.mul(self.unit, c.slots))
        self.samples = [p.add(first, i) for i in range(c.slots)]
        # What must come first is under way together: the queries before the lengths are looked at.
        self.angles = [self.angles_of(sample) for sample in self.samples]
        head = p.add(p.mul(self.head, plan.Q), p.minimum(self.g, plan.Q - 1))
        self.query_rows = [
            self.row_of(mem.wide_offset(at["q"], p.add(p.mul(sample, plan.H), head), plan.row_bytes))
            for sample in self.samples
        ]
        lengths = [self.scalar("own_lengths", sample) for sample in self.samples]
        self.live = [p.select(arith.cmpi(arith.CmpIPredicate.sge, n, p.i32(0)), 1, 0) for n in lengths]
        self.own_lengths = [p.mul(n, alive) for n, alive in zip(lengths, self.live, strict=True)]
        self.any_live = functools.reduce(arith.ori, self.live)
        prompt = self.scalar("prompt_of", first)
        self.prompt_length = p.mul(self.scalar("prompt_lengths", first), self.any_live_of_cta())
        # Where the keys and the values of each region of the context begin: the prompt, then each sample's own.
        places = [("prompt", prompt, plan.P)] + [("own", sample, plan.C) for sample in self.samples]
        self.regions = [
            [
                mem.offset(
                    mem.wide_offset(at[f"{part}_{kv}"], index, positions * plan.K * kept.row_bytes),
                    p.mul(self.head, kept.row_bytes),
                )
                for kv, kept in (("k", self.keys), ("v", self.values))
            ]
            for part, index, positions in places
        ]
        self.lengths = [self.prompt_length, *self.own_lengths]
        self.tiles = [p.shr(p.add(n, KEYS - 1), 4) for n in self.lengths]
        self.deal()
        self.ring = p.add(self.base, p.mul(self.warp, plan.ring_bytes))
        self.all_here = p.add(self.base, plan.barrier_at)

    def any_live_of_cta(self):
        """Whether any of the CTA's samples has not ended, in all its warps."""
        plan = self.plan
        if plan.config.units == 1:
            return self.any_live
        length = self.scalar("own_lengths", p.add(self.first_sample, p.minimum(self.lane, plan.samples - 1)))
        return p.select(p.any_lane(arith.cmpi(arith.CmpIPredicate.sge, length, p.i32(0))), 1, 0)

    def scalar(self, name: str, index):
        return mem.load_global_b32(mem.offset(self.at[name], p.mul(index, 4)), 0)

    def deal(self):
        """This warp's turns in each region: the first one, and how many, one of `stride`. A turn is a tile, but of the
        prompt as many as the CTA has units, one for each warp of a team to load, all for each to multiply.

        The teams take turns through the prompt and go on, from the same one, with each sample's own: how a sample's are
        dealt depends on its lengths alone, not on those of the samples beside it.
        """
        plan, c = self.plan, self.plan.config
        self.stride = c.cluster * plan.teams
        mine = p.add(p.mul(self.rank, plan.teams), self.team)
        turns = [p.div(p.add(self.tiles[0], c.units - 1), c.units), *self.tiles[1:]]
        following = p.rem(p.sub(p.add(mine, self.stride), p.rem(turns[0], self.stride)), self.stride)
        self.firsts = [mine, *[following] * c.slots]
        self.counts = [
            p.select(p.lt(first, turns), p.div(p.add(p.sub(turns, first), self.stride - 1), self.stride), 0)
            for first, turns in zip(self.firsts, turns, strict=True)
        ]

    def region(self, turn):
        """Which region this warp's turn is in, its keys' and values' addresses, length, and the first key of the tile
        that the warp loads."""
        *addresses, length = [*self.regions[0], self.lengths[0]]
        which, before, first = p.i32(0), p.i32(0), self.firsts[0]
        end = self.counts[0]
        for i in range(1, len(self.regions)):
            past = p.lt(turn, end)  # then the region found so far stays
            new = [*self.regions[i], self.lengths[i]]
            *addresses, length = [arith.select(past, a, b) for a, b in zip([*addresses, length], new, strict=True)]
            which, before = p.select(past, which, i), p.select(past, before, end)
            first = p.select(past, first, self.firsts[i])
            end = p.add(end, self.counts[i])
        tile = p.add(first, p.mul(p.sub(turn, before), self.stride))
        if self.plan.config.units > 1:
            tile = p.select(p.eq(which, 0), p.add(self.first_together(turn), self.unit), tile)
        return which, addresses, length, p.mul(tile, KEYS)

    def first_together(self, turn):
        """The first tile of the prompt that this warp's team loads in a turn."""
        return p.mul(p.add(self.firsts[0], p.mul(turn, self.stride)), self.plan.config.units)

    def row_of(self, address):
        """This lane's 16-bit numbers of a row of E, as float32: [chunk][8]."""
        out = []
        for chunk in range(self.plan.E // 32):
            words = mem.load_global_v4(mem.offset(address, p.mul(self.t, 16)), 64 * chunk)
            out.append([value for word in words for value in p.unpack_half(word)])
        return out

    def _floats(self, address, chunks: int):
        """The same of a float32 row."""
        lane = mem.offset(address, p.mul(self.t, 32))
        quads = [mem.load_global_f32x4(lane, 128 * chunk + 16 * half) for chunk in range(chunks) for half in range(2)]
        return [quads[2 * chunk] + quads[2 * chunk + 1] for chunk in range(chunks)]

    def prepared(self, row, norm: str, angles):
        """Norm and rotation of a row of queries or keys, as words of 16-bit numbers [chunk][4]."""
        plan = self.plan
        chunks = plan.E // 32
        if plan.has_norms:
            squares = [arith.mulf(x, x) for chunk in row for x in chunk]
            total = p.over_quad(arith.addf, functools.reduce(arith.addf, squares))
            mean = arith.addf(arith.mulf(total, p.f32(1 / plan.E)), p.f32(self.eps))
            inverse = p.rsqrt(mean)
            scales = self._floats(self.at[norm], chunks)
            row = [
                [p.round_half(arith.mulf(arith.mulf(x, inverse), w)) for x, w in zip(*pair, strict=True)]
                for pair in zip(row, scales, strict=True)
            ]
        cos, sin = angles
        half = chunks // 2
        out = [[None] * 8 for _ in range(chunks)]
        for chunk in range(half):
            for j in range(8):
                a, b, co, si = row[chunk][j], row[chunk + half][j], cos[chunk][j], sin[chunk][j]
                out[chunk][j] = arith.subf(arith.mulf(a, co), arith.mulf(b, si))
                out[chunk + half][j] = arith.addf(arith.mulf(b, co), arith.mulf(a, si))
        return [[p.pack_half(chunk[2 * j], chunk[2 * j + 1]) for j in range(4)] for chunk in out]

    def angles_of(self, sample):
        at = [mem.offset(self.at[name], p.mul(sample, 2 * self.plan.E)) for name in ("cos", "sin")]
        return [self._floats(address, self.plan.E // 64) for address in at]

    def query_fragments(self):
        """The A operand of every k-step: row g is query head g of the first sample, row g + 8 of the second."""
        plan = self.plan
        rows = [self.prepared(row, "q_norm", angles) for row, angles in zip(self.query_rows, self.angles, strict=True)]
        zero = p.i32(0)
        second = rows[1] if len(rows) > 1 else [[zero] * 4] * (plan.E // 32)
        return [
            [self.keys.operand(row[chunk][2 * half + word]) for word in range(2) for row in (rows[0], second)]
            for chunk in range(plan.E // 32)
            for half in range(2)
        ]  # fmt: skip
