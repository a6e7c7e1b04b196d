"""Completions for a batch of prompts as one pure function: all slots are filled at once, and decode until all ended.

A sample's randomness depends on the key, its prompt's place in the data order, its index in the group and the token's
position, never on the batch it stands in. Dimension letters: N prompts, G completions per prompt, P prompt slots,
C completion slots, B = N * G rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.formats import KernelNVFP4, dequantize
from qerl_jax.models.params import PROJECTIONS, Adapter, Layer, Model, Norms, bias_name, norms_of
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.batch import Prompts, Rollout
from qerl_jax.rollout.decode import prefill
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import decode, empty_completions, empty_slots, fill


def unpacked(model: Model) -> Model:
    """The model with its linear layers dequantized to its compute dtype: XLA does not fuse the decoding of 4-bit codes
    into its matmuls, so the plain path decodes them once before a loop instead of once a token. Weights in the kernels'
    layout stay packed: the kernels decode them on the way. What they take beside them is made ready here: global scales
    that divide, and biases in float32, in which they add them."""
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

    return model.replace(base=model.base.replace(layers=tuple(map(of_layer, model.base.layers))))


def unpacked_bytes(model: Model) -> int:
    """Bytes of what `unpacked` makes beside the model's own arrays."""
    itemsize = model.base.embed.dtype.itemsize
    weights = (getattr(layer, name) for layer in model.base.layers for name in PROJECTIONS)
    return sum(w.shape[0] * w.shape[1] * itemsize for w in weights if not isinstance(w, KernelNVFP4 | jax.Array))


def sample_key(key: jax.Array, place: jax.Array, index: jax.Array) -> jax.Array:
    """The key of sample number `index` of the prompt at `place`; its tokens' keys are folded in by position."""
    return jax.random.fold_in(jax.random.fold_in(key, place), index)


def generate(
    model: Model,
    adapter: Adapter | None,
    prompts: Prompts,
    key: jax.Array,
    settings: SamplingSettings,
    num_generations: int = 1,
    norms: Norms | None = None,
    limits_N: jax.Array | None = None,
) -> Rollout:
    """Samples `num_generations` completions for every prompt until all have ended.

    All of them decode at once; `Engine` takes more than the memory holds.

    Args:
      model, adapter: the policy; adapter None is the base alone.
      prompts: see `Prompts`.
      key: PRNG key of this rollout.
      settings: lengths, EOS ids and sampling; static under jit.
      num_generations: G, static under jit.
      norms: norm scales to use instead of the clean ones (AQN).
      limits_N: int32, most tokens of each prompt's completions, up to settings.max_completion_length, which None is.
    """
    N, G, C = prompts.tokens.shape[0], num_generations, settings.max_completion_length
    B = N * G
    model = unpacked(model)
    norms = norms_of(model, adapter) if norms is None else norms
    last_ND, layers = prefill(model, adapter, prompts.tokens, prompts.lengths, norms)
    slots = empty_slots(last_ND, KVCache(layers, empty_completions(model, B, C), prompts.lengths), B, settings, key)
    row_B, index_B = jnp.divmod(jnp.arange(B, dtype=jnp.int32), G)
    keys_B = jax.vmap(sample_key, (None, 0, 0))(key, jnp.asarray(prompts.places)[row_B], index_B)
    limits_B = jnp.full(B, C, jnp.int32) if limits_N is None else limits_N[row_B]
    slots = fill(slots, model, jnp.ones(B, bool), row_B, keys_B, limits_B, settings)
    slots, _ = decode(slots, model, adapter, norms, C, B, settings, group=G)
    return slots.out
