"""The kernel that makes a matmul's inputs: its program run in NumPy, its lowering, and the kernel on a GPU."""

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from random_weights import normal

from pallas_kernels import KernelWeight, compiling_for, fp4_matmul, fragment_order, inputs_kernel, inputs_plan
from pallas_kernels.inputs_plan import GIVEN, NORMED, make_inputs_plan
from pallas_kernels.layout import EPILOGUE_FACTOR
from pallas_kernels.stream_plan import RESIDENT

EPS = 1e-6


def operands(seed, m, k, ranks, source, dtype=jnp.bfloat16):
    """The kernel's; what x is to be in float64 and, of its elements, an unrounded size; the adapters in float64."""
    rng = np.random.default_rng(seed)
    if source == GIVEN:
        parts = [normal(rng, m, k, dtype=dtype)]
    else:
        parts = [normal(rng, m, k), normal(rng, m, k), 1 + normal(rng, k)]
    a = [normal(rng, rank, k, dtype=dtype) for rank in ranks]
    scales = [np.full(1, 300.0 + 7 * i, np.float32) for i in range(len(ranks))]
    scalings = [np.full(1, 0.25 * (i + 1), np.float32) for i in range(len(ranks))]
    return [*parts, *a, *scales, *scalings]


def expected(given, ranks, source):
    """The residual stream, x before it is rounded, in float64; and a function of x that gives s x A^T and the size of
    its terms."""
    count = {GIVEN: 1, NORMED: 3}[source]
    parts = [np.asarray(v, np.float64) for v in given[:count]]
    residual = None
    if source == GIVEN:
        (x,) = parts
    else:
        residual = np.asarray(given[0]) + np.asarray(given[1])
        wide = residual.astype(np.float64)
        x = wide / np.sqrt(np.mean(wide**2, 1, keepdims=True) + EPS) * parts[2]
    a, rest = given[count : count + len(ranks)], given[count + len(ranks) :]
    factors = [
        np.full(rank, s[0] * t[0] / EPILOGUE_FACTOR)
        for rank, s, t in zip(ranks, rest, rest[len(ranks) :], strict=False)
    ]

    def h(x):
        x, wide_a = np.asarray(x, np.float64), np.concatenate([np.asarray(v, np.float64) for v in a])
        factor = np.concatenate(factors)
        return (x @ wide_a.T) * factor, (abs(x) @ abs(wide_a).T) * factor

    return residual, x, h


def assert_right(got, given, m, ranks, source, ordered=0, ulp=2.0**-8):
    """That the results are right: x once rounded, s x A^T that of the x which the kernel made."""
    residual, x, h = expected(given, ranks, source)
    if residual is not None:
        assert np.array_equal(got["residual"], residual)
    made = x
    if "x" in got:
        made = np.asarray(got["x"], np.float64)
        if ordered == "units":
            made = made.reshape(m, -1, 4, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5).reshape(m, -1)  # unit j h t c
        elif ordered:
            want = fragment_order.reference(jnp.asarray(x, jnp.float32), ordered)  # the order alone
            made = made.reshape(-1, 4, 4, 2, ordered, 4, 2)[..., :m, :, :]  # rows behind M have no meaning
            want = np.asarray(want, np.float64).reshape(-1, 4, 4, 2, ordered, 4, 2)[..., :m, :, :]
            assert (abs(made - want) <= ulp * abs(want) + 1e-30).all()
            made = made.transpose(4, 0, 1, 5, 2, 3, 6).reshape(m, -1)  # rows Q unit t j h c
        assert (abs(made - x) <= ulp * abs(x) + 2.0**-25).all()  # float16's smallest number is 2^-24
    if ranks:
        true, size = h(made)
        error = abs(np.asarray(got["h"], np.float64) - true) - ulp * abs(true)
        assert (error <= 1e-5 * size).all()


def order(ordered):
    """`ordered`, rows in fragment order or "units", as the plan's arguments."""
    return {"units": True} if ordered == "units" else {"ordered": ordered}


def run(plan, given, **more):
    return emulator.run_inputs(plan, given, eps=EPS, **more)


CASES = pytest.mark.parametrize("source, m, k, ranks, ordered", [
    (GIVEN, 17, 1088, (32,), 0),  # 17 chunks for 64 warps: most have none
    (GIVEN, 30, 576, (16, 48, 32), 0),  # 16 rows a tile
    (GIVEN, 34, 576, (64,), 0),  # 32 rows a tile
    (GIVEN, 20, 512, (128, 16), 0),  # nine sixteens of ranks in two tiles of five
    (GIVEN, 20, 1024, (16,), 32),
    (GIVEN, 9, 512, (), 16),
    (GIVEN, 17, 8448, (32,), 32),  # long: 132 chunks for 128 warps
    (NORMED, 9, 1024, (32, 16), 16),
    (NORMED, 30, 576, (16, 48, 32), 0),
    (NORMED, 34, 576, (16,), 0),
    (NORMED, 5, 4352, (112, 32), 8),  # 68 chunks for 96 warps; two tiles of ranks
    (NORMED, 2, 8448, (32, 16), 8),  # 132 for 128: runs of two, A early for one of them
    (NORMED, 12, 512, (), 16),
    (NORMED, 9, 576, (32, 16), "units"),
    (NORMED, 30, 1088, (), "units"),
])  # fmt: skip


@CASES
def test_the_reference_gives_them(source, m, k, ranks, ordered):
    given = operands(m, m, k, ranks, source)
    made = inputs_kernel.reference(make_inputs_plan(m, k, ranks, source, **order(ordered)), EPS, *given)
    assert_right({name: np.asarray(v) for name, v in made.items()}, given, m, ranks, source, ordered)


@CASES
def test_the_program_gives_them(monkeypatch, source, m, k, ranks, ordered):
    few = ((20, 1), (32, 2), (256, 4))  # larger tiles of fewer rows: fewer CTAs to run
    monkeypatch.setattr(inputs_plan, "EIGHTS", {False: few, True: few})
    given = operands(m, m, k, ranks, source)
    plan = make_inputs_plan(m, k, ranks, source, **order(ordered))
    assert plan.eights == (1 if m <= 20 else 2 if m <= 32 else 4)
    assert_right(run(plan, given, seed=m), given, m, ranks, source, ordered)


@pytest.mark.parametrize("source", [GIVEN, NORMED])
def test_float16(source):
    given = operands(3, 5, 576, (16, 32), source, dtype="float16")
    made = run(make_inputs_plan(5, 576, (16, 32), source), given, dtype="float16")
    assert_right(made, given, 5, (16, 32), source, ulp=2.0**-11)
    reference = inputs_kernel.reference(make_inputs_plan(5, 576, (16, 32), source), EPS, *given, dtype="float16")
    assert {name: v.dtype for name, v in made.items()} == {name: v.dtype for name, v in reference.items()}


def test_runs_of_several_batches():
    # three chunks a warp, of which two are loaded together: the second batch ends behind the run
    given, plan = operands(1, 3, 128 * 192, (32,), GIVEN), make_inputs_plan(3, 128 * 192, (32,), GIVEN)
    assert plan.batch == 2 and plan.run == 3
    assert_right(run(plan, given), given, 3, (32,), GIVEN)


@pytest.mark.parametrize("k, warps", [(512, 8), (3584, 8), (5120, 12), (8192, 16)])
def test_a_norms_warps_have_one_chunk_each(k, warps):
    plan = make_inputs_plan(64, k, (32, 32, 32), NORMED)
    assert (plan.warps, plan.run, plan.early) == (warps, 1, 1)


@pytest.mark.parametrize("k, source", [(3584, NORMED), (18944, GIVEN)])
def test_a_wave_holds_all_clusters(k, source):
    for m in range(1, 257):
        plan = make_inputs_plan(m, k, (32,), source)
        assert plan.row_tiles * plan.groups <= RESIDENT[8]


@pytest.mark.parametrize("source", [GIVEN, NORMED])
def test_a_row_depends_on_nothing_else(source):
    ranks = (32, 16)
    given = operands(5, 20, 512, ranks, source)
    whole = run(make_inputs_plan(20, 512, ranks, source), given, seed=1)
    rows = {GIVEN: 1, NORMED: 2}[source]
    few = [v[9:16] for v in given[:rows]] + given[rows:]
    few = run(make_inputs_plan(7, 512, ranks, source), few, seed=2)
    for name, values in few.items():
        assert np.array_equal(whole[name][9:16].view(np.uint8), values.view(np.uint8)), name


@pytest.mark.parametrize("maker, name", [("make_ptx", "cta_sync"), ("make_memory", "barrier_wait_for_cluster")])
def test_without_a_barrier_the_sums_are_wrong(monkeypatch, maker, name):
    given, plan = operands(3, 8, 1024, (32,), NORMED), make_inputs_plan(8, 1024, (32,), NORMED)
    true = run(plan, given)
    emulator.without(monkeypatch, name, maker)

    def is_wrong(result, seed):
        try:
            got = run(plan, given, seed=seed)
        except AssertionError as error:  # or it ends before what is sent to it is there
            return "a CTA that has ended" in str(error)
        got, want = (np.asarray(values[result], np.float64) for values in (got, true))
        return not np.allclose(got, want, rtol=0.1, atol=0.1 * abs(want).max())

    for result in ("x", "h"):
        assert any(is_wrong(result, seed) for seed in range(3)), result


def test_nothing_is_sent_to_a_cta_that_has_not_begun(monkeypatch):
    given, plan = operands(3, 8, 1024, (32,), NORMED), make_inputs_plan(8, 1024, (32,), NORMED)
    emulator.without(monkeypatch, "cluster_wait", "make_ptx")
    with pytest.raises(KeyError):  # its barriers are not made yet
        run(plan, given)


@pytest.mark.parametrize("arguments, message", [
    ((257, 1024, (16,), GIVEN), "M must be in 1..256"),
    ((16, 1040, (16,), GIVEN), "K must be a multiple of 64"),
    ((16, 1024, (8,), GIVEN), "ranks must be multiples of 16"),
    ((16, 1024, (), GIVEN), "nothing to do"),
    ((16, 1088, (), GIVEN, 16), "multiples of 256"),
    ((16, 1024, (), GIVEN, 8), "fragment order"),
    ((256, 1 << 16, (16,), NORMED), "shared memory"),
])  # fmt: skip
def test_what_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        inputs_kernel.build(*arguments)


@pytest.mark.parametrize("m, n, kernels, by_xla", [
    (128, 37888, 2, False),
    (128, 3584, 1, False),  # some CTAs of the wide kernel have no tile: they make x A^T
    (400, 3584, 1, True),
])  # fmt: skip
def test_the_wide_kernels_adapters_go_through_it(m, n, kernels, by_xla):
    k, rank = 3584, 32
    weight = KernelWeight(jax.ShapeDtypeStruct((n // 16, k // 256, 576), jnp.uint32), n, k)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (rank, k), (n, rank))]

    def run(x, a, b, w):
        return fp4_matmul(x, w, 300.0, lora=(a, b, 0.5))

    with compiling_for(90):
        module = export.export(jax.jit(run), platforms=["cuda"])(*shapes, weight).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == kernels
    assert ("stablehlo.dot_general" in module) == by_xla


@pytest.mark.gpu
@pytest.mark.parametrize("source, m, k, ranks, ordered", [
    (GIVEN, 128, 3584, (32, 32, 32), 0),
    (GIVEN, 256, 18944, (32,), 0),
    (GIVEN, 17, 512, (16,), 32),
    (GIVEN, 200, 5120, (128, 128, 128), 0),
    (NORMED, 64, 3584, (32, 32), 64),
    (NORMED, 12, 3584, (), 16),
    (NORMED, 256, 5120, (32, 32, 32), 0),
    (NORMED, 100, 8192, (128, 128), 0),
    (GIVEN, 64, 18944, (32,), 64),
    (GIVEN, 9, 27648, (128,), 16),
    (NORMED, 128, 3584, (32, 32), "units"),
    (NORMED, 256, 5120, (), "units"),
])  # fmt: skip
def test_the_kernel_on_a_gpu(source, m, k, ranks, ordered):
    given = operands(m, m, k, ranks, source)
    kernel = jax.jit(inputs_kernel.build(m, k, ranks, source, eps=EPS, **order(ordered)))
    first = kernel(*given)
    assert_right({name: np.asarray(v) for name, v in first.items()}, given, m, ranks, source, ordered)
    for _ in range(20):
        again = kernel(*given)
        for name in ("residual", "h") if ordered else first:
            assert name not in first or bool((again[name] == first[name]).all())
