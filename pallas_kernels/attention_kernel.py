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

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from .attention_outputs import AttentionOutputs
from .attention_plan import KEYS, AttentionPlan
from .attention_tiles import LOWEST
from .hidden import hidden_shape


class _Warp(AttentionOutputs):
    """One warp's program, from its share of the context to the outputs."""

    def run(self):
        plan, c = self.plan, self.plan.config
        count = functools.reduce(p.add, self.counts)
        if c.cluster > 1:
            p.when(p.eq(self.tid, 0), self.make_barrier)
            p.warp_sync()
            p.cluster_arrive()
        self.lane_ring = mem.per_lane(self.ring, self.lane)
        self.policy = mem.read_once() if plan.reads_once else None
        slot = first_slot = mem.per_lane(self.first_slot(count), self.lane)
        for d in range(c.depth - 1):
            self.fetch_next(p.i32(d), count, slot)
            slot = self.after(slot)
        if c.cluster > 1:
            p.cluster_wait()  # the others' barriers are made
        self.queries = self.query_fragments()
        state = [p.f32(LOWEST), p.f32(0.0)] * c.slots + [p.f32(0.0)] * (plan.E // 2)
        last = p.eq(p.add(self.firsts[0], 1), self.stride)  # the prompt's tiles are dealt from the first warp on
        state = p.if_values(last, lambda: self.newest(state), state)

        def fetch_ahead(i, spare):
            self.fetch_next(p.add(i, c.depth - 1), count, spare)

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
                return [self.after(slot), slot, *state]

            return p.for_range(start, end, 1, carry, step)

        carry = [first_slot, slot, *state]
        if c.units > 1:
            carry = turns(together, 0, self.counts[0], carry)
            self.team_sync()  # the warp's ring is its own from here on
            carry = turns(alone, self.counts[0], count, carry)
        else:
            carry = turns(alone, 0, count, carry)
        state = carry[2:]
        p.warp_sync()
        self.leave(state)
        p.cta_sync()
        self.merge()
        if plan.ranks:
            self.multiply_by_a()

    def first_slot(self, count):
        """Of the ring, for the first of so many tiles: A comes behind them, in the last slot."""
        last = self.plan.config.depth - 1
        return p.sub(last, p.rem(count, last + 1)) if self.plan.ranks else p.i32(0)

    def after(self, slot):
        following = p.add(slot, 1)
        return p.select(p.eq(following, self.plan.config.depth), 0, following)

    def fetch_next(self, turn, count, slot):
        """The copies of a tile, or of A behind the last one, as a group."""
        self.fetch(turn, p.lt(turn, count), slot)
        if self.plan.ranks:
            p.when(p.eq(turn, count), self.fetch_a)
        mem.copy_commit()

    def team_sync(self):
        """What the team's warps have copied is there, and the tiles before are multiplied."""
        p.named_sync(p.add(self.team, 1), 32 * self.plan.config.units)  # barrier 0 is the CTA's

    def make_barrier(self):
        """It counts the bytes of what the cluster's CTAs send."""
        mem.barrier_init(self.all_here, 1)
        mem.barrier_expect(self.all_here, p.i32(self.plan.received_bytes))
        mem.fence_barrier_init()


def attention_outs(plan: AttentionPlan, dtype: str = "bfloat16") -> list[jax.ShapeDtypeStruct]:
    """What the kernel writes beside the caches."""
    outs = [jax.ShapeDtypeStruct((plan.B, plan.H * plan.E), jnp.dtype(dtype))]
    return [*outs, hidden_shape(plan.H, plan.ranks, plan.B)] if plan.ranks else outs


@functools.cache
def build(plan: AttentionPlan, eps: float | None = None, dtype: str = "bfloat16"):
    """The kernel as a function (q [B, H * E], k [B, K * E], v [B, K * E], cos [B, E / 2], sin [B, E / 2],
    prompt_k [N, P, K, E], prompt_v, prompt_of [B], prompt_lengths [B], own_lengths [B], [q_norm [E], k_norm [E]],
    [a [ranks, H * E]], own_k [B, C, K, E], own_v) -> (out [B, H * E], own_k, own_v, [hidden]): the caches in place.
    `eps` is that of the norms, `dtype` that of queries, new keys and values, A and results. `hidden`, where the plan
    has ranks, is out A^T in a part for each head (hidden.py).
    """
    c = plan.config

    def decode_attention(_, *refs):
        _Warp(plan, refs, eps or 0.0).run()

    call = lane_level.kernel(
        decode_attention,
        attention_outs(plan, dtype),
        dtype,
        grid=plan.ctas // c.cluster,
        warps=c.warps,
        cluster=c.cluster,
        shared=plan.total,
    )

    def run(*arrays):
        *inputs, own_k, own_v = arrays
        own_k, own_v = jax.new_ref(own_k), jax.new_ref(own_v)
        out, *hidden = call(*inputs, own_k, own_v)
        return out, jax.freeze(own_k), jax.freeze(own_v), *hidden

    return jax.jit(run)
