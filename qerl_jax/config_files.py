"""A `Config` from a YAML file with overrides, or from dictionaries, and back."""

import dataclasses
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from qerl_jax.config import Config
from qerl_jax.config_checks import options_without_effect
from qerl_jax.config_errors import render_validation_error
from qerl_jax.errors import UserError
from qerl_jax.recipes import Recipe, Source, read_recipe, write_yaml


def load_config(path_or_name: str, overrides: list[str] | None = None) -> Config:
    """Reads a YAML file, or a shipped recipe by its name, with `section.option=value` overrides (values are YAML).

    Null values with a meaning are filled in: run.output_dir becomes runs/<name of the file>, and
    grpo.steps_per_generation becomes gradient_accumulation_steps. The config.yaml of a run folder, which has that run's
    metrics.jsonl and completions.jsonl, or its checkpoints, beside it, means the folder that it lies in, however the
    folder was called when the run began; only an override of run.output_dir names another.

    Raises:
      UserError: the file cannot be read, or one line for each option that is unknown, has a value that is not
        allowed, does not go with another, or would have no effect. An option of the file that an override has made
        ineffective falls back to its default in silence: the override is the later word.
    """
    recipe = read_recipe(path_or_name, overrides or [])
    config = config_from_dict(recipe.values, recipe.sources)
    problems = []
    for option, (why, causes) in options_without_effect(config).items():
        given = [source for name, source in recipe.sources.items() if f"{name}.".startswith(f"{option}.")]
        later = any(cause in recipe.sources and recipe.sources[cause].override for cause in causes)
        latest = next((source for source in given if source.override), next(iter(given), None))
        if latest is not None and (latest.override or not later):
            problems.append(f"{latest}{_without_effect(option, why)}")
    if problems:
        raise UserError("\n".join(problems))
    run = dataclasses.replace(config.run, output_dir=_output_dir(config, recipe))
    return _settled(dataclasses.replace(config, run=run))


def settled_config(config: Config) -> Config:
    """The Config that stands for all that describe the same run. `load_config` gives such a one; a script may not.

    grpo.steps_per_generation is filled in, and options without an effect are at their defaults.

    Raises:
      UserError: one line for each option that would have no effect and is not at its default.
    """
    settled = _settled(config)
    problems = [
        _without_effect(option, why)
        for option, (why, _) in options_without_effect(config).items()
        if operator.attrgetter(option)(config) != operator.attrgetter(option)(settled)
    ]
    if problems:
        raise UserError("\n".join(problems))
    return settled


def _settled(config: Config) -> Config:
    """The config with options without effect at their defaults."""
    values = effective_options(config)
    values["grpo"]["steps_per_generation"] = config.steps_per_generation
    return config_from_dict(values)


def _without_effect(option: str, why: str) -> str:
    return f"{option} has no effect in this run: {why}; leave it out"


def _output_dir(config: Config, recipe: Recipe) -> str:
    given = recipe.sources.get("run.output_dir")
    if recipe.run is not None and not (given is not None and given.override):
        folder = str(recipe.run)
    else:
        folder = config.run.output_dir or str(Path("runs") / recipe.name)
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder!a}: a run's folder has a name in UTF-8; rename this one, or name another") from None
    return folder


def config_from_dict(values: dict[str, Any], sources: dict[str, Source] | None = None) -> Config:
    """A Config from nested dictionaries; `sources` says where each option was set, for the messages.

    Raises:
      UserError: one line for each option that is unknown or has a value that is not allowed.
    """
    try:
        return pydantic.TypeAdapter(Config).validate_python(values)
    except pydantic.ValidationError as error:
        raise UserError(render_validation_error(error, Config, sources or {})) from None


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested dictionaries, lists and scalars with every option; `config_from_dict` reads it back as an equal Config."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def save_yaml(config: Config, path: Path) -> None:
    """Writes every option in force to `path`, replacing it whole; `load_config` reads it back.

    Options that have no effect in this run are left out, since naming them would be an error when it is read.
    """
    write_yaml(effective_options(config), path)


def effective_options(config: Config) -> dict[str, Any]:
    """Nested dictionaries of the options that have an effect in the run."""
    values = config_to_dict(config)
    for option in options_without_effect(config):
        *parents, last = option.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        del section[last]
    return values
