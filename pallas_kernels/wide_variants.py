"""Which configuration of the wide kernel computes a shape: a committed table, and a rule for shapes outside it.

wide_table.json holds, for an operation, K, N and the largest M of a range, the configuration that was fastest on an
H200, its time there and cuBLAS's BF16 time in the same run (benchmarks/fp4_wide_sweep.py writes it). The order of
additions for an output depends on `split` alone: where a shape's ranges have the same `split`, a row's result is the
same for all their M.
"""

import functools
import importlib.resources
import json

from .wide_plan import WideConfig, WidePlan, make_plan

RANGES = (128, 256, 1024, 4096)


def _load() -> dict[tuple[str, int, int, int], WideConfig]:
    text = importlib.resources.files(__package__).joinpath("wide_table.json").read_text()
    return {(e["op"], e["k"], e["n"], e["m"]): WideConfig(*e["config"]) for e in json.loads(text)}


TABLE = _load()


@functools.cache
def wide_config(op: str, m: int, k: int, n: tuple[int, ...]) -> WideConfig:
    """The configuration for op "forward" or "dx"; raises ValueError naming the constraint when the kernel has none."""
    d, r = (k, n) if op == "forward" else (n[0], (k,))
    largest = next((limit for limit in RANGES if m <= limit), RANGES[-1])
    entry = TABLE.get((op, k, sum(n), largest))
    if entry is None:
        entry = _by_rule(op, largest, d, r)
    make_plan(m, d, r, op == "dx", entry)
    return entry


def _by_rule(op: str, m: int, d: int, r: tuple[int, ...]) -> WideConfig:
    """The least estimated time among a few configurations: waves of tiles, and what it costs to add up a split."""
    m_tile, x_depth, w_depth = (128, 6, 3) if m <= 128 else (256, 4, 2)
    plans = []
    for share, split in ((2, 1), (1, 1), (1, 2), (1, 3), (1, 4)):
        try:
            plans.append(make_plan(m, d, r, op == "dx", WideConfig(m_tile, share, split, x_depth, w_depth)))
        except ValueError:
            if (share, split) == (2, 1):  # what does not take this one takes none
                raise
    return min(plans, key=_clocks).config


def _clocks(plan: WidePlan) -> float:
    """Clocks of a multiprocessor: 4096 for 256 inputs of a tile of 256 rows, 10% more where x is not shared."""
    c = plan.config
    waves = -(-plan.items // plan.resident)
    block = 16 * c.m_tile * (1.0 if c.share > 1 else 1.1)
    return waves * (-(-plan.blocks // c.split) * block + 12 * c.m_tile) + (0 if c.split == 1 else 16 * c.m_tile)
