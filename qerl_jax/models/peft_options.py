"""adapter_config.json of a PEFT folder: what of it is read here, and what is refused.

The scaling is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora; both are read.
"""

from pathlib import Path
from typing import Any, NamedTuple

from qerl_jax.errors import UserError, nearest, shown
from qerl_jax.input_files import read_json
from qerl_jax.models.params import MOST_ALPHA, MOST_RANK, PROJECTIONS, lora_scaling

# Trained norm scales: names in `modules_to_save`, and fields of a `Layer`.
NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
# Options that are read here, or that say nothing about what the adapter computes. Any other one must be unset.
_KNOWN = {
    "auto_mapping",  # what PEFT wraps the model with, and the model's class
    "base_model_name_or_path",
    "ensure_weight_tying",  # of saved embeddings and trained tokens, which are refused themselves
    "exclude_modules",
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
_OF_ONE_LAYER = tuple(f".{name}" for name in PROJECTIONS)  # ends of a name with a path, which may be of one layer
_MERGE = "PEFT can merge such an adapter into its base (`merge_and_unload`): take the merged model instead"


class PeftOptions(NamedTuple):
    """What an adapter's configuration says.

    Attributes:
      rank: r.
      scaling: of B A.
      rank_stabilised: whether that is lora_alpha / sqrt(r).
      targets: the projections that have a pair, in the order of PROJECTIONS; None where target_modules is a pattern, so
        that the weights alone tell.
      excluded: names of modules that have none, though they are targets.
      saved_norms: whether the folder has norm scales.
      base_name: base_model_name_or_path as it stands; None where there is none.
      base_class: the class of the base; None where the configuration does not say, as most.
    """

    rank: int
    scaling: float
    rank_stabilised: bool
    targets: tuple[str, ...] | None
    excluded: tuple[str, ...]
    saved_norms: bool
    base_name: Any
    base_class: Any


def read_options(where: Path) -> PeftOptions:
    """Reads an adapter_config.json.

    Raises:
      UserError: it is missing or malformed, or has an option or a value that is not supported; names file and option.
    """
    options = read_json(where)
    _check_options(options, where)
    rank, stabilised = _rank(options, where), _flag(options, "use_rslora", where)
    mapping = options.get("auto_mapping")  # which PEFT writes where it found no task type
    return PeftOptions(
        rank=rank,
        scaling=lora_scaling(rank, _alpha(options, where), stabilised),
        rank_stabilised=stabilised,
        targets=_target_modules(options, where),
        excluded=_excluded(options, where),
        saved_norms=_saved_norms(options, where),
        base_name=options.get("base_model_name_or_path"),
        base_class=mapping.get("base_model_class") if isinstance(mapping, dict) else None,
    )


def _check_options(options: dict[str, Any], where: Path) -> None:
    for key, allowed in _SUPPORTED.items():
        value = options.get(key, allowed[0])
        if value not in allowed:
            hint = "" if key == "task_type" else f". {_MERGE}"
            supported = ", ".join(map(repr, allowed))
            raise UserError(f"{where}: {key} is {shown(repr(value))}; supported: {supported}{hint}")
    for key, value in options.items():
        # 0 is set: as layers_to_transform it is the first layer alone.
        if key not in _KNOWN and key not in _SUPPORTED and (value or type(value) is int):
            raise UserError(f"{where}: option {shown(key)} ({shown(repr(value))}) is not supported. {_MERGE}")


def _rank(options: dict[str, Any], where: Path) -> int:
    rank = options.get("r")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise UserError(f"{where}: r is {shown(repr(rank))}; expected a rank from 1 to {MOST_RANK}")
    return rank


def _alpha(options: dict[str, Any], where: Path) -> float:
    alpha = options.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MOST_ALPHA:
        raise UserError(f"{where}: lora_alpha is {shown(repr(alpha))}; expected a number up to {MOST_ALPHA:g}")
    return alpha


def _flag(options: dict[str, Any], key: str, where: Path) -> bool:
    value = options.get(key, False)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where}: {key} is {shown(repr(value))}; expected true or false")
    return bool(value)


def _target_modules(options: dict[str, Any], where: Path) -> tuple[str, ...] | None:
    """The projections that target_modules names by the ends of their paths, as PEFT matches them. A name of none may be
    another model's: a pair for it would be a tensor too many."""
    names = options.get("target_modules")
    if isinstance(names, str) and names:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        allowed = f"a pattern, or a list of {', '.join(PROJECTIONS)}"
        raise UserError(f"{where}: target_modules is {shown(repr(names))}; expected {allowed}")
    targets = {name.rsplit(".", 1)[-1] for name in names}
    modules = tuple(name for name in PROJECTIONS if name in targets)
    if not modules:
        raise UserError(
            f"{where}: target_modules: {shown(repr(names[0]))} is not supported; allowed: {', '.join(PROJECTIONS)}"
            f"{nearest(names[0], PROJECTIONS)}"
        )
    return modules


def _excluded(options: dict[str, Any], where: Path) -> tuple[str, ...]:
    names = options.get("exclude_modules") or []
    if not isinstance(names, list) or any(not isinstance(n, str) or n.endswith(_OF_ONE_LAYER) for n in names):
        found = shown(repr(names))
        raise UserError(f"{where}: exclude_modules is {found}; supported: a list of names for all layers. {_MERGE}")
    return tuple(names)


def _saved_norms(options: dict[str, Any], where: Path) -> bool:
    names = options.get("modules_to_save") or []
    if names and (not isinstance(names, list) or set(map(str, names)) != set(NORMS)):
        raise UserError(
            f"{where}: modules_to_save is {shown(repr(names))}; supported: none, or {', '.join(NORMS)} together. "
            f"{_MERGE}"
        )
    return bool(names)
