"""What a method makes of one layer, and what is reported of it.

A method is a row of `METHODS`: a function of a plain layer and of what its projections read. GPTQ would be a third one:
the Gram matrices that `observation` keeps are its Hessians, and its columns' feedback replaces the rounding of `rtn`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.params import Layer
from qerl_jax.quantization.awq import smooth
from qerl_jax.quantization.observation import GROUPS, Seen, relative_errors
from qerl_jax.quantization.rtn import round_to_nearest

# Text in the report: what scales were searched on, and what they were not.
SEARCHED, HELD_OUT = "calibration", "held_out"


class Made(NamedTuple):
    """What a method makes of a layer: packed projections, what they stand for in the clean layer's coordinates (float32
    [N, K] by name), and what the method has to say for the report."""

    layer: Layer
    plain: Mapping[str, jax.Array]
    report: dict[str, Any]


class Method(NamedTuple):
    """A way of quantizing.

    Attributes:
      calibrated: whether it needs the inputs of the projections on the calibration text.
      quantize: (config, plain layer in the dtypes it is stored in, inputs by group) -> what it makes; the inputs are
        empty where the method is not calibrated.
    """

    calibrated: bool
    quantize: Callable[[ModelConfig, Layer, Mapping[str, Seen]], Made]


def _rtn(config: ModelConfig, layer: Layer, seen: Mapping[str, Seen]) -> Made:
    rounded = round_to_nearest(layer)
    return Made(rounded.layer, rounded.plain, {})


def _awq(config: ModelConfig, layer: Layer, seen: Mapping[str, Seen]) -> Made:
    smoothed = smooth(config, layer, seen)
    scales = {
        group: {
            "alpha": choice.alpha,
            "duo": choice.duo,
            "smallest": float(choice.columns.min()),
            "largest": float(choice.columns.max()),
        }
        for group, choice in smoothed.choices.items()
    }
    gains = {
        norm: aqn_gain(np.asarray(getattr(layer, norm)), smoothed.choices[group].columns, seen[group])
        for norm, group in (("input_norm", "q_proj"), ("post_attention_norm", "gate_proj"))
    }
    return Made(smoothed.layer, smoothed.plain, {"scales": scales, "aqn_gain": gains})


METHODS = {"rtn": Method(False, _rtn), "awq": Method(True, _awq)}


def quantize_one(
    method: str, config: ModelConfig, layer: Layer, seen: Mapping[str, Mapping[str, Seen]]
) -> tuple[Layer, dict[str, Any]]:
    """Quantizes a layer to NVFP4.

    Args:
      method: a key of `METHODS`.
      config: the network's.
      layer: its plain weights, all in the dtype that they are stored in.
      seen: what the groups' inputs were, by text (`SEARCHED`, which a calibrated method needs; `HELD_OUT`) and group.

    Returns:
      The layer with packed projections, and its part of the report: errors of each projection under round-to-nearest
      and, where it is another, under the method; of awq also what it chose.
    """
    made = METHODS[method].quantize(config, layer, seen.get(SEARCHED, {}))
    plain = {"rtn": made.plain if method == "rtn" else round_to_nearest(layer).plain} | {method: made.plain}
    return made.layer, {"projections": _errors(layer, plain, seen)} | made.report


def _errors(
    layer: Layer, plain: Mapping[str, Mapping[str, jax.Array]], seen: Mapping[str, Mapping[str, Seen]]
) -> dict[str, dict[str, dict[str, float]]]:
    """By projection and kind of error, the relative error under each method."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for group, names in GROUPS.items():
        weights = {name: getattr(layer, name) for name in names}
        grams = {text: groups[group].gram for text, groups in seen.items()}
        for method, approximations in plain.items():
            errors = relative_errors(weights, {name: approximations[name] for name in names}, grams)
            for name, kinds in errors.items():
                for kind, value in kinds.items():
                    label = "weight_error" if kind == "weight" else f"output_error_{kind}"
                    result.setdefault(name, {}).setdefault(label, {})[method] = float(value)
    return result


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
