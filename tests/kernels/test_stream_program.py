"""The streaming kernel's program run in NumPy (see emulator.py): its numbers, its barriers and counters."""

import dataclasses
import functools
import types

import emulator
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import swiglu

from pallas_kernels import layout, ptx, range_scale, repack, stream_compute, stream_kernel, stream_plan
from pallas_kernels.fragment_order import in_unit_order
from pallas_kernels.layout import EPILOGUE_FACTOR
from pallas_kernels.operands import number, padded_ranks
from pallas_kernels.stream_plan import StreamConfig, make_plan

GLOBAL_SCALE = np.float32(2688.0)


@functools.cache
def _matrix(dtype="bfloat16"):
    """A packed matrix [160, 1024] and its values; cases take tiles and quads of it, so it is packed once."""
    rng = np.random.default_rng(7)
    packed = rng.integers(0, 256, (160, 512), dtype=np.uint8)
    scale = rng.integers(0x10, 0x50, (160, 64), dtype=np.uint8)
    weight = repack(jnp.asarray(packed), jnp.asarray(scale), dtype)
    return np.asarray(weight.data), np.asarray(layout.dequantize(weight, GLOBAL_SCALE, jnp.float32), np.float64)


class Case:
    """Operands of a call, its true outputs and the error that they may have."""

    def __init__(self, m, k, n, config, ranks=(), bias=False, global_scales=None, dtype="bfloat16"):
        rng, ulp = np.random.default_rng(m), {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]

        def normal(*shape, scale=1.0):
            return (rng.standard_normal(shape) * scale).astype(dtype)

        self.x, self.weights, self.true, self.bound, loras = normal(m, k), [], [], [], []
        self.h_and_b, all_h, all_b = [], [], []
        x = self.x.astype(np.float64)
        global_scales = np.float32(global_scales or [GLOBAL_SCALE] * len(n))
        self.scales = list(map(number, global_scales))
        self.biases = [rng.standard_normal(n_i).astype(np.float32) for n_i in n] if bias else []
        (data, values), tile = _matrix(dtype), 0
        for i, (n_i, rank) in enumerate(zip(n, ranks or (0,) * len(n), strict=True)):
            tiles = -(-n_i // 16)
            tile %= len(data) - tiles + 1
            self.weights.append(data[tile : tile + tiles, : k // 256])
            dense = values[16 * tile : 16 * tile + n_i, :k] * (np.float64(GLOBAL_SCALE) / global_scales[i])
            tile += tiles
            true, bound = x @ dense.T, 1e-6 * (np.abs(x) @ np.abs(dense).T)
            if bias:
                true = true + self.biases[i]
            if rank:
                a, b = normal(rank, k, scale=k**-0.5), normal(n_i, rank)
                hidden = 0.7 * x @ a.astype(np.float64).T  # rounded to 16 bits between the products
                all_h.append(hidden * (global_scales[i] / EPILOGUE_FACTOR))
                all_b.append(b)
                true = true + hidden @ b.astype(np.float64).T
                bound = bound + ulp * (np.abs(hidden) @ np.abs(b.astype(np.float64)).T)
            loras.append((a, b, 0.7) if rank else None)
            self.true.append(true)
            self.bound.append(bound)
        self.loras = stream_kernel.lora_operands(loras, k, dtype)
        if all_h:
            self.h_and_b = [np.concatenate(all_h, 1).astype(dtype), *all_b]
        self.plan = make_plan(m, k, n, config, padded_ranks(loras), prepared=config.shares)

    def run(self, prepared=False, **options):
        plan = dataclasses.replace(self.plan, prepared=prepared)
        loras = self.h_and_b if prepared else self.loras
        return emulator.run(plan, self.x, self.weights, self.scales, self.biases, loras, **options)

    def is_right(self, ys):
        return all((np.abs(y - true) <= bound).all() for y, true, bound in zip(ys, self.true, self.bound, strict=True))


class Joined(Case):
    """Of gate and up, silu(gate) * up; `apart` has both."""

    def __init__(self, m, k, n, config, ranks=(), bias=False):
        self.apart = Case(m, k, (n, n), config, ranks, bias, (40.0, 700.0))
        vars(self).update(vars(self.apart))
        self.plan = make_plan(m, k, (n, n), config, self.plan.ranks, config.shares, swiglu=True)
        self.true, self.bound = ([v] for v in swiglu(self.true, self.bound))


def waiting_at_all_but(barrier, make_memory):
    """`make_memory` of an emulator in which nobody waits at the barrier at this address."""

    def made(machine):
        memory = make_memory(machine)

        def without(wait):
            return lambda address, parity: address[0] == barrier or wait(address, parity)

        memory.barrier_wait, memory.barrier_wait_for_cluster = map(
            without, (memory.barrier_wait, memory.barrier_wait_for_cluster)
        )
        return memory

    return made


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    monkeypatch.setattr(stream_plan, "RESIDENT", {1: 2, 2: 2, 4: 1})


@pytest.mark.parametrize("config, m, k, n, bias", [
    (StreamConfig(1, 2, 4, 1, 3, 2), 3, 768, (20, 9), True),
    (StreamConfig(2, 1, 2, 2, 2, 3, promote=0), 9, 768, (40,), False),
    (StreamConfig(1, 2, 2, 1, 3, 2, promote=16), 9, 768, (20,), False),  # chains of 2 quads and of 1
    (StreamConfig(1, 4, 1, 1, 3, 2, True), 17, 1024, (48, 16), False),
    (StreamConfig(1, 4, 2, 1, 2, 2, True, promote=0), 8, 512, (96,), False),
    (StreamConfig(1, 4, 4, 1, 2, 2, True, promote=12), 12, 1024, (48,), False),  # chains of 3 quads and of 1
    (StreamConfig(1, 1, 1, 3, 2, 2, waves=2), 5, 512, (70,), False),
    (StreamConfig(1, 5, 1, 3, 2, 2), 2, 256, (16,) * 30, False),  # more global scales than 256 bytes hold
    (StreamConfig(1, 8, 1, 1, 2, 2, True, promote=0, shares=True), 17, 1024, (160, 140), True),
])  # fmt: skip
def test_products(config, m, k, n, bias):
    case = Case(m, k, n, config, bias=bias)
    assert case.is_right(case.run()[0])


@pytest.mark.parametrize("promote, seen", [(0, 8), (16, 16), (32, 0)])  # two sums by turns; each quad's; two quads'
def test_a_chain_does_not_see_the_sums_before_it(promote, seen):
    """One is lost where it is added to 2^24."""
    packed, x = np.zeros((16, 256), np.uint8), np.ones((8, 512), "bfloat16")
    packed[:, 0], x[:, 0] = 0x02, 2.0**24
    unit, step = np.arange(4)[:, None], np.arange(4)
    packed[:, 128 + 32 * unit + 2 * step] = 0x02  # one in each step of the second quad
    weight = repack(jnp.asarray(packed), jnp.full((16, 32), 0x38, jnp.uint8))
    plan = make_plan(8, 512, (16,), StreamConfig(1, 1, 1, 1, 2, 2, promote=promote))
    ((y,),) = emulator.run(plan, x, [np.asarray(weight.data)], [number(1.0)])
    np.testing.assert_array_equal(y, np.full((8, 16), 2.0**24 + seen, np.float32))


@pytest.mark.parametrize("config, m, k, n, ranks", [
    (StreamConfig(1, 2, 2, 1, 3, 3), 8, 512, (9, 33), (32, 16)),
    (StreamConfig(1, 4, 1, 1, 3, 2, True), 20, 512, (64,), (32,)),
])  # fmt: skip
def test_float16(config, m, k, n, ranks):
    case = Case(m, k, n, config, ranks, bias=True, dtype="float16")
    assert case.is_right(case.run()[0])


@pytest.mark.parametrize("prepared", [False, True])
def test_x_that_is_kept_in_float16s_range(prepared):
    case = Case(8, 512, (9, 33), StreamConfig(1, 2, 2, 1, 3, 3), (32, 16), dtype="float16")
    assert case.is_right([range_scale("float16") * y for y in case.run(prepared, scaled=True)[0]])


@pytest.mark.parametrize("config, m, k, n, ranks", [
    (StreamConfig(1, 2, 2, 1, 3, 3), 8, 1024, (9, 33), (32, 16)),  # a CTA with outputs of both
    (StreamConfig(2, 1, 2, 2, 2, 2), 12, 768, (17, 16, 9), (16, 0, 32)),
    (StreamConfig(4, 1, 4, 1, 2, 2), 3, 1024, (16,), (48,)),
    (StreamConfig(1, 4, 1, 1, 3, 2, True), 20, 768, (64,), (32,)),
])  # fmt: skip
def test_lora_inside_and_its_counters_after_a_call(config, m, k, n, ranks):
    case = Case(m, k, n, config, ranks)
    first, second = case.run(calls=2)
    assert case.is_right(first)
    for y, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(y, again)


@pytest.mark.parametrize("config, m, k, n, ranks, bias", [
    (StreamConfig(1, 2, 2, 2, 3, 3), 9, 768, (33, 40), (0, 16), True),
    (StreamConfig(2, 1, 4, 2, 2, 2), 17, 512, (20, 17), (32, 0), True),
    (StreamConfig(4, 1, 1, 3, 2, 2), 33, 1024, (16, 32), (16, 128), False),  # all adapters in one CTA
    (StreamConfig(1, 4, 1, 1, 3, 2, True), 64, 512, (64, 32), (128, 16), True),
    (StreamConfig(2, 4, 1, 1, 2, 2, True), 33, 768, (64, 31), (0, 32), False),
    (StreamConfig(4, 4, 1, 1, 2, 2, True, promote=0), 17, 1024, (60,), (32,), False),
    (StreamConfig(1, 4, 1, 1, 3, 2, True), 9, 512, (48,), (), True),  # x alone
    (StreamConfig(1, 4, 1, 1, 2, 2, True, late_b=True), 64, 768, (96, 31), (128, 16), True),
    (StreamConfig(2, 2, 2, 2, 2, 2, late_b=True), 9, 512, (40, 33), (96, 0), False),
])  # fmt: skip
def test_prepared_operands(config, m, k, n, ranks, bias):
    case = Case(m, k, n, config, ranks, bias)
    assert case.is_right(case.run(prepared=True)[0])


@pytest.mark.parametrize("config, m, k, n, ranks, bias, clusters, most", [
    (StreamConfig(1, 6, 1, 1, 3, 2), 3, 768, 70, (), True, 2, 6),
    (StreamConfig(2, 2, 2, 2, 2, 3), 9, 512, 40, (32, 16), False, 2, 4),
    (StreamConfig(1, 2, 4, 3, 2, 2), 5, 1024, 69, (0, 32), True, 2, 6),  # up's tile may be the next warp's
    (StreamConfig(4, 3, 1, 2, 2, 2, promote=0), 2, 1024, 48, (16, 0), False, 1, 6),
    (StreamConfig(1, 4, 1, 1, 3, 2, True), 33, 512, 48, (0, 32), True, 2, 4),
    (StreamConfig(2, 4, 1, 2, 2, 2, True, promote=0), 17, 768, 79, (32, 16), False, 2, 6),
    (StreamConfig(1, 4, 1, 1, 2, 2, True, waves=2), 9, 512, 65, (16, 32), True, 4, 4),
    (StreamConfig(1, 8, 1, 1, 2, 2, True, waves=2), 9, 512, 155, (16, 32), True, 4, 8),  # 8, 8, 2 and 2
    (StreamConfig(1, 4, 1, 4, 2, 2, True), 12, 512, 76, (), False, 2, 6),  # two of four warps are used
    (StreamConfig(1, 4, 1, 4, 2, 2, True, late_b=True), 12, 512, 76, (48, 128), False, 2, 6),
    (StreamConfig(1, 4, 1, 1, 2, 2, True, waves=2, late_b=True), 9, 512, 65, (16, 32), True, 4, 4),
])  # fmt: skip
def test_swiglu(config, m, k, n, ranks, bias, clusters, most):
    case = Joined(m, k, n, config, ranks, bias)
    assert (case.plan.clusters, case.plan.most_tiles) == (clusters, most)  # of runs that are not all equal
    (product,) = case.run(prepared=True)[0]
    assert case.is_right([product])
    # the same sums, as the kernel that writes both leaves them
    gate, up = case.apart.run(prepared=True)[0]
    silu = gate * (np.float32(1) / (np.float32(1) + np.exp2(gate * np.float32(-ptx.LOG2_E))))
    np.testing.assert_array_equal(product, silu * up)


@pytest.mark.parametrize("m, k, n, ranks, bias, late_b", [
    (33, 1024, 139, (0, 32), True, False),  # one shared result of two
    (9, 768, 160, (16, 32), False, False),
    (9, 768, 130, (), True, False),
    (9, 512, 120, (16, 32), True, True),  # nothing is shared
    (64, 512, 150, (32, 16), True, False),
])  # fmt: skip
def test_two_ctas_share_row_tiles(m, k, n, ranks, bias, late_b):
    case = Joined(m, k, n, StreamConfig(1, 8, 1, 1, 2, 2, True, promote=0, late_b=late_b, shares=True), ranks, bias)
    runs = [case.run(prepared=True, seed=seed)[0] for seed in range(3)]
    assert case.is_right(runs[0])
    for run in runs[1:]:
        np.testing.assert_array_equal(run[0], runs[0][0])


def test_sums_that_a_neighbour_sends_are_waited_for(monkeypatch):
    case = Joined(9, 512, 160, StreamConfig(1, 8, 1, 1, 2, 2, True, promote=0, shares=True))
    monkeypatch.setattr(emulator, "make_memory", waiting_at_all_but(136, emulator.make_memory))

    def is_right(seed):
        try:
            return case.is_right(case.run(prepared=True, seed=seed)[0])
        except AssertionError as error:
            assert "a CTA that has ended" in str(error)
            return False

    assert not all(is_right(seed) for seed in range(4))


@pytest.mark.parametrize("k, n, promote, match", [
    (512, (160, 160), 32, "with wgmma alone, one to a warp"),
    (512, (160,), 0, "without a row tile of their own"),
    (256, (160, 160), 0, "K = 256 is one quad of 256"),
])  # fmt: skip
def test_what_cannot_be_shared(k, n, promote, match):
    with pytest.raises(ValueError, match=match):
        make_plan(9, k, n, StreamConfig(1, 8, 1, 1, 2, 2, True, promote=promote, shares=True))


def test_swiglu_is_rounded_once():
    case = Joined(2, 512, 21, StreamConfig(1, 2, 1, 2, 2, 2))
    (wide,), (narrow,) = case.run(), case.run(wide_out=False)
    np.testing.assert_array_equal(narrow[0], np.asarray(jnp.asarray(wide[0], jnp.bfloat16)))


def test_swiglu_gives_unit_order():
    case = Joined(9, 512, 64, StreamConfig(1, 4, 1, 2, 2, 2, True))
    (plain,) = case.run()[0]
    case.plan = dataclasses.replace(case.plan, gives_units=True)
    (ordered,) = case.run()[0]
    np.testing.assert_array_equal(ordered, in_unit_order(plain))


def test_swiglu_with_lora_inside():
    case = Joined(9, 768, 40, StreamConfig(2, 2, 2, 2, 2, 3), (32, 16))
    first, second = case.run(calls=2)
    assert case.is_right(first)
    np.testing.assert_array_equal(first[0], second[0])


@pytest.mark.parametrize("config, n, tiles", [
    (StreamConfig(1, 8, 1, 1, 2, 2, True, waves=2, promote=0), (160, 155, 9), [8, 8, 2, 3]),  # one group of two
    (StreamConfig(1, 8, 1, 1, 2, 2, True, waves=2), (160, 155, 9), [8, 8, 2, 3]),
    (StreamConfig(1, 3, 2, 2, 2, 2, waves=2), (160, 96), [6, 6, 2, 2]),  # one warp of three, of either half of K
    (StreamConfig(2, 4, 1, 1, 2, 2, True, waves=2), (160,), [4, 4, 1, 1]),
    (StreamConfig(1, 8, 1, 1, 2, 2, True, waves=2), (160, 96), [4, 4, 4, 4]),  # nothing would be left for the last
])  # fmt: skip
def test_all_waves_but_the_last_are_full(config, n, tiles):
    case = Case(9, 512, n, config, bias=True)
    starts = [_first_result(case.plan, cluster) for cluster in range(case.plan.clusters + 1)]
    assert np.diff(starts).tolist() == tiles
    assert case.is_right(case.run()[0])


def _first_result(plan, cluster: int) -> int:
    """By the kernel's own arithmetic."""
    on_ints = {"div": "floordiv", "mul": "mul", "add": "add", "sub": "sub"}
    with pytest.MonkeyPatch.context() as patch:
        for name, of_int in on_ints.items():
            patch.setattr(stream_kernel.p, name, getattr(int, f"__{of_int}__"))
        patch.setattr(stream_kernel.p, "minimum", min)
        return stream_kernel._Kernel.first_result(types.SimpleNamespace(plan=plan), cluster)


def test_given_h_may_be_several_waves(monkeypatch):
    case = Case(64, 512, (60, 31), StreamConfig(1, 4, 1, 1, 2, 2, True, waves=2, promote=0), (32, 16))
    assert case.plan.clusters == 4  # twice those that are resident
    emulator.without(monkeypatch, "count")
    assert case.is_right(case.run(prepared=True)[0])  # nobody waits for another CTA
    with pytest.raises(emulator.Deadlock):
        case.run()


def test_given_h_is_waited_for(monkeypatch):
    case = Case(9, 512, (16,), StreamConfig(1, 1, 1, 1, 2, 2), (16,))
    assert all(case.is_right(case.run(prepared=True, seed=seed)[0]) for seed in range(4))
    monkeypatch.setattr(emulator, "make_memory", waiting_at_all_but(128, emulator.make_memory))
    assert not all(case.is_right(case.run(prepared=True, seed=seed)[0]) for seed in range(4))


def test_the_order_of_the_warps_does_not_matter():
    case = Case(4, 1024, (40,), StreamConfig(2, 1, 2, 2, 3, 2), (16,))
    (expected,) = case.run(seed=1)
    for seed in range(2, 5):
        np.testing.assert_array_equal(case.run(seed=seed)[0][0], expected[0])


@pytest.mark.parametrize("config, m, n, bias", [
    (StreamConfig(1, 1, 1, 1, 2, 2), 2, (16,), False),
    (StreamConfig(2, 1, 2, 2, 2, 2), 11, (32, 16), True),
    (StreamConfig(1, 1, 2, 2, 2, 2), 11, (30,), True),
    (StreamConfig(1, 1, 2, 3, 2, 2), 5, (16, 9), False),
])  # fmt: skip
def test_bfloat16_outputs_are_the_rounded_sums(config, m, n, bias):
    case = Case(m, 512, n, config, bias=bias)
    (wide,), (narrow,) = case.run(), case.run(wide_out=False)
    for sums, y in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(y, np.asarray(jnp.asarray(sums, jnp.bfloat16)))


IN_CLUSTERS = [
    (StreamConfig(2, 1, 2, 2, 2, 2), 12, 768, (40,), (), True),
    (StreamConfig(4, 1, 1, 3, 2, 2), 3, 1024, (33,), (16,), False),
    (StreamConfig(4, 4, 1, 1, 2, 2, True, promote=16), 17, 1024, (60,), (), True),
]


@pytest.mark.parametrize("config, m, k, n, ranks, bias", IN_CLUSTERS)
def test_sums_in_the_place_of_the_rings(config, m, k, n, ranks, bias, monkeypatch):
    """Where there is no room for those that a cluster's CTAs send each other, the numbers are the same."""
    case = Case(m, k, n, config, ranks, bias)
    (apart,) = case.run()
    assert case.plan.sums_apart
    monkeypatch.setattr(stream_plan, "SMEM_LIMIT", case.plan.total - 1)
    for seed in range(3):
        for y, expected in zip(case.run(seed=seed)[0], apart, strict=True):
            np.testing.assert_array_equal(y, expected)
    monkeypatch.setattr(stream_plan.Plan, "sums_at", stream_plan.Plan.ring_at)
    monkeypatch.setattr(stream_plan, "SMEM_LIMIT", 1 << 20)  # there too, but nobody waits until the rings are free
    assert not all(case.is_right(case.run(seed=seed)[0]) for seed in range(6))


def test_nothing_is_sent_to_a_cta_that_has_not_begun(monkeypatch):
    first = types.SimpleNamespace(randrange=lambda count: 0, random=lambda: 1.0)  # a CTA goes on as long as it can
    monkeypatch.setattr(emulator.random, "Random", lambda seed: first)
    case = Case(12, 768, (40,), StreamConfig(2, 3, 1, 1, 2, 2))  # no warp is idle: each that ends has sent
    assert case.is_right(case.run()[0])
    emulator.without(monkeypatch, "cluster_wait", "make_ptx")
    with pytest.raises(KeyError):  # its barriers are not made yet
        case.run()


@pytest.mark.parametrize("config, m, k, n, ranks, bias", IN_CLUSTERS)
def test_what_the_ctas_of_a_cluster_send_is_waited_for(config, m, k, n, ranks, bias, monkeypatch):
    case = Case(m, k, n, config, ranks, bias)
    monkeypatch.setattr(emulator, "make_memory", waiting_at_all_but(136, emulator.make_memory))

    def is_right(seed):
        try:
            return case.is_right(case.run(seed=seed)[0])
        except AssertionError as error:  # or it ends before what is sent to it is there
            assert "a CTA that has ended" in str(error)
            return False

    assert not all(is_right(seed) for seed in range(4))


def test_the_emulator_sees_a_barrier_that_nobody_completes(monkeypatch):
    monkeypatch.setattr(stream_compute.ComputeWarps, "prepared_threads", 32 * 99)
    with pytest.raises(emulator.Deadlock):
        Case(1, 512, (16,), StreamConfig(1, 1, 1, 1, 2, 2)).run()


@pytest.mark.parametrize("name", ["copy_wait", "fence"])
def test_the_emulator_sees_what_nobody_waits_for(monkeypatch, name):
    """Weights that have not landed; sums of LoRA's slices that others cannot see yet."""
    case = Case(1, 1024, (16,), StreamConfig(1, 1, 1, 1, 3, 2), (16,))
    assert case.is_right(case.run()[0])
    emulator.without(monkeypatch, name)
    assert not case.is_right(case.run()[0])
