"""Models written as Hugging Face folders: plain weights, or NVFP4 as compressed-tensors stores it."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.durable import where_it_leads, whole_folder
from qerl_jax.errors import UserError, nearest
from qerl_jax.formats import Weight, dequantized, format_of
from qerl_jax.input_files import read_json
from qerl_jax.models.compressed_tensors import quantization_config, to_store
from qerl_jax.models.loading import named_weights
from qerl_jax.models.params import PROJECTIONS, Model
from qerl_jax.models.shards import Stored, weight_files, write_shards
from qerl_jax.models.source import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, resolve, write_json
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
      UserError: an unknown format, "nvfp4" for linear layers of another format, `path` holds other files, or
        `tokenizer_from` has no tokenizer.
    """
    if weight_format not in SAVED_FORMATS:
        hint = nearest(str(weight_format), SAVED_FORMATS, elsewhere=FORMATS)
        raise UserError(f"weight_format is {weight_format!r}; written are {', '.join(SAVED_FORMATS)}{hint}")
    dtype = model.base.embed.dtype
    hf = described(model, dtype, tokenizer_from)
    weights = named_weights(model)
    tensors: dict[str, Stored] = {}
    for name, weight in weights.items():
        if weight_format == "nvfp4" and format_of(weight) != "bf16":
            tensors |= to_store(name, weight)
        else:
            as_dtype = written_dtype(name, weight, dtype)
            tensors[name] = Stored(jax.ShapeDtypeStruct(weight.shape, as_dtype), _unpacked(weight, as_dtype))
    if weight_format == "nvfp4":
        hf["quantization_config"] = quantization_config(ignore=["lm_head", *_plain_linears(weights)])
    write_model_folder(path, hf, tensors, tokenizer_from)


def written_dtype(name: str, weight: Weight, dtype: jnp.dtype) -> jnp.dtype:
    """What a plain weight is written in: `dtype`, but a norm scale that this would round stays in float32.

    Norm scales are float32 in memory, whatever their folder has; a bfloat16 model with float32 ones keeps them.
    """
    if name.endswith("norm.weight"):
        scale = jnp.asarray(weight)
        held = scale.astype(dtype).astype(scale.dtype)
        return dtype if bool(jnp.array_equal(held, scale)) else scale.dtype
    return dtype


def described(model: Model, dtype: jnp.dtype, tokenizer_from: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The config.json of a model whose tensors are in `dtype`, with the ids of special tokens that `tokenizer_from` has
    in its own; null where there are none, as transformers would put Llama 2's there."""
    source = None if tokenizer_from is None else resolve(tokenizer_from) / CONFIG
    stated = read_json(source) if source is not None and source.is_file() else {}
    ids = {name: stated.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return model.config.to_hf() | ids | {"dtype": dtype.name, "torch_dtype": dtype.name}


def write_model_folder(
    path: str | os.PathLike[str],
    hf: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes config.json, weights and the files copied from another model; whole or not at all.

    Raises:
      UserError: `path` holds other files, or `tokenizer_from` has no tokenizer.
    """
    copied = companions(tokenizer_from)
    target = where_it_leads(path)

    def names(folder: Path) -> list[str]:
        return [CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES, *weight_files(folder)]

    with whole_folder(target, names) as folder:
        write_json(folder / CONFIG, dict(hf))
        write_shards(folder, tensors)
        for file in copied:
            shutil.copyfile(file, folder / file.name)


def companions(source: str | os.PathLike[str] | None) -> Iterable[Path]:
    """Tokenizer files and generation_config.json of another model; none for None.

    Raises:
      UserError: it has no tokenizer.
    """
    if source is None:
        return ()
    folder = resolve(source)
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise UserError(f"{folder / TOKENIZER_FILES[0]} is missing; tokenizer_from must name a model with a tokenizer")
    return [folder / name for name in (*TOKENIZER_FILES, GENERATION_CONFIG) if (folder / name).is_file()]


def _unpacked(weight: Weight, dtype: jnp.dtype) -> Callable[[], jax.Array]:
    return lambda: dequantized(weight, dtype)


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
