"""When the block kernel's CTAs begin and end what they do, by the clocks of their multiprocessors.

    python -m benchmarks.fp4_block_clock OUT.json [--model 7B] [--m 8] [--rank 32] [--made]

Layers follow each other as in `benchmarks.fp4_block`, without attention; o's x A^T is given, with --made it is made in
the kernel. Each event is told as [median, first, last] of all CTAs, us after the CTA's own start. The first compute
warp marks its loops and outputs, the first service warp the copies of x and x A^T. Behind "weights done" comes when
all of the CTA's warps have met ("tiles begun"; in down, behind "slices seen"), when the first warp has stored its tiles
("tiles stored"), and when the CTA has told so ("outputs stored"); "others seen" is when all CTAs have. The clock's rate
is that of the whole kernel by the GPU's timer. Marks cost about a microsecond in all.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import arith

from benchmarks.fp4_block import EPS, HEAD, SHAPES, inputs, random_layer
from benchmarks.report import of_device, require_gpu, write
from pallas_kernels import lane_level
from pallas_kernels import ptx as p
from pallas_kernels import ptx_memory as mem
from pallas_kernels.block import plan_of
from pallas_kernels.block_kernel import Operands, _Kernel, block_outs
from pallas_kernels.counters import first_counters
from pallas_kernels.hidden import hidden_parts
from pallas_kernels.layer_part import operands

PARTS = "o", "gate, up", "down", "q, k, v"
EVENTS = ["others seen", "x asked", "x A^T to be added", "x A^T there", "x there"]
EVENTS += ["weights done", "tiles begun", "slices seen", "tiles stored", "outputs stored"]
BEGIN, END, START = 60, 61, 62  # by the GPU's timer; by the clock
PLACES, LAYERS, REPEATS = 64, 3, 5


class TimedKernel(_Kernel):
    """The kernel with a word for each event of each part; `clocks` is where they lie, [CTAs, PLACES]."""

    finishing: int | None = None  # the part whose tiles are being made outputs

    def mark(self, place: int, warp: int, source: str = "mov.u32 $0, %clock;"):
        def write():
            at = mem.offset(self.outs["clocks"], p.mul(p.add(p.mul(self.cta, PLACES), place), 4))
            mem.store_global_b32(at, p.ptx(source, results=[p.i32_t()], effects=True)[0])

        p.when(arith.andi(p.eq(self.warp, warp), self.is_lane_0), write)

    def mark_part(self, i: int, event: str, warp: int):
        self.mark(len(EVENTS) * i + EVENTS.index(event), warp)

    def mark_timer(self, place: int):
        self.mark(place, 0, "{ .reg .b64 t;\nmov.u64 t, %globaltimer;\ncvt.u32.u64 $0, t; }")

    def run(self):
        self.mark_timer(BEGIN)
        self.mark(START, 0)
        super().run()

    def load_x(self, i):
        if i:
            self.mark_part(i, "others seen", self.plan.warps)
        super().load_x(i)
        self.mark_part(i, "x asked", self.plan.warps)

    def add_hidden(self, i):
        self.mark_part(i, "x A^T to be added", self.plan.warps)
        super().add_hidden(i)
        self.mark_part(i, "x A^T there", self.plan.warps)

    def await_x(self, i):
        super().await_x(i)
        self.mark_part(i, "x there", 0)

    def multiply(self, i, first_item, first_slots):
        made = super().multiply(i, first_item, first_slots)
        self.mark_part(i, "weights done", 0)
        return made

    def await_slices(self, i):
        super().await_slices(i)
        self.mark_part(i, "slices seen", 0)

    def each(self, count, most, body):
        if self.finishing is None:  # those for which B of a large rank is fetched ahead
            super().each(count, most, body)
            return
        self.mark_part(self.finishing, "tiles begun", 0)
        super().each(count, most, body)
        self.mark_part(self.finishing, "tiles stored", 0)

    def finish(self, i, early):
        self.finishing = i
        super().finish(i, early)
        self.finishing = None
        self.mark_part(i, "outputs stored", 0)
        if i + 1 == len(self.plan.parts):
            self.mark_timer(END)


def timed(plan, dtype):
    """`block_kernel.build` with the clocks beside its outputs."""
    outs = block_outs(plan, dtype) | {"clocks": jax.ShapeDtypeStruct((plan.ctas, PLACES), jnp.int32)}

    def run(given):
        leaves, tree = jax.tree.flatten(given)

        def timed_block(_, *refs):
            *refs, shared = refs
            operands_of = jax.tree.unflatten(tree, refs[: len(leaves)])
            TimedKernel(plan, EPS, operands_of, dict(zip(outs, refs[len(leaves) :], strict=True)), shared).run()

        call = lane_level.kernel(
            timed_block, list(outs.values()), dtype,
            grid=plan.ctas // plan.cluster, warps=plan.threads // 32, cluster=plan.cluster, shared=plan.total,
        )  # fmt: skip
        return dict(zip(outs, call(*leaves), strict=True))

    return run


def clocks(x, residual, model, hidden):
    """Of each layer in turn, q of one as the attention's output of the next."""
    found = []
    for layer, norms in model:
        plan = plan_of(len(x), layer, 0 if hidden is None else len(hidden))
        weights = tuple(tuple(map(operands, group)) for group in layer.groups)
        given = Operands(x, residual, weights, norms, jnp.asarray(first_counters(plan.sync_words)), hidden)
        outs = timed(plan, layer.dtype)(given)
        x, residual = outs["y0"], outs["residual2"]
        found.append(outs["clocks"])
    return found


def _since(later, earlier):
    """The difference of clocks, which are the lower 32 bits of longer ones."""
    return (later - earlier) % 2**32


def events(words):
    """us [median, first, last] of each event, from clocks [runs, CTAs, PLACES]; of the whole, by the GPU's timer."""
    whole = _since(words[..., END], words[..., BEGIN].min(1, keepdims=True)).max(1) / 1e3
    last = len(EVENTS) * (len(PARTS) - 1) + EVENTS.index("outputs stored")
    rate = np.median(_since(words[..., last], words[..., START]).max(1) / whole)
    told = {}
    for i, part in enumerate(PARTS):
        for n, event in enumerate(EVENTS):
            us = _since(words[..., len(EVENTS) * i + n], words[..., START]) / rate
            us = us[:, (us < 1e3).all(0)]  # not of CTAs that have no such event
            if us.size:
                of_runs = [np.median(us, 1), us.min(1), us.max(1)]
                told[f"{part}: {event}"] = [round(float(np.median(v)), 2) for v in of_runs]
    return told, round(float(np.median(whole)), 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--model", default="7B", choices=list(SHAPES))
    parser.add_argument("--m", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--made", action="store_true", help="o's x A^T in the kernel")
    args = parser.parse_args()
    require_gpu()
    model = [random_layer(jax.random.key(layer), SHAPES[args.model], args.rank) for layer in range(LAYERS)]
    x, residual = inputs(args.model, args.m, "bfloat16")
    hidden = None
    if args.rank and not args.made:
        hidden = hidden_parts(x, model[0][0].o.lora[0], x.shape[1] // HEAD)
    run = jax.jit(clocks)
    jax.block_until_ready(run(x, residual, model, hidden))
    words = np.stack([np.asarray(layer) for _ in range(REPEATS) for layer in run(x, residual, model, hidden)])
    told, whole = events(words.astype(np.int64))
    for event, (median, first, last) in sorted(told.items(), key=lambda item: item[1][0]):
        print(f"{event:28} {median:6.2f}  {first:6.2f} .. {last:6.2f}", flush=True)
    settings = {key: v for key, v in vars(args).items() if key != "out"}
    write(args.out, of_device() | {"whole_us": whole} | settings | {"events": told})
    return 0


if __name__ == "__main__":
    sys.exit(main())
