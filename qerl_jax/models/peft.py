"""LoRA adapters as PEFT folders: adapter_config.json and adapter_model.safetensors, read and written without PyTorch.

    base_model.model.model.layers.0.mlp.down_proj.lora_A.weight    [r, in]
    base_model.model.model.layers.0.mlp.down_proj.lora_B.weight    [out, r]
    base_model.model.model.layers.0.input_layernorm.weight         [hidden], trained norm scales (`modules_to_save`)

Options are read by `peft_options`. The format of the weights that an adapter was trained on is none of PEFT's, and
stands in a file of its own, qerl_adapter.json.
"""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import run_files
from qerl_jax.durable import whole_folder
from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import files_fingerprint
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.loading import check_tensors, layer_name
from qerl_jax.models.packing import Slot
from qerl_jax.models.params import (
    PROJECTIONS,
    Adapter,
    LoRA,
    Model,
    TrainedNorms,
    check_single,
    lora_alpha,
    norms_to_train,
    projection_shape,
)
from qerl_jax.models.peft_options import NORMS, PeftOptions, read_options
from qerl_jax.models.safetensors import read_safetensors, write_safetensors
from qerl_jax.models.saving import folder_with_tokenizer
from qerl_jax.models.source import ADAPTER_CONFIG, copy_companions, replaceable, resolve, write_json
from qerl_jax.option_names import check_format

ADAPTER_WEIGHTS = "adapter_model.safetensors"
TRAINED_ON = "qerl_adapter.json"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
_PAIR = re.compile(r"\.(\w+)\.lora_[AB]\.weight")


class OpenedAdapter(NamedTuple):
    """An adapter's folder, checked as far as it can be without its network, and not yet loaded.

    Attributes:
      folder: where it is.
      options: what its adapter_config.json says.
      modules: the projections that have a pair, in the order of PROJECTIONS.
      arrays: views of its tensors' bytes by name.
    """

    folder: Path
    options: PeftOptions
    modules: tuple[str, ...]
    arrays: dict[str, np.ndarray]


def open_adapter(path: str | os.PathLike[str]) -> OpenedAdapter:
    """Opens a PEFT LoRA folder.

    Args:
      path: as for `load_adapter`.

    Raises:
      UserError: there is none, one of its files is missing or malformed, or it uses an option that is not supported.
    """
    folder = adapter_folder(path)
    options, weights = read_options(folder / ADAPTER_CONFIG), folder / ADAPTER_WEIGHTS
    if not weights.exists():
        pickle = "; adapter_model.bin is a pickle, which can run code and is never loaded: convert it to safetensors"
        raise UserError(f"{weights} is missing{pickle if (folder / 'adapter_model.bin').exists() else ''}")
    arrays = read_safetensors(weights)
    targets = _modules_of(arrays, weights) if options.targets is None else options.targets
    modules = tuple(name for name in targets if name not in options.excluded)
    return OpenedAdapter(folder, options, modules, arrays)


def _modules_of(arrays: dict[str, np.ndarray], where: Path) -> tuple[str, ...]:
    """The projections that have a tensor of a pair in any layer: the pattern that PEFT found them with is not matched,
    for one from a file may take years."""
    found = {match[1] for name in arrays if (match := _PAIR.search(name))}
    modules = tuple(name for name in PROJECTIONS if name in found)
    if not modules:
        raise UserError(f"{where}: has no LoRA pair of a projection; expected one or more of {', '.join(PROJECTIONS)}")
    return modules


def check_fit(
    opened: OpenedAdapter, config: ModelConfig, *, train_norms: bool | None = None, base_name: str | None = None
) -> None:
    """Compares an adapter with the network that it is for; none of the network's weights are needed.

    Args:
      opened: the adapter.
      config: the network.
      train_norms, base_name: as for `load_adapter`.

    Raises:
      UserError: it is no adapter of this network (family, depth, rank, shape, module, base), or has numbers that are
        not finite; names file, tensor or option, expected and found.
    """
    folder, options, _, arrays = opened
    where, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    expected = config.family.architecture
    if options.base_class not in (None, expected):
        found = shown(options.base_class)
        raise UserError(f"{where}: auto_mapping: the adapter belongs to a {found}, the model is a {expected}")
    if base_name is not None and _last(options.base_name) != _last(base_name):
        raise UserError(
            f"{where}: base_model_name_or_path: expected {base_name}, found {shown(options.base_name)}. The adapter "
            "was trained on another base; if it is the same under another name, correct that entry"
        )
    if options.saved_norms and train_norms is False:
        raise UserError(
            f"{folder}: the adapter has trained norm scales, but train_norms is false; set lora.train_norms=true"
        )
    _check_depth(arrays, config, weights)
    table = _table(config, opened)
    check_tensors({name: (weights, array) for name, array in arrays.items()}, table, folder)
    for name in table:
        if not np.isfinite(arrays[name].astype(np.float32)).all():
            raise UserError(f"{weights}: {name} has numbers that are not finite: what trained it diverged")


def load_adapter(
    path: str | os.PathLike[str], model: Model, *, train_norms: bool | None = None, base_name: str | None = None
) -> Adapter:
    """Reads a PEFT LoRA folder for `model`; all arrays become float32.

    Args:
      path: the folder, or `owner/name` on the Hub.
      model: the network that it must fit.
      train_norms: None takes trained norms as the folder has them; True adds the base's where it has none; False
        refuses a folder that has some.
      base_name: if given, the base that the folder must name; of a path the last part is compared, for folders move.

    Raises:
      UserError: the folder is not a LoRA of this network (family, depth, rank, shape, module, base), uses an option
        that is not supported, or has numbers that are not finite; names file, tensor or option, expected and found.
    """
    opened = open_adapter(path)
    check_fit(opened, model.config, train_norms=train_norms, base_name=base_name)
    options = opened.options

    def array(name: str) -> jax.Array:
        return jnp.array(opened.arrays[name].astype(np.float32))

    def pair(layer: int, name: str) -> LoRA:
        a, b = (array(_lora_name(layer, name, half)) for half in "AB")
        return LoRA(a, b, options.scaling, options.rank_stabilised)

    layers = range(model.config.num_hidden_layers)
    lora = tuple({name: pair(i, name) for name in opened.modules} for i in layers)
    norms = None
    if options.saved_norms:
        first, second = (tuple(array(_PREFIX + layer_name(i, field)) for i in layers) for field in NORMS.values())
        norms = TrainedNorms(input=first, post_attention=second)
    elif train_norms:
        norms = norms_to_train(model)
    return Adapter(lora, norms)


def adapter_folder(path: str | os.PathLike[str]) -> Path:
    """The local folder of an adapter.

    Args:
      path: as for `load_adapter`.

    Raises:
      UserError: there is none, or it holds no adapter.
    """
    folder = resolve(path, shipped=False)  # no adapter is
    if not (folder / ADAPTER_CONFIG).exists():
        if (folder / run_files.CONFIG).exists():
            own = folder / run_files.ADAPTER
            raise UserError(f"{path} is a run, not an adapter; its adapter is {own}, once it has ended")
        raise UserError(f"{folder / ADAPTER_CONFIG} is missing; expected a PEFT folder")
    return folder


def adapter_fingerprint(path: str | os.PathLike[str]) -> str:
    """A digest of an adapter folder's configuration and weights; arguments and errors as those of `adapter_folder`."""
    folder = adapter_folder(path)
    return files_fingerprint(folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def save_adapter(
    adapter: Adapter,
    path: str | os.PathLike[str],
    base_name: str,
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    weight_format: str | None = None,
) -> None:
    """Writes an adapter as the folder that PEFT's `PeftModel.from_pretrained` reads; it appears whole or not at all.

    Args:
      adapter: one rank, one scaling and the same modules in all layers; float64 is written as float32.
      path: the folder; one that holds an adapter already is replaced.
      base_name: name of the model it belongs to, for base_model_name_or_path.
      tokenizer_from: model whose tokenizer and generation_config.json are copied; None writes neither.
      weight_format: the format of the base's weights that it was trained on, told in qerl_adapter.json; None writes no
        such file.

    Raises:
      UserError: `path` holds other files, `tokenizer_from` has no tokenizer, an unknown `weight_format`, or the adapter
        has numbers that are not finite.
      ValueError: ranks, scalings or modules differ among layers, there is no pair, or several adapters are stacked in
        one.
    """
    check_format(weight_format)
    check_single(adapter)
    pairs = [pair for layer in adapter.lora for pair in layer.values()]
    if not pairs:
        raise ValueError("the adapter has no LoRA pair, without which PEFT reads none")
    modules = tuple(adapter.lora[0])
    other = next((i for i, layer in enumerate(adapter.lora) if sorted(layer) != sorted(modules)), None)
    if other is not None:
        raise ValueError(
            f"a PEFT folder has one rank, one scaling and one list of modules; got {sorted(modules)} in layer 0 "
            f"and {sorted(adapter.lora[other])} in layer {other}"
        )
    ranks = {(pair.a.shape[0], pair.scaling, pair.rank_stabilised) for pair in pairs}
    if len(ranks) != 1:
        raise ValueError(f"a PEFT folder has one rank, one scaling and one list of modules; got {sorted(ranks)}")
    [(rank, scaling, stabilised)] = ranks
    arrays: dict[str, jax.Array] = {}
    adapter = jax.tree.map(_at_most_single, adapter)
    for i, layer in enumerate(adapter.lora):
        for name, pair in layer.items():
            arrays |= {_lora_name(i, name, "A"): pair.a, _lora_name(i, name, "B"): pair.b}
        if adapter.norms is not None:
            scales = (adapter.norms.input[i], adapter.norms.post_attention[i])
            arrays |= {_PREFIX + layer_name(i, f): w for f, w in zip(NORMS.values(), scales, strict=True)}
    if broken := [name for name, array in arrays.items() if not np.isfinite(np.asarray(array)).all()]:
        raise UserError(f"{broken[0]} has numbers that are not finite: what trained it diverged; nothing is written")
    options = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora_alpha(rank, scaling, stabilised),
        "lora_dropout": 0.0,
        "modules_to_save": None if adapter.norms is None else list(NORMS),
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": stabilised,
    }
    specs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    tokenizer = folder_with_tokenizer(tokenizer_from)

    def names(folder: Path) -> list[str]:
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINED_ON, *replaceable(folder)]

    with whole_folder(path, names) as folder:
        if tokenizer is not None:
            copy_companions(tokenizer, folder)
        write_json(folder / ADAPTER_CONFIG, options)
        if weight_format is not None:
            write_json(folder / TRAINED_ON, {"weight_format": weight_format})
        write_safetensors(folder / ADAPTER_WEIGHTS, specs, lambda name: np.asarray(arrays[name]), {"format": "pt"})


def _at_most_single(array: jax.Array) -> jax.Array:
    """In float32 what is wider, which no reader of adapters takes."""
    return array.astype(jnp.float32) if array.dtype == jnp.float64 else array


def _last(name: Any) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1]


def _lora_name(layer: int, projection: str, half: str) -> str:
    return f"{_PREFIX}{layer_name(layer, projection).removesuffix('.weight')}.lora_{half}.weight"


def _table(config: ModelConfig, opened: OpenedAdapter) -> dict[str, Slot]:
    """Every tensor that the folder must hold."""
    table: dict[str, Slot] = {}
    options = opened.options
    for i in range(config.num_hidden_layers):
        for name in opened.modules:
            N, K = projection_shape(config, name)
            table[_lora_name(i, name, "A")] = Slot((options.rank, K))
            table[_lora_name(i, name, "B")] = Slot((N, options.rank))
        if options.saved_norms:
            table |= {_PREFIX + layer_name(i, field): Slot((config.hidden_size,)) for field in NORMS.values()}
    return table


def _check_depth(arrays: dict[str, np.ndarray], config: ModelConfig, where: Path) -> None:
    """One line for an adapter of a network with more or fewer layers, which would else miss or exceed many tensors."""
    layers = {int(match[1]) for name in arrays if (match := _LAYER.search(name))}
    if layers and max(layers) + 1 != config.num_hidden_layers:
        raise UserError(
            f"{where}: the adapter has {max(layers) + 1} layers, the model ({config.family.architecture}, hidden_size "
            f"{config.hidden_size}) has {config.num_hidden_layers}: it belongs to another network"
        )
