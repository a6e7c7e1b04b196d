"""Round to nearest: every weight to its format as it stands, in the dtype it is stored in, as `load_model` does."""

from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.models.init import quantize_layer
from qerl_jax.models.params import PROJECTIONS, Layer


@jax.jit
def round_to_nearest(layer: Layer) -> Layer:
    """The layer with its plain projections quantized to NVFP4; q/k/v and gate/up share a global scale."""

    def wide(weight: Any) -> jax.Array:
        return weight.astype(jnp.float32) if weight.dtype == jnp.float16 else weight

    return quantize_layer(layer.replace(**{name: wide(getattr(layer, name)) for name in PROJECTIONS}), "nvfp4")
