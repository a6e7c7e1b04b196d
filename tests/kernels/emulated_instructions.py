"""What `ptx`, `ptx_memory` and `fragments` do, in NumPy, for the emulator: values are vectors of a warp's 32 lanes."""

import functools
import types

import ml_dtypes
import numpy as np

from pallas_kernels import layout, ptx

LANES, _COUNTS = np.arange(32), np.arange(4)[:, None]
U32, U64, F32 = np.uint32, np.uint64, np.float32


def _lanes(value, dtype=U32):
    if isinstance(value, np.ndarray):
        return value if value.shape == (32,) else np.broadcast_to(value, (32,))
    return _constant(int(value)) if dtype is U32 else np.full(32, dtype(value))


@functools.cache
def _constant(value):
    """A number's lanes, which are not written to."""
    lanes = np.full(32, U32(value))
    lanes.flags.writeable = False
    return lanes


# Made once, on import: the threads of XLA's CPU backend, where callbacks run, take subnormal numbers for zeros.
with np.errstate(invalid="ignore"):
    _BF16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def _bf16(words):
    """uint32 [...] -> float64 [..., 2], the lower half first."""
    words = np.ascontiguousarray(words, U32)
    return _BF16.take(words.view(np.uint16).reshape(*words.shape, 2))


def _f16(words):
    """uint32 [...] -> float64 [..., 2], the lower half first."""
    words = np.ascontiguousarray(words, U32)
    return words.view(np.float16).reshape(*words.shape, 2).astype(np.float64)


# Of the 16-bit numbers that a program may multiply: what words of them hold.
NUMBERS = {"bfloat16": _bf16, "float16": _f16}


# The places of a warp's fragments, as indices of flat arrays: where word, lane and half have the left operand [16, 16]
# and the right one [16, 8], and where the sums [16, 8] have element and lane.
_G, _T = np.divmod(LANES, 4)
_I, _HALF, _E = np.arange(4)[:, None, None], np.arange(2), np.arange(4)[:, None]
LEFT = np.argsort((16 * (_G[:, None] + 8 * (_I % 2)) + 2 * _T[:, None] + _HALF + 8 * (_I // 2)).ravel()).reshape(16, 16)
RIGHT = np.argsort((8 * (2 * _T[:, None] + _HALF + 8 * _I[:2]) + _G[:, None]).ravel()).reshape(16, 8)
_SUM_ROW, _SUM_COLUMN = _G + 8 * (_E // 2), 2 * _T + _E % 2


@functools.cache
def _sums(count):
    """Where the sums [16, 8 count] of `count` operands side by side have each of their elements and lane."""
    return 8 * (count * _SUM_ROW + np.arange(count)[:, None, None]) + _SUM_COLUMN


class Barrier:
    """An mbarrier: `count` arrivals and the expected bytes complete a phase."""

    def __init__(self, count):
        self.count, self.left, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, arrivals, n_bytes=0):
        self.left -= arrivals
        self.bytes += n_bytes
        assert self.left >= 0, "more arrivals than the barrier's count"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1


def _where_shared(m, address):
    """CTA and byte of a shared address; the upper byte is 1 + the CTA's rank where `map_rank` made it."""
    address = _lanes(address).astype(np.int64)
    if address.max() < 1 << 24:
        return _lanes(m.now.cta), address
    rank, byte = address >> 24, address & 0xFFFFFF
    first = m.now.cta // m.cluster * m.cluster
    return np.where(rank == 0, m.now.cta, first + rank - 1), byte


def _gather(memory, byte, size):
    return memory[byte[..., None] + np.arange(size)]


def _words(memory, byte, count, dtype):
    """[count, lanes], each lane's from its byte on."""
    return memory.view(dtype).take((byte >> 2) + _COUNTS[:count])


def make_ptx(m):
    """The names of `ptx` that the kernel uses."""
    p, dtype, of_words = types.SimpleNamespace(), np.dtype(m.dtype), NUMBERS[m.dtype]
    p.i32, p.f32 = (lambda v: _lanes(v)), (lambda v: _lanes(v, F32))

    def binary(f, dtype=U32):
        def run(a, b):
            return f(_lanes(a).astype(U32, copy=False), _lanes(b).astype(U32, copy=False)).astype(dtype, copy=False)

        return run

    p.add, p.sub, p.mul, p.and_ = map(binary, (np.add, np.subtract, np.multiply, np.bitwise_and))
    p.xor, p.shr, p.minimum = map(binary, (np.bitwise_xor, np.right_shift, np.minimum))
    p.maximum = binary(np.maximum)
    p.div, p.rem = map(binary, (np.floor_divide, np.remainder))
    p.lt, p.eq = binary(np.less, bool), binary(np.equal, bool)
    p.select = lambda c, a, b: np.where(c, _lanes(a), _lanes(b))
    p.LOG2_E = ptx.LOG2_E
    p.reciprocal = lambda a: (1 / a).astype(F32)
    p.divide = p.divide_without_call = lambda a, b: (a / b).astype(F32)

    def exp2(a):
        with np.errstate(over="ignore"):  # of what nobody waited for
            return np.exp2(a).astype(F32)

    p.exp2 = exp2
    p.rsqrt = p.rsqrt_without_call = lambda a: (1 / np.sqrt(a)).astype(F32)

    p.shuffle_xor = lambda x, distance: _lanes(x)[LANES ^ distance]
    p.pack_halves = lambda lo, hi: (lo & U32(0xFFFF)) | hi << U32(16)
    p.half_dtype, p.half = lambda: m.dtype, lambda: ptx.HALVES[m.dtype]
    p.round_half = lambda v: v.astype(dtype).astype(F32)
    p.unpack_half = lambda word: [v.astype(F32) for v in np.moveaxis(of_words(word), -1, 0)]
    p.pack_half = lambda lo, hi: np.stack([lo, hi], 1).astype(dtype).view(U32)[:, 0]

    def total(parts):
        return functools.reduce(lambda a, b: [(x + y).astype(F32) for x, y in zip(a, b, strict=True)], parts)

    p.total = total

    def over_lanes(join, x, distances):
        for distance in distances:
            x = join(x, x[LANES ^ distance])
        return x

    p.over_lanes, p.over_quad = over_lanes, lambda join, x: over_lanes(join, x, (1, 2))
    p.any_lane = lambda condition: np.broadcast_to(np.any(condition), (32,))
    p.ballot = lambda condition: _lanes(np.packbits(condition, bitorder="little").view(U32)[0])
    p.lowest_bit = lambda word: p.i32((int(word[0]) & -int(word[0])).bit_length() - 1)
    p.set_registers = lambda count, more: None
    special = {"tid.x": lambda: (LANES + 32 * m.now.index).astype(U32), "ctaid.x": lambda: _lanes(m.now.cta)}
    p.sreg = lambda name, again=False: special[name]()
    p.opaque, p.opaque_zero = _lanes, lambda: p.f32(0.0)
    p.uniform = lambda v: _lanes(v[0])
    p.cta_sync = lambda: m.meet((m.now.cta, 0), 32 * m.warps_of_cta)
    p.named_sync = lambda which, threads: m.meet((m.now.cta, int(np.unique(which).item())), threads)
    p.named_arrive = lambda which, threads: m.meet((m.now.cta, which), threads, waits=False)

    def cluster_sync(waits=True):
        m.meet(("cluster", m.now.cta // m.cluster), 32 * m.warps_of_cta * m.cluster, waits)

    def cluster_wait():  # of a program that meets there once
        key = "cluster", m.now.cta // m.cluster
        m.now.pause(lambda: m.named[key][1] > 0)

    p.cluster_sync, p.cluster_arrive, p.cluster_wait = cluster_sync, lambda: cluster_sync(False), cluster_wait
    p.warp_sync = p.wgmma_fence = p.wgmma_commit = lambda: None
    p.wgmma_wait = lambda pending: None
    p.wgmma_finish = lambda acc: acc

    def for_range(lower, upper, step, carries, body):
        i, upper = _lanes(lower).copy(), _lanes(upper)
        while (active := m.now.mask & (i < upper)).any():
            with m.now.only(active):
                new = body(i.copy(), list(carries))
            carries = [np.where(active, n, c) for n, c in zip(new, carries, strict=True)]
            i = i + U32(step)
        return list(carries)

    def if_values(cond, body, otherwise):
        active = m.now.mask & cond
        if not active.any():
            return otherwise
        with m.now.only(active):
            new = body()
        return [np.where(active, n, o) for n, o in zip(new, otherwise, strict=True)]

    def if_else(cond, body, otherwise):
        for mask, branch in ((m.now.mask & cond, body), (m.now.mask & ~cond, otherwise)):
            if mask.any():
                with m.now.only(mask):
                    branch()

    p.for_range, p.if_values, p.if_else = for_range, if_values, if_else
    p.when = lambda cond, body: if_else(cond, body, lambda: None)

    def tile(acc, a, b, numbers=of_words):
        """acc + A [16, 16] B [16, N] for a warp; b [16, N]."""
        left = numbers(np.array(a)).take(LEFT)
        with np.errstate(invalid="ignore", over="ignore"):
            product = left @ b
        return list((np.array(acc) + product.take(_sums(b.shape[1] // 8)).reshape(-1, 32)).astype(F32))

    def mma(acc, a, b0, b1, numbers=of_words):
        return tile(acc, a, numbers(np.array([b0, b1])).take(RIGHT), numbers)

    def wgmma(acc, a, descriptor):
        address, k_stride, n_stride = descriptor
        count = len(acc) // 4
        at = int(address[0]) + k_stride * np.arange(2)[:, None] + n_stride * np.arange(count)
        matrices = of_words(_gather(m.shared[m.now.cta], at, 128).view(U32)).reshape(2, count, 8, 8)  # half n row k
        return tile(acc, a, matrices.transpose(0, 3, 1, 2).reshape(16, -1))

    p.mma_half, p.wgmma_half, p.tile = mma, wgmma, tile
    p.mma_f16 = functools.partial(mma, numbers=_f16)
    p.b_descriptor = lambda address, k_stride, n_stride: (address, k_stride, n_stride)
    p.add_64 = lambda d, sixteens: (d[0] + U32(16 * sixteens), d[1], d[2])
    return p


def make_fp8(p):
    """The names of `ptx_fp8`; `p` is what `make_ptx` gives."""
    fp8 = types.SimpleNamespace()

    def halves(values):
        """float [32, 2] -> a word of two FP16 numbers."""
        return values.astype(np.float16).view(U32)[:, 0]

    def e4m3_of_half(word):
        kept = np.clip(np.stack(p.unpack_half(word), 1), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return kept.view(np.uint16)[:, 0].astype(U32)

    def f16_of_e4m3(word):
        wide = np.ascontiguousarray(word, U32).view(ml_dtypes.float8_e4m3fn).reshape(32, 4).astype(np.float64)
        return [halves(wide[:, :2]), halves(wide[:, 2:])]

    def row_in_e4m3(words):
        narrow = [e4m3_of_half(word) for word in words]
        return [p.pack_halves(*narrow[:2]), p.pack_halves(*narrow[2:])]

    def columns_together(word):
        return np.ascontiguousarray(word, U32).view(np.uint8).reshape(32, 4)[:, [0, 2, 1, 3]].copy().view(U32)[:, 0]

    fp8.e4m3_of_half, fp8.f16_of_e4m3, fp8.row_in_e4m3 = e4m3_of_half, f16_of_e4m3, row_in_e4m3
    fp8.columns_together, fp8.mma_f16 = columns_together, p.mma_f16
    fp8.f16_of_half = lambda word: halves(np.stack(p.unpack_half(word), 1))
    fp8.pack_f16 = lambda lo, hi: halves(np.stack([lo, hi], 1))
    return fp8


def make_memory(m):
    """The names of `ptx_memory` that the kernel uses."""
    mem = types.SimpleNamespace()
    mem.global_address = lambda at: np.full(32, at, U64)
    mem.shared_address = lambda ref: _lanes(0)
    mem.offset = lambda base, more: base + _lanes(more).astype(U64)
    mem.wide_offset = lambda base, index, stride: base + _lanes(index).astype(U64) * U64(stride)
    mem.map_rank = lambda address, rank: address | (_lanes(rank) + U32(1)) << U32(24)
    mem.fence_barrier_init = lambda: None
    mem.fence, mem.fence_async = lambda: m.now.publish(), lambda: None

    def prefetch(address, byte_offset):
        byte = np.where(m.now.mask, address.astype(np.int64) + byte_offset, 0)
        assert byte.max() < m.end, "a global address out of place"

    mem.prefetch = prefetch

    def load_global(count, dtype, align):
        def load(address, byte_offset=0):
            byte = np.where(m.now.mask, address.astype(np.int64) + byte_offset, 0)
            assert (byte % align == 0).all() and byte.max() + 4 * count <= m.end, "a global address out of place"
            return list(_words(m.memory, byte, count, dtype))

        return load

    def store_global(address, data, byte_offset=0):
        """data: uint8 [32, size]"""
        byte = address.astype(np.int64) + byte_offset
        active, size = m.now.mask, data.shape[1]
        assert (byte[active] % size == 0).all() and byte[active].max() + size <= m.end, "a global address out of place"
        m.now.stores.append((byte[active][:, None] + np.arange(size), data[active]))

    def bytes_of(values, dtype):
        return np.stack([np.broadcast_to(v, (32,)).astype(dtype) for v in values], 1).view(np.uint8).reshape(32, -1)

    mem.load_global_v4, mem.load_global_v2 = load_global(4, U32, 16), load_global(2, U32, 8)
    mem.load_fresh_f32 = lambda a: load_global(1, F32, 4)(a)[0]
    mem.load_fresh_f32x4 = mem.load_global_f32x4 = load_global(4, F32, 16)
    mem.load_global_f32 = lambda a, byte_offset=0: load_global(1, F32, 4)(a, byte_offset)[0]
    mem.store_global_f32x4 = lambda a, values, o: store_global(a, bytes_of(values, F32), o)
    mem.store_global_v4 = lambda a, values, o: store_global(a, bytes_of(values, U32), o)
    mem.store_global_v2 = lambda a, values, o: store_global(a, bytes_of(values, U32), o)
    mem.load_global_b32 = lambda a, o: load_global(1, U32, 4)(a, o)[0]
    mem.store_global_f32x2 = lambda a, lo, hi: store_global(a, bytes_of((lo, hi), F32))
    mem.store_global_f32 = lambda a, v: store_global(a, bytes_of((v,), F32))
    mem.store_global_b32 = lambda a, v: store_global(a, bytes_of((v,), U32))
    mem.store_global_halfx2 = lambda a, lo, hi: store_global(a, bytes_of((lo, hi), m.dtype))
    mem.store_global_half = lambda a, v: store_global(a, bytes_of((v,), m.dtype))

    def load_shared(count, dtype):
        def load(address, byte_offset=0):
            cta, byte = _where_shared(m, address)
            byte = np.where(m.now.mask, byte + byte_offset, 0)
            assert (byte % (4 * count) == 0).all(), "a shared address out of line"
            if (cta == cta[0]).all():
                return list(_words(m.shared[cta[0]], byte, count, dtype))
            words = np.empty((count, 32), dtype)
            for which in set(cta.tolist()):
                lanes = cta == which
                words[:, lanes] = _words(m.shared[which], byte[lanes], count, dtype)
            return list(words)

        return load

    def store_shared(address, data, byte_offset, remote=False):
        (cta, byte), size = _where_shared(m, address), data.shape[1]
        byte = byte + byte_offset
        assert not remote or set(cta[m.now.mask]) <= {warp.cta for warp in m.left}, "to a CTA that has ended"
        assert (remote or (cta == m.now.cta).all()) and (byte % size == 0).all()
        for which in set(cta[m.now.mask].tolist()):
            lanes, shared = m.now.mask & (cta == which), m.shared[which]
            assert byte[lanes].max() + size <= len(shared), "past the end of shared memory"
            shared[byte[lanes][:, None] + np.arange(size)] = data[lanes]

    mem.load_shared_v4, mem.load_shared_v2 = load_shared(4, U32), load_shared(2, U32)
    mem.load_shared_f32x4, mem.load_shared_f32x2 = load_shared(4, F32), load_shared(2, F32)
    mem.load_shared_b32 = lambda a, o: load_shared(1, U32)(a, o)[0]
    mem.load_shared_f32 = lambda a, o: load_shared(1, F32)(a, o)[0]
    mem.store_shared_f32x4 = lambda a, values, o: store_shared(a, bytes_of(values, F32), o)
    mem.store_cluster_f32x4 = lambda a, values: store_shared(a, bytes_of(values, F32), 0, remote=True)
    mem.store_shared_f32x2 = lambda a, values: store_shared(a, bytes_of(values, F32), 0)
    mem.store_shared_f32 = lambda a, v, o: store_shared(a, bytes_of((v,), F32), o)

    def load_matrices_transposed(address, byte_offset):
        """Lane l gives the address of row l % 8 of matrix l / 8, and gets of each numbers 2 t, 2 t + 1 of column g."""
        rows = np.stack(load_shared(4, U32)(address, byte_offset), 1).view(np.uint16).reshape(4, 8, 8)
        pairs = rows.transpose(0, 2, 1).reshape(4, 8, 4, 2).astype(U32)
        return list((pairs[..., 0] | pairs[..., 1] << U32(16)).reshape(4, 32))

    def load_global_u16(address, byte_offset):
        byte = address.astype(np.int64) + byte_offset
        assert (byte % 2 == 0).all() and byte.max() + 2 <= m.end, "a global address out of place"
        return _gather(m.memory, byte, 2).view(np.uint16)[:, 0].astype(U32)

    mem.load_matrices_transposed, mem.load_global_u16 = load_matrices_transposed, load_global_u16

    def send(address, values, full):
        data, (cta, byte) = bytes_of(values, F32), _where_shared(m, full)
        assert (cta == _where_shared(m, address)[0])[m.now.mask].all(), "a barrier of another CTA"
        store_shared(address, data, 0, remote=True)
        for lane in LANES[m.now.mask]:
            m.barriers[cta[lane]][int(byte[lane])].arrive(0, -data.shape[1])

    mem.send_f32x4, mem.send_f32 = send, lambda a, v, full: send(a, (v,), full)

    mem.load_shared_address = lambda a: np.stack(load_shared(2, U32)(a), 1).view(U64)[:, 0]
    mem.store_shared_address = lambda a, v: store_shared(a, bytes_of((v,), U64), 0)
    mem.store_shared_half = lambda a, v, o: store_shared(a, bytes_of((v,), m.dtype), o)
    mem.store_shared_halfx2 = lambda a, *values: store_shared(a, bytes_of(values, m.dtype), 0)

    def barrier(address):
        return m.barriers[m.now.cta][int(address[0])]

    def barrier_init(address, count):
        m.barriers[m.now.cta][int(address[0])] = Barrier(int(_lanes(count)[0]))

    def barrier_wait(address, parity):
        b, odd = barrier(address), int(_lanes(parity)[0])
        m.now.pause(lambda: b.phase % 2 != odd)

    mem.barrier_init, mem.barrier_wait = barrier_init, barrier_wait
    mem.barrier_arrive = lambda address: barrier(address).arrive(int(m.now.mask.sum()))
    mem.barrier_expect = lambda address, n: barrier(address).arrive(1, int(_lanes(n)[0]))

    def barrier_arrive_in_cluster(address):
        for cta, byte in zip(*(v[m.now.mask] for v in _where_shared(m, address)), strict=True):
            assert cta in {warp.cta for warp in m.left}, "to a CTA that has ended"
            m.barriers[cta][int(byte)].arrive(1)

    mem.barrier_arrive_in_cluster, mem.barrier_wait_for_cluster = barrier_arrive_in_cluster, barrier_wait

    def bulk_copy(to, source, n_bytes, full, ctas):
        to, source, size, full = map(_lanes, (to, source, n_bytes, full))
        for lane in LANES[m.now.mask]:
            at, from_, bytes_ = int(to[lane]), int(source[lane]), int(size[lane])
            assert from_ + bytes_ <= m.end and at % 16 == from_ % 16 == bytes_ % 16 == 0
            for cta in ctas:
                m.shared[cta][at : at + bytes_] = m.memory[from_ : from_ + bytes_]
                m.barriers[cta][int(full[lane])].arrive(0, -bytes_)

    def bulk_load(to, source, n_bytes, full):
        bulk_copy(to, source, n_bytes, full, [m.now.cta])

    def bulk_load_to_all(to, source, n_bytes, full, count):
        first = m.now.cta // m.cluster * m.cluster
        bulk_copy(to, source, n_bytes, full, range(first, first + count))

    def copy_async(size):
        def copy(to, source, to_offset=0, source_offset=0, policy=None):
            byte = source.astype(np.int64) + source_offset
            active = m.now.mask
            assert (byte[active] % size == 0).all() and byte[active].max() + size <= m.end
            data = _gather(m.memory, np.where(active, byte, 0), size)
            one = active, _lanes(to) + U32(to_offset), data
            if m.landing.random() < 0.5:  # at once, over what somebody may still read
                land([one])
            else:
                m.now.copies.append(one)

        return copy

    def land(copies):
        for mask, to, data in copies:
            with m.now.only(mask):
                store_shared(to, data, 0)

    def copy_commit():
        m.now.groups.append(m.now.copies)
        m.now.copies = []

    def copy_wait(pending):
        done, m.now.groups = m.now.groups[: len(m.now.groups) - pending], m.now.groups[-pending:] if pending else []
        for group in done:
            land(group)

    def copy_wait_all():
        copy_wait(0)
        land(m.now.copies)
        m.now.copies = []

    def copy_arrive(address):
        m.now.pause()  # the copies land some time after, and arrive then
        copy_wait_all()
        barrier(address).arrive(32)

    mem.read_once, mem.per_lane = lambda: None, lambda value, lane: _lanes(value)
    mem.bulk_load_to_all, mem.bulk_load = bulk_load_to_all, bulk_load
    mem.copy_async_16, mem.copy_async_4 = copy_async(16), copy_async(4)
    mem.copy_commit, mem.copy_arrive = copy_commit, copy_arrive
    mem.copy_wait, mem.copy_wait_all = copy_wait, copy_wait_all

    def words(address):
        return [m.memory[int(at) : int(at) + 4].view(U32) for at in address[m.now.mask]]

    def word(address):
        (one,) = words(address)
        return one

    def count_and_wrap(address, last, order="acq_rel"):
        m.now.pause()
        counter = word(address)
        before = int(counter[0])
        counter[0] = 0 if before >= int(_lanes(last)[0]) else before + 1
        return _lanes(before)

    def count(address, number=1):
        m.now.pause()
        for counter, more in zip(words(address), _lanes(number)[m.now.mask], strict=True):
            counter[0] += more

    def count_if(condition, address):
        m.now.pause()
        before = np.zeros(32, U32)
        with m.now.only(m.now.mask & condition):
            if m.now.mask.any():
                before[m.now.mask] = word(address)[0]
                word(address)[0] += 1
        return before

    def await_count(address, value):
        counter = word(address)
        m.now.pause(lambda: counter[0] == _lanes(value)[0])

    def wait_for_at_least(address, value):
        counter = word(address)
        m.now.pause(lambda: counter[0] >= _lanes(value)[0])

    mem.count, mem.await_count, mem.count_and_wrap = count, await_count, count_and_wrap
    mem.count_if, mem.wait_for_at_least = count_if, wait_for_at_least
    return mem


def make_decoding(m):
    """The names of `fragments` that kernels use."""
    made, of_words, dtype = layout.DECODINGS[m.dtype], NUMBERS[m.dtype], np.dtype(m.dtype)
    step = np.prod([np.float64(2.0**exponent) for exponent in made.scale_steps])

    def decode_scales(word, which):
        first = np.where(_lanes(which) == 0x4342, U32(16), U32(0))
        places = first + U32(8) * np.arange(2, dtype=U32)[:, None]
        return list(of_words((word >> places & U32(0xFF)) << U32(made.scale_shift))[..., 0] * step)

    def decode_codes(word, scales, in_place=False):
        pairs = of_words(layout.decode_word(word, m.dtype))
        return list((pairs * np.array(scales * 2)[:, :, None]).astype(dtype).view(U32)[..., 0])

    return {"decode_scales": decode_scales, "decode_codes": decode_codes, "decoding": lambda: made}
