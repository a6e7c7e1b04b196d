"""What is between two attentions for 17 rows and more: which kernels run, and what they are given."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead
from jax import export
from random_weights import normal, tiny_layer
from test_block import scales_of, shapes_of, streams_of

from benchmarks.fp4_block import EPS, SHAPES, SIZES, random_layer
from pallas_kernels import (
    between_attentions,
    between_attentions_reference,
    compiling_for,
    inputs_kernel,
    layer_calls,
    reads_units,
    stream_kernel,
    takes_between_attentions,
    variants,
    wide,
)
from pallas_kernels.fragment_order import in_unit_order
from pallas_kernels.inputs_plan import make_inputs_plan
from pallas_kernels.layout import EPILOGUE_FACTOR, KernelWeight, dequantize
from pallas_kernels.stream_plan import StreamConfig
from pallas_kernels.wide_plan import WideConfig


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("name", SIZES)
def test_takes_the_models_shapes(name, rows):
    with compiling_for(90):
        assert takes_between_attentions(rows, jnp.bfloat16, shapes_of(name, 32))
        assert not any(takes_between_attentions(m, jnp.bfloat16, shapes_of(name, 32)) for m in (0, 257))


# hidden and inner size, outputs of q and of k and v: Qwen3 1.7B, 4B, 8B, 14B, 32B; Llama 3 1B, 8B
OTHERS = [(2048, 6144, 2048, 1024), (2560, 9728, 4096, 1024), (4096, 12288, 4096, 1024), (5120, 17408, 5120, 1024)]
OTHERS += [(5120, 25600, 8192, 1024), (2048, 8192, 2048, 512), (4096, 14336, 4096, 1024)]


@pytest.mark.parametrize("shape", [*SHAPES.values(), *OTHERS])
def test_takes_all_ranks_up_to_128(monkeypatch, shape):
    monkeypatch.setitem(SHAPES, "this", shape)
    with compiling_for(90):
        for rank in (16, 64, 96, 128):
            layer = shapes_of("this", rank)
            taken = [takes_between_attentions(rows, jnp.bfloat16, layer) for rows in (8, 16, 32, 64, 128, 256)]
            assert all(taken), (rank, taken)


@pytest.mark.parametrize("name", SIZES)
def test_o_reads_units_where_the_wide_kernel_has_no_launch_before(name):
    with compiling_for(90):
        assert [m for m in (8, 32, 64, 128, 256) if reads_units(m, shapes_of(name, 32))] == [32, 64, 128, 256]
        assert reads_units(64, shapes_of(name, 0))
        with pytest.raises(ValueError, match="x in unit order is for more than 16 rows, got 8"):
            between_attentions(*streams_of(name, 8), shapes_of(name, 0), scales_of(name), EPS, in_units=True)


@pytest.mark.parametrize("name", SIZES)
def test_rings_make_room_for_adapters(name):
    """Up to rank 64 at 33-64 rows, if they are longer than two without; beyond, B is late."""
    with compiling_for(90):
        without, given = (layer_calls.calls_of(48, shapes_of(name, rank)) for rank in (0, 64))
        assert layer_calls.calls_of(48, shapes_of(name, 128))[1].config.late_b
    shorter = longer = 0
    for a, b in zip(without, given, strict=True):
        if isinstance(b.config, StreamConfig):
            room = {name: getattr(b.config, name) for name in ("depth", "x_depth", "shares")}
            assert dataclasses.replace(a.config, **room) == b.config
            shorter += (b.config.depth, b.config.x_depth) < (a.config.depth, a.config.x_depth)
            longer += max(a.config.depth, a.config.x_depth) > 2
        else:
            assert b.makes_h and not b.before
    assert shorter == longer


@pytest.mark.parametrize("rank, rows, launches", [(32, 32, 5), (32, 64, 5), (8, 200, 5), (0, 64, 5)])
def test_one_or_two_launches_for_each_matmul(rank, rows, launches):
    """Where x needs no order for wgmma, and x A^T is made by the kernel that multiplies, o, down, and q, k and v have
    one."""
    D, _, heads, _ = SHAPES["7B"]
    x, residual = jax.ShapeDtypeStruct((rows, heads), jnp.bfloat16), jax.ShapeDtypeStruct((rows, D), jnp.float32)
    norms = (jax.ShapeDtypeStruct((D,), jnp.float32),) * 2
    with compiling_for(90):
        run = jax.jit(lambda *operands: between_attentions(*operands, EPS))
        module = export.export(run, platforms=["cuda"])(x, residual, shapes_of("7B", rank), norms).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == launches
    assert "stablehlo.dot_general" not in module


def inputs_reference(m, k, ranks, source, ordered, eps, units, dtype):
    """inputs_kernel.build in plain JAX."""
    plan = make_inputs_plan(m, k, ranks, source, ordered, units)
    return functools.partial(inputs_kernel.reference, plan, eps, dtype=dtype)


def products(x, data, scales, biases, n, ranks, lora, out_dtype, swiglu, gives_units):
    """What both kernels that multiply compute."""
    h, b = (lora[0], list(lora[1:])) if lora else (None, [])
    first, ys = 0, []
    for i, (words, scale, outputs) in enumerate(zip(data, scales, n, strict=True)):
        weight = KernelWeight(words.reshape(words.shape[0], -1, 576), outputs, x.shape[1])
        y = jnp.dot(x.astype(jnp.float32), dequantize(weight, scale, jnp.float32).T)
        if ranks and ranks[i]:
            part = h[:, first : first + ranks[i]].astype(jnp.float32)
            y, first = y + part @ b.pop(0).astype(jnp.float32).T * (EPILOGUE_FACTOR / scale), first + ranks[i]
        ys.append(y + biases[i] if biases else y)
    ys = [jax.nn.silu(ys[0]) * ys[1]] if swiglu else ys
    return [(in_unit_order(y) if gives_units else y).astype(out_dtype) for y in ys]


def stream_reference(m, k, n, config, has_bias, *, wide_out, prepared, ranks, swiglu, gives_units, scaled, dtype):
    assert prepared and dtype == "bfloat16", "in which nothing is scaled"

    def run(x, *operands):
        data, scales, rest = operands[: len(n)], operands[len(n) : 2 * len(n)], operands[2 * len(n) :]
        biases, lora = (rest[: len(n)], rest[len(n) :]) if has_bias else ((), rest)
        if config.wgmma:
            x = x.reshape(k // 256, 4, 4, 2, -1, 4, 2).transpose(4, 0, 1, 5, 2, 3, 6).reshape(-1, k)[:m]
        out_dtype = jnp.float32 if wide_out else dtype
        return products(x, data, scales, biases, n, ranks, lora, out_dtype, swiglu, gives_units)

    return run


def wide_reference(x, lora, data, scales, biases, n, ranks, config, out_dtype, swiglu, makes_h, way, eps, handed):
    if way.normed:  # as far as the product is concerned, x might as well be divided now
        squares = handed[0][:, : len(x)].sum(0)
        x = x.astype(jnp.float32) * jax.lax.rsqrt(squares / x.shape[1] + eps)[:, None]
    if way.units:
        x = x.reshape(len(x), -1, 4, 2, 4, 2).transpose(0, 1, 4, 2, 3, 5).reshape(x.shape)  # unit j h t c
    if makes_h:
        present = [i for i, rank in enumerate(ranks) if rank]
        a, b, scalings = (lora[i * len(present) : (i + 1) * len(present)] for i in range(3))
        factors = [scales[i] * scaling / EPILOGUE_FACTOR for i, scaling in zip(present, scalings, strict=True)]
        parts = [jnp.dot(x, a_i.T, preferred_element_type=jnp.float32) * f for a_i, f in zip(a, factors, strict=True)]
        lora = [jnp.concatenate(parts, 1).astype(jnp.bfloat16), *b]
    if way.joins:
        (y,), (residual, scale) = products(x, data, scales, biases, n, ranks, lora, out_dtype, False, False), handed
        flow = residual + y
        x = (flow * scale).astype(jnp.bfloat16)
        squares = jnp.square(flow).reshape(*flow.shape[:1], -1, 64).sum(-1).T
        return [flow, in_unit_order(x) if way.gives_units else x, jnp.pad(squares, ((0, 0), (0, -len(x) % 32)))]
    return products(x, data, scales, biases, n, ranks, lora, out_dtype, swiglu, way.gives_units)


def not_for_the_wide_kernel(*shape, prepared):
    raise ValueError


@pytest.mark.parametrize("rows, qkv, kernel, makes_h", [
    (40, True, StreamConfig, False),
    (40, True, WideConfig, True),
    (100, True, WideConfig, False),
    (70, False, WideConfig, True),
])  # fmt: skip
def test_the_kernels_are_given_what_belongs_to_them(monkeypatch, rows, qkv, kernel, makes_h):
    if kernel is StreamConfig:
        monkeypatch.setattr(variants, "few_rows_config", not_for_the_wide_kernel)
    if not makes_h:
        monkeypatch.setattr(layer_calls, "spare_ctas_make_h", lambda *_: False)
    monkeypatch.setattr(inputs_kernel, "build", inputs_reference)
    monkeypatch.setattr(stream_kernel, "build", stream_reference)
    monkeypatch.setattr(wide, "multiply", wide_reference)
    layer = tiny_layer(16, qkv)
    rng = np.random.default_rng(1)
    x, residual = normal(rng, rows, 512, dtype=jnp.bfloat16), normal(rng, rows, 256)
    norms = [1 + normal(rng, 256, size=0.1) for _ in range(1 + bool(layer.qkv))]
    with compiling_for(90):
        calls = layer_calls.calls_of(rows, layer)
        made = between_attentions(x, residual, layer, norms, EPS)
        assert reads_units(rows, layer) == makes_h
        if makes_h:
            in_units = between_attentions(in_unit_order(x), residual, layer, norms, EPS, in_units=True)
            jax.tree.map(np.testing.assert_array_equal, in_units, made)
        else:
            with pytest.raises(ValueError, match="o does not read x in unit order"):
                between_attentions(x, residual, layer, norms, EPS, in_units=True)
    assert all(isinstance(call.config, kernel) for call in calls)
    assert all(call.makes_h == makes_h != bool(call.before) for call in calls)
    ways = [call.handover for call in calls]
    assert [way.scaled for way in ways] == [False, False, True, False][: len(ways)]
    assert any(way.units for way in ways) == (kernel is WideConfig)
    for before, behind in itertools.pairwise(ways):
        assert before.joins == behind.normed == (makes_h and before is ways[2])
        assert not before.gives_units or behind.units
    true = jax.jit(functools.partial(between_attentions_reference, eps=EPS))(x, residual, layer, norms)
    leaves = zip(jax.tree.leaves(made), jax.tree.leaves(true), strict=True)
    for a, b in leaves:
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert a.shape == b.shape and np.sqrt(((a - b) ** 2).mean()) < 0.01 * np.sqrt((b**2).mean())


drawn = jax.jit(random_layer, static_argnums=(1, 2))


def start(programs, name, rank, rows):
    """The layer by its kernels, its reference, and the layer with x in unit order where it takes that."""
    layer, norms = jax.eval_shape(lambda: random_layer(jax.random.key(0), SHAPES[name], rank))
    x = jax.ShapeDtypeStruct((rows, layer.o.weight.k), jnp.bfloat16)
    residual = jax.ShapeDtypeStruct((rows, layer.o.weight.n), jnp.float32)
    keys = []
    options = [(between_attentions, {}), (between_attentions_reference, {})]
    if reads_units(rows, layer):
        options.append((between_attentions, {"in_units": True}))
    for f, more in options:
        keys.append((f, name, rank, rows, *more))
        programs.start(keys[-1], functools.partial(f, eps=EPS, **more), x, residual, layer, norms)
    return keys


@ahead(start)
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, rank, rows",
    [
        ("7B", 32, 33),
        ("7B", 0, 64),
        ("7B", 128, 100),
        ("14B", 64, 48),
        ("7B", 128, 64),
        ("14B", 96, 32),
        ("14B", 32, 17),
        ("32B", 32, 64),
        ("32B", 32, 130),
    ],
)
def test_on_a_gpu(programs, rng, name, rank, rows):
    run, reference, *rest = map(programs.get, start(programs, name, rank, rows))
    ordered = rest[0] if rest else None
    layer, norms = drawn(jax.random.key(0), SHAPES[name], rank)
    x = jnp.asarray(rng.standard_normal((rows, layer.o.weight.k)), jnp.bfloat16)
    residual = jnp.asarray(rng.standard_normal((rows, layer.o.weight.n)), jnp.float32)
    made, true = (jax.tree.leaves(f(x, residual, layer, norms)) for f in (run, reference))
    for a, b in zip(made, true, strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.sqrt(((a - b) ** 2).mean()) < 0.01 * np.sqrt((b**2).mean())
    for _ in range(10):
        again = jax.tree.leaves(run(x, residual, layer, norms))
        assert all(bool((a == b).all()) for a, b in zip(again, made, strict=True))
    if ordered is None:
        return
    for a, b in zip(jax.tree.leaves(ordered(in_unit_order(x), residual, layer, norms)), true, strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.sqrt(((a - b) ** 2).mean()) < 0.01 * np.sqrt((b**2).mean())
