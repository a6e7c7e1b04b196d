"""The wide kernel without a GPU: what each lane decodes, how shapes are cut, and that each variant lowers for CUDA."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels import layout, repack, variants, wide, wide_fragments, wide_kernel
from pallas_kernels.stream_plan import StreamConfig
from pallas_kernels.wide_plan import PLAIN, Handover, WideConfig, make_plan
from pallas_kernels.wide_split import SplitTiles
from pallas_kernels.wide_variants import FEW_ROWS, RANGES, TABLE, few_rows_config, wide_config

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _rotate(word, turn):
    return ((word << np.uint32(turn)) | (word >> np.uint32(32 - turn))) & np.uint32(0xFFFFFFFF)


def _values(bits, dtype="bfloat16"):
    """The two numbers of a register, bits of value * 2^-126, or in float16 2^-14."""
    halves = np.array([bits & 0xFFFF, bits >> 16], np.uint16).view(dtype)
    return halves.astype(np.float64) * {"bfloat16": 2.0**126, "float16": 2.0**14}[dtype]


def _tile_with_all_codes(dtype="bfloat16"):
    """One row tile and one quad: codes [16, 256] and the words of its lanes [unit, lane, 4]."""
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(16 * 256) % 16).reshape(16, 256).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    weight = repack(jnp.asarray(packed), jnp.full((16, 16), 0x38, jnp.uint8), dtype)
    return codes, np.asarray(weight.data)[0, 0, :512].reshape(4, 32, 4)


@pytest.mark.parametrize("dtype", layout.DECODINGS)
def test_forward_lanes_take_the_columns_that_a_matrix_operand_needs(dtype):
    """What `ForwardFragments` does with a lane's words."""
    (codes, words), made = _tile_with_all_codes(dtype), layout.DECODINGS[dtype]
    assert made.turned_mask(0) == made.turned_mask(2) and not made.direct[0] and not made.direct[2]
    for unit, b, g, t in np.ndindex(4, 4, 8, 4):
        four = words[unit, 4 * g + b]
        for half, word in enumerate((four[t // 2], four[2 + t // 2])):
            columns = 64 * unit + 16 * b + 8 * half + 2 * t + np.arange(2)
            first, second = 2 * (t % 2), 2 * (t % 2) + 1  # pairs
            low = _rotate(word, made.turns[first]) & np.uint32(made.turned_mask(0))
            high = _rotate(word, made.turns[second]) & np.uint32(made.turned_mask(second))
            high |= word & np.uint32(made.direct_mask(second))
            assert np.array_equal(_values(low, dtype), LEVELS[codes[g, columns]])
            assert np.array_equal(_values(high, dtype), LEVELS[codes[g + 8, columns]])


def test_dx_rows_hold_the_columns_that_dx_row_names(monkeypatch):
    codes, words = _tile_with_all_codes()
    for name, f in {"mul": int.__mul__, "add": int.__add__, "shr": int.__rshift__, "and_": int.__and__}.items():
        monkeypatch.setattr(wide_fragments.p, name, f)
    for warp in range(4):
        pairs = [layout.decode_word(words[1, lane, warp]) for lane in range(32)]
        for a, (pair, h, n_half) in enumerate(((0, 0, 0), (2, 1, 0), (1, 0, 1), (3, 1, 1))):
            piece = np.stack([np.concatenate([_values(pairs[4 * g + t][pair]) for t in range(4)]) for g in range(8)])
            for g in range(8):  # row g of the transposed piece is output dx_row, its columns are rows of W
                column = 64 + wide_fragments.dx_row(warp, g, h)
                assert np.array_equal(piece.T[g], LEVELS[codes[8 * n_half : 8 * n_half + 8, column]]), a


def test_every_output_row_of_a_unit_is_named_once(monkeypatch):
    for name, f in {"mul": int.__mul__, "add": int.__add__, "shr": int.__rshift__, "and_": int.__and__}.items():
        monkeypatch.setattr(wide_fragments.p, name, f)
    rows = [wide_fragments.dx_row(warp, g, h) for warp in range(4) for h in range(2) for g in range(8)]
    assert sorted(rows) == list(range(64))


@pytest.mark.parametrize("config, m, d, r, dx, bias, wide_out", [
    (WideConfig(256, 2, 1, 4, 4), 300, 1024, (1024,), False, False, False),
    (WideConfig(128, 1, 3, 4, 6), 100, 1024, (512, 128), False, True, True),  # one wave, D split by 3
    (WideConfig(256, 2, 4, 4, 4), 1024, 1024, (5120,), False, False, False),  # a wave, and 14 pairs of tiles by 4
    (WideConfig(256, 1, 1, 4, 4), 300, 1024, (1024,), True, False, False),
    (WideConfig(128, 2, 2, 4, 6), 40, 768, (80,), True, False, True),
    (WideConfig(128, 1, 1, 4, 6, promote=32), 100, 1024, (512, 128), False, False, True),
    (WideConfig(256, 2, 1, 4, 4, promote=32), 300, 1024, (1024,), False, True, False),
])  # fmt: skip
def test_kernel_lowers_for_cuda_without_a_gpu(config, m, d, r, dx, bias, wide_out):
    assert "mosaic_gpu" in lowered(config, m, d, r, dx, bias, wide_out)


@pytest.mark.parametrize("config, m, d, r, ranks, makes_h, dx", [
    (WideConfig(256, 2, 4, 4, 4), 1024, 1024, (5120,), (16,), False, False),
    (WideConfig(64, 1, 3, 6, 6, promote=32), 64, 3584, (3584, 512, 512), (32, 0, 128), True, False),
    (WideConfig(256, 2, 3, 4, 4, promote=256), 256, 13824, (5120,), (32,), True, False),
    (WideConfig(256, 2, 4, 4, 4, promote=32), 1024, 1024, (5120,), (96,), False, True),
])  # fmt: skip
def test_kernel_with_lora_lowers_for_cuda_without_a_gpu(config, m, d, r, ranks, makes_h, dx):
    assert "mosaic_gpu" in lowered(config, m, d, r, dx, not dx, False, ranks, makes_h)


def lowered(config, m, d, r, dx, bias, wide_out, ranks=(), makes_h=False, handover=PLAIN, handed=()):
    kernel = wide_kernel.build(m, d, r, config, dx, bias, wide_out, ranks, False, makes_h, handover, 1e-6)
    shape = jax.ShapeDtypeStruct
    sizes = [(d, r[0])] if dx else [(r_i, d) for r_i in r]
    args = [shape((m, d), jnp.bfloat16)]
    present = [(r_i, rank) for r_i, rank in zip(r, ranks, strict=False) if rank]
    if makes_h:
        args += [shape((rank, d), jnp.bfloat16) for _, rank in present]
    elif present:
        args.append(shape((m, sum(ranks)), jnp.bfloat16))
    args += [shape(b, jnp.bfloat16) for b in present] + [shape((1,), jnp.float32)] * len(present) * makes_h
    args += [shape((-(-n // 16), -(-k // 256) * layout.QUAD_WORDS), jnp.uint32) for n, k in sizes]
    args += [shape((1,), jnp.float32) for _ in r]
    if bias:
        args += [shape((r_i,), jnp.float32) for r_i in r]
    args += [shape(size, jnp.float32) for size in handed]
    return export.export(kernel, platforms=["cuda"])(*args).mlir_module()


@pytest.mark.parametrize("config", [WideConfig(256, 2, 1, 4, 4), WideConfig(256, 1, 2, 4, 4, promote=32)])
@pytest.mark.parametrize("rank", [0, 48])
def test_dx_of_several_weights_lowers_for_cuda_without_a_gpu(config, rank):
    m, k, ns = 300, 1024, (1304, 512, 136)
    shape = jax.ShapeDtypeStruct

    def dx(dys, data, scales, lora):
        weights = [layout.KernelWeight(one, n, k) for one, n in zip(data, ns, strict=True)]
        return wide.matmul_dx(dys, weights, scales, config, lora=lora)

    data = [shape((-(-n // layout.ROWS), k // layout.COLS, layout.QUAD_WORDS), jnp.uint32) for n in ns]
    lora = (shape((m, rank), jnp.float32), shape((rank, k), jnp.float32)) if rank else None
    operands = [shape((m, n), jnp.bfloat16) for n in ns], data, [shape((), jnp.float32)] * 3, lora
    module = export.export(jax.jit(dx), platforms=["cuda"])(*operands).mlir_module()
    assert module.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("transposed, inputs, message", [
    (True, (512, 504), r"dx has 1024 inputs, those of all its weights, which have \(512, 504\)"),
    (False, (512, 512), "those of all its weights"),
    (True, (1020, 4), "multiples of 8"),
])  # fmt: skip
def test_which_weights_dx_takes(transposed, inputs, message):
    with pytest.raises(ValueError, match=message):
        make_plan(256, 1024, (512,), transposed, WideConfig(), inputs=inputs)


@pytest.mark.parametrize("config, d, r, message", [
    (WideConfig(m_tile=80), 1024, (512,), "m_tile"),
    (WideConfig(share=5), 1024, (512,), "share must be one of"),
    (WideConfig(split=5), 512, (512,), "4 blocks of 128, too few to split by 5"),
    (WideConfig(share=4, split=2), 512, (512,), "wait for each other need a share of 1 or 2"),
    (WideConfig(), 1024, (12,), "multiples of 8"),
    (WideConfig(x_depth=7), 1024, (512,), "shared memory"),
    (WideConfig(128, promote=20), 1024, (512,), "promote must be a multiple of 8"),
])  # fmt: skip
def test_what_a_plan_refuses(config, d, r, message):
    with pytest.raises(ValueError, match=message):
        make_plan(256, d, r, False, config)
    with pytest.raises(ValueError, match=r"LoRA of ranks \(48,\) takes 2 slots of weights at once, w_depth is 1"):
        make_plan(256, 1024, (512,), False, WideConfig(w_depth=1), (48,))


@pytest.mark.parametrize("handover, m, d, r, more, message", [
    (Handover(units=True), 64, 512, (512,), {"transposed": True}, "of dx are plain"),
    (Handover(units=True), 64, 480, (512,), {}, "K in multiples of 64"),
    (Handover(normed=True), 257, 512, (512,), {}, "up to 256 rows"),
    (Handover(joins=True), 64, 512, (512, 512), {}, "one weight joins"),
    (Handover(joins=True), 64, 512, (96,), {}, "N in multiples of 64"),
    (Handover(gives_units=True), 64, 512, (512,), {}, "goes out in unit order"),
    (Handover(gives_units=True), 64, 512, (96, 96), {"swiglu": True}, "goes out in unit order"),
])  # fmt: skip
def test_what_cannot_be_handed_over(handover, m, d, r, more, message):
    with pytest.raises(ValueError, match=message):
        make_plan(m, d, r, more.pop("transposed", False), WideConfig(), handover=handover, **more)


@pytest.mark.parametrize("r, handover", [
    ((512,), Handover(units=True, joins=True, gives_units=True)),
    ((384, 64, 64), Handover(units=True, normed=True)),
])  # fmt: skip
@pytest.mark.parametrize("config", [WideConfig(32, 1, 4, 6, 6, 24), WideConfig(256, 1, 3, 4, 4)])
def test_kernels_that_share_a_norm_lower_for_cuda_without_a_gpu(config, r, handover, calls):
    bias, handed = (False, [(250, 512), (512,)]) if handover.joins else (True, [(16, 256)])
    of = config, 250, 1024, r, False, bias, not bias
    program = lowered(*of, handover=handover, handed=handed)
    assert "wgmma" in program and not calls(program)


@pytest.mark.parametrize("config, m, r, clusters, split_items, parts", [
    (WideConfig(256, 2, 3), 256, 5120, 60, 20, 3),  # 20 pairs of tiles
    (WideConfig(256, 2, 4), 1024, 5120, 66, 14, 4),  # 80 pairs: a wave of 66, 14 x 4 clusters for the others
    (WideConfig(256, 2, 8), 1024, 5120, 66, 14, 4),  # as many as there are
    (WideConfig(256, 2, 3), 1024, 7168, 66, 0, 1),  # 112 pairs: 46 are left, more than half of the clusters
    (WideConfig(256, 2, 2), 256, 132 * 128, 66, 0, 1),  # one whole wave
    (WideConfig(256, 1, 4), 256, 3584, 112, 28, 4),
    (WideConfig(256, 2, 1), 256, 5120, 20, 0, 1),
])  # fmt: skip
def test_the_last_wave_is_split_among_clusters_that_are_all_resident(config, m, r, clusters, split_items, parts):
    plan = make_plan(m, 5120, (r,), False, config)
    assert (plan.clusters, plan.split_items, plan.parts) == (clusters, split_items, parts)
    assert plan.clusters <= plan.resident
    assert plan.longest_chain == (-(-20 // parts) if split_items == plan.items else 20) * 16


@pytest.mark.parametrize("m_tile, split", [(32, 3), (96, 4), (128, 3), (160, 3), (256, 3), (256, 7)])
def test_every_row_of_a_split_tile_is_added_up_by_one_part(m_tile, split):
    tiles = SplitTiles()
    tiles.plan = make_plan(8, 4096, (256,), False, WideConfig(m_tile, 2, split, 2, 2))
    for rows in range(32, m_tile + 1, 32):
        owners = [i for part in range(split) for i in tiles.eights(rows, part)]
        assert owners == list(range(rows // 8))
        sizes = [len(tiles.eights(rows, part)) for part in range(split)]
        assert max(sizes) - min(sizes) <= 1


def test_the_table_is_usable():
    for (op, k, n, m), config in TABLE.items():
        d, r = (k, n) if op == "forward" else (n, k)
        make_plan(m, d, (r,), op == "dx", config)
        if m in RANGES:
            assert wide_config(op, m, k, (n,)) == config
            continue
        assert op == "forward" and m in FEW_ROWS and config.m_tile == m
        with variants.compiling_for(90):
            assert variants.choose(m, k, (n,)) == variants.choose(m // 2 + 1, k, (n,)) == config


def test_few_rows_of_small_matrices_go_there_too_and_adapters_where_it_pays():
    def chosen(m, k, n, *ranks):
        return type(variants.choose(m, k, (n,), None, ranks))

    with variants.compiling_for(90):
        small, down = (3584, 3584), (18944, 3584)
        assert [chosen(m, *small) for m in (16, 17, 32, 33)] == [StreamConfig, WideConfig, WideConfig, WideConfig]
        assert [chosen(m, *down) for m in (17, 64)] == [StreamConfig] * 2
        for shape in (small, down):
            assert [chosen(m, *shape, 32) for m in (16, 17, 64)] == [StreamConfig, WideConfig, WideConfig]
        assert chosen(64, 3584, 37888, 32) is StreamConfig  # no CTA is without a tile
        assert chosen(64, 27648, 5120, 32) is StreamConfig  # long
        assert chosen(64, 4096, 4096, 128) is WideConfig  # in three parts, which leave more CTAs than four
        qkv = 64, 3584, (3584, 512, 512)
        assert isinstance(variants.choose(*qkv, None, (256,) * 3), WideConfig) and not spare(*qkv, *[256] * 3)
        assert variants.lora_inside(64, 3584, (3584,), (32,))
        assert isinstance(variants.choose(64, 3584, (3580, 4)), StreamConfig)  # no multiples of 8
        # in a decode step, where x comes in unit order, without adapters and for longer parts too
        long = 27648, (5120,)
        for m, ranks in ((17, (0,)), (64, (0,)), (32, (32,))):
            assert isinstance(variants.choose_prepared(m, *long, ranks), WideConfig)
        assert isinstance(variants.choose_prepared(64, 5120, (27648,) * 2, (32,) * 2, True), StreamConfig)


def spare(m, k, n, *ranks, config=None):
    with variants.compiling_for(90):
        return variants.spare_ctas_make_h(m, k, n, ranks, config or wide_config("forward", m, k, n))


def test_sums_of_few_rows_are_promoted_after_an_eighth_of_k_but_16_to_64_steps():
    found = [few_rows_config(64, k, (1024,), prepared=True).promote for k in (1024, 4096, 16384)]
    assert found == [16, 32, 64]


def test_ctas_without_a_tile_make_x_at_where_they_are_in_time():
    assert (
        spare(128, 3584, (3584,), 32)
        and spare(256, 18944, (3584,), 32)
        and spare(256, 3584, (3584, 512, 512), *[32] * 3)
    )
    assert not spare(128, 3584, (3584,), 0)  # no adapter
    assert not spare(128, 3584, (37888,), 32)  # all have tiles
    assert not spare(256, 12288, (4096,), 32)  # four CTAs for 12288 columns
    assert not spare(64, 2048, (2048,), 32, config=WideConfig(64, 4))  # of fours some GPUs hold fewer
    assert spare(64, 12288, (4096,), 32, config=WideConfig(64, 1, 4, 6, 6))
    assert not spare(256, 3584, (3584, 512, 512), *[128] * 3)  # more than a warp's registers
    assert not spare(600, 1024, (1024,), 32)  # more rows than there are warps for
    assert not spare(64, 3600, (3584,), 32, config=WideConfig(64, 1, 4, 6, 6))  # no multiple of 32
    with variants.compiling_for(90), pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "multiprocessors", lambda: 114)  # they would wait for each other
        assert not variants.spare_ctas_make_h(128, 3584, (3584,), (32,), wide_config("forward", 128, 3584, (3584,)))


def test_a_rows_x_at_does_not_depend_on_m():
    plans = [
        make_plan(m, 3584, (3584,), False, WideConfig(128, 1, 4), (32,), makes_h=True).spare for m in (65, 100, 128)
    ]
    assert len(set(plans)) == 1


@pytest.mark.parametrize("op", ["forward", "dx"])
def test_shapes_outside_the_table_get_a_configuration(wide_variants_with, op):
    wide_config = wide_variants_with((0, 11)).wide_config
    for m, k, n in ((65, 80, 40), (128, 1536, 2048), (256, 4096, 4096), (4096, 8192, 1024)):
        config = wide_config(op, m, k, (n,))
        # 64 tiles of 256 x 128 rows in two parts take less time than 32 of 256 x 256 in four
        assert config.m_tile == (128 if m <= 128 or (op, m) == ("forward", 256) else 256)
    # 96 tiles of 256 rows would leave a quarter of the multiprocessors idle
    assert wide_config(op, 700, 4096, (4096,)).m_tile == 192
    # 16 tiles of outputs: split, so that more than an eighth of the multiprocessors have work
    assert wide_config("forward", 128, 4096, (2048,)).split == 8


@pytest.mark.parametrize("op, k, n, m, tile, parts", [
    ("forward", 18944, (3584,), 1280, 224, 3),  # 66 + 18 pairs of tiles instead of 66 + 4, of which 18 by three
    ("dx", 4096, (12288, 12288), 1280, 256, 4),  # outside the table: 14 of 80 pairs in four parts
    ("forward", 3584, (18944, 18944), 300, 160, 2),  # two tiles of which the second has 160 rows, not 64 after 256
    ("forward", 5120, (13824, 13824), 3000, 256, 1),  # nothing is better
    ("forward", 3584, (3584,), 1024, 256, 1),  # the table's own rows
])  # fmt: skip
def test_rows_between_those_that_were_measured_are_cut_to_fill_the_last_wave(
    wide_variants_with, op, k, n, m, tile, parts
):
    config = wide_variants_with((0, 11)).wide_config(op, m, k, n)
    d, r, inputs = (k, n, ()) if op == "forward" else (sum(n), (k,), n)
    plan = make_plan(m, d, r, op == "dx", config, inputs=inputs)
    assert (config.m_tile, plan.parts) == (tile, parts)


def test_many_rows_and_dx_go_to_the_wide_kernel_on_hopper(monkeypatch):
    with variants.compiling_for(90):
        assert isinstance(variants.choose(64, 13824, (5120,)), StreamConfig)
        assert isinstance(variants.choose(65, 13824, (5120,)), WideConfig)
        assert isinstance(variants.choose(65, 3584, (4609,)), StreamConfig)  # N is no multiple of 8
        assert variants.choose(257, 3584, (4609,)) == variants.choose_dx(257, 3584, (4609,)) == "dequantize-mosaic"
        assert isinstance(variants.choose_dx(8, 3584, (4608,)), WideConfig)
        assert variants.choose(128, 3584, (3584,)).split > 1
    with variants.compiling_for(90), monkeypatch.context() as patch:
        patch.setattr(variants, "multiprocessors", lambda: 114)  # those that split D wait for each other
        assert variants.choose(128, 3584, (3584,)).split == variants.choose_dx(128, 3584, (3584,)).split == 1
        assert isinstance(variants.choose(64, 3584, (3584,)), StreamConfig)
    with variants.compiling_for(75):
        assert variants.choose(300, 3584, (4608,)) == variants.choose_dx(300, 3584, (4608,)) == "dequantize"


@pytest.mark.parametrize("m_tile, share, r", [(256, 2, 136), (192, 4, 264), (128, 1, 256), (64, 8, 128)])
def test_every_output_is_computed_once(monkeypatch, m_tile, share, r):
    """By the kernel's own arithmetic; with up to 50 tiles of rows, in one group or several."""
    on_ints = {"div": "floordiv", "rem": "mod", "mul": "mul", "add": "add", "sub": "sub"}
    for name, of_int in on_ints.items():
        monkeypatch.setattr(wide_kernel.p, name, getattr(int, f"__{of_int}__"))
    monkeypatch.setattr(wide_kernel.p, "i32", int)
    for m in {1, 40, *range(m_tile, 50 * m_tile, 59)}:
        plan = make_plan(m, 1024, (r,), False, WideConfig(m_tile, share))
        computed = np.zeros((m, plan.r_groups * share), int)
        for run in plan.runs:
            for item, rank in np.ndindex(run.end - run.first, share):
                cta = types.SimpleNamespace(plan=plan, rank=rank)
                unit = wide_kernel.Unit(run.first + item, run.rows, run.parts, 0, 0, 0)
                r_tile, row = wide_kernel._Kernel.tile(cta, unit)
                computed[row : row + run.rows, r_tile] += 1
        assert (computed == 1).all(), m


@pytest.mark.parametrize("m, r, config, runs", [
    (2112, 37888, WideConfig(split=2), [(0, 1184, 256, 1), (1184, 1320, 64, 1), (1320, 1332, 64, 2)]),
    (2112, 37888, WideConfig(), [(0, 1184, 256, 1), (1184, 1332, 64, 1)]),
    (2048, 3584, WideConfig(split=2), [(0, 112, 256, 1)]),
    (300, 3584, WideConfig(split=2), [(0, 14, 256, 2), (14, 28, 64, 2)]),
    (200, 3584, WideConfig(128, 1, 2), [(0, 28, 128, 2), (28, 56, 96, 2)]),
    (130, 3584, WideConfig(), [(0, 14, 160, 1)]),
])  # fmt: skip
def test_the_last_tile_has_as_many_rows_as_there_are(m, r, config, runs):
    assert [tuple(run) for run in make_plan(m, 3584, (r,), False, config).runs] == runs


@pytest.mark.parametrize(
    "m, m_tiles, items", [(256, 1, 1), (4096, 16, 16), (4100, 17, 17), (4400, 18, 18), (8448, 33, 33), (9000, 36, 36)]
)
def test_groups_of_row_tiles_are_filled_up_little(m, m_tiles, items):
    plan = make_plan(m, 1024, (256,), False, WideConfig())
    assert (plan.r_groups, plan.m_tiles, plan.items) == (1, m_tiles, items)
    for m in range(1, 40000, 256):
        plan = make_plan(m, 1024, (256,), False, WideConfig())
        assert plan.m_tiles <= plan.items <= plan.m_tiles + -(-plan.m_tiles // 16) and plan.m_group <= 16


def test_a_tile_is_multiplied_by_its_own_weights_ranks_where_these_are_alike():
    def steps(config, n, ranks, **more):
        return make_plan(64, 3584, n, False, config, ranks, **more).lora_steps

    one, two = WideConfig(64, 1, 1, 3, 4), WideConfig(64, 2, 1, 3, 4)
    qkv = (3584, 512, 512)
    assert steps(one, qkv, (128,) * 3) == steps(two, qkv, (128,) * 3) == 8
    assert steps(two, (128, 128), (32, 32)) == 4, "a cluster has tiles of both"
    assert steps(one, qkv, (128, 128, 0)) == 16
    assert steps(one, (512, 512), (32, 32), swiglu=True) == 4, "a tile is both's"
    assert steps(one, (3584,), (32,)) == 2
