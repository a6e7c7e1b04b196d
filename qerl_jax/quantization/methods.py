"""What a method makes of one layer, and what is reported of it. GPTQ's place is a third method: it needs the Gram
matrices that `observation` keeps, and gives what the others give.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.params import Layer
from qerl_jax.quantization.awq import smooth
from qerl_jax.quantization.observation import GROUPS, Seen, relative_errors
from qerl_jax.quantization.rtn import round_to_nearest

METHODS = ("rtn", "awq")
# Text in the report: what scales were searched on, and what they were not.
SEARCHED, HELD_OUT = "calibration", "held_out"


def quantize_one(
    method: str, config: ModelConfig, layer: Layer, seen: Mapping[str, Mapping[str, Seen]]
) -> tuple[Layer, dict[str, Any]]:
    """Quantizes a layer to NVFP4.

    Args:
      method: one of `METHODS`.
      config: the network's.
      layer: its plain weights, all in the dtype that they are stored in.
      seen: what the groups' inputs were, by text (`SEARCHED`, which awq needs; `HELD_OUT`) and group.

    Returns:
      The layer with packed projections, and its part of the report: errors of each projection under round-to-nearest
      and, where it is another, under the method; of awq also what it chose.
    """
    rounded = round_to_nearest(layer)
    plain, result = {"rtn": rounded.plain}, rounded.layer
    report: dict[str, Any] = {}
    if method == "awq":
        smoothed = smooth(config, layer, seen[SEARCHED])
        plain["awq"], result = smoothed.plain, smoothed.layer
        report["scales"] = {
            group: {
                "alpha": choice.alpha,
                "duo": choice.duo,
                "smallest": float(choice.columns.min()),
                "largest": float(choice.columns.max()),
            }
            for group, choice in smoothed.choices.items()
        }
        report["aqn_gain"] = {
            norm: aqn_gain(np.asarray(getattr(layer, norm)), smoothed.choices[group].columns, seen[SEARCHED][group])
            for norm, group in (("input_norm", "q_proj"), ("post_attention_norm", "gate_proj"))
        }
    return result, {"projections": _errors(layer, plain, seen)} | report


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
