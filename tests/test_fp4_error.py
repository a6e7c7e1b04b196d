"""The benchmark of errors, with the kernel replaced by products whose error is known."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fp4_error
from benchmarks.compiling import Programs
from benchmarks.fp4_wide_sweep import write_entries
from pallas_kernels import KernelWeight, fp4_matmul_reference, stream_kernel, wide
from pallas_kernels.stream_plan import StreamConfig
from pallas_kernels.wide_plan import WideConfig

K, N, M = 512, 96, 8
EXACT, WRONG = StreamConfig(1, 3, 2), StreamConfig(1, 3, 1)


def test_the_error_of_each_case_is_found_and_set_beside_cublas(monkeypatch):
    def build(m, k, n, config, wide_out):
        assert wide_out  # errors are those of the sums, before the last rounding
        factor = 1.0 if config == EXACT else 1.0 + 2.0**-10

        def kernel(x, data, scale):
            return [fp4_matmul_reference(x.astype(jnp.float32), KernelWeight(data, *n, k), scale) * factor]

        return kernel

    monkeypatch.setattr(stream_kernel, "build", build)
    monkeypatch.setattr(fp4_error, "of_the_table", lambda m, k, n: [EXACT])
    programs, configs_of = Programs(2), lambda m, k, n: [EXACT, WRONG]
    fp4_error.start(programs, K, N, [M], configs_of)
    programs.wait()
    assert len(programs) == 4  # operands, cuBLAS's product, two configurations
    right, wrong = fp4_error.measure(programs, K, N, [M], configs_of, np.random.default_rng(0), timed=False)
    assert (right["table"], wrong["table"]) == (True, False)
    assert right["codes"] < 5e-7 and right["ratio"] < 4
    # all terms positive: |y - x W^T| / (|x| |W|^T) is the factor's own error
    assert wrong["positive"] == pytest.approx(2.0**-10, rel=3e-3) and wrong["ratio"] > 100


def test_more_rows_are_the_wide_kernels_and_some_of_many_are_compared(monkeypatch):
    def matmul(x, weight, scale, config, dtype):
        assert dtype == jnp.float32
        return fp4_matmul_reference(x.astype(jnp.float32), weight, scale) * (1.0 if config.promote else 1.0 + 2.0**-10)

    monkeypatch.setattr(wide, "matmul", matmul)
    programs, configs = Programs(2), [WideConfig(128), WideConfig(128, promote=16)]
    fp4_error.start(programs, K, N, [300], lambda m, k, n: configs)
    rows = fp4_error.measure(programs, K, N, [300], lambda m, k, n: configs, np.random.default_rng(0), timed=False)
    assert rows[0]["positive"] == pytest.approx(2.0**-10, rel=3e-3) and rows[1]["ratio"] < 4
    assert rows[1]["config"] == [128, 2, 1, 4, 4, 16]
    assert list(map(type, fp4_error.of_the_table(65, 13824, 5120))) == [WideConfig]
    assert list(map(type, fp4_error.of_the_table(64, 13824, 5120))) == [StreamConfig, WideConfig]  # with adapters


def test_the_fastest_that_is_right_takes_the_place_of_a_table_entry_that_is_not(tmp_path):
    def row(m, promote, ratio, us, k=3584):
        config = [128, 1, 1, 4, 6, promote]
        return {"k": k, "n": 3584, "m": m, "config": config, "table": not promote, "ratio": ratio, "us": us}

    rows = [row(128, 0, 2.0, 9.0), row(128, 32, 1.1, 10.0), row(128, 64, 1.1, 9.5), row(128, 128, 1.2, 9.1)]
    rows += [row(256, 0, 1.2, 20.0), row(256, 32, 0.5, 19.0), row(128, 0, 2.0, 5.0, k=512), row(64, 0, 9.0, 5.0)]
    (entry,) = fp4_error.right_entries(rows)
    assert (entry["m"], entry["config"][-1], entry["us"]) == (128, 64, None)
    path = tmp_path / "table.json"
    path.write_text('[{"op": "forward", "k": 3584, "n": 3584, "m": 128}, {"op": "dx", "k": 3584, "n": 3584, "m": 128}]')
    write_entries(path, [entry])
    assert json.loads(path.read_text()) == [{"op": "dx", "k": 3584, "n": 3584, "m": 128}, entry]


def test_chains_of_the_wide_kernel_that_are_short_already_are_not_tried():
    config = WideConfig(128, 1, 4, 4, 6)  # 56 steps
    assert fp4_error.promoted(config, 32, 128, 3584, 3584).promote == 32
    assert fp4_error.promoted(config, 64, 128, 3584, 3584) is None
    assert fp4_error.promoted(config, 0, 128, 3584, 3584) == config


def test_promotion_that_does_not_fit_takes_room_from_the_rings():
    full = StreamConfig(4, 12, 1, 1, 4, 3, True, promote=0)
    tried = fp4_error.promoted(full, 64, 64, 13824, 5120)
    assert tried.promote == 64 and (tried.depth, tried.x_depth) == (4, 2)
    assert fp4_error.promoted(full, 0, 64, 13824, 5120) == full
    assert fp4_error.promoted(StreamConfig(1, 28, 1, 1, 2, 2, True, promote=0), 64, 64, 5120, 55296) is None
    assert fp4_error.promoted(StreamConfig(1, 6, 2, 3, 3, 3), 64, 8, 3584, 37888).promote == 64
