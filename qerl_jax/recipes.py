"""Recipes: YAML 1.2 files of options, the ones that ship with the package, and overrides from the command line.

YAML 1.2 (ruamel), because 1.1 reads `1e-5` as a text and `off` as false. Each option remembers where it was set, so
that a later complaint can name the file and line.
"""

import dataclasses
import importlib.resources
import io
import json
import locale
import os
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from qerl_jax.durable import named, write_whole
from qerl_jax.errors import UserError, nearest
from qerl_jax.run_files import CONFIG, is_run

# What reading a text as YAML raises: ValueError for a date that is none, RecursionError for brackets without an end.
_UNREADABLE = YAMLError, ValueError, RecursionError
_MERGE = "tag:yaml.org,2002:merge"
_MOST_VALUES = 100_000  # of a file with its aliases written out
_UNFOLDED = 2**30  # columns; where ruamel folds a text at a backslash, it reads back with a space there
_LINE_BREAKS = "\x85\u2028\u2029"  # which ruamel writes as they are, and may read back as a space


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an option was set; as a text, the start of a message about it."""

    place: str
    override: bool = False

    def __str__(self) -> str:
        return f"{self.place}: "


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What was read: the name of the run, nested values, and the source of every dotted option.

    `run` is the run folder that the file is the config of, None for any other file.
    """

    name: str
    values: dict[str, Any]
    sources: dict[str, Source]
    run: Path | None = None


def shipped_recipes() -> list[str]:
    """Names of the recipes in the package."""
    folder = importlib.resources.files("qerl_jax") / "configs"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_recipe(path_or_name: str, overrides: list[str]) -> Recipe:
    """Reads a file, or a shipped recipe (`quickstart`, or `configs/quickstart.yaml` where no such file exists).

    Raises:
      UserError: no such file or recipe, unreadable YAML (with line and column), not a mapping, a repeated key, an
        override that is not `section.option=value`.
    """
    path_or_name = os.path.expanduser(path_or_name)
    values, sources = _parse(_read_text(path_or_name), path_or_name)
    for override in overrides:
        _apply(override, values, sources)
    path = Path(path_or_name)
    run = named(path.parent) if path.name == CONFIG and is_run(path.parent) else None
    return Recipe(path.stem, values, sources, run)


def write_yaml(values: dict[str, Any], path: Path) -> None:
    """Writes nested dictionaries as block YAML, whole or not at all."""
    text = _dumped(values, readable=True)
    if any(mark in text for mark in _LINE_BREAKS):
        text = _dumped(values, readable=False)
    write_whole(path, text)


def _dumped(values: dict[str, Any], readable: bool) -> str:
    """Values as YAML; where not `readable`, with all that is not ASCII as escapes."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = _UNFOLDED
    yaml.allow_unicode = readable
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()


def _read_text(path_or_name: str) -> str:
    path = Path(path_or_name)
    bare = path.name == path_or_name and path.suffix not in (".yaml", ".yml")
    shipped = path.stem if bare or path.parent.name == "configs" else None
    if shipped in shipped_recipes() and (bare or not path.exists()):
        return (importlib.resources.files("qerl_jax") / "configs" / f"{shipped}.yaml").read_text("utf-8")
    if os.path.isdir(path):
        inside = path / CONFIG
        hint = f"; to continue this run name its config: {inside}" if inside.exists() else ""
        raise UserError(f"{path_or_name} is a folder; expected a YAML file or a shipped recipe{hint}")
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        names = shipped_recipes()
        raise UserError(
            f"{path_or_name}: no such file, and no shipped recipe of that name{nearest(path.stem, names)}; "
            f"shipped recipes: {', '.join(names)}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path_or_name}: not UTF-8 text (byte {error.start}); expected a YAML file") from None
    except OSError as error:
        raise UserError(f"{path_or_name}: cannot be read: {error.strerror}") from None


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[str, Source]]:
    try:
        node, values = _read_yaml(text)
        sources: dict[str, Source] = {}
        _locate(node, "", where, sources)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        problem = str(error.problem or error.context).splitlines()[0]
        raise UserError(f"{place}: not readable as YAML: {problem}") from None
    except _UNREADABLE as error:
        raise UserError(f"{where}: not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(
            f"{where}: found {found}; expected sections with options, such as `optimizer: {{max_steps: 10}}`"
        )
    # A section whose options are all commented out is null to YAML.
    return {name: {} if section is None else section for name, section in values.items()}, sources


def _read_yaml(text: str) -> tuple[Node | None, Any]:
    """A text's nodes, which know their lines, and its value; raises what `_UNREADABLE` names."""
    node = YAML(typ="safe", pure=True).compose(text)
    _check_nodes(node)
    return node, YAML(typ="safe", pure=True).load(text)


def _check_nodes(node: Node | None) -> None:
    """Raises MarkedYAMLError where a mapping has a key twice (ruamel does not say where the first one is), or where
    something holds itself by an alias (ruamel accepts it) or more values than anybody means."""
    sizes: dict[Node, int] = {}

    def look(node: Node | None, mark: Any, around: tuple[Node, ...]) -> int:
        """How many values a node is with its aliases written out. `mark` is where the key or the list stands that holds
        the node: an alias is the anchor's own node."""
        if node in around:
            place, name = f"line {node.start_mark.line + 1}", node.anchor
            problem = f"*{name} is in what &{name} in {place} names, which would never end; write out what is meant"
            raise MarkedYAMLError(problem=problem, problem_mark=mark)
        if not isinstance(node, SequenceNode | MappingNode):
            return 1
        if node not in sizes:
            sizes[node] = 1 + parts(node, (*around, node))
        if sizes[node] > _MOST_VALUES:
            problem = f"it is {sizes[node]} values with all aliases written out; allowed: {_MOST_VALUES}"
            raise MarkedYAMLError(problem=problem, problem_mark=mark or node.start_mark)
        return sizes[node]

    def parts(node: SequenceNode | MappingNode, around: tuple[Node, ...]) -> int:
        if isinstance(node, SequenceNode):
            return sum(look(item, node.start_mark, around) for item in node.value)
        size = 0
        lines: dict[tuple[str | None, str], int] = {}
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                if (name := (key.tag, key.value)) in lines:
                    problem = f'found duplicate key "{key.value}", also in line {lines[name]}; keep one, for all of it'
                    raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[name] = key.start_mark.line + 1
            size += look(value, key.start_mark, around)
        return size

    look(node, None, ())


def _locate(node: Node | None, prefix: str, where: str, sources: dict[str, Source]) -> None:
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            sources[f"{prefix}{index}"] = Source(f"{where}, line {item.start_mark.line + 1}")
            _locate(item, f"{prefix}{index}.", where, sources)
    if not isinstance(node, MappingNode):
        return
    # First what `<<` takes over from other mappings, which the mapping's own options replace.
    for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
        if key.tag == _MERGE:
            for other in reversed(value.value) if isinstance(value, SequenceNode) else [value]:
                _locate(other, prefix, where, sources)
        else:
            option = f"{prefix}{key.value}"
            sources[option] = Source(f"{where}, line {key.start_mark.line + 1}")
            _locate(value, f"{option}.", where, sources)


def _apply(override: str, values: dict[str, Any], sources: dict[str, Source]) -> None:
    option, equals, text = override.partition("=")
    option = option.strip()
    if not equals or not all(option.split(".")):
        raise UserError(f"command line: {override!r} is not an override; expected section.option=value")
    if re.search("[\ud800-\udfff]", text):  # how Python stands for bytes that the locale cannot read
        raise UserError(
            f"command line: {option}: {text!r} has bytes that the locale, {locale.getpreferredencoding(False)}, cannot "
            "read; set LC_ALL=C.UTF-8, or give a file another name"
        )
    found: dict[str, Source] = {}
    try:
        node, value = _read_yaml(text)
        _set_by_override(option, value, found)
    except _UNREADABLE as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"command line: {option}: {text!r} is not readable as a YAML value: {reason}") from None
    if "#" in text[0 if node is None else node.end_mark.index :]:
        raise UserError(
            f"command line: {option}: in {text!r} YAML takes what follows # for a comment; quote the text, as in "
            f"{option}='\"{text}\"', or leave the comment out"
        )
    *parents, last = option.split(".")
    section = values
    for depth, parent in enumerate(parents):
        if section.get(parent) is None:  # not there, or null as a run's config has it
            section[parent] = {}
        inner = section[parent]
        if not isinstance(inner, dict):
            place = ".".join(parents[: depth + 1])
            raise UserError(f"command line: {override!r}: {place} is {inner!r} and has no options; set it as a whole")
        section = inner
    section[last] = value
    for old in [name for name in sources if name.startswith(f"{option}.")]:
        del sources[old]  # what was in the section is gone with it
    sources |= found


def text_override(option: str, text: str) -> str:
    """`option=text` as an override that sets a text, in quotes where YAML would read it as something else."""
    plain = f"{option}={text}"
    try:
        values: dict[str, Any] = {}
        _apply(plain, values, {})
        for part in option.split("."):
            values = values[part]
    except UserError:
        values = {}
    return plain if values == text else f"{option}={json.dumps(text, ensure_ascii=False)}"


def _set_by_override(option: str, value: Any, sources: dict[str, Source]) -> None:
    sources[option] = Source("command line", override=True)
    if isinstance(value, dict):
        for name, inner in value.items():
            _set_by_override(f"{option}.{name}", inner, sources)
