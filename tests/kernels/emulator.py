"""Runs the programs of kernels (streaming, block, inputs, attention) in NumPy: every warp of every CTA, 32 lanes at
once, in a random order.

A program is Python that calls `ptx` and `ptx_memory`; here those names mean NumPy operations on vectors of 32 lanes.
Warps are threads of which one runs at a time; at each point where a warp may wait (barriers, counters) the next one is
drawn by a seed, so that a missing barrier shows under some seeds. Asynchronous copies land at once, or as late as the
program allows, and stores to global memory are seen by others after a fence; shared memory and outputs begin as NaN.
What is not modelled: registers, the rest of the memory model, time, and the tensor cores' truncation (sums are rounded
once a step).
"""

import concurrent.futures
import contextlib
import queue
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
from emulated_instructions import make_decoding, make_fp8, make_memory, make_ptx

from pallas_kernels import (
    attention_cache,
    attention_inputs,
    attention_kernel,
    attention_outputs,
    attention_tiles,
    block_compute,
    block_kernel,
    block_lora,
    block_outputs,
    block_service,
    float16_range,
    fragment_order,
    hidden,
    inputs_kernel,
    inputs_sources,
    pick,
    stream_compute,
    stream_kernel,
    stream_lora,
    stream_outputs,
    stream_shared,
    stream_slices,
    swiglu,
)
from pallas_kernels.inputs_plan import CLUSTER


class Deadlock(AssertionError):
    """Every warp waits for another."""


class Stopped(AssertionError):
    """Another warp failed."""


class Warp:
    def __init__(self, machine, cta, index):
        self.machine, self.cta, self.index = machine, cta, index
        self.mask, self.may_go, self.turn, self.done = np.ones(32, bool), lambda: True, queue.SimpleQueue(), False
        self.copies, self.groups, self.stores = [], [], []

    def run(self, program):
        try:
            self.wait_for_turn()
            program()
            self.publish()
        finally:
            self.done = True
            self.machine.idle.put(None)

    def publish(self):
        """Let other CTAs see what this warp stored in global memory, and what those did that it met at a barrier."""
        met = self.machine.met[self.cta]
        for place, data in met + self.stores:
            self.machine.memory[place] = data
        self.stores = []
        met.clear()

    def pause(self, may_go=lambda: True):
        """Let another warp run; come back some time after `may_go()` holds."""
        self.may_go = may_go
        self.machine.idle.put(None)
        self.wait_for_turn()

    def wait_for_turn(self):
        self.turn.get()
        if self.machine.stopped:
            raise Stopped

    @contextlib.contextmanager
    def only(self, mask):
        before, self.mask = self.mask, mask
        yield
        self.mask = before


class Machine:
    """Global memory, CTAs and their warps, whose 16-bit numbers are of `dtype`."""

    def __init__(self, seed, dtype="bfloat16"):
        self.dtype, self.random, self.idle = dtype, random.Random(seed), queue.SimpleQueue()
        self.landing = random.Random(seed)  # apart: whether a copy lands at once changes no order of warps
        self.memory, self.end = np.full(1 << 20, 0xFF, np.uint8), 256
        self.now, self.slow = None, ()  # warps, (CTA, index), that run where no others can

    def put(self, array):
        """Its address."""
        array = np.ascontiguousarray(array)
        at, size = self.end, array.nbytes
        if at + size > self.memory.size:
            more = np.full(self.memory.size + 2 * size, 0xFF, np.uint8)
            self.memory = np.concatenate([self.memory, more])
        self.memory[at : at + size] = array.reshape(-1).view(np.uint8)
        self.end = -(-(at + size) // 256) * 256
        return at

    def get(self, at, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory[at : at + size].view(dtype).reshape(shape).copy()

    def launch(self, ctas, cluster, warps, shared_bytes, program):
        self.cluster, self.warps_of_cta, self.stopped = cluster, warps, False
        self.shared = [np.full(shared_bytes, 0xFF, np.uint8) for _ in range(ctas)]
        self.barriers = [{} for _ in range(ctas)]
        self.named, self.met = {}, [[] for _ in range(ctas)]
        left = self.left = [Warp(self, cta, index) for cta in range(ctas) for index in range(warps)]
        with concurrent.futures.ThreadPoolExecutor(len(left)) as pool:
            running = {warp: pool.submit(warp.run, program) for warp in left}
            try:
                while left:
                    self.step(left, running)
            finally:
                self.stopped = True
                for warp in left:
                    warp.turn.put(None)

    def step(self, left, running):
        start = self.random.randrange(len(left))
        order = left[start:] + left[:start]
        if self.slow:
            order.sort(key=lambda warp: (warp.cta, warp.index) in self.slow)
        self.now = next((warp for warp in order if warp.may_go()), None)
        if self.now is None:
            raise Deadlock(f"{len(left)} warps wait: {sorted((w.cta, w.index) for w in left)}")
        self.now.turn.put(None)
        self.idle.get()
        if self.now.done:
            left.remove(self.now)
            running[self.now].result()

    def meet(self, key, threads, waits=True):
        """A barrier of `threads` threads."""
        self.met[self.now.cta] += self.now.stores
        self.now.stores = []
        arrived, round_ = self.named.get(key, (0, 0))
        arrived += 32
        assert arrived <= threads, f"more than {threads} threads at barrier {key}"
        self.named[key] = (0, round_ + 1) if arrived == threads else (arrived, round_)
        if waits:
            self.now.pause(lambda: self.named[key][1] > round_)


ARITH = types.SimpleNamespace(
    addf=lambda a, b: (a + b).astype(np.float32), mulf=lambda a, b: (a * b).astype(np.float32),
    subf=lambda a, b: (a - b).astype(np.float32), divf=lambda a, b: (a / b).astype(np.float32),
    maximumf=np.maximum, select=np.where, andi=np.bitwise_and, ori=np.bitwise_or,
    CmpIPredicate=types.SimpleNamespace(sge=lambda a, b: a.view(np.int32) >= b.view(np.int32)),
    CmpFPredicate=types.SimpleNamespace(OGT=np.greater),
    cmpi=lambda compare, a, b: compare(a, b), cmpf=lambda compare, a, b: compare(a, b),
)  # fmt: skip


def _emulated(m):
    p = make_ptx(m)
    names = {"p": p, "mem": make_memory(m), "fp8": make_fp8(p), "arith": ARITH}
    names |= make_decoding(m)
    stream = fragment_order, stream_kernel, stream_compute, stream_lora, stream_outputs
    stream += stream_shared, stream_slices
    inputs = inputs_kernel, inputs_sources, hidden, float16_range, swiglu
    block = block_compute, block_kernel, block_lora, block_outputs, block_service
    attention = attention_cache, attention_inputs, attention_kernel, attention_outputs, attention_tiles
    return replaced((*stream, *inputs, *block, *attention, pick), names)


def without(monkeypatch, name, maker="make_memory"):
    """The emulator with one of `ptx_memory`'s functions (of `ptx`'s with "make_ptx") doing nothing."""
    real = globals()[maker]

    def made(machine):
        functions = real(machine)
        setattr(functions, name, lambda *_: None)
        return functions

    monkeypatch.setitem(globals(), maker, made)


@contextlib.contextmanager
def replaced(modules, names):
    """The modules with other objects behind those of these names that they know."""
    before = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, names[name])
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def run_simple(program, x, out, ctas, warps):
    """`out` after a kernel of independent warps; `program` takes the two operands."""
    m = Machine(0)
    from_, to = m.put(x), m.put(out)
    with _emulated(m):
        m.launch(ctas, 1, warps, 1, lambda: program(from_, to))
    return m.get(to, out.shape, out.dtype)


def run_inputs(plan, operands, *, eps=0.0, seed=0, dtype="bfloat16"):
    """What the kernel of inputs_kernel.py writes, by name."""
    m = Machine(seed, dtype)
    refs = [m.put(np.asarray(v)) for v in operands]
    shapes = inputs_kernel.inputs_outs(plan, dtype)
    outs = [m.put(np.full(s.shape, np.nan, s.dtype)) for s in shapes.values()]
    ctas = plan.row_tiles * plan.groups * CLUSTER
    with _emulated(m):
        program = inputs_kernel._Kernel
        m.launch(ctas, CLUSTER, plan.warps, plan.total, lambda: program(plan, eps, [*refs, *outs], None).run())
    return {name: m.get(at, s.shape, s.dtype) for at, (name, s) in zip(outs, shapes.items(), strict=True)}


def run(plan, x, weights, scales, biases=(), loras=(), *, wide_out=True, scaled=False, seed=0, calls=1):
    """The outputs [M, n_i] of a kernel, of several calls that share their memory; `loras` are its LoRA operands."""
    m = Machine(seed, np.asarray(x).dtype.name)
    c = plan.config
    xs = [fragment_order.reference(jnp.asarray(x), plan.m_tiles * 8)] if c.wgmma else [x]
    xs += [x] if c.wgmma and plan.computes_h else []
    operands = [m.put(np.asarray(v)) for v in (*xs, *weights, *scales, *biases, *loras)]
    dtype = np.float32 if wide_out else np.dtype(m.dtype)
    shapes = [((plan.m, n), dtype) for n in plan.outs]
    shapes += [(s.shape, s.dtype) for s in stream_kernel.lora_space(plan)]
    outs = [m.put(np.full(shape, np.nan, dtype)) for shape, dtype in shapes]
    results = []
    with _emulated(m):
        for _ in range(calls):

            def program():
                stream_kernel._Kernel(plan, [*operands, *outs, None], bool(biases), wide_out, scaled).run()

            m.launch(plan.clusters * c.together, c.together, 4 * plan.warpgroups, plan.total, program)
            results.append([m.get(at, *shape) for at, shape in zip(outs, shapes[: len(plan.outs)], strict=False)])
    return results


def run_block(plan, eps, operands, *, seed=0, calls=1, slow=()):
    """What the block kernel writes, by name, of several calls that share their memory."""
    m = Machine(seed, np.asarray(operands.x).dtype.name)
    m.slow = slow
    given = jax.tree.map(lambda v: m.put(np.asarray(v)), operands)
    shapes = block_kernel.block_outs(plan, m.dtype)
    made = {name: m.put(np.full(s.shape, np.nan, s.dtype)) for name, s in shapes.items()}
    results = []
    with _emulated(m):
        for _ in range(calls):

            def program():
                block_kernel._Kernel(plan, eps, given, made, None).run()

            m.launch(plan.ctas, plan.cluster, plan.threads // 32, plan.total, program)
            results.append({name: m.get(made[name], s.shape, s.dtype) for name, s in shapes.items()})
    return results


def run_attention(plan, eps, *operands, seed=0):
    """What the function that `attention_kernel.build` makes gives of the `operands`."""
    m = Machine(seed, np.asarray(operands[0]).dtype.name)
    refs = [m.put(np.asarray(v)) for v in operands]
    shapes = attention_kernel.attention_outs(plan, m.dtype)
    outs = [m.put(np.full(s.shape, np.nan, s.dtype)) for s in shapes]
    c = plan.config
    with _emulated(m):
        program = attention_kernel._Warp
        m.launch(plan.ctas, c.cluster, c.warps, plan.total, lambda: program(plan, [*refs, *outs, None], eps).run())
    caches = [m.get(at, v.shape, v.dtype) for at, v in zip(refs[-2:], map(np.asarray, operands[-2:]), strict=True)]
    out, *hidden = (m.get(at, s.shape, s.dtype) for at, s in zip(outs, shapes, strict=True))
    return out, *caches, *hidden
