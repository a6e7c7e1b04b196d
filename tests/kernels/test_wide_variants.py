"""The wide kernel's configurations by estimate: near the fastest of what was measured."""

import collections
import json
import math
from pathlib import Path

import pytest

from pallas_kernels.wide_plan import WideConfig, make_plan
from pallas_kernels.wide_variants import (
    APART_US,
    FEW_ROWS,
    RANK_US,
    TABLE,
    cuts,
    decode_us,
    few_rows_config,
    fitting,
    makes_h_in_time,
    product_us,
    promotion,
    wide_config,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "fp4_wide_splits.json"


def times_of(units, rank):
    """Measured times of each case, K, N and M, by configuration."""
    result = json.loads(RESULTS.read_text())
    times = collections.defaultdict(dict)
    for values in result["rows"]:
        row = dict(zip(result["columns"], values, strict=True))
        if (row["units"], row["rank"]) == (units, rank):
            times[row["k"], tuple(row["n"]), row["m"]][WideConfig(*row["config"])] = row["device_us"]
    return times


@pytest.mark.parametrize("units, up_to_64, mean, most", [
    (False, True, 1.005, 1.04),
    (False, False, 1.005, 1.04),
    (True, True, 1.01, 1.04),
    (True, False, 1.01, 1.06),
])  # fmt: skip
def test_of_what_was_measured_the_least_estimate_is_nearly_the_fastest(units, up_to_64, mean, most):
    slower = []
    for (k, n, m), times in times_of(units, 0).items():
        m_tiles, promote = ((m,), promotion(k)) if up_to_64 else ((128, 256), 0)
        plans = fitting(cuts(m_tiles, promote, few=True), "forward", m, k, n)
        found = [plan.config for plan in plans if plan.config in times]
        if (m in FEW_ROWS) == up_to_64 and found:
            slower.append(times[found[0]] / min(times.values()))
    assert len(slower) >= 20
    assert math.prod(slower) ** (1 / len(slower)) < mean and max(slower) < most


@pytest.mark.parametrize("up_to_64, mean, most", [(True, 1.01, 1.06), (False, 1.01, 1.05)])
def test_with_adapters_what_it_takes_is_nearly_the_fastest(up_to_64, mean, most):
    """Where spare CTAs are too few to make x A^T, launches before do."""
    slower, alone = [], times_of(True, 0)
    for (k, n, m), times in times_of(True, 32).items():
        ranks = (32,) * len(n)
        apart = APART_US + RANK_US * sum(ranks) / 16
        us = {c: times[c] if makes_h_in_time(m, k, n, ranks, c) else alone[k, n, m][c] + apart for c in times}
        config = few_rows_config(m, k, n, ranks, True) if m in FEW_ROWS else wide_config("forward", m, k, n, ranks)
        if (m in FEW_ROWS) == up_to_64:
            slower.append(us[config] / min(us.values()))
    assert len(slower) >= 20
    assert math.prod(slower) ** (1 / len(slower)) < mean and max(slower) < most


def test_the_estimates_of_a_decode_step_are_near_what_was_measured():
    for rank, estimate, mean, most in ((0, product_us, 0.031, 0.18), (32, decode_us, 0.04, 0.26)):
        off = []
        for (k, n, m), times in times_of(True, rank).items():
            for config, us in times.items():
                plan = make_plan(m, k, n, False, config)
                off.append(abs(estimate(plan, *[(rank,) * len(n)] * bool(rank)) / us - 1))
        assert len(off) == 301 and sum(off) / len(off) < mean and max(off) < most


@pytest.mark.parametrize("m, k, n, split", [(32, 11008, 2048, 8), (64, 9728, 2560, 6), (128, 8192, 3072, 5)])
def test_few_tiles_are_split_into_as_many_parts_as_there_are_multiprocessors(m, k, n, split):
    config = few_rows_config(m, k, (n,), (), True) if m in FEW_ROWS else wide_config("forward", m, k, (n,))
    assert (config.share, config.split) == (1, split)
    assert make_plan(m, k, (n,), False, config).clusters == -(-n // 128) * split <= 132


@pytest.mark.parametrize("m, parts", [(64, 3), (128, 3), (256, 4)])
def test_adapters_get_more_spare_ctas_where_these_cost_less_than_a_launch_of_their_own(wide_variants_with, m, parts):
    """Four parts of 32 tiles leave four multiprocessors for x A^T of 12288 inputs; three, 36."""
    (k, n), of = (12288, (4096,)), wide_variants_with((0, 11))
    assert ("forward", k, n[0], m) not in TABLE
    config = few_rows_config(m, k, n, (32,), True) if m in FEW_ROWS else of.wide_config("forward", m, k, n, (32,))
    assert config.split == parts


def test_with_few_registers_lower_tiles_are_nearly_the_fastest(wide_variants_with):
    """Of what JAX 0.12 took. The highest are left to promoted sums, whose totals are not in registers there."""
    result = json.loads((RESULTS.parent / "jax_0_12_tiles.json").read_text())
    few, times, slower = wide_variants_with((0, 12)), collections.defaultdict(dict), []
    for values in result["rows"]:
        row = dict(zip(result["columns"], values, strict=True))
        times[row["op"], row["m"], row["k"], (row["n"],)][WideConfig(*row["config"])] = row["device_us"]
    for case, us in times.items():
        config = few.wide_config(*case)
        assert config.m_tile <= 192 or config.promote
        slower.append(us[config] / min(us.values()))
    assert len(slower) == 20
    assert math.prod(slower) ** (1 / len(slower)) < 1.01 and max(slower) < 1.06
