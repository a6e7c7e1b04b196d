"""A norm between two matmuls as a part of both: its sums of squares in the wide kernel before, its division behind.

RMSNorm divides a row by one number, its root mean square. So can what the row is multiplied to be divided, and nobody
has to wait for all of a row before it is multiplied. The kernel that `joins` adds its outputs to the residual stream
and writes

  residual  float32 [M, R]
  x         residual * the norm's scale, 16 bits [M, R], in unit order if it is to be (see also float16_range.py)
  squares   the residual stream's, added up over every 64 columns, float32 [R / 64, M in 32s]

The kernel whose x is `normed` multiplies that x. Its two warps that neither load nor multiply add up the squares of
every row meanwhile, in a fixed order, and leave 1 / sqrt(mean + eps) in shared memory, by which its sums are multiplied
on their way out. So s x A^T too may be of x that is not divided.
"""

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from . import ptx as p
from . import ptx_memory as mem
from . import ptx_tensor as pt
from .float16_range import into_range, out_of_range
from .fragment_order import unit_place
from .wide_plan import SLICE, SLICE_ROWS, WidePlan

NORM_WARPS = 2  # the last of the CTA's, that add up squares
AT_ONCE = 5  # of a lane's loads of squares: what their few registers hold
SLICES_AT_ONCE = 4  # slices that a warp's lanes share out


def joined_outs(plan: WidePlan, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """x and the squares."""
    (r,) = plan.r
    x = jax.ShapeDtypeStruct((plan.m, r), jnp.dtype(dtype))
    return [x, jax.ShapeDtypeStruct((r // SLICE, plan.slice_rows), jnp.float32)]


class NormWarps:
    """What warps do for a norm. The CTA's class sets the attributes before."""

    plan: WidePlan
    eps: float

    # ---- what joins the residual stream --------------------------------------------------------------------------

    def residual_of(self, row, column):
        """Four columns of the residual stream; rows and columns behind the last ones repeat them."""
        row, column = p.minimum(row, self.plan.m - 1), p.minimum(column, self.plan.r[0] - 4)
        return mem.load_global_f32x4(self.place_in(self.residual, row, column, 4), 0)

    def norm_scale_of(self, column):
        known = p.minimum(column, self.plan.r[0] - 4)
        return mem.load_global_f32x4(mem.offset(self.norm_scale, p.mul(known, 4)), 0)

    def join(self, known, row, column, values, residual, scale):
        """Four outputs of a row, of which sixteen lanes have a slice's, on their way out; stored if `known`."""
        plan = self.plan
        flow = [arith.addf(old, new) for old, new in zip(residual, values, strict=True)]
        pt.store_global_f32x4_if(known, self.place_in(self.outs[0], row, column, 4), flow)
        normed = into_range([arith.mulf(v, s) for v, s in zip(flow, scale, strict=True)])
        self.put_half(known, self.x_out, row, column, normed)
        squares = p.total([[arith.mulf(v, v)] for v in flow])[0]
        squares = p.over_lanes(arith.addf, squares, (1, 2, 4, 8))
        place = p.mul(p.add(p.mul(p.div(column, SLICE), plan.slice_rows), row), 4)
        first_lane = p.eq(p.and_(self.lane, 15), 0)
        pt.store_global_f32_if(arith.andi(known, first_lane), mem.offset(self.squares_out, place), squares)

    def put_half(self, known, out, row, column, values):
        """Four outputs of a row in 16 bits, in the order that the kernel behind reads."""
        if self.plan.handover.gives_units:
            for i in (0, 2):
                place = self.place_in(out, row, unit_place(p.add(column, i)), 2)
                pt.store_global_halfx2_if(known, place, values[i : i + 2])
        else:
            pt.store_global_halfx4_if(known, self.place_in(out, row, column, 2), values)

    def place_in(self, array, row, column, size: int):
        """Of an array [M, R] of the one width that all outputs have."""
        return mem.offset(mem.wide_offset(array, row, self.plan.outs[0] * size), p.mul(column, size))

    # ---- what divides --------------------------------------------------------------------------------------------

    def add_squares(self):
        """One of the two warps: 1 / root mean square of every other group of rows. Eight lanes have four rows each of
        every fourth slice."""
        plan = self.plan
        slices = plan.d // SLICE
        own_row, first = p.mul(p.and_(self.lane, 7), 4), p.shr(self.lane, 3)

        def of_group(group, _):
            row = p.add(p.mul(group, SLICE_ROWS), own_row)
            column = mem.offset(self.squares, p.mul(row, 4))

            def add(start, acc):
                loaded = []
                for i in range(0, SLICES_AT_ONCE * AT_ONCE, SLICES_AT_ONCE):
                    at = p.add(start, i)
                    known = p.minimum(at, slices - 1)
                    four = mem.load_global_f32x4(mem.wide_offset(column, known, 4 * plan.slice_rows), 0)
                    loaded.append((p.lt(at, slices), four))
                for has, four in loaded:
                    acc = [arith.addf(a, arith.select(has, v, p.f32(0.0))) for a, v in zip(acc, four, strict=True)]
                return acc

            sums = p.for_range(first, slices, SLICES_AT_ONCE * AT_ONCE, [p.f32(0.0)] * 4, add)
            means = [arith.mulf(p.over_lanes(arith.addf, v, (8, 16)), p.f32(1 / plan.d)) for v in sums]
            inverse = out_of_range([p.rsqrt_without_call(arith.addf(mean, p.f32(self.eps))) for mean in means])
            p.when(p.eq(first, 0), lambda: mem.store_shared_f32x4(self.inverse_of(row), inverse, 0))
            return []

        p.for_range(p.and_(self.warp, 1), plan.slice_rows // SLICE_ROWS, NORM_WARPS, [], of_group)
        p.warp_sync()
        p.when(self.is_lane_0, lambda: mem.barrier_arrive(self.inverse_ready))

    def inverse_of(self, row):
        """Where a row's 1 / root mean square lies."""
        return p.add(p.add(self.inverse_ready, 16), p.mul(row, 4))

    def await_inverse(self):
        mem.barrier_wait(self.inverse_ready, p.i32(0))

    def divided(self, row, values):
        """A row's values over its root mean square."""
        inverse = mem.load_shared_f32(self.inverse_of(p.minimum(row, self.plan.m - 1)), 0)
        return [arith.mulf(v, inverse) for v in values]
