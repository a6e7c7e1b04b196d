"""What a rollout makes ready once, before the prompts and before the loop over tokens.

Linear layers are dequantized to the compute dtype: XLA does not fuse the decoding of 4-bit codes into its matmuls, so
the plain path decodes them once instead of once a token. Weights in the kernels' layout stay packed, since the kernels
decode them on the way. What the kernels take beside them is made here: global scales that divide, and biases in the
float32 in which they are added. LoRA's A and B are cast to the compute dtype and padded with zeros to the rank that the
kernels take; in the loop that would be two launches for each pair and token.

One function makes all this and another puts it in place, so that a program can return the new arrays alone: an array
that a jitted function returns unchanged is a copy, and the packed weights are most of the memory.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import padded_rank
from qerl_jax.formats import KernelNVFP4, Weight, dequantize, format_of
from qerl_jax.models.params import PROJECTIONS, Adapter, Layer, LoRA, Model, bias_name, check_fits


class Made(flax.struct.PyTreeNode):
    """New arrays only: of each layer by field, dequantized weights, biases, and for packed weights the global scale;
    and LoRA pairs, None where they stay as they are."""

    layers: tuple[dict[str, jax.Array], ...]
    lora: tuple[dict[str, LoRA], ...] | None


def made(model: Model, adapter: Adapter | None) -> Made:
    """Whatever is not yet as the matrix products take it."""
    dtype = model.base.embed.dtype

    def of_layer(layer: Layer) -> dict[str, jax.Array]:
        new: dict[str, jax.Array] = {}
        for name in PROJECTIONS:
            weight, bias = getattr(layer, name), getattr(layer, bias_name(name))
            if isinstance(weight, KernelNVFP4):
                if weight.scale_multiplies:
                    new[name] = weight.divisor
                if bias is not None and bias.dtype != jnp.float32:
                    new[bias_name(name)] = bias.astype(jnp.float32)
            elif format_of(weight) != "bf16" or weight.dtype != dtype:
                new[name] = dequantize(weight, dtype)
        return new

    def of_pair(weight: Weight, pair: LoRA) -> LoRA:
        rank = pair.a.shape[0]
        more = padded_rank(rank) - rank if isinstance(weight, KernelNVFP4) else 0
        a, b = pair.a.astype(dtype), pair.b.astype(dtype)
        return pair.replace(a=jnp.pad(a, ((0, more), (0, 0))), b=jnp.pad(b, ((0, 0), (0, more))))

    layers, lora = model.base.layers, None
    if adapter is not None:
        check_fits(model, adapter)
        lora = tuple(
            {name: of_pair(getattr(layer, name), pair) for name, pair in pairs.items()}
            for layer, pairs in zip(layers, adapter.lora, strict=True)
        )
        if _kinds(lora) == _kinds(adapter.lora):
            lora = None
    return Made(tuple(map(of_layer, layers)), lora)


def _kinds(tree: Any) -> list[tuple[Any, ...]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def prepared(model: Model, adapter: Adapter | None, new: Made) -> tuple[Model, Adapter | None]:
    """The model and the adapter with what `made` made of them."""

    def of_layer(layer: Layer, fields: dict[str, jax.Array]) -> Layer:
        ready: dict[str, Any] = dict(fields)
        for name in PROJECTIONS:
            weight = getattr(layer, name)
            if name in fields and isinstance(weight, KernelNVFP4):
                ready[name] = weight.replace(global_scale=fields[name], scale_multiplies=False)
        return layer.replace(**ready) if ready else layer

    layers = tuple(map(of_layer, model.base.layers, new.layers))
    if adapter is not None and new.lora is not None:
        adapter = adapter.replace(lora=new.lora)
    return model.replace(base=model.base.replace(layers=layers)), adapter
