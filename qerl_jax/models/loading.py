"""Models in Hugging Face folders: one flat table of tensor names, read one tensor at a time (written: `saving`).

Projections and the output matrix may be plain (`...q_proj.weight`) or packed, as compressed-tensors and modelopt store
them (see `packing`); the network's output matrix is plain always.
Every name, shape and dtype is compared with the table before the first byte goes to the device.
"""

import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import run_files
from qerl_jax.errors import UserError, nearest, shown
from qerl_jax.formats import PACKED, PackedFormat, Weight, dequantized
from qerl_jax.input_files import read_json
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.dtypes import network_dtype
from qerl_jax.models.init import SHARED_SCALE, all_finite, init_model
from qerl_jax.models.mapped import largest_magnitude, same_bytes, to_device
from qerl_jax.models.modelopt import QUANT_CONFIG
from qerl_jax.models.packed_by import packing_of
from qerl_jax.models.packing import TAKE_PLAIN, Packing, Slot
from qerl_jax.models.params import PROJECTIONS, Base, Layer, Model, projection_shape, small_shapes
from qerl_jax.models.source import ADAPTER_CONFIG, CONFIG, INDEX, WEIGHTS, Tensors, open_tensors, resolve
from qerl_jax.option_names import check_format
from qerl_jax.program import program
from qerl_jax.progress import Progress

_log = logging.getLogger(__name__)

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    **{f"{name}_proj": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_proj": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{f"{name}_bias": f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
    **{f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"},
}
# Dtypes that weights have in one form of 4 or 8 bits or another, and buffers of plain networks never.
_OF_CODES = {"uint8", "int8", "int32", "uint32", "float8_e4m3fn", "float8_e5m2"}
_ONE_NUMBER = {(), (1,)}  # of which programs differ in whether it has a dimension
# Buffers that old exports carry; they follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


def layer_name(layer: int, field: str) -> str:
    """File name of a `Layer`'s field."""
    return f"model.layers.{layer}.{_LAYER_NAMES[field]}"


def tensor_table(config: ModelConfig, packing: Packing | None = None) -> dict[str, Slot]:
    """The flat table: every tensor that a folder of this network holds, by its name there.

    Args:
      config: the network.
      packing: how its projections are stored; None where they are plain.
    """
    D, V = config.hidden_size, config.vocab_size

    def linear(weight: str, N: int, K: int) -> dict[str, Slot]:
        if packing is None or packing.is_plain(weight):
            return {weight: Slot((N, K))}
        return {weight + suffix: slot for suffix, slot in packing.parts(N, K).items()}

    table = {EMBED: Slot((V, D)), NORM: Slot((D,))}
    if not config.tie_word_embeddings:
        table |= linear(HEAD, V, D)
    for i in range(config.num_hidden_layers):
        table |= {layer_name(i, field): Slot(shape) for field, shape in small_shapes(config).items()}
        for name in PROJECTIONS:
            table |= linear(layer_name(i, name), *projection_shape(config, name))
    return table


def named_weights(model: Model) -> dict[str, Weight]:
    """Every weight of a model by its name in a folder, in the order of the network; packed ones under the name of the
    plain weight that they stand for."""
    base = model.base
    weights: dict[str, Weight] = {EMBED: base.embed}
    for i, layer in enumerate(base.layers):
        for field in _LAYER_NAMES:
            if (weight := getattr(layer, field)) is not None:
                weights[layer_name(i, field)] = weight
    weights[NORM] = base.final_norm
    if base.lm_head is not None:
        weights[HEAD] = base.lm_head
    return weights


class Opened(NamedTuple):
    """A model's folder, checked and not yet loaded.

    Attributes:
      folder: where it is.
      hf: its config.json.
      config: what that describes.
      packing: how its projections are stored; None where they are plain.
      tensors: by name, without those that follow from others or say nothing about weights.
    """

    folder: Path
    hf: dict[str, Any]
    config: ModelConfig
    packing: Packing | None
    tensors: Tensors


def open_model(path: str | os.PathLike[str]) -> Opened:
    """Opens a model's folder and compares names, shapes and dtypes with its configuration; no weight is read yet.

    Args:
      path: as for `load_model`.

    Raises:
      UserError: naming file and tensor, what was expected and what was found.
    """
    folder = resolve(path)
    # Some programs leave the base's config.json in an adapter's folder.
    if not (folder / CONFIG).exists() or not any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX)):
        _refuse_run_or_adapter(folder, os.fspath(path))
    hf = read_json(folder / CONFIG)
    config = ModelConfig.from_hf(hf, str(folder / CONFIG))
    packing = packing_of(hf, folder)
    unread = () if packing is None else packing.unread
    tensors = _without_implied(open_tensors(folder), config.tie_word_embeddings, unread)
    # Before the table of names, which an absurd number would make larger than memory.
    if config.num_hidden_layers > len(tensors):
        raise UserError(
            f"{folder / CONFIG}: num_hidden_layers is {config.num_hidden_layers}; the folder has {len(tensors)} "
            "tensors, and a layer several"
        )
    if packing is not None:
        _check_packed_shapes(config, packing, folder / CONFIG)
    else:
        _refuse_packed(tensors)
    check_tensors(tensors, tensor_table(config, packing), folder)
    return Opened(folder, hf, config, packing, tensors)


def _check_packed_shapes(config: ModelConfig, packing: Packing, where: Path) -> None:
    """Raises UserError for packed projections that are no whole blocks: their shapes in the folder would be cut off."""
    kind, layers = PACKED[packing.weight_format], range(config.num_hidden_layers)
    linears: dict[str, tuple[int, int, list[str]]] = {
        name: (*projection_shape(config, name), [layer_name(i, name) for i in layers]) for name in PROJECTIONS
    }
    if not config.tie_word_embeddings:
        linears["lm_head"] = (config.vocab_size, config.hidden_size, [HEAD])
    for name, (N, K, weights) in linears.items():
        if not kind.fits(N, K) and not all(map(packing.is_plain, weights)):
            raise UserError(f"{where}: {name} is [{N}, {K}] and packed by quantization_config; {kind.needs}")


def _refuse_packed(tensors: Tensors) -> None:
    """Raises UserError for weights that a program has quantized, in a folder that does not say how."""
    for name, (where, array) in tensors.items():
        if array.dtype.name in _OF_CODES:
            raise UserError(
                f"{where}: tensor {shown(name)} is {array.dtype}, so the weights are quantized, but neither "
                f"quantization_config in {CONFIG} nor {QUANT_CONFIG} says how; copy what is missing of the model's "
                f"files, or {TAKE_PLAIN}"
            )


def _refuse_run_or_adapter(folder: Path, name: str) -> None:
    export, word = f"{program()} export", shlex.quote(name)
    if (folder / run_files.CONFIG).exists():
        raise UserError(
            f"{name} is a run, not a model; its base is model.model_name_or_path in {folder / run_files.CONFIG}, and "
            f"`{export} {word} OUT --format bf16` merges base and adapter into a model"
        )
    if (folder / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{name} is a PEFT adapter, not a model; give its base, with lora.adapter={word} to train it on, or merge "
            f"both first: `{export} BASE OUT --format bf16 --adapter {word}`"
        )


def model_shapes(path: str | os.PathLike[str]) -> Model:
    """The network of a folder as shapes alone, with plain linear layers; no weight is read. Arguments and errors as
    those of `open_model`."""
    config = open_model(path).config
    return jax.eval_shape(lambda key: init_model(key, config), jax.random.key(0))


def load_model(path: str | os.PathLike[str], weight_format: str | None = None, dtype: Any = None) -> Model:
    """Loads a model, quantizing its linear layers on the way if asked; tensors go to the device one at a time.

    Args:
      path: folder, `owner/name` on the Hub, or `builtin:NAME`.
      weight_format: None keeps the stored one; "nvfp4", "mxfp4", "nf4" and "nf4_double_quant" quantize the weights of a
        plain folder (round to nearest in the dtype they are stored in, float16 as float32; in NVFP4 q/k/v and gate/up
        share a global scale, as llm-compressor writes them), and keep a packed folder of that format as it is stored,
        layers that it left plain too; "bf16" leaves or unpacks plain weights in `dtype`. A packed output matrix is
        always unpacked.
      dtype: float32, bfloat16 or float16, of embeddings, head, biases and plain weights; None takes the stored dtype
        of the embeddings (float32 where that is float16). In float16 numbers below 2^-14 lose bits, and one that it
        cannot hold is refused. Norm scales are float32 always.

    Raises:
      UserError: naming file and tensor, what was expected and what was found.
    """
    check_format(weight_format)
    folder, _, config, packing, tensors = open_model(path)
    if (folder / ADAPTER_CONFIG).exists():  # for which transformers would load another base, and this adapter
        _log.warning(
            "%s holds a model and a PEFT adapter beside it; the model alone is loaded. To have the adapter on it, move "
            "that to a folder of its own and name it: lora.adapter, or --adapter",
            folder,
        )
    made = None if weight_format is None or packing is not None else PACKED.get(weight_format)
    if packing is not None and weight_format not in (None, "bf16", packing.weight_format):
        raise UserError(
            f"weight_format is {weight_format!r}, but {folder} holds {packing.weight_format} weights, which would be "
            f"rounded a second time; allowed: {packing.weight_format}, bf16"
        )
    if dtype is None:
        dtype = jnp.bfloat16 if tensors[EMBED][1].dtype == jnp.bfloat16 else jnp.float32
    dtype = network_dtype(dtype)

    def plain(name: str, as_dtype: jnp.dtype) -> jax.Array:
        array = to_device(tensors[name][1], as_dtype)
        progress.advance(tensors[name][1].nbytes)
        return held(name, array)

    def held(name: str, array: jax.Array) -> jax.Array:
        if array.dtype == jnp.float16 and not all_finite(array):
            raise UserError(
                f"{tensors[name][0] if name in tensors else folder}: tensor {name} is not finite in float16, whose "
                "largest number is 65504; allowed: dtype float32 or bfloat16"
            )
        return array

    def is_packed(name: str) -> bool:
        return packing is not None and not packing.is_plain(name)

    def packed(name: str, unpack: bool) -> Weight:
        assert packing is not None
        weight = packing.read(tensors, name)
        for suffix in packing.parts(*weight.shape):
            progress.advance(tensors[name + suffix][1].nbytes)
        return held(name, dequantized(weight, dtype)) if unpack else weight

    def head() -> jax.Array:
        weight = packed(HEAD, unpack=True) if is_packed(HEAD) else plain(HEAD, dtype)
        assert isinstance(weight, jax.Array)
        return weight

    def layer(i: int) -> Layer:
        fields: dict[str, Any] = {
            field: plain(layer_name(i, field), jnp.dtype(jnp.float32) if field.endswith("norm") else dtype)
            for field in small_shapes(config)
        }
        for group in SHARED_SCALE:
            names = {field: layer_name(i, field) for field in group}
            for field, name in names.items():
                if is_packed(name):
                    fields[field] = packed(name, unpack=weight_format == "bf16")
            unpacked = {field: name for field, name in names.items() if field not in fields}
            if made is not None and unpacked:
                for field, fields[field] in _quantized(tensors, unpacked, made):
                    progress.advance(tensors[names[field]][1].nbytes)
            else:
                fields |= {field: plain(name, dtype) for field, name in unpacked.items()}
        return Layer(**fields)

    total = sum(array.nbytes for _, array in tensors.values())
    with Progress(f"loading {path}", len(tensors), total) as progress:
        base = Base(
            embed=plain(EMBED, dtype),
            layers=tuple(layer(i) for i in range(config.num_hidden_layers)),
            final_norm=plain(NORM, jnp.dtype(jnp.float32)),
            lm_head=None if config.tie_word_embeddings else head(),
        )
    return Model(base, config)


def _without_implied(found: Tensors, tied: bool, unread: tuple[str, ...]) -> Tensors:
    """`found` without tensors that follow from the configuration or from others, or whose names end as in `unread`."""
    found = {name: entry for name, entry in found.items() if not name.endswith((_DERIVED, *unread))}
    if tied and HEAD in found and EMBED in found:
        where, head = found.pop(HEAD)
        embed = found[EMBED][1]
        if head.dtype != embed.dtype or not same_bytes(head, embed):
            raise UserError(
                f"{where}: tensor {HEAD} differs from {EMBED}; expected none or the same, for {CONFIG} has "
                "tie_word_embeddings true"
            )
    return found


def check_tensors(found: Tensors, table: Mapping[str, Slot], folder: Path) -> None:
    """Compares names, shapes and dtypes with the table, before any byte is used.

    Raises:
      UserError: a tensor is missing, too many, or of another shape or dtype; names file and tensor, expected and found.
    """
    missing = [name for name in table if name not in found]
    if missing:
        name, slot = missing[0], table[missing[0]]
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        hint = nearest(name, [other for other in found if other not in table and _layers(other) == _layers(name)])
        raise UserError(f"{folder}: tensor {name} is missing{more}; expected {slot.dtypes[0]}{list(slot.shape)}{hint}")
    for name, (where, array) in found.items():
        if name not in table:
            raise UserError(
                f"{where}: tensor {shown(name)} {array.dtype}{list(array.shape)} belongs to no part of what the "
                "folder's configuration describes"
            )
        slot = table[name]
        if array.shape != slot.shape and not {array.shape, slot.shape} <= _ONE_NUMBER:
            raise UserError(
                f"{where}: tensor {name}: expected shape {list(slot.shape)} by the configuration, found "
                f"{list(array.shape)}"
            )
        if array.dtype.name not in slot.dtypes:
            allowed = " or ".join(slot.dtypes)
            raise UserError(f"{where}: tensor {name}: expected dtype {allowed}, found {array.dtype.name}")


def _layers(name: str) -> list[str]:
    """The numbers in a tensor's name: one of another layer is no misspelling."""
    return re.findall(r"\.(\d+)\.", name)


def _quantized(tensors: Tensors, names: Mapping[str, str], made: PackedFormat) -> Iterator[tuple[str, Weight]]:
    """Packed weights of the projections that read one input, each alone on the device in 16 or 32 bits."""
    amaxes, dtypes = [], []
    for name in names.values():
        where, array = tensors[name]
        if not made.fits(*array.shape):
            raise UserError(f"{where}: tensor {name}: {made.needs}, found {list(array.shape)}")
        dtypes.append(np.dtype(np.float32) if array.dtype == np.float16 else array.dtype)
        amaxes.append(largest_magnitude(array).astype(np.float32))
        if not np.isfinite(amaxes[-1]):
            raise UserError(f"{where}: tensor {name}: expected finite weights, found NaN or infinity")
    shared = (
        None if made.shared_scale is None else made.shared_scale(jnp.float32(max(amaxes)), jnp.result_type(*dtypes))
    )
    for (field, name), dtype in zip(names.items(), dtypes, strict=True):
        weight = to_device(tensors[name][1], dtype)
        # Waited for: calls that are only queued would hold their inputs, a whole layer's.
        yield field, jax.block_until_ready(made.quantize(weight, shared))
