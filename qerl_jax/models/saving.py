"""Models written as Hugging Face folders: plain weights, or NVFP4 as compressed-tensors stores it.

An adapter can be folded into its base: W + scaling * B A in float32, rounded once; trained norms take the base's place.
A packed base is unpacked for it: 4-bit weights could not hold what training added. The product is computed in full
float32 on a GPU too, whose default would round A and B to fewer bits than the sum keeps.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.durable import whole_folder
from qerl_jax.errors import UserError, check_kind, nearest
from qerl_jax.formats import Weight, dequantize, format_of
from qerl_jax.input_files import read_json
from qerl_jax.models.compressed_tensors import quantization_config, to_store
from qerl_jax.models.dtypes import network_dtype
from qerl_jax.models.init import all_finite
from qerl_jax.models.loading import layer_name, named_weights
from qerl_jax.models.params import PROJECTIONS, Adapter, LoRA, Model, check_fits, check_kinds
from qerl_jax.models.shards import Stored, weight_files, write_shards
from qerl_jax.models.source import CONFIG, TOKENIZER_FILES, copy_companions, replaceable, resolve, write_json
from qerl_jax.option_names import FORMATS, SAVED_FORMATS


def save_model(
    model: Model,
    path: str | os.PathLike[str],
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    weight_format: str = "bf16",
) -> None:
    """Writes a folder that transformers and `load_model` read, one tensor in memory at a time.

    The folder appears whole or not at all. Above 5 GB the weights are several files with an index.

    Args:
      model: the network.
      path: the folder; one that holds a model already is replaced.
      tokenizer_from: model whose tokenizer and generation_config.json are copied; None writes neither.
      weight_format: "bf16" writes plain weights in the embeddings' dtype, unpacking packed ones; "nvfp4" writes
        the packed bytes as they are, in compressed-tensors' `nvfp4-pack-quantized`. Linear layers that are plain beside
        packed ones stay plain and are named in the configuration's `ignore`. Norm scales that the embeddings' dtype
        would round are written in float32.

    Raises:
      TypeError: not a Model.
      UserError: an unknown format, "nvfp4" for linear layers of another format, numbers that are not finite in the
        embeddings' dtype, `path` holds other files, or `tokenizer_from` has no tokenizer.
    """
    if weight_format not in SAVED_FORMATS:
        hint = nearest(weight_format, SAVED_FORMATS, elsewhere=FORMATS)
        raise UserError(f"weight_format is {weight_format!r}; written are {', '.join(SAVED_FORMATS)}{hint}")
    if weight_format == "bf16":
        save_merged(model, None, path, tokenizer_from=tokenizer_from)
        return
    check_kinds(model, None)
    dtype = model.base.embed.dtype
    hf = _described(model, dtype, tokenizer_from)
    weights = named_weights(model)
    tensors: dict[str, Stored] = {}
    for name, weight in weights.items():
        if format_of(weight) == "bf16":
            tensors[name] = _stored(name, weight, None, _written_dtype(name, weight, dtype))
        else:
            tensors |= to_store(name, weight)
    hf["quantization_config"] = quantization_config(ignore=["lm_head", *_plain_linears(weights)])
    _write_model_folder(path, hf, tensors, tokenizer_from)


def save_merged(
    model: Model,
    adapter: Adapter | None,
    path: str | os.PathLike[str],
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    dtype: Any = None,
) -> None:
    """Writes `merge_adapter(model, adapter)` as a folder, one tensor unpacked and merged at a time.

    Args:
      model, adapter: as for `merge_adapter`; None writes the base alone.
      path, tokenizer_from: as for `save_model`.
      dtype: float32, bfloat16 or float16, of the tensors in the folder but norm scales that it would round, which stay
        in float32; None takes the embeddings'. A sum is rounded once, to this.

    Raises:
      UserError: as `save_model`, another dtype, or numbers that are not finite in it. TypeError, ValueError: as
        `merge_adapter`.
    """
    check_kinds(model, adapter)
    target = model.base.embed.dtype if dtype is None else network_dtype(dtype)
    pairs: dict[str, LoRA] = {}
    if adapter is not None:
        check_fits(model, adapter)
        model = _with_norms(model, adapter)
        pairs = {layer_name(i, name): pair for i, layer in enumerate(adapter.lora) for name, pair in layer.items()}
    tensors = {
        name: _stored(name, weight, pairs.get(name), _written_dtype(name, weight, target))
        for name, weight in named_weights(model).items()
    }
    _write_model_folder(path, _described(model, target, tokenizer_from), tensors, tokenizer_from)


def merge_adapter(model: Model, adapter: Adapter) -> Model:
    """The network that computes by itself what `model` computes with `adapter`: plain weights in the embeddings' dtype.

    It takes as much memory as the model in that dtype; `save_merged` needs one tensor at a time.

    Args:
      model: the base, in any weight format.
      adapter: LoRA pairs for any of its projections, and norm scales if they are trained.

    Raises:
      TypeError: not a Model and an Adapter.
      ValueError: the adapter is of another network, has a pair of no projection, or is several stacked in one.
    """
    check_kinds(model, None)
    check_kind("adapter", adapter, Adapter)
    check_fits(model, adapter)
    dtype = model.base.embed.dtype
    layers = []
    for old, pairs in zip(_with_norms(model, adapter).base.layers, adapter.lora, strict=True):
        layers.append(
            old.replace(**{name: _merged(getattr(old, name), pairs.get(name), dtype) for name in PROJECTIONS})
        )
    return model.replace(base=model.base.replace(layers=tuple(layers)))


@functools.partial(jax.jit, static_argnames="dtype")
def _merged(weight: Weight, pair: LoRA | None, dtype: jnp.dtype) -> jax.Array:
    if pair is None:
        return dequantize(weight, dtype)
    change_NK = jnp.matmul(pair.b, pair.a, precision=jax.lax.Precision.HIGHEST)
    return (dequantize(weight, jnp.dtype(jnp.float32)) + pair.scaling * change_NK).astype(dtype)


def _with_norms(model: Model, adapter: Adapter) -> Model:
    if adapter.norms is None:
        return model
    norms = zip(model.base.layers, adapter.norms.input, adapter.norms.post_attention, strict=True)
    layers = tuple(layer.replace(input_norm=first, post_attention_norm=second) for layer, first, second in norms)
    return model.replace(base=model.base.replace(layers=layers))


def _stored(name: str, weight: Weight, pair: LoRA | None, dtype: jnp.dtype) -> Stored:
    """A tensor that is plain in the folder, unpacked and merged when it is asked for."""

    def make() -> jax.Array:
        made = _merged(weight, pair, dtype)
        if not all_finite(made):
            raise UserError(
                f"tensor {name} has numbers that are not finite, or that {dtype} does not hold (up to "
                f"{float(jnp.finfo(dtype).max):g}); nothing was written"
            )
        return made

    return Stored(jax.ShapeDtypeStruct(weight.shape, dtype), make)


def _written_dtype(name: str, weight: Weight, dtype: jnp.dtype) -> jnp.dtype:
    """What a plain weight is written in: `dtype`, but a norm scale that this would round stays in float32.

    Norm scales are float32 in memory, whatever their folder has; a bfloat16 model with float32 ones keeps them.
    """
    if name.endswith("norm.weight"):
        scale = jnp.asarray(weight)
        held = scale.astype(dtype).astype(scale.dtype)
        return dtype if bool(jnp.array_equal(held, scale)) else scale.dtype
    return dtype


def _described(model: Model, dtype: jnp.dtype, tokenizer_from: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The config.json of a model whose tensors are in `dtype`, with the ids of special tokens that `tokenizer_from` has
    in its own; null where there are none, as transformers would put Llama 2's there."""
    source = None if tokenizer_from is None else resolve(tokenizer_from) / CONFIG
    stated = read_json(source) if source is not None and source.is_file() else {}
    ids = {name: stated.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return model.config.to_hf() | ids | {"dtype": dtype.name, "torch_dtype": dtype.name}


def _write_model_folder(
    path: str | os.PathLike[str],
    hf: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    tokenizer_from: str | os.PathLike[str] | None,
) -> None:
    """Writes config.json, weights and the files copied from another model; whole or not at all."""
    tokenizer = folder_with_tokenizer(tokenizer_from)

    def names(folder: Path) -> list[str]:
        return [CONFIG, *replaceable(folder), *weight_files(folder)]

    with whole_folder(path, names) as folder:
        write_json(folder / CONFIG, dict(hf))
        write_shards(folder, tensors)
        if tokenizer is not None:
            copy_companions(tokenizer, folder)


def folder_with_tokenizer(source: str | os.PathLike[str] | None) -> Path | None:
    """The folder of another model, whose `COMPANIONS` are to be copied; None for None.

    Raises:
      UserError: it has no tokenizer.
    """
    if source is None:
        return None
    folder = resolve(source)
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise UserError(f"{folder / TOKENIZER_FILES[0]} is missing; tokenizer_from must name a model with a tokenizer")
    return folder


def _plain_linears(weights: Mapping[str, Weight]) -> list[str]:
    """Module names of the linear layers that are not packed.

    Raises:
      UserError: none is.
    """
    linears = [name for name in weights if name.split(".")[-2] in PROJECTIONS and name.endswith(".weight")]
    plain = [name.removesuffix(".weight") for name in linears if format_of(weights[name]) == "bf16"]
    if len(plain) == len(linears):
        raise UserError(
            "weight_format is 'nvfp4', but the model's linear layers are plain; quantize them first, with "
            "load_model(path, 'nvfp4') or quantize(model, 'nvfp4')"
        )
    return plain
