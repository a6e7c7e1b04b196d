"""Which configuration of the wide kernel computes a shape: a committed table, and a rule for shapes outside it.

wide_table.json holds, for an operation, K, N and the largest M of a range, the configuration that was fastest on an
H200, its time there and that of XLA's BF16 product in the same run, by cuBLAS or a kernel of its own
(benchmarks/fp4_wide_sweep.py writes it, now by cuBLAS alone); without them it has not been measured. Where cuBLAS's own
error asks for it, the fastest that promotes its sums. The order of additions for an output depends on how many CTAs
split D alone (WideConfig.split): up to 256 rows, where a shape's ranges have split 1, or the same in one wave, a row's
result is the same for all their M; with more rows the split is chosen for each M. Entries for 32 and 64 rows are of
shapes where it is faster than the streaming kernel, in calls without adapters. Else a rule says where: see
few_rows_config.
"""

import contextlib
import dataclasses
import functools
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Iterator

import jax

from .wide_plan import WHOLE_BLOCKS, Run, WideConfig, WidePlan, make_plan

FEW_ROWS, RANGES = (32, 64), (128, 256, 512, 768, 1024, 4096)
ONE_TILE = 256  # rows that are one tile
# From 0.12 on JAX compiles Mosaic kernels with fewer registers than tiles of 256 rows need (docs/log.md, JAX 0.12).
TALLEST = 256 if jax.__version_info__ < (0, 12) else 192
M_TILES = tuple(height for height in (160, 192, 224, 256) if height <= TALLEST)  # heights of tiles of more rows
_ENTRIES = json.loads(importlib.resources.files(__package__).joinpath("wide_table.json").read_text())
_MEASURED = {(e["op"], e["k"], e["n"], e["m"]): WideConfig(*e["config"]) for e in _ENTRIES}
# Taller tiles that promote their sums are faster all the same: lower ones have their totals in registers.
TABLE = {shape: c for shape, c in _MEASURED.items() if c.m_tile <= TALLEST or c.promote}
# Of a part of a tile, up to which this kernel is faster than the streaming kernel: with x A^T inside than with x A^T
# made before; and in a decode step, where x comes in unit order, with adapters and without
FEW_BLOCKS, FEW_BLOCKS_PREPARED = 50, 80
CLOCKS_PER_US, LAUNCH_US = 1750, 3.0
# What a decode step takes longer where x A^T of a matmul, and a norm, are launches of their own; and for each 16 ranks
APART_US, RANK_US = 5.0, 0.3


@functools.cache
def wide_config(op: str, m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...] = ()) -> WideConfig:
    """The configuration for op "forward" or "dx"; raises ValueError naming the constraint when the kernel has none. For
    a shape outside the table, up to 256 rows, one by which adapters of forward's `ranks` cost little."""
    d, r, inputs = (k, n, ()) if op == "forward" else (sum(n), (k,), n)
    largest = next((limit for limit in RANGES if m <= limit), RANGES[-1])
    shape = op, m if m > ONE_TILE else largest, d, r, inputs
    entry = TABLE.get((op, k, sum(n), largest))
    if entry is None:
        entry = _by_rule(*shape, ranks if m <= ONE_TILE else ())
    elif ONE_TILE < m != largest:
        entry = _suited(entry, *shape)
    make_plan(m, d, r, op == "dx", entry, inputs=inputs)
    return entry


@functools.cache
def few_rows_config(
    m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...] = (), prepared: bool = False
) -> WideConfig:
    """The configuration for 17 to 64 rows, which the streaming kernel takes too; raises ValueError where that is the
    faster, or where this kernel does not take the shape. `prepared` says that kernels before make what it reads.

    With adapters this one is the faster where it makes x A^T itself (`_with_few_blocks`), and from 33 rows on, where
    another launch has to, at the same shapes as without."""
    limit = next((limit for limit in FEW_ROWS if limit // 2 < m <= limit), None)
    measured = TABLE.get(("forward", k, sum(n), limit))
    rule = functools.partial(_with_few_blocks, limit, k, n, ranks, FEW_BLOCKS_PREPARED if prepared else FEW_BLOCKS)
    if limit is None:
        config = None
    elif any(ranks):
        config = rule() or (measured if limit == FEW_ROWS[-1] else None)
    else:
        config = measured or (rule() if prepared else None)
    if config is None:
        raise ValueError(f"M = {m}, K = {k}, N = {n} is for the streaming kernel")
    make_plan(m, k, n, False, config)
    return config


def _with_few_blocks(m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...], most_blocks: int) -> WideConfig | None:
    """The fastest cut of which all tiles are split and a part has no more blocks, with adapters of those whose spare
    CTAs make x A^T in time; if there is one that a launch less makes up for."""
    plans = fitting(cuts((m,), promotion(k), few=True), "forward", m, k, n)
    few = [p for p in plans if p.split_items == p.items and p.blocks <= most_blocks * p.parts]
    if not few or clocks(few[0]) > clocks(plans[0]) + LAUNCH_US * CLOCKS_PER_US:
        return None
    fastest = _with_adapters(few, ranks) if any(ranks) else few[0]
    return fastest and fastest.config


def promotion(k: int) -> int:
    """After how many steps sums of few rows are promoted: an eighth of K, which is as long as cuBLAS's chains are where
    it splits K the most, or 64."""
    return min(64, max(16, k // (16 * 8) // 8 * 8))


def _by_rule(
    op: str, m: int, d: int, r: tuple[int, ...], inputs: tuple[int, ...], ranks: tuple[int, ...] = ()
) -> WideConfig:
    """The least estimated time."""
    few = op == "forward" and m <= ONE_TILE
    of_one = (128,) if m <= 128 or ONE_TILE > TALLEST else (128, ONE_TILE) if few else (ONE_TILE,)
    plans = fitting(cuts(of_one if m <= ONE_TILE else M_TILES, few=few), op, m, d, r, inputs)
    if not plans:  # what does not take this one takes none: says why
        make_plan(m, d, r, op == "dx", WideConfig(), inputs=inputs)
    fastest = _with_adapters(plans, ranks) if any(ranks) else None
    apart = product_us(plans[0]) + APART_US + RANK_US * sum(ranks) / 16
    return (fastest if fastest and decode_us(fastest, ranks) < apart else plans[0]).config


def _with_adapters(plans: Iterable[WidePlan], ranks: tuple[int, ...]) -> WidePlan | None:
    """Of those whose spare CTAs make x A^T in time the fastest."""
    in_time = [p for p in plans if makes_h_in_time(p.m, p.d, p.r, ranks, p.config)]
    return min(in_time, key=lambda plan: decode_us(plan, ranks), default=None)


def _suited(measured: WideConfig, op: str, m: int, d: int, r: tuple[int, ...], inputs: tuple[int, ...]) -> WideConfig:
    """A configuration that was measured with other rows, or what is like it but for the tiles' height and the split of
    the last wave, where that has the least estimated time, by more than 1%."""
    others = [
        dataclasses.replace(measured, m_tile=m_tile, split=split, **_depths(m_tile))
        for m_tile, split in itertools.product(M_TILES, (1, 2, 3, 4))
    ]
    best = next(iter(fitting(others, op, m, d, r, inputs)), None)
    own = clocks(make_plan(m, d, r, op == "dx", measured, inputs=inputs))
    return best.config if best is not None and clocks(best) < 0.99 * own else measured


def cuts(m_tiles: Iterable[int], promote: int = 0, few: bool = False) -> list[WideConfig]:
    """Every way to share x and to split D of these tiles, of `few` rows or of any number."""
    ways = _CUTS + _MORE_PARTS * few
    return [WideConfig(m_tile, *cut, **_depths(m_tile), promote=promote) for m_tile in m_tiles for cut in ways]


def _depths(m_tile: int) -> dict[str, int]:
    """Slots of the rings of x and of weights: six, or four where tiles are larger."""
    return {"x_depth": 6 if m_tile <= 64 else 4, "w_depth": 6 if m_tile <= WHOLE_BLOCKS else 4}


def fitting(
    configs: Iterable[WideConfig], op: str, m: int, d: int, r: tuple[int, ...], inputs: tuple[int, ...] = ()
) -> list[WidePlan]:
    """Plans of a shape in those cuts that fit, the least estimated time first."""
    plans = []
    for config in configs:
        with contextlib.suppress(ValueError):
            plan = make_plan(m, d, r, op == "dx", config, inputs=inputs)
            if plan.parts == config.split:
                plans.append(plan)
    return sorted(plans, key=clocks)


_CUTS = ((2, 1), (1, 1), (4, 1), (2, 2), (2, 3), (2, 4), (1, 2), (1, 3), (1, 4))
_MORE_PARTS = ((1, 5), (1, 6), (1, 7), (1, 8))  # measured of few rows alone


def clocks(plan: WidePlan) -> float:
    """Estimated clocks: 2048 for 128 inputs of a tile of 256 rows, more a row for fewer rows, where decoding is not
    hidden (dx's, which transposes, sooner), at least 1100, and more where x is not shared or, where all tiles are
    split, is; a tile's way out; and adding up where D is split. Of few rows, forward, also what was measured of these
    alone: more for each part, and for CTAs that meet where they share."""
    shares, few = plan.config.share > 1, plan.m <= ONE_TILE and not plan.transposed
    slower = 1.0 if shares != (plan.split_items == plan.items) else 1.02
    time = 1200.0 * (shares and few)
    for run, turns in _turns(plan):
        fewer = (256 - run.rows) / 128
        shown = fewer if plan.transposed or fewer > 1 else fewer**1.5
        block = max(1100, 8 * run.rows * (1 + 0.25 * shown)) * slower
        unit = -(-plan.blocks // run.parts) * block + (12 if run.parts == 1 else 32) * run.rows
        unit += few * (run.parts - 1) * (100 + 2.6 * run.rows)
        time += unit * turns
    return time


def _turns(plan: WidePlan) -> Iterator[tuple[Run, int]]:
    """The runs of items, and how many units of each one after the other the busiest cluster has."""
    before = 0
    for run in plan.runs:
        behind = before + (run.end - run.first) * run.parts
        yield run, -(-behind // plan.resident) - -(-before // plan.resident)
        before = behind


def product_us(plan: WidePlan) -> float:
    """Estimated time of a decode step's call, whose x comes in unit order. It is within 3% in the mean, 17% at most, of
    what an H200 took for matrices of few outputs, and `decode_us` within 4% and 25%
    (benchmarks/results/h200/fp4_wide_splits.json)."""
    rows = plan.config.m_tile
    block = max(0.285 + 0.00245 * rows, rows / 224)
    blocks = sum(turns * -(-plan.blocks // run.parts) for run, turns in _turns(plan))
    return 3.5 + 0.0075 * rows + blocks * block + (plan.parts - 1) * (0.1 + 0.0014 * rows)


def decode_us(plan: WidePlan, ranks: tuple[int, ...]) -> float:
    """The same where CTAs without a tile make x A^T: of the product and LoRA's behind it, or until x A^T is there."""
    rows, spare = plan.config.m_tile, dataclasses.replace(plan, ranks=ranks, makes_h=True).spare
    made = 4.9 + 0.035 * rows + spare.copied / 40e3 + 0.03 * spare.ctas + RANK_US * spare.tiles
    return max(product_us(plan) + 1, made)


def makes_h_in_time(
    m: int, k: int, n: tuple[int, ...], ranks: tuple[int, ...], config: WideConfig, swiglu: bool = False
) -> bool:
    """Whether CTAs that have no tile can make x A^T of adapters of these padded ranks, and soon enough: by estimates
    that fit what an H200 took within 2 us, it delays the kernel by less than a launch takes, which it saves where x is
    given; where x is a norm it saves A's part of one. Of whole tiles of rows, so that it is the same for all M of a
    range up to 256."""
    rows = -(-m // config.m_tile) * config.m_tile
    try:
        plan = make_plan(rows, k, n, False, config, ranks, swiglu, makes_h=True)
    except ValueError:
        return False
    us = 4.2 + clocks(plan) / CLOCKS_PER_US
    return 7.5 + 0.01 * plan.spare.m + plan.spare.copied / 44e3 <= us + LAUNCH_US
