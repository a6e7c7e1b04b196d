"""The streaming kernel's configurations by estimate: near the fastest of what was measured, and there for any shape."""

import collections
import dataclasses
import json
import math
from pathlib import Path

import pytest

from pallas_kernels import compiling_for
from pallas_kernels.stream_plan import make_plan
from pallas_kernels.stream_variants import by_rule
from pallas_kernels.variants import RANGES, apart, choose_prepared, config_for, lora_inside

SWEEP = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "fp4_sweep.json"


@pytest.mark.parametrize("ms, mean, most", [((8, 16), 1.04, 1.11), ((32, 64), 1.004, 1.05)])
def test_of_what_was_measured_it_takes_nearly_the_fastest(ms, mean, most):
    times = collections.defaultdict(dict)
    for k, n, m, rank, config, us, _ in json.loads(SWEEP.read_text())["rows"]:
        if rank:
            continue
        cluster, warps_n, warps_k, tiles, _, _, wgmma, *_ = config
        cut = cluster, warps_n, warps_k, tiles, wgmma
        times[k, n, m][cut] = min(us, times[k, n, m].get(cut, math.inf))
    slower = []
    for (k, n, m), measured in times.items():
        c = by_rule(m, k, (n,))[0]
        cut = c.cluster, c.warps_n, c.warps_k, c.tiles, c.wgmma
        if m in ms and cut in measured:
            slower.append(measured[cut] / min(measured.values()))
    assert len(slower) >= 20
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
    assert plan.bytes_ahead >= 25_000 and plan.used_warps >= 5
    if m > 32 and swiglu:  # the others go to the wide kernel
        ranks = (32,) * len(n)
        with compiling_for(90):
            config = choose_prepared(m, k, n, ranks, swiglu)
            assert make_plan(m, k, n, config, ranks, True, swiglu).bytes_ahead >= 25_000


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
