"""Runs the wide kernel's program in NumPy, as emulator.py does the streaming kernel's: warps in random order,
barriers, tensor copies into swizzled slots of one or several CTAs, sums that CTAs add together. A load from shared
memory is under way until the warp's next wgmma, whose operands must have come: an arrival does not wait for it; a wgmma
until the warp has waited for its group (emulated_products.py). Not modelled: time."""

import functools
import types

import numpy as np
from emulated_instructions import NUMBERS, make_decoding, make_memory, make_ptx
from emulated_products import Overwritten, Products
from emulator import ARITH, Machine, replaced

from pallas_kernels import (
    float16_range,
    fragment_order,
    hidden,
    pick,
    swiglu,
    wide_fragments,
    wide_kernel,
    wide_lora,
    wide_multiply,
    wide_norm,
    wide_spare,
    wide_split,
)
from pallas_kernels.counters import first_counters
from pallas_kernels.layout import DECODINGS
from pallas_kernels.wide_plan import TILE

U32, F32 = np.uint32, np.float32
MOST_ROWS = 256  # of a tile


class Unordered(AssertionError):
    """The copy engine loads what may not have reached it: a store without `fence_async` behind it, or a wait."""


class Ref(int):
    """The address of an operand, which knows its shape."""

    shape: tuple[int, ...]
    itemsize: int


def _put(m, array):
    ref = Ref(m.put(array))
    ref.shape, ref.itemsize = array.shape, array.dtype.itemsize
    return ref


def _unsigned(value):
    return value & 0xFFFFFFFF if isinstance(value, int) else value


def _overlap(places, first, end):
    return any(first < stop and start < end for start, stop in places)


def _swizzled(at):
    """Where 128-byte swizzling puts a byte."""
    return at ^ (at >> 7 & 7) << 4


@functools.cache
def _words_of_rows(start, rows):
    """Where rows of 16 numbers, 128 bytes apart, lie in slots that are swizzled; in words."""
    return _swizzled(start + 128 * np.arange(rows)[:, None] + 4 * np.arange(8)) // 4


def _make_ptx(m):
    p = make_ptx(m)
    for name in ("and_", "sub", "add", "i32"):
        f = getattr(p, name)
        setattr(p, name, lambda *args, f=f: f(*map(_unsigned, args)))
    dtype, numbers, low_mask = np.dtype(m.dtype), NUMBERS[m.dtype], U32(DECODINGS[m.dtype].turned_mask(0))

    def wgmma(acc, a, descriptor):
        start = int(descriptor[0][0])
        words = m.shared[m.now.cta].view(U32)[start // 1024 * 256 :].take(_words_of_rows(start % 1024, 2 * len(acc)))
        return p.tile(acc, a, numbers(words).reshape(-1, 16).T)

    def rotated(word, by):
        by = by & U32(31)
        return word << by | word >> (U32(32) - by & U32(31))

    def scaled(bits, scale):
        return (numbers(bits) * scale[:, None]).astype(dtype).view(U32)[:, 0]

    def ptx(code, *args, **_):
        if code.startswith("bar.sync $0, 128"):
            m.meet((m.now.cta, int(args[0][0])), 128)
            return []
        assert f"mul.rn.{p.half()}x2" in code  # `ForwardFragments._pairs`
        word, (low, high), low_turn, high_turn, high_mask, direct_mask = args
        b = rotated(word, high_turn) & high_mask | word & direct_mask
        return [scaled(rotated(word, low_turn) & low_mask, low), scaled(b, high)]

    p.wgmma_half, p.i32_t = wgmma, lambda: None
    p.wgmma_fence = lambda: m.loads.pop(m.now, None)
    m.products = Products(m, p)
    p.ptx = m.products.decoding(ptx)
    return p


def _make_memory(m):
    mem = make_memory(m)
    mem.long_offset = lambda base, index, stride: (
        base + index.astype(np.uint64) * np.uint64(1) * stride.astype(np.uint64)
    )
    m.unordered = {}  # by warp, addresses that it stored to, or None: that it has waited
    store, wait = mem.store_global_half, mem.wait_for_at_least

    def store_global_half(address, value):
        m.unordered.setdefault(m.now, []).extend(address[m.now.mask])
        store(address, value)

    def wait_for_at_least(address, value):
        wait(address, value)
        m.unordered.setdefault(m.now, []).append(None)

    mem.store_global_half, mem.wait_for_at_least = store_global_half, wait_for_at_least
    mem.fence_async = lambda: m.unordered.pop(m.now, None)
    m.loads = {}  # by warp, of those under way the first byte and the one behind the last

    def under_way(load, size):
        def loaded(address, byte_offset=0):
            places = address[m.now.mask].astype(np.int64) + byte_offset
            m.loads.setdefault(m.now, set()).add((int(places.min()), int(places.max()) + size))
            return load(address, byte_offset)

        return loaded

    mem.load_shared_v4, mem.load_shared_b32 = under_way(mem.load_shared_v4, 16), under_way(mem.load_shared_b32, 4)
    return mem


def _make_tensor(m, mem):
    pt = types.SimpleNamespace(set_registers=lambda count, up: None)
    maps = []

    def tensor_map(ctx, ref, box, swizzle):
        maps.append((ref, box, swizzle))
        return np.full(32, len(maps) - 1)

    pt.tensor_map = tensor_map
    pt.swizzled_descriptor = lambda address: (address, None, None)
    pt.multicast_mask = lambda count: (1 << count) - 1
    pt.own_memory = lambda words: np.full((words, 32), np.nan, F32)
    pt.load_own_f32x4 = lambda own, word: list(own[word : word + 4].copy())

    def store_own_f32x4(own, values, word):
        own[word : word + 4] = values

    pt.store_own_f32x4 = store_own_f32x4

    def tensor_load(to, source, column, row, barrier, mask=None, policy=None):
        (ref, box, swizzle), to = maps[int(source[0])], int(to[0])
        end = ref + int(np.prod(ref.shape)) * ref.itemsize
        stored = [at for places in m.unordered.values() for at in places if at is not None]
        if None in m.unordered.get(m.now, []) or any(ref <= at < end for at in stored):
            raise Unordered
        column, row = int(np.broadcast_to(column, 32)[0]), int(np.broadcast_to(row, 32)[0])
        data = np.zeros((*box, ref.itemsize), np.uint8)
        matrix = m.memory[ref : ref + int(np.prod(ref.shape)) * ref.itemsize].reshape(*ref.shape, ref.itemsize)
        known = matrix[row : row + box[0], column : column + box[1]]
        data[: known.shape[0], : known.shape[1]] = known
        data, place = data.reshape(-1), np.arange(data.size)
        if swizzle:
            assert to % 1024 == 0 and box[1] * ref.itemsize == swizzle
            place = _swizzled(place)
        first = m.now.cta // m.cluster * m.cluster
        ctas = [m.now.cta] if mask is None else [first + i for i in range(m.cluster) if mask >> i & 1]
        for cta in ctas:
            if any(warp.cta == cta and _overlap(loads, to, to + data.size) for warp, loads in m.loads.items()):
                raise Overwritten
            m.products.check_copy(cta, to, to + data.size)
            m.shared[cta][to + place] = data
            m.barriers[cta][int(barrier[0])].arrive(0, -data.size)

    def tensor_prefetch(source, column, row):
        """Of a matrix, or of a last tile that is partly behind its end."""
        ref, box, _ = maps[int(source[0])]
        rows, columns = ref.shape
        column, row = int(np.broadcast_to(column, 32)[0]), int(np.broadcast_to(row, 32)[0])
        assert row % box[0] == column % box[1] == 0 and row < rows + MOST_ROWS and column < columns + TILE

    def remote_arrive(barrier, rank):
        first = m.now.cta // m.cluster * m.cluster
        for lane in np.flatnonzero(m.now.mask):
            m.barriers[first + int(rank[lane])][int(barrier[lane])].arrive(1)

    def store_f32x4(condition, address, values):
        with m.now.only(m.now.mask & condition):
            if m.now.mask.any():
                mem.store_global_f32x4(address, values, 0)

    def store_halfx4(condition, address, values):
        with m.now.only(m.now.mask & condition):
            if m.now.mask.any():
                mem.store_global_halfx2(address, *values[:2])
                mem.store_global_halfx2(address + np.uint64(4), *values[2:])

    def store_halfx2(condition, address, values):
        with m.now.only(m.now.mask & condition):
            if m.now.mask.any():
                mem.store_global_halfx2(address, *values)

    def store_f32(condition, address, value):
        with m.now.only(m.now.mask & condition):
            if m.now.mask.any():
                mem.store_global_f32(address, value)

    pt.store_global_f32_if, pt.store_global_halfx2_if = store_f32, store_halfx2
    pt.tensor_load, pt.remote_arrive = tensor_load, remote_arrive
    pt.tensor_prefetch = tensor_prefetch
    pt.store_global_f32x4_if, pt.store_global_halfx4_if = store_f32x4, store_halfx4
    return pt


def _transpose_8x8(value):
    """`ptx_tensor.transpose_8x8`."""
    matrix = np.stack([value & U32(0xFFFF), value >> U32(16)], 1).reshape(8, 8).T.reshape(32, 2)
    return matrix[:, 0] | matrix[:, 1] << U32(16)


def _emulated(m):
    mem = _make_memory(m)
    names = {"p": _make_ptx(m), "mem": mem, "pt": _make_tensor(m, mem), "arith": ARITH}
    writers = make_decoding(m) | {"transpose_8x8": _transpose_8x8}
    names |= writers | {name: m.products.decoding(writers[name]) for name in ("decode_codes", "transpose_8x8")}
    kernels = wide_kernel, wide_multiply, wide_norm, wide_lora, wide_spare, wide_split, wide_fragments
    modules = *kernels, fragment_order, hidden, pick, float16_range, swiglu
    return replaced(modules, names)


def run(plan, operands, has_bias, *, wide_out=True, seed=0, calls=1, eps=0.0):
    """The results, of several calls a list of them; `operands` are those of the function that `wide_kernel.build`
    makes. The counters are zero after every call."""
    m = Machine(seed, np.asarray(operands[0]).dtype.name)
    dtype = np.dtype(np.float32 if wide_out else m.dtype)
    refs = [_put(m, np.asarray(v)) for v in operands]
    kinds = [((plan.m, r), dtype) for r in plan.outs]
    if plan.handover.joins:
        kinds += [(out.shape, out.dtype) for out in wide_norm.joined_outs(plan, m.dtype)]
    outs = [_put(m, np.full(shape, np.nan, kind)) for shape, kind in kinds]
    exchange, results, ctas = [], [], plan.ctas
    if plan.counters:
        refs.append(sync := _put(m, first_counters(plan.counters)))
    if plan.split_items:
        exchange = [_put(m, np.full(wide_kernel.sums_size(plan), np.nan, F32))]
    if plan.makes_h:
        ctas += plan.spare.ctas
        exchange.append(_put(m, np.full(wide_spare.sums_shape(plan), np.nan, F32)))
        exchange.append(_put(m, np.full((plan.m, sum(plan.ranks)), np.nan, m.dtype)))
    with _emulated(m):
        for _ in range(calls):

            def program():
                wide_kernel._Kernel(None, plan, [*refs, *outs, *exchange, Ref(0)], has_bias, wide_out, eps).run()

            m.launch(ctas, plan.config.share, 12, plan.total, program)
            results.append([m.get(at, *kind) for at, kind in zip(outs, kinds, strict=True)])
            if plan.counters:
                np.testing.assert_array_equal(m.get(sync, sync.shape, U32), first_counters(plan.counters))
    return results if calls > 1 else results[0]
