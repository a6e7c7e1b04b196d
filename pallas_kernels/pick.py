"""Several matrices as one: which of them an index falls in."""

from collections.abc import Sequence

from jaxlib.mlir.dialects import arith

from . import ptx as p
from .stream_plan import Plan


def pick(sizes: Sequence[int], index, values):
    """Of which size's range an index is: the `values` of that one, and the index in it."""
    first, chosen, local = 0, list(values[0]), index
    for size, here in zip(sizes, values[1:], strict=False):
        first += size
        earlier = p.lt(index, first)
        chosen = [arith.select(earlier, a, b) for a, b in zip(chosen, here, strict=True)]
        local = p.select(earlier, local, p.sub(index, first))
    return chosen, local


def of_tile(plan: Plan, index, values):
    """Of which weight of the streaming kernel a row tile is: the `values` of that one, and the tile's place in it. With
    SwiGLU gate's and up's tiles take turns."""
    if not plan.swiglu:
        return pick(plan.tiles_of, index, values)
    is_up = p.eq(p.and_(index, 1), 1)
    return [arith.select(is_up, up, gate) for gate, up in zip(*values, strict=True)], p.shr(index, 1)
