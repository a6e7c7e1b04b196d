"""What one decode step computes between two attentions, for few rows (M <= 16), as one kernel.

Letters: M rows, D hidden size, K inputs and N outputs of a weight; row tiles of 16 outputs, quads of 256 inputs (see
layout.py), items of one tile and one quad, panels of 8 rows.

The output projection, the residual stream, RMSNorm, gate, up and SwiGLU, down, and the next layer's RMSNorm and q, k, v
are *parts* that follow each other in one grid of CTAs, one a multiprocessor. Between two parts a CTA waits for all
others, or, where it has a slice of the next part's K, for those that make it. Weights do not depend on what the others
compute: while a CTA waits, its warps go on fetching their items of the next parts, as far as their rings reach, so the
memory does not rest.

  * Items: a part's row tiles are shared by groups of CTAs (with `slices`, also its K), and a CTA's items, tile after
    tile, by its compute warps in equal runs. A table in shared memory holds the addresses of a warp's items of all
    parts; it streams them through its ring with cp.async, each lane its own bytes, and needs no barrier for them
    (block_compute.py).
  * Sums: a warp leaves the sum of its run's part of a tile in shared memory; in the end one warp adds a tile's sums, K
    ascending, and finishes it: scales, LoRA, bias, then SwiGLU or the residual stream. Sums over slices of K go
    through the L2, and the CTAs of a group finish the tiles between them (block_outputs.py).
  * x: the service warps copy it to shared memory, and compute LoRA's first product (see block_service.py), but for o
    where attention has (`wanted_a`). With two to 8 rows two CTAs are a cluster, and each copies half of x to both.
  * Panels: with more than 8 rows the CTAs of a cluster have the same tiles, and each half of K for all rows, so that x
    takes no more room. A warp sends the sums of each panel to the CTA that finishes it, which is then as with 8 rows.
  * RMSNorm: who writes the residual stream also writes its product with the norm's scale in 16 bits, and its tile's
    squares; the division by the root of their mean happens to the next part's sums.

The order of additions depends on the shape, the plan and how many panels there are, never else on M, on other rows, or
on timing.
"""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import lane_level
from . import ptx as p
from . import ptx_memory as mem
from .block_compute import ComputeWarps
from .block_plan import PANEL, BlockPlan, Part
from .block_service import ServiceWarps
from .layer_part import Weight
from .layout import ROWS


class Operands(NamedTuple):
    """x [M, K], the residual stream float32 [M, D], the weights of each part, the norm scale float32 [D] after each
    part that joins the residual stream and is not the last, the counters, and, where it is given, x A^T of the first
    part (hidden.py)."""

    x: Any
    residual: Any
    weights: tuple[tuple[Weight, ...], ...]
    norms: tuple[Any, ...]
    sync: Any
    hidden: Any = None


@dataclasses.dataclass(frozen=True)
class Share:
    """What a CTA does of a part: its group, its slice, entries and quads from the first on, and how many quads each
    cut of the slice has; tiles, items."""

    group: Any
    slice: Any
    first: Any
    entries: Any
    first_quad: Any
    quads: Any
    quads_of: tuple[Any, ...]
    tiles: Any
    items: Any


class _Kernel(ComputeWarps, ServiceWarps):
    """One CTA's program."""

    def __init__(self, plan: BlockPlan, eps: float, operands: Operands, outs: dict[str, Any], shared):
        self.plan, self.eps = plan, eps

        def addresses(tree):
            return jax.tree.map(mem.global_address, tree)

        operands, self.outs = Operands(*map(addresses, operands)), addresses(outs)
        self.weights, self.sync = operands.weights, operands.sync
        base = mem.shared_address(shared)
        self.tid = p.sreg("tid.x")
        self.lane, self.warp = p.and_(self.tid, 31), p.uniform(p.shr(self.tid, 5))
        self.is_lane_0 = p.eq(self.lane, 0)
        self.g, self.t = p.shr(self.lane, 2), p.and_(self.lane, 3)
        self.cta = p.sreg("ctaid.x")
        self.rank = p.rem(self.cta, plan.cluster)
        self.panel = self.rank if plan.panels > 1 else p.i32(0)  # that it finishes, and which cut of K it has
        self.x_full, self.h_full, self.sums_full = (p.add(base, 8 * n) for n in range(3))
        self.inverse_base, self.squares_base = p.add(base, 64), p.add(base, 128)
        self.table_base, self.sums_base = p.add(base, plan.table_at), p.add(base, plan.sums_at)
        self.h_base, self.x_base = p.add(base, plan.h_at), p.add(base, plan.x_at)
        self.ring_base = p.add(base, plan.ring_at)
        # of each panel this lane's
        self.rows_in_x = [p.minimum(p.add(self.g, PANEL * n), plan.m - 1) for n in range(plan.panels)]
        self.shares = [self.share(part) for part in plan.parts]
        # what a part reads, and the residual stream, its norm's scale and where its squares lie
        self.x_of, self.flows, residual, norms = [operands.x], [], operands.residual, list(operands.norms)
        self.hidden_of = [self.outs.get(f"hidden{i}", operands.hidden) for i in range(len(plan.parts))]
        for i, part in enumerate(plan.parts):
            flow = types.SimpleNamespace(before=residual, after=None, norm=None, normed=None, squares=None)
            if part.joins:
                flow.after = residual = self.outs[f"residual{i}"]
                if i + 1 < len(plan.parts):
                    flow.norm, flow.normed = norms.pop(0), self.outs[f"x{i + 1}"]
                    flow.squares = self.outs[f"squares{i}"]
            self.flows.append(flow)
            self.x_of.append(self.outs.get(f"x{i + 1}"))

    def share(self, part: Part) -> Share:
        place = p.div(self.cta, part.cuts)
        group, in_slice = p.rem(place, part.groups), p.div(place, part.groups)
        has, in_slice = p.lt(in_slice, part.slices), p.minimum(in_slice, part.slices - 1)

        def run(index, of, total):
            first = p.div(p.mul(index, total), of)
            return first, p.sub(p.div(p.mul(p.add(index, 1), total), of), first)

        # where groups cannot all have as many entries the first ones, which multiply by A, have fewer
        fewest, more = divmod(part.entries, part.groups)
        equal = part.groups - more
        first = p.add(p.mul(group, fewest), p.sub(p.maximum(group, equal), equal))
        entries = p.select(p.lt(group, equal), fewest, fewest + 1)
        first_quad, quads = run(in_slice, part.slices, part.quads)
        entries = p.select(has, entries, 0)  # the CTAs beyond groups x slices x cuts have none
        tiles = p.mul(entries, 2) if part.paired else entries
        quads_of = tuple(run(p.i32(n), part.cuts, quads)[1] for n in range(part.cuts))
        before, quads = run(self.panel, part.cuts, quads)
        first_quad = p.add(first_quad, before)
        return Share(group, in_slice, first, entries, first_quad, quads, quads_of, tiles, p.mul(tiles, quads))

    def run(self):
        if self.plan.cluster > 1:
            self.make_cluster_barriers()
        p.if_else(p.lt(self.warp, self.plan.warps), self.compute, self.serve)

    # ---- places --------------------------------------------------------------------------------------------------

    def counter(self, word: int, n=None):
        """That at a word, or the n-th from there on, each of which is followed by that of those who have seen it."""
        first = mem.offset(self.sync, p.i32(4 * word))
        return first if n is None else mem.offset(first, p.mul(n, 8))

    def tell(self, counter, number: Any = 1):
        """One thread, of what a barrier says that its CTA has stored."""
        mem.fence()
        mem.count(counter, number)

    def leave(self, counter, waiting):
        """Says that one of `waiting` has seen the counter; the last of them clears it for the next call. The answer
        takes as long as a load from the L2, so nothing that others wait for comes after it."""
        last = p.sub(waiting, 1)
        before = mem.count_and_wrap(mem.offset(counter, p.i32(4)), last, "relaxed")
        p.when(p.eq(before, last), lambda: mem.store_global_b32(counter, p.i32(0)))

    def run_of(self, items, warp):
        """First of a CTA's items that a warp has, and the first after them."""
        return tuple(p.div(p.mul(items, w), self.plan.warps) for w in (warp, p.add(warp, 1)))


def block_outs(plan: BlockPlan, dtype: str = "bfloat16") -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes: `residual` after each part that joins it, the last part's `y` of each weight, and what
    CTAs leave for each other."""

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def half(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    outs, last = {}, len(plan.parts) - 1
    for i, part in enumerate(plan.parts):
        if part.joins:
            outs[f"residual{i}"] = f32(plan.m, plan.hidden)
        if part.joins and i < last:
            outs[f"x{i + 1}"] = half(plan.m, plan.hidden)
            outs[f"squares{i}"] = f32(plan.panels, plan.hidden // ROWS, PANEL)
        if part.paired:
            outs[f"x{i + 1}"] = half(plan.m, part.n[0])
        if not part.joins and not part.paired:
            outs |= {f"y{w}": half(plan.m, n) for w, n in enumerate(part.n)}
        if part.slices > 1:
            outs[f"sums{i}"] = f32(part.slices * plan.panels * part.entries * 128)
        if part.lora_units:
            outs[f"hidden{i}"] = f32(part.lora_units * plan.panels * 128)
    return outs


@functools.cache
def build(plan: BlockPlan, eps: float, dtype: str = "bfloat16"):
    """The kernel as a function of Operands that returns `block_outs` arrays."""
    outs = block_outs(plan, dtype)
    names = list(outs)

    def run(operands: Operands):
        leaves, tree = jax.tree.flatten(operands)

        def nvfp4_block(_, *refs):
            *refs, shared = refs
            given = jax.tree.unflatten(tree, refs[: len(leaves)])
            made = dict(zip(names, refs[len(leaves) :], strict=True))
            _Kernel(plan, eps, given, made, shared).run()

        call = lane_level.kernel(
            nvfp4_block,
            [outs[name] for name in names],
            dtype,
            grid=plan.ctas // plan.cluster,
            warps=plan.threads // 32,
            cluster=plan.cluster,
            shared=plan.total,
        )
        return dict(zip(names, call(*leaves), strict=True))

    return jax.jit(run)
