"""What one decode step computes between two attentions for 17-256 rows: one or two launches for each matmul.

The first makes what the matmul reads (inputs_kernel.py): x, and s x A^T of its adapters. The second multiplies: the
streaming or the wide kernel, by the table; of gate and up it writes silu(gate) * up. Where the wide kernel has spare
CTAs, these make s x A^T instead, and an x that is given needs no first launch. With fewer rows the streaming kernel's
own LoRA is faster than a launch.

Letters: M rows, D hidden size, K inputs and N outputs of a weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import inputs_kernel, stream_kernel, wide
from .inputs_plan import GIVEN, NORMED, make_inputs_plan
from .layer_part import LayerPart, Projection, operands
from .layout import COLS
from .stream_plan import StreamConfig, make_plan
from .variants import choose_prepared, spare_ctas_make_h
from .wide_plan import WideConfig

FEWEST_ROWS = 17
UNIT_ROWS = 128  # of a tile of the wide kernel; larger ones hide decoding behind their products


class Call(NamedTuple):
    """One matmul of projections that read the same x.

    Attributes:
      m, k, n: rows, inputs, outputs of each projection.
      ranks: padded ranks of their adapters, 0 for none.
      source: what x is, see inputs_plan.py.
      config: the kernel that multiplies, with its configuration.
      makes_h: whether that kernel also makes s x A^T.
      ordered: rows of x in fragment order, or 0.
      swiglu: whether the projections are gate and up, of which the result is silu(gate) * up.
      units: whether the kernel that multiplies reads x in unit order (fragment_order.py), in which the wide kernel
        decodes with the fewest instructions: where x is made here, and rows are so few that decoding is not hidden.
      gives_units: whether its result has that order.
    """

    m: int
    k: int
    n: tuple[int, ...]
    ranks: tuple[int, ...]
    source: str
    config: StreamConfig | WideConfig
    makes_h: bool
    ordered: int
    swiglu: bool
    units: bool = False
    gives_units: bool = False

    @property
    def before(self) -> tuple[int, ...]:
        """Ranks of the adapters whose s x A^T is made by the first launch."""
        return () if self.makes_h else tuple(rank for rank in self.ranks if rank)

    @property
    def reads_given(self) -> bool:
        """Whether there is nothing to make."""
        return self.source == GIVEN and not self.before and not self.ordered


def calls_of(m: int, layer: LayerPart) -> list[Call]:
    """The matmuls, in their order; raises ValueError naming the constraint when a kernel does not take the shape."""
    if m < FEWEST_ROWS:
        raise ValueError(f"M must be at least {FEWEST_ROWS}, got {m}")
    kinds = ((GIVEN, False), (NORMED, True), (GIVEN, False), (NORMED, False))
    calls = [_call(m, group, *kind) for group, kind in zip(layer.groups, kinds, strict=False)]
    of_norm = [call._replace(units=call.source == NORMED and _gains_by_units(call)) for call in calls]
    o, gate_up, down, *qkv = of_norm
    units = down.reads_given and _gains_by_units(down)
    return [o, gate_up._replace(gives_units=units), down._replace(units=units), *qkv]


def _gains_by_units(call: Call) -> bool:
    return isinstance(call.config, WideConfig) and call.config.m_tile <= UNIT_ROWS


def _call(m: int, group: Sequence[Projection], source: str, swiglu: bool) -> Call:
    (k,) = {projection.weight.k for projection in group}
    n = tuple(projection.weight.n for projection in group)
    ranks = tuple(projection.rank for projection in group)
    if k % COLS:
        raise ValueError(f"K must be a multiple of {COLS}, got {k}")
    config = choose_prepared(m, k, n, ranks, swiglu)
    streams = isinstance(config, StreamConfig)
    ordered = (
        8 * make_plan(m, k, n, config, ranks, prepared=True, swiglu=swiglu).m_tiles if streams and config.wgmma else 0
    )
    makes_h = isinstance(config, WideConfig) and spare_ctas_make_h(m, k, n, ranks, config, swiglu)
    call = Call(m, k, n, ranks, source, config, makes_h, ordered, swiglu)
    if not call.reads_given:
        make_inputs_plan(m, k, call.before, source, ordered)
    return call


def between_attentions(
    x: jax.Array, residual: jax.Array, layer: LayerPart, norms: Sequence[jax.Array], eps: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`block.between_attentions` for more rows than its kernel takes."""
    calls = calls_of(x.shape[0], layer)
    scales = [jnp.asarray(scale, jnp.float32) for scale in norms]
    _, (y,) = _run(calls[0], layer.groups[0], (x,), jnp.float32, eps)
    residual, product = _run(calls[1], layer.groups[1], (residual, y, scales[0]), jnp.bfloat16, eps)
    _, (y,) = _run(calls[2], layer.groups[2], product, jnp.float32, eps)
    if not layer.qkv:
        return residual + y, ()
    residual, qkv = _run(calls[3], layer.groups[3], (residual, y, scales[1]), jnp.bfloat16, eps)
    return residual, tuple(qkv)


def _run(call: Call, group: Sequence[Projection], source, out_dtype, eps: float):
    """The residual stream, if x is its norm, and the results [M, N] of one call."""
    weights = list(map(operands, group))
    present = [weight for weight in weights if weight.a is not None]
    made = {"x": source[0]}
    if not call.reads_given:
        kernel = inputs_kernel.build(call.m, call.k, call.before, call.source, call.ordered, eps, call.units)
        names = ("a", "scale", "lora_scale") if call.before else ()
        made |= kernel(*source, *[getattr(weight, name) for name in names for weight in present])
    lora = [made["h"], *[weight.b for weight in present]] if call.before else []
    if call.makes_h:
        lora = [getattr(weight, name) for name in ("a", "b", "lora_scale") for weight in present]
    data, scales = [weight.data for weight in weights], [weight.scale for weight in weights]
    biases = stream_kernel.all_biases([weight.bias for weight in weights], call.n)
    ranks = call.ranks if present else ()
    if isinstance(call.config, WideConfig):
        of = call.n, ranks, call.config, out_dtype, call.swiglu, call.makes_h, call.units, call.gives_units
        ys = wide.multiply(made["x"], lora, data, scales, biases, *of)
    else:
        wide_out = out_dtype != jnp.bfloat16
        of = call.m, call.k, call.n, call.config
        more = {"ranks": ranks, "prepared": True, "swiglu": call.swiglu, "gives_units": call.gives_units}
        multiply = stream_kernel.build(*of, bool(biases), wide_out=wide_out, **more)
        ys = multiply(made["x"], *data, *scales, *biases, *lora)
    return made.get("residual"), ys
