"""LoRA adapters as PEFT folders: adapter_config.json and adapter_model.safetensors, read and written without PyTorch.

    base_model.model.model.layers.0.mlp.down_proj.lora_A.weight    [r, in]
    base_model.model.model.layers.0.mlp.down_proj.lora_B.weight    [out, r]
    base_model.model.model.layers.0.input_layernorm.weight         [hidden], trained norm scales (`modules_to_save`)

The scaling is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora; both are read, and written as they were. The
format of the weights that an adapter was trained on is none of PEFT's options, and stands in a file of its own,
qerl_adapter.json.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.durable import whole_folder
from qerl_jax.errors import UserError, nearest, shown
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.files import files_fingerprint, read_json
from qerl_jax.models.loading import Slot, check_tensors, layer_name
from qerl_jax.models.params import (
    PROJECTIONS,
    Adapter,
    LoRA,
    Model,
    TrainedNorms,
    check_single,
    lora_alpha,
    lora_scaling,
    norms_of,
    projection_shape,
)
from qerl_jax.models.safetensors import read_safetensors, write_safetensors
from qerl_jax.models.saving import companions
from qerl_jax.models.source import ADAPTER_CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, resolve, write_json
from qerl_jax.option_names import FORMATS
from qerl_jax.recipes import RUN_CONFIG

ADAPTER_WEIGHTS = "adapter_model.safetensors"
TRAINED_ON = "qerl_adapter.json"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
# Options that are read here, or that say nothing about what the adapter computes. Any other one must be unset.
_KNOWN = {
    "auto_mapping",  # what PEFT wraps the model with, and the model's class
    "base_model_name_or_path",
    "inference_mode",
    "layers_pattern",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "use_rslora",
}
# Options that have supported values besides "unset". The other initialisations change the base's weights too.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}


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
    folder = adapter_folder(path)
    where, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    options = read_json(where)
    _check_options(options, where)
    _check_family(options, model.config, where)
    found_base = options.get("base_model_name_or_path")
    if base_name is not None and _last(found_base) != _last(base_name):
        raise UserError(
            f"{where}: base_model_name_or_path: expected {base_name}, found {found_base}. The adapter was trained on "
            "another base; if it is the same under another name, correct that entry"
        )
    rank, modules, saved_norms = _rank(options, where), _target_modules(options, where), _saved_norms(options, where)
    stabilised = _flag(options, "use_rslora", where)
    scaling = lora_scaling(rank, _alpha(options, where), stabilised)
    if saved_norms and train_norms is False:
        raise UserError(
            f"{folder}: the adapter has trained norm scales, but train_norms is false; set lora.train_norms=true"
        )
    if not weights.exists():
        pickle = "; adapter_model.bin is a pickle, which can run code and is never loaded: convert it to safetensors"
        raise UserError(f"{weights} is missing{pickle if (folder / 'adapter_model.bin').exists() else ''}")
    arrays = read_safetensors(weights)
    _check_depth(arrays, model.config, weights)
    table = _table(model.config, modules, rank, saved_norms)
    check_tensors({name: (weights, array) for name, array in arrays.items()}, table, folder)

    def array(name: str) -> jax.Array:
        wide = arrays[name].astype(np.float32)
        if not np.isfinite(wide).all():
            raise UserError(f"{weights}: {name} has numbers that are not finite: what trained it diverged")
        return jnp.array(wide)

    layers = range(model.config.num_hidden_layers)
    lora = tuple(
        {
            name: LoRA(array(_lora_name(i, name, "A")), array(_lora_name(i, name, "B")), scaling, stabilised)
            for name in modules
        }
        for i in layers
    )
    norms = None
    if saved_norms:
        first, second = (tuple(array(_PREFIX + layer_name(i, field)) for i in layers) for field in _NORMS.values())
        norms = TrainedNorms(input=first, post_attention=second)
    elif train_norms:
        # Copies: an update donates the adapter, and the base must outlive it.
        norms = jax.tree.map(jnp.copy, norms_of(model, None).replace(final=None))
    return Adapter(lora, norms)


def adapter_folder(path: str | os.PathLike[str]) -> Path:
    """The local folder of an adapter; for who loads a large model first, and an adapter for it then.

    Args:
      path: as for `load_adapter`.

    Raises:
      UserError: there is none, or it holds no adapter.
    """
    folder = resolve(path)
    if not (folder / ADAPTER_CONFIG).exists():
        if (folder / RUN_CONFIG).exists():
            raise UserError(f"{path} is a run, not an adapter; its adapter is {folder / 'adapter'}, once it has ended")
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
      adapter: one rank, one scaling and the same modules in all layers.
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
    if weight_format is not None and weight_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"weight_format is {weight_format!r}; allowed: {known}{nearest(weight_format, FORMATS)}")
    check_single(adapter)
    pairs = [pair for layer in adapter.lora for pair in layer.values()]
    if not pairs:
        raise ValueError("the adapter has no LoRA pair, without which PEFT reads none")
    modules = tuple(adapter.lora[0])
    ranks = {(pair.a.shape[0], pair.scaling, pair.rank_stabilised) for pair in pairs}
    if len(ranks) != 1 or any(tuple(sorted(layer)) != tuple(sorted(modules)) for layer in adapter.lora):
        raise ValueError(f"a PEFT folder has one rank, one scaling and one list of modules; got {sorted(ranks)}")
    [(rank, scaling, stabilised)] = ranks
    arrays: dict[str, jax.Array] = {}
    for i, layer in enumerate(adapter.lora):
        for name, pair in layer.items():
            arrays |= {_lora_name(i, name, "A"): pair.a, _lora_name(i, name, "B"): pair.b}
        if adapter.norms is not None:
            scales = (adapter.norms.input[i], adapter.norms.post_attention[i])
            arrays |= {_PREFIX + layer_name(i, f): w for f, w in zip(_NORMS.values(), scales, strict=True)}
    if (broken := next((name for name, array in arrays.items() if not jnp.isfinite(array).all()), None)) is not None:
        raise UserError(f"{broken} has numbers that are not finite: what trained it diverged; nothing is written")
    options = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora_alpha(rank, scaling, stabilised),
        "lora_dropout": 0.0,
        "modules_to_save": None if adapter.norms is None else list(_NORMS),
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": stabilised,
    }
    specs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    copied = companions(tokenizer_from)
    own = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINED_ON, GENERATION_CONFIG, *TOKENIZER_FILES]
    with whole_folder(path, own) as folder:
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        write_json(folder / ADAPTER_CONFIG, options)
        if weight_format is not None:
            write_json(folder / TRAINED_ON, {"weight_format": weight_format})
        write_safetensors(folder / ADAPTER_WEIGHTS, specs, lambda name: np.asarray(arrays[name]), {"format": "pt"})


def _last(name: Any) -> str:
    return str(name).rstrip("/").rsplit("/", 1)[-1]


def _lora_name(layer: int, projection: str, half: str) -> str:
    return f"{_PREFIX}{layer_name(layer, projection).removesuffix('.weight')}.lora_{half}.weight"


def _table(config: ModelConfig, modules: tuple[str, ...], rank: int, saved_norms: bool) -> dict[str, Slot]:
    """Every tensor that the folder must hold."""
    table: dict[str, Slot] = {}
    for i in range(config.num_hidden_layers):
        for name in modules:
            N, K = projection_shape(config, name)
            table |= {_lora_name(i, name, "A"): Slot((rank, K)), _lora_name(i, name, "B"): Slot((N, rank))}
        if saved_norms:
            table |= {_PREFIX + layer_name(i, field): Slot((config.hidden_size,)) for field in _NORMS.values()}
    return table


def _check_options(options: dict[str, Any], where: Path) -> None:
    for key, allowed in _SUPPORTED.items():
        value = options.get(key, allowed[0])
        if value not in allowed:
            raise UserError(f"{where}: {key} is {value!r}; supported: {', '.join(map(repr, allowed))}")
    for key, value in options.items():
        # 0 is set: as layers_to_transform it is the first layer alone.
        if key not in _KNOWN and key not in _SUPPORTED and (value or type(value) is int):
            raise UserError(f"{where}: option {shown(key)} ({shown(repr(value))}) is not supported")


def _check_family(options: dict[str, Any], config: ModelConfig, where: Path) -> None:
    """A folder names the class of its base where PEFT found no task type; most say nothing of the family."""
    mapping = options.get("auto_mapping")
    found = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    expected = config.family.architecture
    if found not in (None, expected):
        raise UserError(f"{where}: auto_mapping: the adapter belongs to a {shown(found)}, the model is a {expected}")


def _check_depth(arrays: dict[str, np.ndarray], config: ModelConfig, where: Path) -> None:
    """One line for an adapter of a network with more or fewer layers, which would else miss or exceed many tensors."""
    layers = {int(match[1]) for name in arrays if (match := _LAYER.search(name))}
    if layers and max(layers) + 1 != config.num_hidden_layers:
        raise UserError(
            f"{where}: the adapter has {max(layers) + 1} layers, the model ({config.family.architecture}, hidden_size "
            f"{config.hidden_size}) has {config.num_hidden_layers}: it belongs to another network"
        )


def _rank(options: dict[str, Any], where: Path) -> int:
    rank = options.get("r")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{where}: r is {rank!r}; expected a rank of 1 or more")
    return rank


def _alpha(options: dict[str, Any], where: Path) -> float:
    alpha = options.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e30:
        raise UserError(f"{where}: lora_alpha is {shown(repr(alpha))}; expected a number up to 1e30")
    return alpha


def _flag(options: dict[str, Any], key: str, where: Path) -> bool:
    value = options.get(key, False)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {shown(repr(value))}; expected true or false")
    return bool(value)


def _target_modules(options: dict[str, Any], where: Path) -> tuple[str, ...]:
    names = options.get("target_modules")
    if not isinstance(names, list) or not names:
        raise UserError(f"{where}: target_modules is {names!r}; expected a list of {', '.join(PROJECTIONS)}")
    for name in names:
        if name not in PROJECTIONS:
            raise UserError(
                f"{where}: target_modules: {name!r} is not supported; allowed: {', '.join(PROJECTIONS)}"
                f"{nearest(str(name), PROJECTIONS)}"
            )
    return tuple(name for name in PROJECTIONS if name in names)


def _saved_norms(options: dict[str, Any], where: Path) -> bool:
    names = options.get("modules_to_save") or []
    if names and (not isinstance(names, list) or set(map(str, names)) != set(_NORMS)):
        raise UserError(f"{where}: modules_to_save is {names!r}; supported: none, or {', '.join(_NORMS)} together")
    return bool(names)
