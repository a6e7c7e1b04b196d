"""Configurations of the streaming kernel for any shape, by a rough estimate: what benchmarks/fp4_sweep.py measures, and
what shapes outside the table get (variants.py).

The estimate ranks only; it has no units. Of what the sweep has measured
(benchmarks/results/h200/fp4_sweep.json) it takes a configuration that is 4% slower than the fastest in the mean up to
16 rows, 11% at most, and 0.4% and 5% above.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator

from .stream_plan import RESIDENT, Plan, StreamConfig, make_plan

MMA_ROWS = 16  # up to which mma.sync multiplies; more go to wgmma
PROMOTE_MMA = 4  # each quad ends a chain: cuBLAS may split K into very many parts where N is small, and err little
ENOUGH_AHEAD, MOST_AHEAD = 48_000, 90_000  # bytes of weights that a CTA has under way
REGISTERS = 65536  # of a multiprocessor


@functools.cache
def by_rule(
    m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...] = (), swiglu: bool = False, wgmma: bool | None = None
) -> tuple[StreamConfig, ...]:
    """Those that take the shape: of fewer waves before those of more, of wgmma those that promote their sums before
    those that do not, for which there may be room where N is large; and so the best first. Those whose numbers the
    registers do not nearly hold come behind all others. `wgmma` None is by M."""
    wgmma = m > MMA_ROWS if wgmma is None else wgmma
    estimate = _with_wgmma if wgmma else _with_mma
    found: list[Plan] = []
    for waves, promote in itertools.product((1, 2, 4), (StreamConfig.promote, 0) if wgmma else (PROMOTE_MMA,)):
        plans = _plans(m, k, n, ranks, swiglu, StreamConfig(wgmma=wgmma, waves=waves, promote=promote))
        found += sorted(plans, key=estimate, reverse=True)
    # ptxas then lets no two wgmma overlap, or spills: 5120 x 55296 at 64 rows takes 114 us in one wave, 78 in two
    found.sort(key=lambda plan: wgmma and _room(plan) < 0.85)
    return tuple(plan.config for plan in found)


def _plans(m, k, n, ranks, swiglu, cut: StreamConfig) -> Iterator[Plan]:
    """One of each cut of the outputs and of K; the rest is as in `cut`."""
    joined = 2 if swiglu else 1  # row tiles that stay together
    results = sum(-(-n_i // 16) for n_i in n) // joined
    group = 4 if cut.wgmma else 1  # warps that act as one
    for cluster, tiles, warps_k, x_depth in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4), (3, 2)):
        per_cluster = joined * -(-results // min(RESIDENT[cluster] * cut.waves, results))
        warps_n = -(-per_cluster // (group * tiles)) * group
        plans = []
        for depth in range(2, 9):
            config = StreamConfig(cluster, warps_n, warps_k, tiles, depth, x_depth, cut.wgmma, cut.waves, cut.promote)
            with contextlib.suppress(ValueError):
                plans.append(make_plan(m, k, n, config, ranks, swiglu=swiglu))
        if not plans:
            continue
        if cut.wgmma:  # the deepest ring that does not ask for more than the memory gives
            yield next((plan for plan in reversed(plans) if plan.bytes_ahead <= MOST_AHEAD), plans[0])
        elif _registers_hold(plans[0]):
            yield next((plan for plan in plans if plan.bytes_ahead >= ENOUGH_AHEAD), plans[-1])


def _registers_hold(plan: Plan) -> bool:
    """The sums, with mma.sync."""
    warps = plan.config.warps
    return 4 * plan.config.tiles * plan.m_tiles <= (64 if warps <= 15 else 48 if warps <= 19 else 32)


def _busy(plan: Plan, most: int) -> float:
    """The mean of the multiprocessors' work over what one does that has the most row tiles."""
    c = plan.config
    return plan.all_tiles / (most * RESIDENT[c.cluster]) * plan.quads / (-(-plan.quads // c.cluster) * c.cluster)


def _with_mma(plan: Plan) -> float:
    warps, busy = plan.config.warps, _busy(plan, plan.most_tiles * plan.config.waves)
    even = warps / (4 * -(-warps // 4))  # on the four schedulers
    return busy * even**0.3 * min(1, warps / 12) ** 0.4 * min(1, 16 / warps) ** 0.15


def _with_wgmma(plan: Plan) -> float:
    c = plan.config
    ahead = min(1, plan.bytes_ahead / 40_000)
    return _busy(plan, plan.working_tiles) * _room(plan) * ahead**0.5 * min(1, c.warps / 12) ** 0.3


def _room(plan: Plan) -> float:
    """What the registers hold of a thread's sums, codes and addresses, with wgmma."""
    c = plan.config
    return min(1, REGISTERS / (plan.warpgroups * 128) / (c.tiles * plan.m_tiles * 4 + 16 * c.tiles + 36))
