"""LoRA's first product for many rows: the kernel's program run in NumPy, its lowering, and the kernel on a GPU."""

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels import KernelWeight, compiling_for, fp4_matmul, lora_down
from pallas_kernels.layout import EPILOGUE_FACTOR


def operands(seed, m, k, ranks):
    """x, the As, global scales and scalings; and s x A^T scale / EPILOGUE_FACTOR with the sizes of its terms."""
    keys = jax.random.split(jax.random.key(seed), len(ranks) + 1)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    a = [jax.random.normal(key, (rank, k), jnp.bfloat16) for key, rank in zip(keys[1:], ranks, strict=True)]
    scales = [np.full(1, 300.0 + 7 * i, np.float32) for i in range(len(ranks))]
    scalings = [np.full(1, 0.25 * (i + 1), np.float32) for i in range(len(ranks))]
    factors = np.concatenate(
        [np.full(rank, s[0] * t[0] / EPILOGUE_FACTOR) for rank, s, t in zip(ranks, scales, scalings, strict=True)]
    )
    wide_x, wide_a = np.asarray(x, np.float64), np.concatenate([np.asarray(v, np.float64) for v in a])
    return [x, *a, *scales, *scalings], (wide_x @ wide_a.T) * factors, (abs(wide_x) @ abs(wide_a).T) * factors


def assert_close(got, true, size):
    error = abs(np.asarray(got, np.float64) - true) - 2.0**-8 * abs(true)
    assert (error <= 1e-5 * size).all()


@pytest.mark.parametrize("m, k, ranks", [
    (33, 1024, (32,)),  # 32 runs of K for 64 warps: half of them have none
    (70, 2208, (16, 48, 32)),  # 69 runs: some of two, in one batch
    (129, 2048 + 32, (64,)),  # 32 rows a tile
    (20, 512, (128, 16)),  # nine sixteens of ranks in two tiles of five
])  # fmt: skip
def test_the_program_gives_the_product(m, k, ranks):
    given, true, size = operands(m, m, k, ranks)
    assert_close(emulator.run_lora_down(lora_down.make_down_plan(m, k, ranks), given), true, size)


def test_runs_of_several_batches():
    # 320 columns a warp, ten chunks, of which seven are loaded together: the second batch ends behind the run
    given, true, size = operands(1, 3, 64 * 320, (16,))
    plan = lora_down.make_down_plan(3, 64 * 320, (16,))
    assert plan.batch == 7 and plan.chunks == 64 * 10
    assert_close(emulator.run_lora_down(plan, given), true, size)


def test_a_rows_product_depends_on_nothing_else():
    given, _, _ = operands(5, 20, 1024, (32, 16))
    whole = emulator.run_lora_down(lora_down.make_down_plan(20, 1024, (32, 16)), given, seed=1)
    few = emulator.run_lora_down(lora_down.make_down_plan(7, 1024, (32, 16)), [given[0][9:16], *given[1:]], seed=2)
    assert np.array_equal(whole[9:16].view(np.uint16), few.view(np.uint16))


@pytest.mark.parametrize("name", ["cta_sync", "cluster_sync"])
def test_without_a_barrier_the_sums_are_wrong(monkeypatch, name):
    given, true, _ = operands(3, 16, 1024, (32,))
    real = emulator.make_ptx

    def made(machine):
        p = real(machine)
        setattr(p, name, lambda: None)
        return p

    monkeypatch.setattr(emulator, "make_ptx", made)
    got = [emulator.run_lora_down(lora_down.make_down_plan(16, 1024, (32,)), given, seed=s) for s in range(3)]
    assert any(not np.allclose(np.asarray(y, np.float64), true, rtol=0.1, atol=0.1 * abs(true).max()) for y in got)


@pytest.mark.parametrize("m, k, ranks, message", [
    (257, 1024, (16,), "M must be in 1..256"),
    (16, 1040, (16,), "K must be a multiple of 32"),
    (16, 1024, (8,), "ranks must be multiples of 16"),
    (16, 1024, (), "one at least"),
])  # fmt: skip
def test_what_it_refuses(m, k, ranks, message):
    with pytest.raises(ValueError, match=message):
        lora_down.build(m, k, ranks)


@pytest.mark.parametrize("m, kernels", [(128, 2), (300, 1)])
def test_the_wide_kernels_adapters_go_through_it(m, kernels):
    n, k, rank = 3584, 3584, 32
    weight = KernelWeight(jax.ShapeDtypeStruct((n // 16, k // 256, 576), jnp.uint32), n, k)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (rank, k), (n, rank))]

    def run(x, a, b, w):
        return fp4_matmul(x, w, 300.0, lora=(a, b, 0.5))

    with compiling_for(90):
        module = export.export(jax.jit(run), platforms=["cuda"])(*shapes, weight).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == kernels
    assert ("stablehlo.dot_general" in module) == (kernels == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("m, k, ranks", [
    (128, 3584, (32, 32, 32)), (256, 18944, (32,)), (64, 3584, (32,)), (17, 512, (16,)), (200, 5120, (128, 128, 128)),
])  # fmt: skip
def test_the_kernel_on_a_gpu(m, k, ranks):
    given, true, size = operands(m, m, k, ranks)
    run = jax.jit(lora_down.build(m, k, ranks))
    first = run(*given)
    assert_close(first, true, size)
    for _ in range(20):
        assert bool((run(*given) == first).all())
