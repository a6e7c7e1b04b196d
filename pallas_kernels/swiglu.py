"""silu(gate) * up of float32 numbers, as the kernels join the two, and its gradient."""

from jaxlib.mlir.dialects import arith

from . import ptx as p
from .float16_range import into_range


def gated(gate, up):
    """Kept in float16's range, see float16_range.py."""
    return into_range([arith.mulf(arith.mulf(gate, _sigmoid(gate)), up)])[0]


def gated_back(d, gate, up):
    """The gradients of gate and up where that of silu(gate) * up is d."""
    share = _sigmoid(gate)
    silu = arith.mulf(gate, share)
    slope = arith.addf(share, arith.mulf(silu, arith.subf(p.f32(1.0), share)))
    return arith.mulf(arith.mulf(d, up), slope), arith.mulf(d, silu)


def _sigmoid(x):
    return p.reciprocal(arith.addf(p.f32(1.0), p.exp2(arith.mulf(x, p.f32(-p.LOG2_E)))))
