"""The decoding of one token per slot through kernels that compute everything between two attentions.

Dimension letters: S slots, D hidden size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import LayerPart, Projection, between_attentions, takes_between_attentions, wanted_a
from qerl_jax.formats import KernelNVFP4
from qerl_jax.models.config import QKV
from qerl_jax.models.params import PROJECTIONS, Adapter, Layer, LoRA, Model, Norms, bias_name
from qerl_jax.models.transformer import KV, attention_inputs, lora_of
from qerl_jax.rollout.attention import TokenAttend


def layer_parts(model: Model, adapter: Adapter | None, slots: int) -> list[LayerPart] | None:
    """The projections between each layer's attention and the next one's; None where a kernel does not take them."""
    layers = model.base.layers
    if not all(isinstance(getattr(layer, name), KernelNVFP4) for layer in layers for name in PROJECTIONS):
        return None
    parts = []
    for i, layer in enumerate(layers):
        o, gate, up, down = (
            _projection(layer, lora_of(adapter, i), name) for name in ("o_proj", "gate_proj", "up_proj", "down_proj")
        )
        following = layers[i + 1 : i + 2]
        qkv = tuple(_projection(layer, lora_of(adapter, i + 1), name) for layer in following for name in QKV)
        parts.append(LayerPart(o, gate, up, down, qkv))
    dtype = model.base.embed.dtype
    return parts if all(takes_between_attentions(slots, dtype, part) for part in parts) else None


def _projection(layer: Layer, lora: dict[str, LoRA], name: str) -> Projection:
    weight, bias, pair = getattr(layer, name), getattr(layer, bias_name(name)), lora.get(name)
    adapter = None if pair is None else (pair.a, pair.b, jnp.float32(pair.scaling))
    return Projection(weight.tiles, weight.divisor, None if bias is None else bias.astype(jnp.float32), adapter)


def run_layers(
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    parts: list[LayerPart],
    attend: Callable[[int], TokenAttend],
    x_SD: jax.Array,
    in_units: bool,
) -> tuple[jax.Array, list[KV]]:
    """All layers on the residual stream, with the `parts` of `layer_parts`; `in_units` is the order in which
    `attend` gives its result.

    Returns:
      The residual stream after the last layer, and each layer's keys and values as `attend` gives them.
    """
    config, layers = model.config, model.base.layers
    caches: list[KV] = []
    lora, scale, dtype = lora_of(adapter, 0), norms.input[0], model.base.embed.dtype
    qkv = attention_inputs(config, dtype, layers[0], lora, scale, x_SD[:, None])
    for i, (layer, part) in enumerate(zip(layers, parts, strict=True)):
        q, k, v = qkv
        attended, kv, hidden = attend(i)(layer, q, k, v, wanted_a(x_SD.shape[0], part))
        caches.append(kv)
        scales = norms.post_attention[i], *norms.input[i + 1 : i + 2]
        x_SD, following = between_attentions(attended[:, 0], x_SD, part, scales, config.rms_norm_eps, in_units, hidden)
        qkv = tuple(y_SN[:, None] for y_SN in following)
    return x_SD, caches
