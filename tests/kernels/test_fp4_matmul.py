"""fp4_matmul: the reference path, gradients, vmap, errors; and that each kernel lowers for CUDA without a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from random_weights import normal

from pallas_kernels import (
    KernelWeight,
    compiling_for,
    dequantize_kernel,
    fp4_matmul,
    fp4_matmul_dx,
    fp4_matmul_dx_reference,
    fp4_matmul_reference,
    layout,
    repack,
    stream_kernel,
)
from pallas_kernels.counters import first_counters
from pallas_kernels.stream_plan import COUNTERS, StreamConfig, make_plan
from pallas_kernels.variants import TABLE, choose_prepared, config_for


def _weight(seed, n, k):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = rng.integers(0x20, 0x60, (n, k // 16), dtype=np.uint8)
    return repack(jnp.asarray(packed), jnp.asarray(scale))


def _x(seed, m, k, dtype=jnp.float32):
    return normal(np.random.default_rng(seed), m, k, dtype=dtype)


def test_reference_against_float64():
    w, x, gs = _weight(0, 48, 64), _x(1, 5, 64), jnp.float32(700.0)
    a, b, bias = _x(2, 4, 64), _x(3, 48, 4), _x(4, 1, 48)[0]
    dense = np.asarray(layout.dequantize(w, gs, jnp.float32), np.float64)

    def f64(v):
        return np.asarray(v, np.float64)

    true = f64(x) @ dense.T + 0.5 * (f64(x) @ f64(a).T) @ f64(b).T + f64(bias)
    got = fp4_matmul_reference(x, w, gs, lora=(a, b, 0.5), bias=bias)
    np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(fp4_matmul(x, w, gs, lora=(a, b, 0.5), bias=bias), true, rtol=1e-5, atol=1e-4)


def test_dequantize_path_equals_reference():
    w, x, gs = _weight(0, 40, 80), _x(1, 3, 80, jnp.bfloat16), jnp.float32(3.0)
    got = fp4_matmul(x, w, gs, backend="dequantize").astype(jnp.float32)
    want = fp4_matmul(x, w, gs, backend="reference").astype(jnp.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3)
    dy = _x(2, 3, 40, jnp.bfloat16)
    got = fp4_matmul_dx(dy, w, gs, backend="dequantize").astype(jnp.float32)
    want = fp4_matmul_dx(dy, w, gs, backend="reference").astype(jnp.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3)


def test_list_of_weights_equals_one_by_one():
    ws = [_weight(i, n, 64) for i, n in enumerate((32, 16, 16))]
    x, scales = _x(9, 4, 64), [jnp.float32(s) for s in (1.0, 2.0, 5.0)]
    loras = [(_x(3, 2, 64), _x(4, 32, 2), 2.0), None, (_x(5, 8, 64), _x(6, 16, 8), 0.25)]
    biases = [jnp.arange(32.0), None, jnp.ones(16)]
    ys = fp4_matmul(x, ws, scales, lora=loras, bias=biases)
    for y, w, s, lora, bias in zip(ys, ws, scales, loras, biases, strict=True):
        np.testing.assert_allclose(y, fp4_matmul(x, w, s, lora=lora, bias=bias), rtol=1e-6, atol=1e-5)


def test_gradients_are_those_of_the_dense_product():
    w, x, gs = _weight(0, 48, 64), _x(1, 5, 64), jnp.float32(100.0)
    a, b, dy = _x(2, 4, 64), _x(3, 48, 4), _x(4, 5, 48)
    dense = layout.dequantize(w, gs, jnp.float32)

    def loss(x, a, b):
        return (fp4_matmul(x, w, gs, lora=(a, b, 0.5)) * dy).sum()

    def dense_loss(x, a, b):
        return ((x @ dense.T + 0.5 * (x @ a.T) @ b.T) * dy).sum()

    got, want = jax.grad(loss, (0, 1, 2))(x, a, b), jax.grad(dense_loss, (0, 1, 2))(x, a, b)
    for g, t in zip(got, want, strict=True):
        np.testing.assert_allclose(g, t, rtol=2e-4, atol=2e-3)
    batch = jax.vmap(jax.grad(loss), (0, None, None))(jnp.stack([x, 2 * x]), a, b)
    np.testing.assert_allclose(batch[0], want[0], rtol=2e-4, atol=2e-3)


def test_derivatives_that_are_not_there_are_named():
    w, x, dy = _weight(0, 48, 64), _x(1, 5, 64), _x(2, 5, 48)

    def loss(x):
        return jnp.square(fp4_matmul(x, w, 1.0)).sum()

    def of_dx(dy):
        return fp4_matmul_dx(dy, w, 1.0).sum()

    for f, at in ((jax.hessian(loss), x), (jax.grad(lambda x: jax.grad(loss)(x).sum()), x), (jax.grad(of_dx), dy)):
        with pytest.raises(TypeError, match="first derivatives only, and fp4_matmul_dx has none"):
            f(at)


def test_gradients_of_a_list_with_adapters_of_its_own():
    """Also under vmap: over x, over x and adapters, and over adapters alone."""
    scales, ns, ranks = [jnp.float32(100.0), jnp.float32(7.0), jnp.float32(3000.0)], (48, 16, 32), (4, None, 20)
    weights, x = [_weight(i, n, 64) for i, n in enumerate(ns)], _x(1, 5, 64)
    dys = [_x(10 + i, 5, n) for i, n in enumerate(ns)]
    pairs = [None if r is None else (_x(20 + r, r, 64), _x(30 + r, n, r)) for n, r in zip(ns, ranks, strict=True)]
    dense = [layout.dequantize(w, s, jnp.float32) for w, s in zip(weights, scales, strict=True)]

    def loss(x, pairs):
        loras = [pair and (*pair, 0.5) for pair in pairs]
        ys = fp4_matmul(x, weights, scales, lora=loras)
        return sum((y * dy).sum() for y, dy in zip(ys, dys, strict=True))

    def dense_loss(x, pairs):
        added = [0.5 * (x @ pair[0].T) @ pair[1].T if pair else 0 for pair in pairs]
        ys = [x @ w.T + more for w, more in zip(dense, added, strict=True)]
        return sum((y * dy).sum() for y, dy in zip(ys, dys, strict=True))

    def check(got, want):
        for g, t in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, t, rtol=2e-4, atol=1e-5 * np.abs(t).max())

    both, both_dense = jax.grad(loss, (0, 1)), jax.grad(dense_loss, (0, 1))
    check(jax.jit(both)(x, pairs), jax.jit(both_dense)(x, pairs))
    xs, many = jnp.stack([x, 2 * x]), jax.tree.map(lambda v: jnp.stack([v, 3 * v]), pairs)
    for axes, operands in (((0, None), (xs, pairs)), ((0, 0), (xs, many)), ((None, 0), (x, many))):
        check(*(jax.jit(jax.vmap(of_one, axes))(*operands) for of_one in (both, both_dense)))


def test_vmap_folds_rows_and_refuses_batched_weights():
    w, gs = _weight(0, 32, 64), jnp.float32(1.0)
    x = _x(1, 12, 64)
    got = jax.jit(jax.vmap(lambda x: fp4_matmul(x, w, gs)))(x.reshape(3, 4, 64))
    np.testing.assert_allclose(got.reshape(12, 32), fp4_matmul(x, w, gs), rtol=1e-5, atol=1e-4)
    batched = KernelWeight(jnp.stack([w.data, w.data]), w.n, w.k)
    refused = "a batch of x and of LoRA only, not of weights, scales or biases"
    for f, argument in (
        (lambda w: fp4_matmul(x, w, gs), batched),
        (lambda gs: fp4_matmul(x, w, gs), jnp.ones(2)),
        (lambda bias: fp4_matmul(x, w, gs, bias=bias), jnp.ones((2, 32))),
    ):
        with pytest.raises(ValueError, match=refused):
            jax.vmap(f)(argument)
    with pytest.raises(ValueError, match="a batch of dy only, not of weights or scales"):
        jax.vmap(lambda gs: fp4_matmul_dx(jnp.ones((2, 32)), w, gs))(jnp.ones(2))


def test_in_a_while_loop():
    w, gs = _weight(0, 64, 64), jnp.float32(200.0)
    step = jax.jit(lambda x, turns: jax.lax.fori_loop(0, turns, lambda _, x: fp4_matmul(x, w, gs), x))
    x = _x(1, 2, 64)
    want = x
    for _ in range(3):
        want = fp4_matmul(want, w, gs)
    np.testing.assert_allclose(step(x, 3), want, rtol=1e-4, atol=1e-4)


def test_no_rows_and_wrong_shapes():
    w, gs = _weight(0, 32, 64), jnp.float32(1.0)
    assert fp4_matmul(jnp.zeros((0, 64)), w, gs).shape == (0, 32)
    assert fp4_matmul_dx(jnp.zeros((0, 32)), w, gs).shape == (0, 64)
    with pytest.raises(ValueError, match="K = 48"):
        fp4_matmul(jnp.zeros((2, 48)), w, gs)
    with pytest.raises(ValueError, match="backend"):
        fp4_matmul(jnp.zeros((2, 64)), w, gs, backend="cutlass")
    with pytest.raises(ValueError, match="one entry for each"):
        fp4_matmul(jnp.zeros((2, 64)), [w, w], [gs])
    with pytest.raises(TypeError, match="x is int32; expected a float dtype"):
        fp4_matmul(jnp.zeros((2, 64), jnp.int32), w, gs)
    for a, b in (((8, 64), (1, 8)), ((8, 64), (32, 4)), ((8, 32), (32, 8))):
        with pytest.raises(ValueError, match=r"lora has A .* and B .*, the weight .32, 64. takes .R, K. and .N, R."):
            fp4_matmul(jnp.zeros((2, 64)), w, gs, lora=(jnp.zeros(a), jnp.zeros(b), 1.0))
    with pytest.raises(ValueError, match="LoRA's rank must be at least 1; a weight without an adapter has None"):
        fp4_matmul(jnp.zeros((2, 64)), w, gs, lora=(jnp.zeros((0, 64)), jnp.zeros((32, 0)), 1.0))
    with pytest.raises(ValueError, match=r"a weight must have outputs, got .0, 64."):
        fp4_matmul(jnp.zeros((2, 64)), [w, _weight(0, 0, 64)], [gs, gs])
    with pytest.raises(ValueError, match=r"bias is .1,., the weight .32, 64. takes .N."):
        fp4_matmul(jnp.zeros((2, 64)), w, gs, bias=jnp.zeros(1))


@pytest.mark.parametrize("f", [fp4_matmul, fp4_matmul_reference])
def test_adapters_and_biases_that_would_be_broadcast_are_refused(f):
    """A scaling of each output would be one of each rank in the gradient."""
    w, x, a, b = _weight(0, 32, 64), jnp.zeros((2, 64)), jnp.zeros((32, 64)), jnp.zeros((32, 32))
    with pytest.raises(ValueError, match=r"lora's scaling must be one number, got shape .32,."):
        f(x, w, 1.0, lora=(a, b, jnp.ones(32)))
    with pytest.raises(ValueError, match="lora's scaling must be one number, got None"):
        f(x, w, 1.0, lora=(a, b, None))
    with pytest.raises(ValueError, match=r"lora has A .32, 64. and B .1, 32., the weight .32, 64. takes"):
        f(x, w, 1.0, lora=(a, b[:1], 1.0))
    with pytest.raises(ValueError, match=r"bias is .1,., the weight .32, 64. takes .N."):
        f(x, w, 1.0, bias=jnp.zeros(1))
    assert f(x, w, jnp.ones(1), lora=(a, b, jnp.ones(1))).shape == (2, 32)


def test_whole_numbers_are_refused():
    """Products would be cut to them."""
    w, x, dy = _weight(0, 32, 64), jnp.zeros((2, 64)), jnp.zeros((2, 32), jnp.int32)
    for f in (fp4_matmul_dx, fp4_matmul_dx_reference):
        with pytest.raises(TypeError, match="dy is int32; expected a float dtype"):
            f(dy, w, 1.0)
    with pytest.raises(TypeError, match="x is int32; expected a float dtype"):
        fp4_matmul_reference(x.astype(jnp.int32), w, 1.0)
    with pytest.raises(TypeError, match="out_dtype is int32; expected a float dtype"):
        fp4_matmul(x, w, 1.0, out_dtype=jnp.int32)


def test_arguments_of_another_kind_are_named():
    w, x, dy = _weight(0, 32, 64), jnp.zeros((2, 64)), jnp.zeros((2, 32))
    a, b = jnp.zeros((4, 64)), jnp.zeros((32, 4))
    stack = KernelWeight(jnp.stack([w.data, w.data]), w.n, w.k)
    for f, rows in ((fp4_matmul, x), (fp4_matmul_dx, dy)):
        with pytest.raises(TypeError, match="a weight is ndarray; expected a KernelWeight, which `repack` makes"):
            f(rows, np.zeros((32, 64)), 1.0)
        with pytest.raises(ValueError, match=r"data of a weight .32, 64. must be .2, 1, 576., got .2, 2, 1, 576."):
            f(rows, stack, 1.0)
        with pytest.raises(ValueError, match=r"global_scale must be one number, got shape .2,."):
            f(rows, w, jnp.ones(2))
        with pytest.raises(ValueError, match="global_scale must be one number, got None"):
            f(rows, w, None)
    with pytest.raises(ValueError, match="global_scale must be a list, with one entry for each of the 2 weights"):
        fp4_matmul(x, [w, w], 1.0)
    with pytest.raises(ValueError, match=r"a weight's lora must be .A, B, scaling. or None, got tuple of 2"):
        fp4_matmul(x, w, 1.0, lora=(a, b))
    with pytest.raises(ValueError, match=r"a weight's lora must be .A, B, scaling. or None, got ArrayImpl"):
        fp4_matmul(x, [w, w, w], [1.0] * 3, lora=(a, b, 1.0))


def holds(plan, k, n):
    """Whether every output has a warp, all of K is walked, and the CTA fits a multiprocessor's shared memory."""
    places = plan.clusters * plan.config.places
    return places >= plan.all_tiles >= n / 16 and plan.quads * 256 >= k and plan.total <= 227 << 10


def test_every_table_entry_takes_its_shape():
    for (k, n, m, lora), config in TABLE.items():
        assert holds(make_plan(m, k, (n,), config, (32,) if lora else ()), k, n)


@pytest.mark.parametrize("m", [1, 8, 16, 33, 64])
@pytest.mark.parametrize("k, n", [(3584, 4608), (18944, 3584), (64, 32), (896, 4864), (4096, 28672)])
def test_a_configuration_exists(m, k, n):
    assert holds(make_plan(m, k, (n,), config_for(m, k, (n,))), k, n)


@pytest.mark.parametrize("config, n, more, message", [
    (StreamConfig(x_depth=9), (32,), {}, r"x_depth 2\.\.8, got 3, 9"),
    (StreamConfig(warps_n=6, wgmma=True), (32,), {}, "warps_n must be a multiple of 4, got 6"),
    (StreamConfig(cluster=2), (32,), {}, "1 quads of 256, too few for a cluster of 2"),
    (StreamConfig(warps_n=32, warps_k=1, depth=2), (32,), {}, "more than 1024 threads"),
    (StreamConfig(), (32, 64), {"swiglu": True}, "two weights of equal N"),
    (StreamConfig(depth=2, late_b=True), (32,), {"ranks": (160,), "prepared": True}, "B of 10240 bytes does not fit"),
    (StreamConfig(), (80, 80), {"swiglu": True, "gives_units": True}, "unit order, N in multiples of 64"),
])  # fmt: skip
def test_what_a_plan_refuses(config, n, more, message):
    with pytest.raises(ValueError, match=message):
        make_plan(8, 256, n, config, **more)


def test_a_plan_names_what_does_not_fit():
    with pytest.raises(ValueError, match="M must be in"):
        make_plan(65, 256, (32,), StreamConfig())
    with pytest.raises(ValueError, match="row tiles"):
        make_plan(8, 256, (65536,), StreamConfig(warps_n=2))
    with pytest.raises(ValueError, match="shared memory"):
        make_plan(64, 4096, (32,), StreamConfig(depth=6, x_depth=8))


@pytest.mark.parametrize("config, n, bias, ranks", [
    (StreamConfig(1, 3, 4, 1, 3, 2), (48, 16), True, ()),
    (StreamConfig(2, 1, 2, 2, 2, 3), (64,), False, ()),
    (StreamConfig(4, 1, 1, 1, 4, 2), (40,), False, ()),
    (StreamConfig(1, 4, 2, 1, 3, 2, True), (64,), True, ()),
    (StreamConfig(1, 4, 2, 1, 3, 2, waves=2), (64,), False, ()),
    (StreamConfig(1, 3, 4, 1, 3, 2), (48, 16), False, (32, 0)),
    (StreamConfig(2, 1, 2, 2, 2, 3), (64,), False, (128,)),
    (StreamConfig(1, 4, 2, 1, 3, 2, True), (64, 40), False, (16, 48)),
])  # fmt: skip
def test_kernel_lowers_for_cuda_without_a_gpu(config, n, bias, ranks):
    m, k = 9, 1024
    kernel = stream_kernel.build(m, k, n, config, has_bias=bias, ranks=ranks)
    shape = jax.ShapeDtypeStruct
    args = [shape((m, k), jnp.bfloat16)] + [shape((-(-i // 16), k // 256, 576), jnp.uint32) for i in n]
    args += [shape((1,), jnp.float32)] * len(n)
    if bias:
        args += [shape((i,), jnp.float32) for i in n]
    if ranks:
        present = [(i, r) for i, r in zip(n, ranks, strict=True) if r]
        args += [shape((r, k), jnp.bfloat16) for _, r in present] + [shape((i, r), jnp.bfloat16) for i, r in present]
        args += [shape((1,), jnp.float32)] * len(present) + [shape((COUNTERS + 1,), jnp.uint32)]
    module = export.export(kernel, platforms=["cuda"])(*args).mlir_module()
    assert "mosaic_gpu" in module


@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize("rows, width", [(9, 896), (9, 1280), (10, 1024)])
def test_x_must_have_whole_quads_and_the_kernels_rows(wgmma, rows, width):
    """The kernel would read what lies behind it."""
    kernel, shape = stream_kernel.build(9, 896, (64,), StreamConfig(1, 4, 1, 1, 2, 2, wgmma)), jax.ShapeDtypeStruct
    given = shape((4, 4, 576), jnp.uint32), shape((1,), jnp.float32)
    with pytest.raises(ValueError, match=rf"^x must be \[9, 1024\], got \[{rows}, {width}\]"):
        kernel.trace(shape((rows, width), jnp.bfloat16), *given)


def prepared_operands(m, k, n, config, ranks):
    """Shapes of what a kernel of prepared operands takes."""
    shape = jax.ShapeDtypeStruct
    args = [shape((-(-i // 16), k // 256, 576), jnp.uint32) for i in n] + [shape((1,), jnp.float32)] * len(n)
    if ranks:
        args.append(shape((m, sum(ranks)), jnp.bfloat16))
        args += [shape((i, r), jnp.bfloat16) for i, r in zip(n, ranks, strict=True) if r]
    return [shape(make_plan(m, k, n, config, ranks, True).x_shape, jnp.bfloat16), *args]


@pytest.mark.parametrize("m, k, n, ranks", [
    (16, 3584, (3584, 512, 512), (128, 0, 32)),  # mma.sync, clusters of 2
    (33, 18944, (3584,), (32,)),  # wgmma, clusters of 4
    (64, 5120, (27648, 27648), (32, 32)),  # two waves, which cannot compute x A^T inside
    (20, 5120, (5120,), ()),
])  # fmt: skip
def test_kernel_with_prepared_operands_lowers_for_cuda_without_a_gpu(m, k, n, ranks):
    with compiling_for(90):
        config = config_for(m, k, n, ranks)
        if config.waves > 1:  # its rings are shorter then
            config = choose_prepared(m, k, n, ranks)
        kernel = stream_kernel.build(m, k, n, config, ranks=ranks, prepared=True)
        x, *args = prepared_operands(m, k, n, config, ranks)
        module = export.export(kernel, platforms=["cuda"])(x, *args).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == 1  # nothing comes before it
    assert config.wgmma == (m > 16) and config.waves == (2 if m == 64 else 1)
    with pytest.raises(ValueError, match="prepared x must be"):
        jax.eval_shape(kernel, jax.ShapeDtypeStruct((m + 1, k), jnp.bfloat16), *args)


@pytest.mark.parametrize("config, m, n, ranks", [
    (StreamConfig(2, 3, 2, 1, 3, 3), 5, 33, (0, 32)),
    (StreamConfig(1, 4, 1, 2, 2, 2, True, promote=0), 64, 40, (32, 16)),
    (StreamConfig(1, 4, 1, 1, 2, 2, True, waves=2), 33, 48, ()),
])  # fmt: skip
@pytest.mark.parametrize("wide_out", [False, True])
def test_kernel_with_swiglu_lowers_for_cuda_without_a_gpu(config, m, n, ranks, wide_out):
    k, n = 1024, (n, n)
    kernel = stream_kernel.build(m, k, n, config, wide_out=wide_out, ranks=ranks, prepared=True, swiglu=True)
    args = prepared_operands(m, k, n, config, ranks)
    (y,) = jax.eval_shape(kernel, *args)
    assert y.shape == (m, n[0]) and y.dtype == (jnp.float32 if wide_out else jnp.bfloat16)
    module = export.export(kernel, platforms=["cuda"])(*args).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("lora", [(None, 4), (20, None), (8, 8)])
def test_list_with_and_without_lora_lowers_through_the_public_call(lora):
    k, n = 320, (48, 33)
    x = jax.ShapeDtypeStruct((5, k), jnp.bfloat16)
    weights = [KernelWeight(jax.ShapeDtypeStruct((-(-i // 16), 2, 576), jnp.uint32), i, k) for i in n]
    loras = [
        None if r is None else (jax.ShapeDtypeStruct((r, k), jnp.float32), jax.ShapeDtypeStruct((i, r), jnp.float32))
        for r, i in zip(lora, n, strict=True)
    ]

    def f(x, weights, loras):
        pairs = [None if pair is None else (*pair, 0.5) for pair in loras]
        return fp4_matmul(x, weights, [1.0, 2.0], lora=pairs, backend="mosaic")

    ys = jax.eval_shape(f, x, weights, loras)
    assert [y.shape for y in ys] == [(5, 48), (5, 33)] and ys[0].dtype == jnp.bfloat16
    assert "mosaic_gpu" in export.export(jax.jit(f), platforms=["cuda"])(x, weights, loras).mlir_module()


def test_adapters_of_each_row_block_under_vmap():
    w, x, gs = _weight(0, 48, 64), _x(1, 6, 64).reshape(2, 3, 64), jnp.float32(700.0)
    a, b = _x(2, 8, 64).reshape(2, 4, 64), _x(3, 96, 4).reshape(2, 48, 4)
    got = jax.vmap(lambda x, a, b: fp4_matmul(x, w, gs, lora=(a, b, 0.5)))(x, a, b)
    for i in range(2):
        np.testing.assert_allclose(got[i], fp4_matmul(x[i], w, gs, lora=(a[i], b[i], 0.5)), rtol=1e-5, atol=1e-4)


def test_adapters_of_each_row_block_are_added_before_the_one_rounding():
    w, gs, bf16 = _weight(0, 48, 64), jnp.float32(700.0), jnp.bfloat16
    x, a, b = _x(1, 6, 64).reshape(2, 3, 64), _x(2, 8, 64).reshape(2, 4, 64), _x(3, 96, 4).reshape(2, 48, 4)
    f = functools.partial(fp4_matmul, backend="reference")
    got = jax.vmap(lambda x, a, b: f(x, w, gs, lora=(a, b, 0.02)))(x.astype(bf16), a, b)
    for i in range(2):
        alone = f(x[i].astype(bf16), w, gs, lora=(a[i], b[i], 0.02))  # as large as the base's
        assert alone.dtype == bf16 and (got[i] == alone).mean() > 0.98


def test_a_plan_for_lora():
    plan = make_plan(8, 3584, (3584, 512, 512), StreamConfig(2, 3, 4, 2, 5, 3), (32, 0, 16))
    assert plan.rank_tiles == (2, 0, 1) and plan.lora_warps == 3 and plan.lora_units == 3 * plan.lora_slices
    assert 1 <= plan.lora_slices <= 28  # parts of 128 columns at least
    with pytest.raises(ValueError, match="multiples of 16"):
        make_plan(8, 3584, (3584,), StreamConfig(4, 4, 4, 2, 4, 3), (8,))
    assert first_counters(3).tolist() == [0, 0, 0, 1]
    shape = 16, 5120, (13824, 13824), StreamConfig(2, 27, 1, 1, 2, 3), (32, 32)
    assert [make_plan(*shape, given).warpgroups for given in (False, True)] == [8, 7]  # nobody multiplies by A


def test_a_plan_for_swiglu():
    config = StreamConfig(1, 27, 1, 1, 2, 2)
    plan = make_plan(8, 5120, (27648, 27648), config)  # 3456 row tiles, at most 27 for each of 132 CTAs
    assert plan.clusters == 132 and plan.most_tiles == 27
    with pytest.raises(ValueError, match="two by two; 132 clusters of 27"):  # 1728 pairs, at most 14
        make_plan(8, 5120, (27648, 27648), config, swiglu=True)
    plan = make_plan(8, 5120, (27648, 27648), dataclasses.replace(config, warps_n=28), swiglu=True)
    assert plan.most_tiles == 28 and plan.outs == (27648,)
    assert make_plan(8, 512, (40, 40), config, swiglu=True).clusters == 3
    for n in ((64,), (64, 80), (64, 64, 64)):
        with pytest.raises(ValueError, match="two weights of equal N"):
            make_plan(8, 512, n, config, swiglu=True)


@pytest.mark.parametrize("n", [4864, 8960, 11008, 17408, 18944, 27648])
def test_gate_and_up_of_any_size_find_a_configuration(n):
    """4864 and the like are not in the table, and by themselves would be an odd number of tiles for a CTA."""
    with compiling_for(90):
        for m in (33, 64):
            config = choose_prepared(m, 1024, (n, n), (16, 16), swiglu=True)
            assert make_plan(m, 1024, (n, n), config, (16, 16), True, swiglu=True).most_tiles % 2 == 0


@pytest.mark.parametrize("dtype", layout.DECODINGS)
def test_dequantize_kernel_lowers_for_cuda_without_a_gpu(dtype):
    data = jax.ShapeDtypeStruct((3, 2, 576), jnp.uint32)
    module = export.export(dequantize_kernel.build(3, 2, dtype), platforms=["cuda"])(data).mlir_module()
    assert "mosaic_gpu" in module
