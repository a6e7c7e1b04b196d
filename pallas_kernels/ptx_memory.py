"""PTX for memory: loads, stores, asynchronous copies and the barriers that they complete on.

Addresses of shared memory are 32-bit integers, of global memory 64-bit; `byte_offset` is a constant added to one.
Everything here has side effects and keeps its place.
"""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .ptx import f32_t, half, i32, i32_t, ptx


def shared_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(i32_t(), utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def offset(base_64: ir.Value, offset_32: ir.Value) -> ir.Value:
    """base + offset in bytes; the offset is unsigned."""
    return arith.addi(base_64, arith.extui(ir.IntegerType.get_signless(64), offset_32))


def wide_offset(base_64: ir.Value, index_32: ir.Value, stride: int) -> ir.Value:
    """base + index * stride in bytes, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(base_64, arith.muli(arith.extui(i64, index_32), utils.c(stride, i64)))


def long_offset(base_64: ir.Value, index_32: ir.Value, stride_32: ir.Value) -> ir.Value:
    """base + index * stride in bytes, the product in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(base_64, arith.muli(arith.extui(i64, index_32), arith.extui(i64, stride_32)))


def barrier_init(address: ir.Value, count: int | ir.Value):
    ptx("mbarrier.init.shared::cta.b64 [$0], $1;", address, i32(count) if isinstance(count, int) else count)


def barrier_expect(address: ir.Value, n_bytes: ir.Value):
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", address, n_bytes)


def barrier_arrive(address: ir.Value):
    ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", address)


def barrier_arrive_in_cluster(address: ir.Value):
    """At a barrier of a CTA of the cluster (see `map_rank`): what is stored before, it sees behind
    `barrier_wait_for_cluster`."""
    ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", address)


def barrier_wait(address: ir.Value, parity: ir.Value):
    _wait_at_barrier("", address, parity)


def barrier_wait_for_cluster(address: ir.Value, parity: ir.Value):
    _wait_at_barrier(".acquire.cluster", address, parity)


def _wait_at_barrier(order: str, address: ir.Value, parity: ir.Value):
    ptx(
        "{ .reg .pred done;\nagain_${:uid}:\n"
        f"mbarrier.try_wait.parity{order}.shared::cta.b64 done, [$0], $1;\n@!done bra again_${{:uid}};\n}}",
        address,
        parity,
        convergent=True,
    )


def fence_barrier_init():
    ptx("fence.mbarrier_init.release.cluster;", convergent=False)


def bulk_load(dst_shared, src_global, n_bytes, barrier):
    """Contiguous copy by the copy engine; 16-byte aligned and sized; completes on the barrier."""
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        dst_shared,
        src_global,
        n_bytes,
        barrier,
    )


def bulk_load_to_all(dst_shared, src_global, n_bytes, barrier, count: int):
    """The same to the same place in each of a cluster's first `count` CTAs, counted by each one's barrier."""
    ptx(
        f"{{ .reg .b16 all;\nmov.b16 all, {(1 << count) - 1};\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[$0], [$1], $2, [$3], all;\n}",
        dst_shared,
        src_global,
        n_bytes,
        barrier,
    )


def load_shared_v4(address, byte_offset: int):
    return ptx(
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];", address, results=[i32_t()] * 4, effects=True
    )


def load_shared_b32(address, byte_offset: int):
    return ptx(f"ld.shared.b32 $0, [$1+{byte_offset}];", address, results=[i32_t()], effects=True)[0]


def load_shared_address(address) -> ir.Value:
    """A global address that is kept in shared memory."""
    return ptx("ld.shared.b64 $0, [$1];", address, results=[ir.IntegerType.get_signless(64)], effects=True)[0]


def store_shared_address(address, value):
    ptx("st.shared.b64 [$0], $1;", address, value)


def read_once() -> ir.Value:
    """A policy for copies of what streams past: it is the first to leave the L2."""
    i64 = ir.IntegerType.get_signless(64)
    return ptx("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", results=[i64], effects=True)[0]


def per_lane(value, lane):
    """The value, in a way in which ptxas knows no part of it that lanes share. `copy_async_*` with a policy takes only
    shared addresses that are made of these, of numbers that differ by lane, and of constants: another part ptxas puts
    in a uniform register beside the policy's, which is an illegal instruction (seen with 13.5, and with JAX 0.11.2's
    own). The lane is there since a shuffle of what lanes share is taken out."""
    code = "{ .reg .b32 v;\nadd.u32 v, $1, $2;\nshfl.sync.idx.b32 v, v, $2, 31, 0xffffffff;\nsub.u32 $0, v, $2; }"
    return ptx(code, value, lane, results=[i32_t()], effects=True, convergent=True)[0]


def copy_async_16(dst_shared, src_global, dst_offset: int = 0, src_offset: int = 0, policy: ir.Value | None = None):
    """This lane's 16 bytes, past L1."""
    _copy_async("cg", ".L2::128B", 16, dst_shared, src_global, dst_offset, src_offset, policy)


def copy_async_4(dst_shared, src_global, dst_offset: int = 0, src_offset: int = 0, policy: ir.Value | None = None):
    _copy_async("ca", "", 4, dst_shared, src_global, dst_offset, src_offset, policy)


def _copy_async(level: str, fetched: str, size: int, dst_shared, src_global, dst_offset, src_offset, policy):
    hint, more = ("", []) if policy is None else (".L2::cache_hint", [policy])
    where = f"[$0+{dst_offset}], [$1+{src_offset}], {size}{', $2' if more else ''}"
    ptx(f"cp.async.{level}.shared.global{hint}{fetched} {where};", dst_shared, src_global, *more)


def copy_commit():
    ptx("cp.async.commit_group;")


def copy_wait(pending: int):
    """Until at most `pending` of this thread's groups are under way."""
    ptx(f"cp.async.wait_group {pending};")


def copy_wait_all():
    ptx("cp.async.wait_all;")


def copy_arrive(barrier):
    """This lane arrives on the barrier when its copies so far are complete."""
    ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", barrier)


def store_shared_f32(address, value, byte_offset: int):
    ptx(f"st.shared.f32 [$0+{byte_offset}], $1;", address, value)


def load_shared_f32(address, byte_offset: int):
    return ptx(f"ld.shared.f32 $0, [$1+{byte_offset}];", address, results=[f32_t()], effects=True)[0]


def load_matrices_transposed(address, byte_offset: int):
    """Four 8 x 8 matrices of 16-bit numbers, each transposed; lane l gives the address of row l % 8 of matrix l / 8."""
    code = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0, $1, $2, $3}}, [$4+{byte_offset}];"
    return ptx(code, address, results=[i32_t()] * 4, effects=True, convergent=True)


def load_shared_f32x2(address):
    return ptx("ld.shared.v2.f32 {$0, $1}, [$2];", address, results=[f32_t()] * 2, effects=True)


def load_shared_f32x4(address, byte_offset: int):
    return ptx(
        f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];", address, results=[f32_t()] * 4, effects=True
    )


def store_shared_f32x4(address, values, byte_offset: int):
    ptx(f"st.shared.v4.f32 [$0+{byte_offset}], {{$1, $2, $3, $4}};", address, *values)


def store_shared_half(address, value, byte_offset: int):
    ptx(f"{{ .reg .b16 h;\ncvt.rn.{half()}.f32 h, $1;\nst.shared.b16 [$0+{byte_offset}], h; }}", address, value)


def store_shared_halfx2(address, lo, hi):
    ptx(f"{{ .reg .b32 b;\ncvt.rn.{half()}x2.f32 b, $2, $1;\nst.shared.b32 [$0], b; }}", address, lo, hi)


def load_shared_v2(address, byte_offset: int):
    return ptx(f"ld.shared.v2.b32 {{$0, $1}}, [$2+{byte_offset}];", address, results=[i32_t()] * 2, effects=True)


def store_shared_f32x2(address, values):
    ptx("st.shared.v2.f32 [$0], {$1, $2};", address, *values)


def store_cluster_f32x4(address, values):
    ptx("st.shared::cluster.v4.f32 [$0], {$1, $2, $3, $4};", address, *values)


# To another CTA of the cluster, with the bytes counted on a barrier there: a store and a barrier of the cluster would
# wait for all that this CTA has stored in global memory too.


def send_f32(address, value, barrier):
    ptx("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [$0], $1, [$2];", address, value, barrier)


def send_f32x4(address, values, barrier):
    code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
    ptx(code, address, *values, barrier)


def load_global_f32(address):
    return ptx("ld.global.nc.f32 $0, [$1];", address, results=[f32_t()], effects=True)[0]


def load_global_b32(address, byte_offset: int):
    return ptx(f"ld.global.nc.b32 $0, [$1+{byte_offset}];", address, results=[i32_t()], effects=True)[0]


def load_global_v2(address, byte_offset: int):
    return ptx(f"ld.global.nc.v2.b32 {{$0, $1}}, [$2+{byte_offset}];", address, results=[i32_t()] * 2, effects=True)


def load_global_v4(address, byte_offset: int):
    """16 bytes that are read once: not kept in L1."""
    return ptx(
        f"ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];",
        address,
        results=[i32_t()] * 4,
        effects=True,
    )


def prefetch(address, byte_offset: int):
    """Has the L2 fetch what will be loaded later."""
    ptx(f"prefetch.global.L2 [$0+{byte_offset}];", address)


def load_global_f32x4(address, byte_offset: int):
    code = f"ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];"
    return ptx(code, address, results=[f32_t()] * 4, effects=True)


def load_global_u16(address, byte_offset: int):
    """Two bytes, in the lower half of a word."""
    code = f"{{ .reg .b16 h;\nld.global.nc.b16 h, [$1+{byte_offset}];\ncvt.u32.u16 $0, h; }}"
    return ptx(code, address, results=[i32_t()], effects=True)[0]


def store_global_v2(address, values, byte_offset: int):
    ptx(f"st.global.v2.b32 [$0+{byte_offset}], {{$1, $2}};", address, *values)


def store_global_v4(address, values, byte_offset: int):
    ptx(f"st.global.v4.b32 [$0+{byte_offset}], {{$1, $2, $3, $4}};", address, *values)


def store_global_f32(address, value):
    ptx("st.global.f32 [$0], $1;", address, value)


def store_global_f32x2(address, lo, hi):
    ptx("st.global.v2.f32 [$0], {$1, $2};", address, lo, hi)


def store_global_half(address, value):
    ptx(f"{{ .reg .b16 h;\ncvt.rn.{half()}.f32 h, $1;\nst.global.b16 [$0], h; }}", address, value)


def store_global_halfx2(address, lo, hi):
    ptx(f"{{ .reg .b32 b;\ncvt.rn.{half()}x2.f32 b, $2, $1;\nst.global.b32 [$0], b; }}", address, lo, hi)


def store_global_f32x4(address, values, byte_offset: int):
    ptx(f"st.global.v4.f32 [$0+{byte_offset}], {{$1, $2, $3, $4}};", address, *values)


# Between CTAs: stores, then `fence`, then an atomic; on the other side the atomic, `fence`, then `load_fresh_*`.


def fence():
    ptx("fence.acq_rel.gpu;")


def fence_async():
    """Between stores to global memory and the copy engine's loads of it, on either side."""
    ptx("fence.proxy.async.global;")


def load_fresh_f32x4(address, byte_offset: int):
    """What another CTA wrote: never from this multiprocessor's L1."""
    return ptx(
        f"ld.relaxed.gpu.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{byte_offset}];",
        address,
        results=[f32_t()] * 4,
        effects=True,
    )


def load_fresh_f32(address):
    return ptx("ld.relaxed.gpu.global.f32 $0, [$1];", address, results=[f32_t()], effects=True)[0]


def count_and_wrap(address, last: ir.Value, order: str = "acq_rel"):
    """Add one to a counter that goes back to zero after `last`; returns what it was. With the order "relaxed" it orders
    no other memory, and there is no fence in front of it."""
    return ptx(f"atom.{order}.gpu.global.inc.u32 $0, [$1], $2;", address, last, results=[i32_t()], effects=True)[0]


def count(address, number: int | ir.Value = 1):
    """Add so many, after a `fence` of this thread."""
    number = i32(number) if isinstance(number, int) else number
    ptx("red.relaxed.gpu.global.add.u32 [$0], $1;", address, number)


def count_if(condition: ir.Value, address) -> ir.Value:
    """Where the condition holds, add one; returns what it was, elsewhere 0. It orders no other memory, and the number
    is waited for only where it is needed: `inc`, since ptxas adds up what a warp's lanes `add` and waits for that."""
    code = (
        "{ .reg .pred p;\nsetp.ne.b32 p, $1, 0;\nmov.b32 $0, 0;\n"
        "@p atom.relaxed.gpu.global.inc.u32 $0, [$2], 0xffffff;\n}"
    )
    return ptx(code, arith.extui(i32_t(), condition), address, results=[i32_t()], effects=True)[0]


def _ask_again_while(differs: str, load: str, address, value: ir.Value, afterwards: str = ""):
    ptx(
        "{ .reg .pred waits;\n.reg .b32 seen;\nagain_${:uid}:\n"
        f"{load}.gpu.global.u32 seen, [$0];\nsetp.{differs}.u32 waits, seen, $1;\n"
        f"@waits bra again_${{:uid}};\n{afterwards}}}",
        address,
        value,
        convergent=True,
    )


def await_count(address, value: ir.Value):
    """Until a counter has a value. It asks the L2 without holding up the multiprocessor's other copies, as acquiring
    loads do; one fence follows."""
    _ask_again_while("ne", "ld.relaxed", address, value, "fence.acq_rel.gpu;\n")


def wait_for_at_least(address, value: ir.Value):
    """Until a counter has a value or more, by acquiring loads: no fence follows, which would wait once more."""
    _ask_again_while("lo", "ld.acquire", address, value)


def store_global_b32(address, value):
    ptx("st.relaxed.gpu.global.u32 [$0], $1;", address, value)


def map_rank(address, rank: ir.Value):
    """This CTA's shared address -> the same place in the cluster's CTA `rank`."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, rank, results=[i32_t()])[0]
