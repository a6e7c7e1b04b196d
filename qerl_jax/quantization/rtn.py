"""Round to nearest: every weight to its format as it stands, in the dtype it is stored in, as `load_model` does."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qerl_jax.formats import dequantize
from qerl_jax.models.init import quantize_layer
from qerl_jax.models.params import PROJECTIONS, Layer


class Rounded(NamedTuple):
    """A layer with packed projections, and what these stand for, float32 [N, K] by name."""

    layer: Layer
    plain: dict[str, jax.Array]


@jax.jit
def round_to_nearest(layer: Layer) -> Rounded:
    """Quantizes the plain projections of a layer to NVFP4; q/k/v and gate/up share a global scale."""

    def wide(weight: Any) -> jax.Array:
        return weight.astype(jnp.float32) if weight.dtype == jnp.float16 else weight

    packed = quantize_layer(layer.replace(**{name: wide(getattr(layer, name)) for name in PROJECTIONS}), "nvfp4")
    return Rounded(packed, {name: dequantize(getattr(packed, name), jnp.dtype(jnp.float32)) for name in PROJECTIONS})
