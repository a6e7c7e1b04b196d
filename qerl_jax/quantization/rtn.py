"""Round to nearest: every weight to its format as it stands, in the dtype it is stored in, as `load_model` does."""

import jax

from qerl_jax.models.init import quantize_layer
from qerl_jax.models.params import Layer


@jax.jit
def round_to_nearest(layer: Layer) -> Layer:
    """The layer with its plain projections quantized to NVFP4; q/k/v and gate/up share a global scale."""
    return quantize_layer(layer, "nvfp4")
