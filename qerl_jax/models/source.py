"""Where a model's files are: a shipped policy, a local folder, or a repository of the Hugging Face Hub.

Only JSON, tokenizer files and safetensors are ever fetched or read; pickles can run code.
"""

import functools
import importlib.resources
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from qerl_jax.durable import with_home
from qerl_jax.errors import UserError, nearest, nearest_beside, shown
from qerl_jax.input_files import read_json
from qerl_jax.models.safetensors import read_safetensors
from qerl_jax.run_files import MODEL_CONFIG

CONFIG, WEIGHTS, INDEX = MODEL_CONFIG, "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
CHAT_TEMPLATES = "additional_chat_templates"  # a folder: those with a name, as for tools, one in each .jinja file
GENERATION_CONFIG = "generation_config.json"
# What stands beside a model's weights, and is copied with them.
COMPANIONS = (*TOKENIZER_FILES, CHAT_TEMPLATES, GENERATION_CONFIG)
# Tensors by name: the file and a view of its bytes.
Tensors = dict[str, tuple[Path, np.ndarray]]

_BUILTIN = "builtin:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLE = "is a pickle, which can run code and is never loaded: convert it to safetensors"
# What else may hold a model, by the ending of its name, and what to do with it.
_ELSEWHERE = {
    ".safetensors": f"alone is not read: {INDEX} must name all files of a model, or {WEIGHTS} be the only one",
    **dict.fromkeys((".bin", ".pt", ".pth", ".pkl", ".ckpt"), _PICKLE),
    ".gguf": "is a GGUF file, which is not read: take the model's safetensors",
}


def resolve(path: str | os.PathLike[str], shipped: bool = True) -> Path:
    """The local folder of a model or adapter.

    Args:
      path: `builtin:NAME` for a policy of this package, a folder, or `owner/name` on the Hub, whose files are then
        downloaded into huggingface_hub's cache (HF_HUB_OFFLINE=1 takes them from there only). A process looks for
        them there once; a revision that is pushed later is another process's.
      shipped: whether it may be one of this package.

    Raises:
      UserError: there is no such folder, policy or repository, or the Hub cannot be reached.
    """
    name = os.fspath(path)
    if shipped and name.startswith(_BUILTIN):
        return _builtin(name.removeprefix(_BUILTIN))
    folder = with_home(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{name} is a file; expected the folder it lies in, with {CONFIG} and {WEIGHTS}")
    if not _HUB_NAME.fullmatch(name):
        raise UserError(
            f"{name}: no such folder{nearest_beside(folder)}; allowed: a folder, owner/name on the Hugging Face Hub"
            f"{f', {_BUILTIN}NAME' if shipped else ''}"
        )
    return _download(name)


def from_anywhere(path: str) -> str:
    """The name of the same folder or repository that holds in any working folder."""
    folder = with_home(path)
    return os.path.abspath(folder) if not path.startswith(_BUILTIN) and folder.is_dir() else path


def _builtin(name: str) -> Path:
    policies = importlib.resources.files("qerl_jax.policies")
    known = sorted(entry.name for entry in policies.iterdir() if entry.joinpath(CONFIG).is_file())
    if name not in known:
        raise UserError(f"{_BUILTIN}{name} is unknown; allowed: {', '.join(known)}{nearest(name, known)}")
    return Path(str(policies / name))


@functools.cache  # a command asks for a model several times, and must read all of it from one revision
def _download(name: str) -> Path:
    # Imported here: it opens network machinery that runs from local files never need.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*TOKENIZER_FILES, f"{CHAT_TEMPLATES}/*.jinja", "*.json", "*.safetensors"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{name}: no such folder here{nearest_beside(Path(name))}, and it could not be had from the Hugging Face "
            f"Hub ({reason}). Check the name, the network and, for a gated repository, `hf auth login`"
        ) from error


def copy_companions(source: Path, target: Path) -> None:
    """Copies what a model's folder has of `COMPANIONS` to an empty one."""
    templates = (source / CHAT_TEMPLATES).glob("*.jinja")
    for file in [*(source / name for name in COMPANIONS), *templates]:
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def replaceable(folder: Path) -> list[str]:
    """`COMPANIONS`, without the folder of chat templates where this one's holds anything else, which would be lost."""
    foreign = any(file.suffix != ".jinja" for file in (folder / CHAT_TEMPLATES).glob("*"))
    return [name for name in COMPANIONS if not (foreign and name == CHAT_TEMPLATES)]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """An indented JSON file that ends with a newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def open_tensors(folder: Path) -> Tensors:
    """Every tensor of a model folder by name, with the file it is in: single or sharded with an index.

    Raises:
      UserError: no safetensors, a shard missing or malformed, or an index that does not agree with its shards.
    """
    if os.path.lexists(folder / WEIGHTS):
        return {name: (folder / WEIGHTS, array) for name, array in read_safetensors(folder / WEIGHTS).items()}
    if not (folder / INDEX).exists():
        names = sorted(path.name for path in folder.iterdir())
        others = [f"; {shown(name)} {hint}" for end, hint in _ELSEWHERE.items() for name in names if name.endswith(end)]
        raise UserError(f"{folder}: expected {WEIGHTS} or {INDEX}, found neither{''.join(others[:1])}")
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: weight_map is missing; expected an object of tensor and file names")
    tensors: Tensors = {}
    if not weight_map:
        raise UserError(f"{index}: weight_map is empty; expected an object of tensor and file names")
    for shard in sorted({_shard_name(index, value) for value in weight_map.values()}):
        if not os.path.lexists(folder / shard):
            raise UserError(f"{folder / shard} is missing; {index.name} names it")
        for name, array in read_safetensors(folder / shard).items():
            if (said := weight_map.get(name)) != shard:
                there = f"{index.name} has it in {shown(said)}" if name in weight_map else f"{index.name} lacks it"
                raise UserError(f"{folder / shard}: holds tensor {shown(name)}; {there}")
            tensors[name] = (folder / shard, array)
    for name, shard in weight_map.items():
        if name not in tensors:
            raise UserError(f"{folder / shard}: tensor {shown(name)} is missing; {index.name} says it is there")
    return tensors


def _shard_name(index: Path, value: Any) -> str:
    if (
        not isinstance(value, str)
        or not value.endswith(".safetensors")
        or not value.isprintable()
        or Path(value).name != value
    ):
        raise UserError(
            f"{index}: {shown(repr(value))} is not allowed; expected the name of a .safetensors file beside it"
        )
    return value
