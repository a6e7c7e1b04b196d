"""The benchmark of errors, with the kernel replaced by products whose error is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fp4_error
from benchmarks.compiling import Programs
from pallas_kernels import KernelWeight, fp4_matmul_reference, stream_kernel
from pallas_kernels.stream_plan import StreamConfig

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
    programs, configs_of = Programs(2), lambda m, k, n: [EXACT, WRONG]
    fp4_error.start(programs, K, N, [M], configs_of)
    programs.wait()
    assert len(programs) == 4  # operands, cuBLAS's product, two configurations
    right, wrong = fp4_error.measure(programs, K, N, [M], configs_of, np.random.default_rng(0), timed=False)
    assert (right["table"], wrong["table"]) == (True, False)
    assert right["codes"] < 5e-7 and right["ratio"] < 4
    # all terms positive: |y - x W^T| / (|x| |W|^T) is the factor's own error
    assert wrong["positive"] == pytest.approx(2.0**-10, rel=1e-3) and wrong["ratio"] > 100


def test_promotion_that_does_not_fit_takes_room_from_the_rings():
    full = StreamConfig(4, 12, 1, 1, 4, 3, True, promote=0)
    tried = fp4_error.promoted(full, 64, 64, 13824, 5120)
    assert tried.promote == 64 and (tried.depth, tried.x_depth) == (4, 2)
    assert fp4_error.promoted(full, 0, 64, 13824, 5120) == full
    assert fp4_error.promoted(StreamConfig(1, 28, 1, 1, 2, 2, True, promote=0), 64, 64, 5120, 55296) is None
    assert fp4_error.promoted(StreamConfig(1, 6, 2, 3, 3, 3), 64, 8, 3584, 37888).promote == 32  # mma.sync: each quad
