"""The streaming kernel's configurations by estimate: near the fastest of what was measured, and there for any shape."""

import collections
import dataclasses
import json
import math
from pathlib import Path

import pytest

from pallas_kernels import compiling_for
from pallas_kernels.stream_plan import StreamConfig, make_plan
from pallas_kernels.stream_variants import by_rule
from pallas_kernels.variants import RANGES, apart, choose_prepared, config_for, lora_inside

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def times_of(file, alike):
    """A case's times by configuration, of the rows in which the columns `alike` have these values."""
    result = json.loads((RESULTS / file).read_text())
    times = collections.defaultdict(dict)
    for values in result["rows"]:
        row = dict(zip(result["columns"], values, strict=True))
        if all(row[name] == value for name, value in alike.items()):
            times[row["k"], row["n"], row["m"]][StreamConfig(*row["config"])] = row["device_us"]
    return times


def cut_of(config):
    """All but rings and chains."""
    return dataclasses.replace(config, depth=2, x_depth=2, promote=0)


@pytest.mark.parametrize("file, alike, ms, mean, most", [
    ("fp4_rings.json", {"rank": 0}, (8, 16), 1.02, 1.09),
    ("fp4_rings.json", {"rank": 0}, (32, 64), 1.02, 1.05),
    ("fp4_other_models.json", {"swiglu": True}, (32, 64), 1.015, 1.12),
])  # fmt: skip
def test_of_what_was_measured_it_takes_nearly_the_fastest(file, alike, ms, mean, most):
    slower = []
    for (k, n, m), times in times_of(file, alike).items():
        swiglu = alike.get("swiglu", False)
        c = by_rule(m, k, (n // 2, n // 2) if swiglu else (n,), (), swiglu)[0]
        same = [config for config in times if cut_of(config) == cut_of(c)]
        rings = [config for config in same if (config.depth, config.x_depth) == (c.depth, c.x_depth)]
        if m in ms and same:
            slower.append(min(times[config] for config in rings or same) / min(times.values()))
    assert len(slower) >= 14
    assert math.prod(slower) ** (1 / len(slower)) < mean and max(slower) < most


@pytest.mark.parametrize("m", RANGES)
@pytest.mark.parametrize("k, n, swiglu", [
    (4096, (4096, 1024, 1024), False), (12288, (4096,), False),  # Qwen3 8B
    (5120, (17408, 17408), True), (8192, (5120,), False),  # 14B; 32B
    (8192, (28672, 28672), True), (28672, (8192,), False),  # Llama 70B
    (2048, (2048,), False), (2560, (9728, 9728), True),
])  # fmt: skip
def test_shapes_of_other_models_have_enough_under_way(m, k, n, swiglu):
    config = by_rule(m, k, n, (), swiglu)[0]
    plan = make_plan(m, k, n, config, swiglu=swiglu)
    assert config.wgmma == (m > 16)
    assert plan.bytes_ahead >= 18_000 and plan.used_warps >= 5
    if m > 32 and swiglu:  # the others go to the wide kernel
        ranks = (32,) * len(n)
        with compiling_for(90):
            config = choose_prepared(m, k, n, ranks, swiglu)
            assert make_plan(m, k, n, config, ranks, True, swiglu).bytes_ahead >= 18_000


@pytest.mark.parametrize("m, k, n", [(1, 16, 8), (64, 256, 16), (33, 80, 40), (8, 512, 152_064), (64, 5120, 110_592)])
def test_the_smallest_and_the_largest(m, k, n):
    configs = by_rule(m, k, (n,))
    waves = [config.waves for config in configs if make_plan(m, k, (n,), config)]
    assert m > 16 or waves == sorted(waves)  # of more rows those that registers do not hold come last
    assert (waves[0] > 1) == (n > 60_000)


@pytest.mark.parametrize("k, n", [(5120, 27648), (8192, 29568)])  # 32B, 72B
def test_gate_and_up_of_more_than_one_wave_are_multiplied_apart_with_adapters(k, n):
    with compiling_for(90):
        config = config_for(64, k, (n, n))
        assert config.waves == 2 and apart(64, k, (n, n), config, (32, 32)) and lora_inside(64, k, (n, n), (32, 32))
        assert not apart(64, k, (n, n), config, (0, 0)) and not apart(64, k, (n,), config, (32,))
        assert not apart(64, k, (n, n), dataclasses.replace(config, waves=1), (32, 32))
