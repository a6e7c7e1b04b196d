"""One decoding step's attention: a query per sample over its prompt's keys and values and over its own.

Letters: B samples, H query heads, K key-value heads, Q = H / K query heads on each, E head size, N prompts of P slots,
C slots of a completion.

A cluster of CTAs does one unit, `slots` samples (with a common prompt) x one key-value head; their Q <= 8 queries each
are the 16 rows of a tensor-core tile. The unit's context, first the prompt's tiles of 16 keys, then each sample's own,
is dealt out to the warps of all CTAs in turn. A warp streams its tiles through a ring in shared memory (cp.async), and
keeps a running maximum, sum and weighted sum of values (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022,
arXiv 2205.14135). Then the partial results meet, first in the CTA, then in the cluster, and are added in a fixed order.

The queries and the step's own key come as the projections left them: their per-head norm (Qwen3) and their rotation
happen here, and the step's key and value are written to the cache in place, which nothing else of this step reads.

Fragments (m16n8k16; lane = 4 g + t): a row of E numbers is cut into chunks of 32; lane t holds numbers 8 t .. 8 t + 7
of each chunk, the same for queries and keys, so that a lane's load is two k-steps, and a rotation's two halves (E / 2
apart) are in one lane. Values come through ldmatrix, transposed. The cache has the queries' dtype or, keys,
values or both, E4M3 (attention_cache.py).
"""

import functools

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from .attention_plan import KEYS, AttentionPlan
from .attention_tiles import LOWEST, AttentionTiles
from .fragment_order import unit_place


class _Warp(AttentionTiles):
    """One warp's program, from its share of the context to the outputs."""

    def run(self):
        plan, c = self.plan, self.plan.config
        count = functools.reduce(p.add, self.counts)
        if c.cluster > 1:
            p.when(p.eq(self.tid, 0), self.make_barrier)
            p.warp_sync()
            p.cluster_arrive()
        for d in range(c.depth - 1):
            self.fetch(p.i32(d), p.lt(d, count), p.i32(d))
            mem.copy_commit()
        if c.cluster > 1:
            p.cluster_wait()  # the others' barriers are made
        self.queries = self.query_fragments()
        state = [p.f32(LOWEST), p.f32(0.0)] * c.slots + [p.f32(0.0)] * (plan.E // 2)
        last = p.eq(p.add(self.firsts[0], 1), self.stride)  # the prompt's tiles are dealt from the first warp on
        state = p.if_values(last, lambda: self.newest(state), state)

        def fetch_ahead(i, spare):
            ahead = p.add(i, c.depth - 1)
            self.fetch(ahead, p.lt(ahead, count), spare)
            mem.copy_commit()

        def together(i, slot, spare, state):
            """A turn of the prompt's: all tiles that the team has loaded."""
            self.team_sync()
            fetch_ahead(i, spare)
            rings = p.add(self.base, p.mul(self.team, c.units * plan.ring_bytes))
            first = self.first_together(i)

            def one(unit, state):
                tile = p.add(p.add(rings, p.mul(unit, plan.ring_bytes)), p.mul(slot, plan.tile_bytes))
                left = p.sub(self.prompt_length, p.mul(p.add(first, unit), KEYS))
                return self.weigh(tile, p.i32(0), left, self.scores(tile), state)

            tiles = p.mul(p.minimum(p.sub(self.tiles[0], first), c.units), self.any_live)
            return p.for_range(0, tiles, 1, state, one)

        def alone(i, slot, spare, state):
            """A turn that is a tile of the warp's own."""
            p.warp_sync()
            tile = p.add(self.ring, p.mul(slot, plan.tile_bytes))
            scores = self.scores(tile)
            fetch_ahead(i, spare)
            which, _, length, first = self.region(i)
            return self.weigh(tile, which, p.sub(length, first), scores, state)

        def turns(turn, start, end, carry):
            def step(i, carry):
                slot, spare, *state = carry
                mem.copy_wait(c.depth - 2)
                state = turn(i, slot, spare, state)
                after = p.add(slot, 1)
                return [p.select(p.eq(after, c.depth), 0, after), slot, *state]

            return p.for_range(start, end, 1, carry, step)

        carry = [p.i32(0), p.i32(c.depth - 1), *state]
        if c.units > 1:
            carry = turns(together, 0, self.counts[0], carry)
            self.team_sync()  # the warp's ring is its own from here on
            carry = turns(alone, self.counts[0], count, carry)
        else:
            carry = turns(alone, 0, count, carry)
        state = carry[2:]
        mem.copy_wait_all()
        p.warp_sync()
        self.leave(state)
        p.cta_sync()
        self.merge()

    def team_sync(self):
        """What the team's warps have copied is there, and the tiles before are multiplied."""
        p.named_sync(p.add(self.team, 1), 32 * self.plan.config.units)  # barrier 0 is the CTA's

    def make_barrier(self):
        """It counts the bytes of what the cluster's CTAs send."""
        mem.barrier_init(self.all_here, 1)
        mem.barrier_expect(self.all_here, p.i32(self.plan.received_bytes))
        mem.fence_barrier_init()

    # ---- the end ------------------------------------------------------------------------------------------------

    def leave(self, state):
        """This warp's partial result to the place of its ring."""
        plan, c = self.plan, self.plan.config
        for i in range(c.slots):
            row = p.add(self.g, 8 * i)
            at = p.add(self.ring, p.mul(row, plan.partial_stride))
            for block in range(plan.E // 16):
                first, second = (state[2 * c.slots + 4 * d + 2 * i :][:2] for d in (2 * block, 2 * block + 1))
                self.values.leave(at, self.t, block, first, second)
            total = p.over_quad(arith.addf, state[2 * i + 1])

            def write(row=row, i=i, total=total):
                at = p.add(self.ring, p.add(p.mul(row, 4), plan.rows * plan.partial_stride))
                mem.store_shared_f32(at, state[2 * i], 0)
                mem.store_shared_f32(at, total, 4 * plan.rows)

            p.when(p.eq(self.t, 0), write)

    def merge(self):
        """The CTA's warps' results become one. Alone, it is the output; in a cluster each CTA gets all CTAs' results of
        an equal share of the outputs, and adds them up."""
        plan, c = self.plan, self.plan.config
        pairs, threads = plan.E // 2, c.warps * 32
        rows = c.units * plan.rows
        owned = rows * pairs // c.cluster
        received = p.add(self.base, plan.received_at)

        def of_warps(index, _):
            row, pair = p.div(index, pairs), p.rem(index, pairs)
            unit, of_unit = p.div(row, plan.rows), p.rem(row, plan.rows)
            warps = [p.add(unit, team * c.units) for team in range(plan.teams)]
            joined = _join([self.of_warp(p.add(self.base, p.mul(w, plan.ring_bytes)), of_unit, pair) for w in warps])
            if c.cluster == 1:
                self.store(row, pair, *joined[1:])
            else:
                owner, place = p.div(index, owned), p.add(p.mul(self.rank, owned), p.rem(index, owned))
                to = p.add(received, p.mul(place, 16))
                mem.send_f32x4(mem.map_rank(to, owner), joined, mem.map_rank(self.all_here, owner))
            return []

        p.for_range(self.tid, rows * pairs, threads, [], of_warps)
        if c.cluster == 1:
            return
        mem.barrier_wait(self.all_here, p.i32(0))

        def of_ctas(local, _):
            index, at = p.add(p.mul(self.rank, owned), local), p.add(received, p.mul(local, 16))
            joined = _join([mem.load_shared_f32x4(at, 16 * owned * r) for r in range(c.cluster)])
            self.store(p.div(index, pairs), p.rem(index, pairs), *joined[1:])
            return []

        p.for_range(self.tid, owned, threads, [], of_ctas)

    def of_warp(self, place, row, pair):
        """A warp's partial result of a pair of outputs: maximum, sum of weights, weighted sums."""
        plan = self.plan
        head = p.add(place, p.add(p.mul(row, 4), plan.rows * plan.partial_stride))
        at = p.add(place, p.add(p.mul(row, plan.partial_stride), p.mul(pair, 8)))
        return [*(mem.load_shared_f32(head, 4 * plan.rows * i) for i in range(2)), *mem.load_shared_f32x2(at)]

    def store(self, row, pair, total, *sums):
        """A pair of outputs; zeros for a sample that has ended."""
        plan = self.plan
        head, sample = p.and_(row, 7), p.add(self.first_sample, p.shr(row, 3))

        def write():
            inverse = arith.divf(p.f32(1.0), arith.maximumf(total, p.f32(1e-30)))
            index = p.add(p.mul(sample, plan.H), p.add(p.mul(self.head, plan.Q), head))
            column = p.mul(pair, 2)
            place = unit_place(column) if plan.in_units else column
            at = mem.offset(mem.wide_offset(self.at["out"], index, plan.row_bytes), p.mul(place, 2))
            mem.store_global_halfx2(at, *(arith.mulf(s, inverse) for s in sums))

        p.when(p.lt(head, plan.Q), write)


def _join(parts):
    """Partial results of a pair of outputs, each a maximum, a sum of weights and two weighted sums, added in order."""
    top = functools.reduce(arith.maximumf, [part[0] for part in parts])
    scales = [p.exp2(arith.subf(part[0], top)) for part in parts]
    return [top, *p.total([[arith.mulf(s, v) for v in part[1:]] for s, part in zip(scales, parts, strict=True)])]


@functools.cache
def build(plan: AttentionPlan, eps: float | None = None, dtype: str = "bfloat16"):
    """The kernel as a function (q [B, H * E], k [B, K * E], v [B, K * E], cos [B, E / 2], sin [B, E / 2],
    prompt_k [N, P, K, E], prompt_v, prompt_of [B], prompt_lengths [B], own_lengths [B], [q_norm [E], k_norm [E]],
    own_k [B, C, K, E], own_v) -> (out [B, H * E], own_k, own_v): the last two in place. `eps` is that of the norms,
    `dtype` that of queries, new keys and values, and results.
    """
    c = plan.config

    def decode_attention(_, *refs):
        _Warp(plan, refs, eps or 0.0).run()

    call = lane_level.kernel(
        decode_attention,
        jax.ShapeDtypeStruct((plan.B, plan.H * plan.E), jnp.dtype(dtype)),
        dtype,
        grid=plan.ctas // c.cluster,
        warps=c.warps,
        cluster=c.cluster,
        shared=plan.total,
    )

    def run(*arrays):
        *inputs, own_k, own_v = arrays
        own_k, own_v = jax.new_ref(own_k), jax.new_ref(own_v)
        out = call(*inputs, own_k, own_v)
        return out, jax.freeze(own_k), jax.freeze(own_v)

    return jax.jit(run)
