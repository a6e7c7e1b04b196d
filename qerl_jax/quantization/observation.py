"""What calibration keeps of the inputs of a layer's projections, and the errors that follow from it.

Projections that read the same input form a group (`SHARED_SCALE`: q/k/v, o, gate/up, down), named here by its first.
Of a group's inputs X [tokens, K] two things are kept, summed over all tokens: |x| of each channel, and the Gram matrix
X^T X. With it the output error of any approximation of a weight is known exactly, for all tokens and without them:

    ||X W^T - X V^T||^2 = tr((W - V) X^T X (W - V)^T)

Memory is K^2 floats a group, however much text there is.

Dimension letters: B rows, T positions, D hidden size, K inputs and N outputs of a projection.
"""

import functools
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import SHARED_SCALE
from qerl_jax.models.params import Layer, projection_shape
from qerl_jax.models.transformer import run_layer

GROUPS = {names[0]: names for names in SHARED_SCALE}


class Seen(flax.struct.PyTreeNode):
    """Sums over the tokens seen at one group's input: |x| [K] and the Gram matrix [K, K], float32; their number []."""

    magnitude: jax.Array
    gram: jax.Array
    tokens: jax.Array


def nothing_seen(config: ModelConfig) -> dict[str, Seen]:
    """By group, before the first token."""

    def zeros(K: int) -> Seen:
        return Seen(jnp.zeros(K, jnp.float32), jnp.zeros((K, K), jnp.float32), jnp.zeros((), jnp.float32))

    return {group: zeros(projection_shape(config, group)[1]) for group in GROUPS}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def observe(
    config: ModelConfig, layer: Layer, x_BTD: jax.Array, lengths_B: jax.Array, seen: dict[str, Seen]
) -> dict[str, Seen]:
    """Adds the inputs that the layer's projections get from the stream x; rows count up to their lengths.

    Args:
      config: the network's.
      layer: plain weights in x's dtype.
      x_BTD: the residual stream before the layer.
      lengths_B: int32; a row of length 0 counts for nothing.
      seen: what was seen so far; its buffers are used up.
    """
    mask_BT1 = (jnp.arange(x_BTD.shape[1]) < lengths_B[:, None])[..., None]
    tokens = jnp.sum(mask_BT1, dtype=jnp.float32)
    result: dict[str, Seen] = {}

    def add(group: str, inputs_BTK: jax.Array) -> None:
        old = seen[group]
        x_MK = jnp.where(mask_BT1, inputs_BTK, 0).reshape(-1, inputs_BTK.shape[-1])
        # Products of two bfloat16 are exact in the float32 sum; float32 inputs must not pass through TF32.
        gram_KK = jax.lax.dot_general(
            x_MK,
            x_MK,
            (((0,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        magnitude_K = jnp.sum(jnp.abs(x_MK), axis=0, dtype=jnp.float32)
        result[group] = Seen(old.magnitude + magnitude_K, old.gram + gram_KK, old.tokens + tokens)

    run_layer(config, layer, x_BTD, add)
    return result


def squared_output(w_NK: jax.Array, gram_KK: jax.Array) -> jax.Array:
    """||X W^T||^2 over the tokens in the Gram matrix, float32 []."""
    w_NK = w_NK.astype(jnp.float32)
    return jnp.sum(jnp.matmul(w_NK, gram_KK, precision=jax.lax.Precision.HIGHEST) * w_NK)


@jax.jit
def relative_errors(
    weight_NK: jax.Array, approximation_NK: jax.Array, grams: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """How far the approximation of a weight is from it.

    Args:
      weight_NK, approximation_NK: the two.
      grams: Gram matrices of its inputs by the name of the text they come from.

    Returns:
      `weight`, ||W - V|| / ||W||, and by text ||X W^T - X V^T|| / ||X W^T||; 0 where W, or X, is 0.
    """

    def root(error: jax.Array, whole: jax.Array) -> jax.Array:
        # The tiny negative values that rounding may leave of a zero error become zero.
        return jnp.where(whole > 0, jnp.sqrt(jnp.maximum(error, 0) / jnp.where(whole > 0, whole, 1)), 0.0)

    w_NK = weight_NK.astype(jnp.float32)
    delta_NK = w_NK - approximation_NK.astype(jnp.float32)
    return {"weight": root(jnp.sum(jnp.square(delta_NK)), jnp.sum(jnp.square(w_NK)))} | {
        text: root(squared_output(delta_NK, gram), squared_output(w_NK, gram)) for text, gram in grams.items()
    }
