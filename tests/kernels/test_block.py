"""between_attentions: how its plan divides the work, what it refuses, that it lowers, the decode step through it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from tiny import CONFIG

from benchmarks.fp4_block import SHAPES, SIZES
from pallas_kernels import (
    LayerPart,
    Projection,
    between_attentions,
    between_attentions_reference,
    compiling_for,
    decode_attention_reference,
    takes_between_attentions,
    wanted_a,
)
from pallas_kernels.block import plan_of
from pallas_kernels.block_plan import BATCH, MOST_ITEMS, PIECES, SERVICE_WARPS, Part, make_block_plan
from pallas_kernels.hidden import hidden_shape
from pallas_kernels.layout import KernelWeight
from pallas_kernels.stream_plan import SMEM_LIMIT
from qerl_jax.models.init import for_kernels, init_adapter, init_model, quantize
from qerl_jax.models.params import norms_of
from qerl_jax.rollout import attention, fused
from qerl_jax.rollout.attention import KVCache, empty_kv
from qerl_jax.rollout.decode import decode_step


def shapes_of(name, rank):
    def projection(n, k, biased=False):
        def array(shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype)

        lora = (array((rank, k), jnp.bfloat16), array((n, rank), jnp.bfloat16), array((), jnp.float32))
        data = KernelWeight(array((n // 16, k // 256, 576), jnp.uint32), n, k)
        bias = array((n,), jnp.float32) if biased else None
        return Projection(data, array((), jnp.float32), bias, lora if rank else None)

    D, F, heads, kv = SHAPES[name]
    qkv = tuple(projection(n, D, True) for n in (heads, kv, kv))
    return LayerPart(projection(D, heads), projection(F, D), projection(F, D), projection(D, F), qkv)


def streams_of(name, m):
    """x and the residual stream."""
    D, _, heads, _ = SHAPES[name]
    return jax.ShapeDtypeStruct((m, heads), jnp.bfloat16), jax.ShapeDtypeStruct((m, D), jnp.float32)


def scales_of(name):
    return (jax.ShapeDtypeStruct(SHAPES[name][:1], jnp.float32),) * 2


@pytest.mark.parametrize("rank", [0, 32, 64, 128])
@pytest.mark.parametrize("name", SIZES)
def test_plans_fit_and_all_numbers_of_rows_divide_alike(name, rank):
    plans = [plan_of(m, shapes_of(name, rank)) for m in (1, 8, 9, 16)]
    assert plans[0].parts == plans[1].parts and plans[2].parts == plans[3].parts
    # of o, whose slices would have 26 items in the place of 28 (7B), an exchange would cost more than it saves
    assert [part.slices > 1 for part in plans[0].parts] == [False, False, True, False]
    assert [plan.warps for plan in plans] == [16 if name == "32B" and rank <= 64 else 12] * 2 + [12] * 2
    for plan in plans:
        assert plan.total <= SMEM_LIMIT and plan.depth >= (3 if plan.panels == 1 or name != "32B" else 2)
        assert plan.depth <= MOST_ITEMS
        for part in plan.parts:
            assert part.groups * part.slices * part.cuts <= 132 and part.cuts == plan.panels
            assert part.slices == 1 or part.cuts == 2 or part.groups % 2 == 0  # a pair of CTAs reads the same columns
            # the busiest CTA has at most half more than an equal share; of the large parts a twelfth
            share = sum(part.tiles_of) * part.quads / 132
            assert part.most_items <= (1.5 if share < 100 else 13 / 12) * share


@pytest.mark.parametrize("rank", [16, 32, 128])
@pytest.mark.parametrize("name", SIZES)
def test_units_of_a_are_equal_parts_of_a_slice_of_k(name, rank):
    """For whose pieces warps have registers all at once, but with many ranks of down, which has the largest K."""
    for m in (1, 8, 9, 16):
        for i, part in enumerate(plan_of(m, shapes_of(name, rank)).parts):
            pieces, shares = part.most_quads * 8, part.lora_chunks * SERVICE_WARPS
            most = max((n + 1) * pieces // shares - n * pieces // shares for n in range(shares))
            assert most == part.most_pieces
            assert most <= PIECES or (i == 2 and rank == 128)


@pytest.mark.parametrize("name", SIZES)
def test_many_ranks_are_no_more_units_than_ctas_but_in_down(name):
    """A CTA would wait for A of each further one; and for each 8 ranks that a warp adds up alone."""
    for m in (8, 16):
        for i, part in enumerate(plan_of(m, shapes_of(name, 128)).parts):
            fits = [part.together(tiles, part.half_parts) * part.half_parts <= BATCH for tiles in part.rank_tiles]
            assert all(fits) or part.half_parts > BATCH / 2
            if i != 2:
                assert part.lora_units <= part.groups * part.cuts * part.slices * (1 if m == 8 or i == 0 else 2)
            assert part.lora_turns(part.lora_chunks) <= (6 if i == 2 else 3)


@pytest.mark.parametrize("m", [1, 8, 9])
@pytest.mark.parametrize("name", SIZES)
def test_a_tile_is_shared_by_as_many_warps_as_are_added(name, m):
    """In whatever CTA, whose items its warps have in equal runs."""
    plan = plan_of(m, shapes_of(name, 32))

    def equal_runs(total, count):
        return [(n * total // count, (n + 1) * total // count) for n in range(count)]

    for part in plan.parts:
        most = 0
        for begin, end in equal_runs(part.entries, part.groups):
            tiles = (end - begin) * (2 if part.paired else 1)
            for first, last in equal_runs(part.quads, part.slices):
                for a, b in equal_runs(last - first, part.cuts):
                    warps = equal_runs(tiles * (b - a), plan.warps)
                    for tile in equal_runs(tiles * (b - a), tiles):
                        having = [w for w, run in enumerate(warps) if max(run[0], tile[0]) < min(run[1], tile[1])]
                        most = max(most, having[-1] - having[0] + 1)
        assert plan.most_holders(part) == most


def test_warps_do_not_depend_on_the_rows_where_their_rings_do():
    # of a width of 7168: 16 warps would have rings of three items for one row, of two for eight
    D, F, kv = 7168, 18432, 1024
    parts = (
        Part(D, (D,), (32,), (False,), joins=True),
        Part(D, (F, F), (32, 32), (False, False), paired=True, normed=True),
        Part(F, (D,), (32,), (False,), joins=True),
        Part(D, (D, kv, kv), (32,) * 3, (True,) * 3, normed=True),
    )
    assert make_block_plan(1, D, parts, 132, warps=16).depth == 3
    assert [make_block_plan(m, D, parts, 132).warps for m in (1, 8)] == [12, 12]


def test_whether_it_is_taken_does_not_depend_on_the_rows_of_a_panel(monkeypatch):
    """Of a width of 7168 x of 9 to 12 rows would fit, of 16 not; of 72B's that of 1 to 6 rows, beside rings of three
    items, of 7 and 8 not."""
    monkeypatch.setitem(SHAPES, "7168", (7168, 18432, 7168, 1024))
    monkeypatch.setitem(SHAPES, "72B", (8192, 29440, 8192, 1024))
    with compiling_for(90):
        taken = {
            name: [takes_between_attentions(m, jnp.bfloat16, shapes_of(name, 32)) for m in range(1, 17)]
            for name in ("7168", "72B")
        }
    assert taken == {"7168": [True] * 8 + [False] * 8, "72B": [False] * 16}


@pytest.mark.parametrize("change, message", [
    ({"m": 17}, "M must be in 1..16"),
    ({"k": 300}, "K must be a multiple of 256"),
    ({"m": 9}, "K must be at least 512 for 9 rows, got 256"),
    ({"n": (48,)}, "must have 256 outputs"),
    ({"ranks": (8,)}, "ranks must be multiples of 16"),
    ({"n": (256, 512), "paired": True, "joins": False}, "gate and up must have the same outputs"),
    ({"ctas": 131}, "CTAs come in pairs, got 131"),
])  # fmt: skip
def test_what_the_plan_refuses(change, message):
    part = Part(256, (256,), (0,), (False,), joins=True)
    m, ctas = (change.pop(name, usual) for name, usual in (("m", 8), ("ctas", 132)))
    with pytest.raises(ValueError, match=message):
        make_block_plan(m, 256, (dataclasses.replace(part, **change),), ctas)


@pytest.mark.parametrize("m, rank", [(8, 0), (8, 8), (1, 8), (16, 8)])
def test_lowers_for_hopper_as_one_kernel(m, rank):
    with compiling_for(90):
        run = jax.jit(lambda *operands: between_attentions(*operands, 1e-6))
        operands = *streams_of("7B", m), shapes_of("7B", rank), scales_of("7B")
        module = export.export(run, platforms=["cuda"])(*operands).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.dot_general" not in module


@pytest.fixture
def step():
    """A decode step of a tiny model in bfloat16 with packed weights, as a function of nothing."""
    config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    model = for_kernels(quantize(init_model(jax.random.key(0), config, jnp.bfloat16)))
    adapter = init_adapter(jax.random.key(1), model, 8, 16.0)
    adapter = jax.tree.map(lambda v: v + 0.05 * jax.random.normal(jax.random.key(2), v.shape), adapter)
    tokens, zeros, lengths = jnp.array([3, 5, 7]), jnp.zeros(3, jnp.int32), jnp.full(3, 2, jnp.int32)

    def run():
        cache = KVCache(empty_kv(model, 1, 4), empty_kv(model, 3, 4), jnp.array([2], jnp.int32))
        norms = norms_of(model, adapter)
        return jax.jit(lambda: decode_step(model, adapter, tokens, cache, zeros, lengths, zeros, norms, 3))()

    return run


@pytest.mark.parametrize("by_attention", [False, True], ids=["made there", "by attention"])
def test_a_decode_step_through_it_is_the_plain_one(step, monkeypatch, by_attention):
    """With x A^T of o made there, or by attention."""
    plain, plain_cache = step()
    given = []

    def attend(*arguments, group, in_units, a):
        return decode_attention_reference(*arguments, a=a)

    def between(*arguments):
        given.append(arguments[-1] is not None)
        return between_attentions_reference(*arguments)

    monkeypatch.setattr(fused, "takes_between_attentions", lambda *_: True)
    monkeypatch.setattr(fused, "between_attentions", between)
    monkeypatch.setattr(fused, "wanted_a", lambda _, part: part.o.lora[0])
    if by_attention:
        monkeypatch.setattr(attention, "takes_decode_attention", lambda *_: True)
        monkeypatch.setattr(attention, "decode_attention", attend)
    made, cache = step()
    assert given == [by_attention] * 2
    kept = plain_cache.completion
    if by_attention:  # where positions come before heads
        kept = jax.tree.map(lambda array: array.swapaxes(1, 2), kept)
    pairs = zip(jax.tree.leaves((made, cache.completion)), jax.tree.leaves((plain, kept)), strict=True)
    for a, b in pairs:
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.sqrt(((a - b) ** 2).mean()) < 0.01 * np.sqrt((b**2).mean())  # bfloat16's roundings


def test_who_makes_x_a():
    """Attention, where that is faster, for all rows of a panel alike."""
    wanted = {
        (name, rank): [wanted_a(m, shapes_of(name, rank)) is not None for m in (1, 8, 9, 16, 17)]
        for name in SIZES for rank in (0, 32, 128)
    }  # fmt: skip
    few, none = [True] * 4 + [False], [False] * 5
    assert wanted == {
        ("7B", 0): none, ("14B", 0): none, ("32B", 0): none, ("7B", 128): none, ("14B", 128): none, ("32B", 128): none,
        ("7B", 32): few, ("14B", 32): few, ("32B", 32): [False, False, True, True, False],
    }  # fmt: skip


@pytest.mark.parametrize("m, rank, message", [(17, 32, "got 17 rows and an adapter"), (8, 0, "got 8 rows and no")])
def test_x_a_that_nobody_takes(m, rank, message):
    operands = *streams_of("7B", m), shapes_of("7B", rank), scales_of("7B"), hidden_shape(28, 32, m)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *given: between_attentions(*given[:-1], 1e-6, hidden=given[-1]), *operands)


@pytest.mark.parametrize("f, m", [(between_attentions, 8), (between_attentions, 32), (between_attentions_reference, 8)])
@pytest.mark.parametrize("which, change, message", [
    ("x", lambda x: x.update(shape=(x.shape[0], 256)), r"x must be \[\d+, 3584\], got \[\d+, 256\]"),
    ("residual", lambda stream: stream.update(dtype=jnp.bfloat16), "residual stream must be float32, got bfloat16"),
    ("residual", lambda stream: stream.update(shape=(1, 3584)), r"residual must be \[\d+, 3584\], got \[1, 3584\]"),
    ("norms", lambda norms: norms[:1], "2 norms are needed, got 1"),
    ("norms", lambda norms: (norms[0], norms[1].update(shape=(1,))), r"norms\[1\] must be \[3584\], got \[1\]"),
    ("layer", lambda layer: layer._replace(up=layer.o), r"that do not follow each other: \(3584, 3584\), \(18944, "),
    ("layer", lambda layer: layer._replace(qkv=(layer.down,) * 3), "that do not follow each other"),
    ("layer", lambda layer: layer._replace(qkv=(layer.qkv[0]._replace(bias=layer.qkv[1].bias),)), r"bias is \(512,\)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(f, m, which, change, message):
    """It would be read as if it did, or broadcast."""
    x, residual = streams_of("7B", m)
    operands = {"x": x, "residual": residual, "layer": shapes_of("7B", 32), "norms": scales_of("7B")}
    operands[which] = change(operands[which])
    with compiling_for(90), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *given: f(*given, 1e-6), *operands.values())


def test_a_layer_that_does_not_fit_is_not_taken():
    layer = shapes_of("7B", 32)
    with compiling_for(90):
        assert takes_between_attentions(8, jnp.bfloat16, layer)
        assert not takes_between_attentions(8, jnp.bfloat16, layer._replace(down=layer.gate))


@pytest.mark.parametrize("m", [8, 32])
def test_biases_are_float32_for_the_kernels(m):
    layer = shapes_of("7B", 0)
    narrow = [v._replace(bias=v.bias.update(dtype=jnp.bfloat16)) for v in layer.qkv]
    modules = []
    for qkv in (layer.qkv, tuple(narrow)):
        with compiling_for(90):
            run = jax.jit(lambda *operands: between_attentions(*operands, 1e-6))
            operands = *streams_of("7B", m), layer._replace(qkv=qkv), scales_of("7B")
            modules.append(export.export(run, platforms=["cuda"])(*operands).mlir_module())
    taken = [re.findall(r"@mosaic_gpu_v2.*?: \((.*?)\) ->", module) for module in modules]
    assert taken[0] and taken[0] == taken[1]


def test_without_a_gpu_a_step_takes_the_plain_way(step, monkeypatch):
    called = []
    monkeypatch.setattr(fused, "between_attentions", lambda *_: called.append(1))
    step()
    assert not called
