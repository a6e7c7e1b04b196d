"""The projections between one attention and the next, and what kernels take of them.

Letters: K inputs and N outputs of a weight, R LoRA's rank.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .layout import KernelWeight
from .operands import adapter, number, padded_rank


class Projection(NamedTuple):
    """A weight [N, K] and what belongs to it: global scale (a divisor), bias [N], and LoRA's A [R, K], B [N, R]
    in the weight's dtype and scaling."""

    weight: KernelWeight
    global_scale: jax.Array
    bias: jax.Array | None = None
    lora: tuple[jax.Array, jax.Array, jax.Array] | None = None

    @property
    def rank(self) -> int:
        """LoRA's, as the kernel takes it; 0 without."""
        return 0 if self.lora is None else padded_rank(self.lora[0].shape[0])


class LayerPart(NamedTuple):
    """The projections between one attention and the next, of one dtype. `qkv` is the next layer's; empty behind the
    last layer."""

    o: Projection
    gate: Projection
    up: Projection
    down: Projection
    qkv: tuple[Projection, ...] = ()

    @property
    def groups(self) -> tuple[tuple[Projection, ...], ...]:
        """Those that read the same x, in their order."""
        return ((self.o,), (self.gate, self.up), (self.down,), *([self.qkv] if self.qkv else []))

    @property
    def dtype(self) -> str:
        """What the kernels multiply in; ValueError where weights differ in that."""
        found = sorted({projection.weight.dtype for group in self.groups for projection in group})
        if len(found) > 1:
            raise ValueError(f"a layer's weights must have one dtype, got {', '.join(found)}")
        return found[0]


class Weight(NamedTuple):
    """A weight's operands: data uint32 [N/16, K/256, 576] (layout.py), global scale float32 [1], bias float32 [N], and
    LoRA's A [R, K] and B [N, R] in 16 bits and scaling float32 [1]; None where it has none."""

    data: Any
    scale: Any
    bias: Any = None
    a: Any = None
    b: Any = None
    lora_scale: Any = None


def operands(projection: Projection) -> Weight:
    """The arrays as kernels take them."""
    lora: tuple[jax.Array | None, ...] = (None, None, None)
    if projection.lora is not None:
        lora = adapter(projection.lora, projection.weight.k, projection.weight.dtype)
    bias = None if projection.bias is None else projection.bias.astype(jnp.float32)
    return Weight(projection.weight.data, number(projection.global_scale), bias, *lora)
