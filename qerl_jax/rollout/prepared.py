"""What a rollout makes ready once, before the prompts and before the loop over tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.formats import KernelNVFP4, dequantize
from qerl_jax.models.params import PROJECTIONS, Adapter, Layer, Model, bias_name


def prepared(model: Model, adapter: Adapter | None) -> tuple[Model, Adapter | None]:
    """The model and the adapter as the products take them; what is prepared already stays as it is.

    Linear layers are dequantized to the compute dtype: XLA does not fuse the decoding of 4-bit codes into its matmuls,
    so the plain path decodes them once instead of once a token. Weights in the kernels' layout stay packed: the kernels
    decode them on the way. What they take beside them is made here: global scales that divide, and biases in float32,
    in which they add them. LoRA's A and B are cast to the compute dtype.
    """
    dtype = model.base.embed.dtype

    def of_layer(layer: Layer) -> Layer:
        ready: dict[str, Any] = {}
        for name in PROJECTIONS:
            weight, bias = getattr(layer, name), getattr(layer, bias_name(name), None)
            if not isinstance(weight, KernelNVFP4):
                ready[name] = dequantize(weight, dtype)
                continue
            ready[name] = weight.replace(global_scale=weight.divisor, scale_multiplies=False)
            if bias is not None:
                ready[bias_name(name)] = bias.astype(jnp.float32)
        return layer.replace(**ready)

    model = model.replace(base=model.base.replace(layers=tuple(map(of_layer, model.base.layers))))
    if adapter is None:
        return model, None
    cast = tuple(
        {name: pair.replace(a=pair.a.astype(dtype), b=pair.b.astype(dtype)) for name, pair in layer.items()}
        for layer in adapter.lora
    )
    return model, adapter.replace(lora=cast)


def dequantized_bytes(model: Model) -> int:
    """Bytes of the weights that `prepared` makes beside the model's own."""
    itemsize = model.base.embed.dtype.itemsize
    weights = (getattr(layer, name) for layer in model.base.layers for name in PROJECTIONS)
    return sum(w.shape[0] * w.shape[1] * itemsize for w in weights if not isinstance(w, KernelNVFP4 | jax.Array))
