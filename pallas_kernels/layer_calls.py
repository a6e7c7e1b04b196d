"""What one decode step computes between two attentions for 17-256 rows: one or two launches for each matmul.

The first makes what the matmul reads (inputs_kernel.py): x, and s x A^T of its adapters. The second multiplies: the
streaming or the wide kernel, by the table; of gate and up it writes silu(gate) * up. Where the wide kernel has spare
CTAs, these make s x A^T instead, and an x that is given needs no first launch; nor does the norm before q, k and v,
which is then a part of down's kernel and of theirs. Up to 16 rows all is one kernel (block_kernel.py).

Letters: M rows, D hidden size, K inputs and N outputs of a weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import inputs_kernel, stream_kernel, wide, wide_plan
from .inputs_plan import GIVEN, NORMED, make_inputs_plan
from .layer_part import LayerPart, Projection, operands
from .layout import COLS
from .operands import all_biases
from .stream_plan import StreamConfig, make_plan
from .variants import choose_prepared, spare_ctas_make_h
from .wide_plan import PLAIN, Handover, WideConfig

FEWEST_ROWS = 17


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
      handover: in which form the kernel that multiplies reads x and gives its result.
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
    handover: Handover = PLAIN

    @property
    def before(self) -> tuple[int, ...]:
        """Ranks of the adapters whose s x A^T is made by the first launch."""
        return () if self.makes_h else tuple(rank for rank in self.ranks if rank)

    @property
    def reads_given(self) -> bool:
        """Whether there is nothing to make."""
        return self.source == GIVEN and not self.before and not self.ordered


def calls_of(m: int, layer: LayerPart, in_units: bool = False) -> list[Call]:
    """The matmuls, in their order, the first one's x in unit order or not; raises ValueError naming the constraint when
    a kernel does not take the shape."""
    if m < FEWEST_ROWS:
        raise ValueError(f"M must be at least {FEWEST_ROWS}, got {m}")
    kinds = ((GIVEN, False), (NORMED, True), (GIVEN, False), (NORMED, False))
    calls = [_call(m, group, *kind) for group, kind in zip(layer.groups, kinds, strict=False)]
    o, *behind = _handed_over(*calls)
    if in_units:
        o = _reading_units(o)
        if not _takes(o):
            raise ValueError(f"o does not read x in unit order at M = {m}, K = {o.k}, N = {o.n}")
    return [o, *behind]


def reads_units(m: int, layer: LayerPart) -> bool:
    """Whether o gains by x in unit order."""
    return _takes(_reading_units(calls_of(m, layer)[0]))


def _reading_units(call: Call) -> Call:
    return call._replace(handover=Handover(units=True))


def _handed_over(o: Call, gate_up: Call, down: Call, qkv: Call | None = None) -> list[Call]:
    """The calls with the forms of what they hand over to each other: x in unit order where the wide kernel gains by it,
    but for o's, which is another kernel's; and down with the residual stream, q, k and v with a norm to be divided."""
    into_down = down.reads_given and _gains_by_units(down)
    gate_up = gate_up._replace(handover=Handover(units=_gains_by_units(gate_up), gives_units=into_down))
    down = down._replace(handover=Handover(units=into_down, scaled=True))
    if qkv is None:
        return [o, gate_up, down]
    units = _gains_by_units(qkv)
    of_qkv = qkv._replace(handover=Handover(units=units))
    joining = down._replace(handover=Handover(units=into_down, joins=True, gives_units=units, scaled=True))
    normed = qkv._replace(source=GIVEN, handover=Handover(units=units, normed=True))
    return [o, gate_up, *((joining, normed) if _takes(joining) and _takes(normed) else (down, of_qkv))]


def _gains_by_units(call: Call) -> bool:
    return isinstance(call.config, WideConfig)


def _takes(call: Call) -> bool:
    """Whether the wide kernel multiplies, with no launch before, in the call's form."""
    if not isinstance(call.config, WideConfig) or not call.reads_given:
        return False
    try:
        of = call.config, call.ranks, call.swiglu, call.makes_h, call.handover
        wide_plan.make_plan(call.m, call.k, call.n, False, *of)
    except ValueError:
        return False
    return True


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
    x: jax.Array, residual: jax.Array, layer: LayerPart, norms: Sequence[jax.Array], eps: float, in_units: bool = False
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`block.between_attentions` for more rows than its kernel takes."""
    o, gate_up, down, *qkv = calls_of(x.shape[0], layer, in_units)
    dtype = jnp.dtype(layer.dtype)
    scales = [jnp.asarray(scale, jnp.float32) for scale in norms]
    _, (y,) = _run(o, layer.groups[0], (x,), jnp.float32, eps)
    residual, product = _run(gate_up, layer.groups[1], (residual, y, scales[0]), dtype, eps)
    if down.handover.joins:
        _, (residual, x, *squares) = _run(down, layer.groups[2], product, jnp.float32, eps, (residual, scales[1]))
        return residual, tuple(_run(*qkv, layer.groups[3], (x,), dtype, eps, squares)[1])
    _, (y,) = _run(down, layer.groups[2], product, jnp.float32, eps)
    if not qkv:
        return residual + y, ()
    residual, ys = _run(*qkv, layer.groups[3], (residual, y, scales[1]), dtype, eps)
    return residual, tuple(ys)


def _run(call: Call, group: Sequence[Projection], source, out_dtype, eps: float, handed: Sequence[jax.Array] = ()):
    """The residual stream, if x is made here and its norm, and the results of one call: [M, N] each, or what
    `Handover.joins` says. `handed` are the operands of its handover."""
    weights, dtype = list(map(operands, group)), group[0].weight.dtype
    present = [weight for weight in weights if weight.a is not None]
    made = {"x": source[0]}
    if not call.reads_given:
        units = call.handover.units
        kernel = inputs_kernel.build(call.m, call.k, call.before, call.source, call.ordered, eps, units, dtype)
        names = ("a", "scale", "lora_scale") if call.before else ()
        made |= kernel(*source, *[getattr(weight, name) for name in names for weight in present])
    lora = [made["h"], *[weight.b for weight in present]] if call.before else []
    if call.makes_h:
        lora = [getattr(weight, name) for name in ("a", "b", "lora_scale") for weight in present]
    data, scales = [weight.data for weight in weights], [weight.scale for weight in weights]
    biases = all_biases([weight.bias for weight in weights], call.n)
    ranks = call.ranks if present else ()
    if isinstance(call.config, WideConfig):
        of = call.n, ranks, call.config, out_dtype, call.swiglu, call.makes_h, call.handover, eps, handed
        ys = wide.multiply(made["x"], lora, data, scales, biases, *of)
    else:
        wide_out = jnp.dtype(out_dtype).name != dtype
        of = call.m, call.k, call.n, call.config
        more = {"ranks": ranks, "swiglu": call.swiglu, "gives_units": call.handover.gives_units}
        more |= {"scaled": call.handover.scaled, "dtype": dtype}
        multiply = stream_kernel.build(*of, bool(biases), wide_out=wide_out, prepared=True, **more)
        ys = multiply(made["x"], *data, *scales, *biases, *lora)
    return made.get("residual"), ys
