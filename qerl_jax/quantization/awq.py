"""AWQ: scales that move quantization error to the input channels that matter least (Lin et al. 2023, arXiv 2306.00978).

A weight W [N, K] is quantized as Q(W diag(s)) and its inputs are divided by s, which a preceding operation does for
free: the network's function stays the same, and the error of channel k weighs 1 / s_k. Four places can take a scale:

    input_norm -> q, k, v        v -> o        post_attention_norm -> gate, up        up -> down

The norm's scale, or the rows of v or up and their bias, are divided by s. v's channels are shared by all query heads
of its group, so s is one per key-value head and channel, from the mean over the heads that read it.

The scale is searched per place: s = x^a / u^(1-a) or x^a, a = 0, 0.05, ..., 0.95, with x the mean magnitude of the
input channel and u the weights' mean magnitude there, each 16 inputs relative to their largest (the `duo` scaling of
llm-compressor). The best has the least sum of relative squared output errors of the place's projections, on all
calibration tokens (see `observation`). No scale is below 1/1024 of the place's largest: a channel that is nearly dead,
as of a neuron whose gate is always shut, would get one so small that its row of up outgrew all others by more than
block scales can hold. v and up are quantized with the rows that o and down gave them. With the scales settled, each
block of 16 inputs gets the block scale of least error: AWQ's clipping (see `block_scales`).

Files hold norm scales and biases in 16 bit, where w / s would be rounded and the function with it. So s is moved to
where w / s is a number of that type: by at most its rounding, and the folder's function is unchanged to float32.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.formats import NVFP4Weight, global_scale
from qerl_jax.formats.nvfp4 import BLOCK
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.params import Layer
from qerl_jax.quantization.block_scales import nearest_values, search_block_scales
from qerl_jax.quantization.layers import Made
from qerl_jax.quantization.observation import GROUPS, Seen, squared_output

GRID = 20
_WIDEST = 1024.0  # largest over smallest scale; normal numbers of E4M3, which block scales are, span 28672
# Vectors that are divided by a scale instead of a projection's inputs; the rows of v and up are too.
_VECTORS = ("input_norm", "post_attention_norm", "v_bias", "up_bias")


def candidates(x_K: np.ndarray, u_K: np.ndarray) -> list[tuple[np.ndarray, float, bool]]:
    """The scales [K] to try, each with its exponent and whether it counts the weights too.

    Args:
      x_K: mean magnitude of each input channel.
      u_K: mean relative magnitude of the weights that read it.
    """
    live = (x_K > 0) & (u_K > 0)
    result = []
    for duo in (False, True):
        for alpha in np.arange(GRID) / GRID:
            scale = np.ones(x_K.shape, np.float64)
            scale[live] = x_K[live] ** alpha / (u_K[live] ** (1 - alpha) if duo else 1)
            if live.any():
                scale[live] = np.maximum(scale[live], scale[live].max() / _WIDEST)
                scale[live] /= np.sqrt(scale[live].max() * scale[live].min())
            result.append((scale, float(alpha), duo))
    return result


def representable(scale: np.ndarray, vector: np.ndarray | None) -> np.ndarray:
    """The scale nearest to `scale` for which vector / scale is a number of the vector's own dtype: any for an entry 0;
    1 where there is none (an entry that would become 0 or infinite)."""
    if vector is None:
        return scale.astype(np.float32)
    wide = vector.astype(np.float64)
    divided = (wide / scale).astype(vector.dtype).astype(np.float64)
    usable = (divided != 0) & np.isfinite(divided)
    moved = np.where(usable, wide / np.where(usable, divided, 1), 1)
    return np.where(wide == 0, scale, moved).astype(np.float32)


@jax.jit
def _relative_magnitude(weights: list[jax.Array]) -> jax.Array:
    """Mean over all rows of |w| / (largest |w| of its 16 inputs), float32 [K]."""
    w_NK = jnp.abs(jnp.concatenate([weight.astype(jnp.float32) for weight in weights]))
    blocks = w_NK.reshape(w_NK.shape[0], -1, BLOCK)
    largest = blocks.max(-1, keepdims=True)
    return jnp.mean(blocks / jnp.where(largest > 0, largest, 1), axis=0).reshape(-1)


Weights = Mapping[str, jax.Array]


def _scaled(weights: Weights, columns_K: jax.Array, rows: Weights) -> tuple[dict[str, jax.Array], jax.Array]:
    """W * columns / rows by name in float32, and the global scale that they share."""
    scaled = {name: w.astype(jnp.float32) * columns_K / rows[name][:, None] for name, w in weights.items()}
    largest = jnp.max(jnp.stack([jnp.abs(w).max() for w in scaled.values()]))
    return scaled, global_scale(largest, jnp.dtype(jnp.float32))


@jax.jit
def _losses(
    weights: dict[str, jax.Array], rows: dict[str, jax.Array], gram_KK: jax.Array, columns_CK: jax.Array
) -> jax.Array:
    """For each candidate, the sum over the projections of ||X W^T - X V^T||^2 / ||X W^T||^2 [C]."""
    whole = {name: squared_output(w, gram_KK) for name, w in weights.items()}

    def loss(columns_K: jax.Array) -> jax.Array:
        scaled, shared = _scaled(weights, columns_K, rows)
        errors = []
        for name, w_NK in scaled.items():
            delta_NK = (nearest_values(w_NK, shared) - w_NK) * rows[name][:, None] / columns_K
            errors.append(squared_output(delta_NK, gram_KK) / jnp.maximum(whole[name], 1e-30))
        return jnp.sum(jnp.stack(errors))

    return jax.lax.map(loss, columns_CK)


@jax.jit
def _packed(
    weights: dict[str, jax.Array], rows: dict[str, jax.Array], gram_KK: jax.Array, columns_K: jax.Array
) -> dict[str, NVFP4Weight]:
    """By name the packed W * columns / rows."""
    scaled, shared = _scaled(weights, columns_K, rows)
    power_K = jnp.diagonal(gram_KK) / jnp.square(columns_K)
    return {name: search_block_scales(w_NK, shared, power_K) for name, w_NK in scaled.items()}


def smooth(config: ModelConfig, layer: Layer, seen: Mapping[str, Seen]) -> Made:
    """Searches the scales of one layer and quantizes it.

    Args:
      config: the network's.
      layer: plain projections; norm scales and biases in the dtype that the file will hold them in.
      seen: the inputs of the groups.

    Returns:
      Norm scales and biases that took scales have the dtypes they came in. The report has the scales by group, how they
      were found, and the gain of AQN's noise by norm.
    """
    weights = {group: {name: getattr(layer, name) for name in names} for group, names in GROUPS.items()}
    rows = {name: np.ones(getattr(layer, name).shape[0], np.float32) for names in GROUPS.values() for name in names}
    vectors = {name: np.asarray(value) for name in _VECTORS if (value := getattr(layer, name, None)) is not None}
    Q = config.num_attention_heads // config.num_key_value_heads
    columns: dict[str, np.ndarray] = {}
    scales: dict[str, dict[str, Any]] = {}

    def to_channels(values_K: np.ndarray) -> np.ndarray:
        """o's inputs -> v's outputs: the mean over the query heads that share a key-value head."""
        return values_K.reshape(config.num_key_value_heads, Q, config.head_dim).mean(axis=1).reshape(-1)

    def to_inputs(channels: np.ndarray) -> np.ndarray:
        """v's outputs -> o's inputs."""
        heads = channels.reshape(config.num_key_value_heads, 1, config.head_dim)
        return np.broadcast_to(heads, (config.num_key_value_heads, Q, config.head_dim)).reshape(-1)

    def search(group: str, source: str) -> np.ndarray:
        """Chooses the group's scale, which divides the vector `source` where there is one; returns it by channel of
        what takes it."""
        shared = group == "o_proj"
        x_K = np.asarray(seen[group].magnitude, np.float64) / max(float(seen[group].tokens), 1.0)
        u_K = np.asarray(_relative_magnitude(list(weights[group].values())), np.float64)
        tried = candidates(to_channels(x_K), to_channels(u_K)) if shared else candidates(x_K, u_K)
        usable = [representable(scale, vectors.get(source)) for scale, _, _ in tried]
        columns_CK = np.stack([to_inputs(scale) if shared else scale for scale in usable])
        own_rows = {name: rows[name] for name in weights[group]}
        losses = np.asarray(_losses(weights[group], own_rows, seen[group].gram, columns_CK))
        best = int(np.argmin(losses))
        _, alpha, duo = tried[best]
        columns[group] = columns_CK[best]
        smallest, largest = float(columns[group].min()), float(columns[group].max())
        scales[group] = {"alpha": alpha, "duo": duo, "smallest": smallest, "largest": largest}
        return usable[best]

    taken = {"v_bias": search("o_proj", "v_bias"), "up_bias": search("down_proj", "up_bias")}
    rows["v_proj"], rows["up_proj"] = taken["v_bias"], taken["up_bias"]
    taken["input_norm"] = search("q_proj", "input_norm")
    taken["post_attention_norm"] = search("gate_proj", "post_attention_norm")
    changed: dict[str, Any] = {
        name: jnp.asarray((vector.astype(np.float64) / taken[name]).astype(vector.dtype))
        for name, vector in vectors.items()
    }
    for group, members in weights.items():
        own_rows = {name: rows[name] for name in members}
        # Waited for: calls that are only queued would run beside each other, with a float32 copy of the layer.
        changed |= jax.block_until_ready(_packed(members, own_rows, seen[group].gram, columns[group]))
    gains = {
        norm: aqn_gain(np.asarray(getattr(layer, norm)), columns[group], seen[group])
        for norm, group in (("input_norm", "q_proj"), ("post_attention_norm", "gate_proj"))
    }
    return Made(layer.replace(**changed), {"scales": scales, "aqn_gain": gains}, rows, columns)


def aqn_gain(norm_D: np.ndarray, columns_D: np.ndarray, seen: Seen) -> float:
    """By how much AQN's noise grows through the scales, as a factor on sigma.

    AQN adds Z to the norm scale w. After AWQ the scale is w / s and the weights are W diag(s), so the same Z moves the
    products by W diag(s) Z where it moved them by W diag(Z): channel k gets s_k times the noise. The factor is the root
    mean square of s over the channels, each weighted by the power of the normalized activation (x_k / w_k)^2.
    """
    norm_D = norm_D.astype(np.float64)
    power_D = np.asarray(jnp.diagonal(seen.gram), np.float64)
    live = norm_D != 0
    power_D = power_D[live] / np.square(norm_D[live])
    return float(np.sqrt((np.square(columns_D[live].astype(np.float64)) * power_D).sum() / power_D.sum()))
