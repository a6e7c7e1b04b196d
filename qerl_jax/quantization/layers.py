"""Single layers between a model's folder, the device and the files of a quantization."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.formats import PACKED, dequantize
from qerl_jax.models.compressed_tensors import packed_weight, to_store
from qerl_jax.models.loading import EMBED, HEAD, NORM, Opened, layer_name
from qerl_jax.models.mapped import to_device
from qerl_jax.models.params import PROJECTIONS, Base, Layer, Model

_NVFP4 = PACKED["nvfp4"]
_FIELDS = tuple(field.name for field in dataclasses.fields(Layer))


class Made(NamedTuple):
    """What a method makes of a layer.

    Attributes:
      layer: packed projections, and norm scales and biases as they are beside them.
      report: what the method has to say.
      rows: by projection, what its rows were divided by before it was rounded [N]; no entry if they were not.
      columns: by group, what the columns of its projections were multiplied by [K]; no entry if they were not.
    """

    layer: Layer
    report: dict[str, Any]
    rows: Mapping[str, np.ndarray] = MappingProxyType({})
    columns: Mapping[str, np.ndarray] = MappingProxyType({})


def read_layer(source: Opened, layer: int) -> Layer:
    """A layer of a folder on the device, every tensor in the dtype that it is stored in.

    Raises:
      UserError: a weight that cannot be quantized; names file and tensor.
    """
    fields: dict[str, Any] = {}
    for field in _FIELDS:
        entry = source.tensors.get(layer_name(layer, field))
        fields[field] = None if entry is None else to_device(entry[1])
        if field not in PROJECTIONS or entry is None:
            continue
        where = f"{entry[0]}: tensor {layer_name(layer, field)}"
        if not _NVFP4.fits(*entry[1].shape):
            raise UserError(f"{where}: {_NVFP4.needs}, found {list(entry[1].shape)}")
        if not jnp.isfinite(fields[field]).all():
            raise UserError(f"{where}: expected finite weights, found NaN or infinity")
    return Layer(**fields)


def to_tensors(layer: Layer, number: int) -> dict[str, np.ndarray]:
    """A quantized layer's tensors by their names in a folder."""
    tensors: dict[str, np.ndarray] = {}
    for field in _FIELDS:
        value = getattr(layer, field)
        if field in PROJECTIONS:
            stored = to_store(layer_name(number, field), value)
            tensors |= {name: np.asarray(tensor.make()) for name, tensor in stored.items()}
        elif value is not None:
            tensors[layer_name(number, field)] = np.asarray(value)
    return tensors


def from_tensors(tensors: Mapping[str, np.ndarray], number: int, where: Path) -> Layer:
    """The layer that `to_tensors` wrote."""
    entries = {name: (where, array) for name, array in tensors.items()}

    def value(field: str) -> Any:
        name = layer_name(number, field)
        if field in PROJECTIONS:
            return packed_weight(entries, name)
        return jnp.array(tensors[name], copy=True) if name in tensors else None

    return Layer(**{field: value(field) for field in _FIELDS})


@functools.partial(jax.jit, static_argnames="dtype")
def computed(layer: Layer, dtype: jnp.dtype) -> Layer:
    """The layer as the network computes with it in `dtype`: plain projections and biases, norm scales in float32."""

    def value(field: str) -> Any:
        old = getattr(layer, field)
        if field in PROJECTIONS:
            return dequantize(old, dtype)
        return None if old is None else old.astype(jnp.float32 if field.endswith("norm") else dtype)

    return Layer(**{field: value(field) for field in _FIELDS})


def ends_of(source: Opened, dtype: jnp.dtype) -> Model:
    """The network without its layers: embeddings and head in `dtype`, the final norm in float32."""

    def read(name: str, as_dtype: Any) -> jax.Array:
        return to_device(source.tensors[name][1], as_dtype)

    head = None if source.config.tie_word_embeddings else read(HEAD, dtype)
    norm = read(NORM, jnp.float32)
    return Model(Base(read(EMBED, dtype), (), norm, head), source.config)
