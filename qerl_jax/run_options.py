"""Which options of a run may change while it goes on, which are compared, and which name a place."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl_jax.config import Config
from qerl_jax.config_files import config_from_dict, config_to_dict, effective_options
from qerl_jax.data import dataset
from qerl_jax.errors import UserError
from qerl_jax.models import source
from qerl_jax.rewards import loading
from qerl_jax.rewards.loading import titles
from qerl_jax.run_files import CONFIG

OPTIONS = "options"  # in a checkpoint's progress, and in the summary of a finished run
# Options that say where something lies -> a function to the name that means the same thing in any working folder.
_PLACES = {
    "model.model_name_or_path": source.from_anywhere,
    "lora.adapter": source.from_anywhere,
    "data.train_dataset": dataset.from_anywhere,
    "evaluation.eval_dataset": dataset.from_anywhere,
}
_REWARDS = "reward.functions"
_MAPPINGS = {"data.chat_template_kwargs"}  # options whose value is a mapping
LOCATIONS = *_PLACES, _REWARDS
_POLICY = "model.", "lora."  # sections of a run that say what its policy is
# What may change between the two halves of a run without changing what it computes.
_FREE = {
    "run.output_dir",
    "run.save_steps",
    "run.save_total_limit",
    "run.log_completions",
    "run.report_to",
    "run.max_nonfinite_steps",
    "reward.timeout",
    "evaluation.eval_steps",
    "evaluation.batch_size",
}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted option; one that is a mapping as JSON, in which 1 is not true."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if not isinstance(value, dict):
            out[name] = value
        else:
            out |= {name: json.dumps(value)} if name in _MAPPINGS else _flat(value, f"{name}.")
    return out


def with_whole_paths(config: Config) -> Config:
    """The config by which the same things are found from any working folder."""
    values = config_to_dict(config)
    for option, from_anywhere in _PLACES.items():
        section, name = option.split(".")
        if values[section][name] is not None:
            values[section][name] = from_anywhere(values[section][name])
    _rename_functions(values, loading.from_anywhere)
    return config_from_dict(values)


def _rename_functions(values: dict[str, Any], rename: Callable[[str], str]) -> None:
    """Renames the reward functions of a config's nested options, and with them the metric of dynamic sampling."""
    functions, sampling = values["reward"]["functions"], values["grpo"]["dynamic_sampling"]
    given = titles([one["function"] for one in functions])
    for one in functions:
        one["function"] = rename(one["function"])
    if sampling["metric"] in given:  # a title may hold a path
        sampling["metric"] = titles([one["function"] for one in functions])[given.index(sampling["metric"])]


def refuse_what_has_gone(config: Config, folder: Path, *options: str) -> None:
    """Refuses a run, in `folder`, when what one of these options of its config names is no longer there.

    Raises:
      UserError: naming the option, the place, and the file to write another one into.
    """
    values = _flat(config_to_dict(config))
    functions = [one["function"].rpartition(":")[0] for one in values[_REWARDS]]
    for option in options:
        for place in functions if option == _REWARDS else [values[option]]:
            if place is not None and os.path.isabs(place) and not os.path.exists(place):
                raise UserError(
                    f"{option}: {place} is no longer there; put it back or, if it has moved, write its place into "
                    f"{folder / CONFIG}"
                )


def options_to_keep(config: Config) -> dict[str, Any]:
    """What each checkpoint keeps of its run's config, as OPTIONS of its progress, and the summary at the end: by name,
    the options with an effect that the run's course depends on. Places are left out: things may move, and the run's
    identity knows what they are."""
    return _without_places(effective_options(config))


def _without_places(values: dict[str, Any]) -> dict[str, Any]:
    _rename_functions(values, loading.without_place)
    return {name: value for name, value in _flat(values).items() if name not in _FREE | _PLACES.keys()}


def as_named_now(kept: dict[str, Any]) -> dict[str, Any]:
    """Options that a run has kept, by the names of this version: `constant` of an earlier one had a warm-up, and its
    ratio was kept with it."""
    kind = "optimizer.lr_scheduler_type"
    had_warm_up = kept.get(kind) == "constant" and "optimizer.warmup_ratio" in kept
    return kept | {kind: "constant_with_warmup"} if had_warm_up else kept


def changes(stored: Config, kept: dict[str, Any], given: Config) -> list[str]:
    """What differs and matters to the run's course, a line each.

    Where the options of the newest checkpoint, `kept`, differ from those of the file, `stored`, the file was edited,
    and the checkpoint's count. A checkpoint of an earlier version has none.
    """
    old, new = _flat(config_to_dict(stored)), _flat(config_to_dict(given))
    in_file, in_given = _without_places(config_to_dict(stored)), _without_places(config_to_dict(given))
    for name in kept.keys() & in_file.keys():
        if kept[name] != in_file[name]:
            old[name], new[name] = kept[name], in_given[name]
    return _differences(old, new, sorted((old.keys() | new.keys()) - _FREE))


def changes_of_policy(kept: dict[str, Any], stored: Config) -> list[str]:
    """How a run's file, `stored`, differs in its model and adapter from the options that the run has `kept`, a line
    each."""
    in_file = _without_places(config_to_dict(stored))
    if stored.model.dtype == "auto":  # which a run settles
        del in_file["model.dtype"]
    names = [name for name in sorted(kept.keys() & in_file.keys()) if name.startswith(_POLICY)]
    return _differences(kept, in_file, names)


def _differences(old: dict[str, Any], new: dict[str, Any], names: list[str]) -> list[str]:
    return [
        f"{name} was {old.get(name)!r}, is now {new.get(name)!r}" for name in names if old.get(name) != new.get(name)
    ]
