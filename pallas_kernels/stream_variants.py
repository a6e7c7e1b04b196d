"""Configurations of the streaming kernel for any shape, by a rough estimate: what benchmarks/fp4_sweep.py measures, and
what shapes outside the table get (variants.py).

The estimate ranks only; it has no units. What it takes of the configurations measured on an H200
(benchmarks/results/h200/fp4_rings.json) is slower than the fastest by 1.5% in the mean up to 16 rows, 8% at most, and
by 1.2% and 5% above; of gate and up of eleven other models (fp4_other_models.json) by 1.0% and 11%.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator

from .stream_plan import RESIDENT, SHARING, Plan, StreamConfig, make_plan

MMA_ROWS = 16  # up to which mma.sync multiplies; more go to wgmma
PROMOTE_MMA = 4  # each quad ends a chain: cuBLAS may split K into very many parts where N is small, and err little
# With 17 to 64 rows cuBLAS does not split a short K, nor a long one where outputs are many. Its chains are all of K.
SHORT_K, LONG_K, MANY_OUTPUTS = 1024, 8192, 96 * 128
ENOUGH_AHEAD = 18_000  # bytes of weights that a CTA has under way
REGISTERS = 65536  # of a multiprocessor
MOST_SHARING = 24  # warps of a CTA whose last share row tiles; with 28, 5120 x 51200 takes no less time at 32 rows


@functools.cache
def by_rule(
    m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...] = (), swiglu: bool = False, wgmma: bool | None = None
) -> tuple[StreamConfig, ...]:
    """Those that take the shape: of fewer waves before those of more, of wgmma, where N is small, those that promote
    their sums before those that do not; and so the best first. Those whose numbers the registers do not nearly hold
    come behind all others. `wgmma` None is by M."""
    wgmma = m > MMA_ROWS if wgmma is None else wgmma
    estimate = _with_wgmma if wgmma else _with_mma
    is_unsplit = k <= SHORT_K or (sum(n) >= MANY_OUTPUTS and k <= LONG_K)
    promotions = (PROMOTE_MMA,) if not wgmma else (0,) if is_unsplit else (StreamConfig.promote, 0)
    found: list[Plan] = []
    for waves, promote in itertools.product((1, 2, 4), promotions):
        plans = _plans(m, k, n, ranks, swiglu, StreamConfig(wgmma=wgmma, waves=waves, promote=promote))
        found += sorted(plans, key=estimate, reverse=True)
    # ptxas then lets no two wgmma overlap, or spills: 5120 x 55296 at 64 rows takes 114 us in one wave, 78 in two
    found.sort(key=lambda plan: wgmma and _room(plan) < 0.85)
    return tuple(plan.config for plan in found)


def _plans(m, k, n, ranks, swiglu, cut: StreamConfig) -> Iterator[Plan]:
    """One of each cut of the outputs and of K; the rest is as in `cut`."""
    for one, x_depth in itertools.product(_cuts(n, swiglu, cut), (3, 2)):
        plans = []
        for depth in range(2, 9):
            with contextlib.suppress(ValueError):
                config = dataclasses.replace(one, depth=depth, x_depth=x_depth)
                plans.append(make_plan(m, k, n, config, ranks, swiglu=swiglu))
        if plans and (cut.wgmma or _registers_hold(plans[0])):
            # deeper rings take up to 15% longer (docs/log.md, Short rings)
            yield next((plan for plan in plans if plan.bytes_ahead >= ENOUGH_AHEAD), plans[-1])


def _cuts(n, swiglu, cut: StreamConfig) -> Iterator[StreamConfig]:
    """With as few warps as hold all row tiles. With wgmma a warp has one: with more, registers are too few."""
    joined = 2 if swiglu else 1  # row tiles that stay together
    results = sum(-(-n_i // 16) for n_i in n) // joined
    group = 4 if cut.wgmma else 1  # warps that act as one
    if cut.wgmma:  # in pairs, of which the last groups have the same
        most = joined * -(-results // min(RESIDENT[2], results))
        warps = -(-(most - SHARING) // 8) * 4 + SHARING
        if warps <= MOST_SHARING:
            yield dataclasses.replace(cut, warps_n=warps, warps_k=1, tiles=1, shares=True)
    for cluster, tiles, warps_k in itertools.product((1, 2, 4), (1,) if cut.wgmma else (1, 2, 3), (1, 2, 4)):
        most = joined * -(-results // min(RESIDENT[cluster] * cut.waves, results))
        warps_n = -(-most // (group * tiles)) * group
        yield dataclasses.replace(cut, cluster=cluster, warps_n=warps_n, warps_k=warps_k, tiles=tiles)


def _registers_hold(plan: Plan) -> bool:
    """The sums, with mma.sync."""
    warps = plan.config.warps
    return 4 * plan.config.tiles * plan.m_tiles <= (64 if warps <= 15 else 48 if warps <= 19 else 32)


def _busy(plan: Plan, most: int) -> float:
    """The mean of the multiprocessors' work over what one does that has the most row tiles."""
    cluster = plan.config.cluster
    return plan.all_tiles / (most * RESIDENT[cluster]) * plan.quads / (-(-plan.quads // cluster) * cluster)


def _with_mma(plan: Plan) -> float:
    c = plan.config
    units = c.tiles * plan.units_warp  # that a warp multiplies between two waits
    return _busy(plan, plan.most_tiles) * min(1, c.warps / 12) ** 0.2 * min(1, units / 4) ** 0.3


def _with_wgmma(plan: Plan) -> float:
    c = plan.config
    quads = plan.quads // c.cluster  # and a quarter of one is the end, where a cluster's CTAs wait for each other
    alone = 1 if c.cluster == 1 else 0.97
    return alone * quads / (quads + 0.25) * _busy(plan, plan.working_tiles) * _room(plan) * min(1, c.warps / 12) ** 0.2


def _room(plan: Plan) -> float:
    """What the registers hold of a thread's sums, codes and addresses, with wgmma."""
    c = plan.config
    return min(1, REGISTERS / (plan.warpgroups * 128) / (c.tiles * plan.m_tiles * 4 + 16 * c.tiles + 36))
