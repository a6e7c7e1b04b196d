"""What a method makes of one layer, and what is reported of it.

A method is a row of `METHODS`: a function of a plain layer and of what its projections read. GPTQ would be a third one:
the Gram matrices that `observation` keeps are its Hessians, and its columns' feedback replaces the rounding of `rtn`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.formats import Weight, dequantize
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import quantize_layer
from qerl_jax.models.params import Layer
from qerl_jax.quantization.awq import smooth
from qerl_jax.quantization.layers import Made
from qerl_jax.quantization.observation import GROUPS, Seen, relative_errors

# Names of texts in the report: the one that scales were searched on, and the one that they were not.
SEARCHED, HELD_OUT = "calibration", "held_out"


class Method(NamedTuple):
    """A way of quantizing.

    Attributes:
      calibrated: whether it needs the inputs of the projections on the calibration text.
      quantize: (config, plain layer in the dtypes it is stored in, inputs by group) -> what it makes; the inputs are
        empty where the method is not calibrated.
    """

    calibrated: bool
    quantize: Callable[[ModelConfig, Layer, Mapping[str, Seen]], Made]


@jax.jit
def round_to_nearest(layer: Layer) -> Layer:
    """The layer with its plain projections quantized to NVFP4 as they stand, in the dtype they are stored in, as
    `load_model` does; q/k/v and gate/up share a global scale."""
    return quantize_layer(layer, "nvfp4")


def _rtn(config: ModelConfig, layer: Layer, seen: Mapping[str, Seen]) -> Made:
    return Made(round_to_nearest(layer), {})


METHODS = {"rtn": Method(False, _rtn), "awq": Method(True, smooth)}


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
    compared = {"rtn": made if method == "rtn" else Made(round_to_nearest(layer), {})} | {method: made}
    return made.layer, {"projections": _errors(layer, compared, seen)} | made.report


@jax.jit
def in_clean_coordinates(weight: Weight, rows_N: Any, columns_K: Any) -> jax.Array:
    """What a weight whose rows were divided and columns multiplied stands for in the clean layer, float32 [N, K]."""
    return dequantize(weight, jnp.dtype(jnp.float32)) * rows_N[:, None] / columns_K


def _errors(
    layer: Layer, compared: Mapping[str, Made], seen: Mapping[str, Mapping[str, Seen]]
) -> dict[str, dict[str, dict[str, float]]]:
    """By projection and kind of error, the relative error under each method."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for group, names in GROUPS.items():
        grams = {text: groups[group].gram for text, groups in seen.items()}
        for name in names:
            weight = getattr(layer, name)
            N, K = weight.shape
            for method, made in compared.items():
                rows_N, columns_K = made.rows.get(name, np.ones(N)), made.columns.get(group, np.ones(K))
                approximation = in_clean_coordinates(
                    getattr(made.layer, name), jnp.float32(rows_N), jnp.float32(columns_K)
                )
                for kind, value in relative_errors(weight, approximation, grams).items():
                    label = "weight_error" if kind == "weight" else f"output_error_{kind}"
                    result.setdefault(name, {}).setdefault(label, {})[method] = float(value)
    return result
