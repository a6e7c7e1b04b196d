"""Messages about options: pydantic's findings rendered as `where: section.option is VALUE; allowed: ...`."""

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic

from qerl_jax.errors import nearest

_UNKNOWN = "unexpected_keyword_argument"
_MISSING = "missing"
_NOT_TEXT = "invalid_key"
_OPTION = re.compile(r"\w+(?:\.\w+)+")


def render_validation_error(error: pydantic.ValidationError, root: type, sources: Mapping[str, object]) -> str:
    """One line per finding.

    Args:
      error: what pydantic found while making a `root`.
      root: the dataclass whose fields are the sections.
      sources: by dotted option, an object whose text starts the message (`file.yaml, line 3: `).
    """
    lines = [_render(finding, root, sources) for finding in error.errors()]
    return "\n".join(dict.fromkeys(line for line in lines if line))


def option_names(kind: type, prefix: str = "") -> list[str]:
    """Every dotted option below the dataclass `kind`, sections included."""
    names = []
    for name, hint in get_type_hints(kind).items():
        names.append(prefix + name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            names += option_names(hint, f"{prefix}{name}.")
    return names


def allowed(annotation: Any) -> str:
    """What an annotation admits, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((item for item in args[1:] if isinstance(item, str)), allowed(args[0]))
    if origin is Literal:
        return ", ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else allowed(arg) for arg in args)
    if origin is tuple:
        return f"a list of: {allowed(args[0])}"
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return f"a mapping with the options {', '.join(get_type_hints(annotation))}"
    return str(annotation)


def _render(finding: Any, root: type, sources: Mapping[str, object]) -> str:
    location: tuple[str | int, ...] = finding["loc"]
    if finding["type"] == "value_error" and not location:  # of options that do not go together
        return "\n".join(_placed(line, sources) for line in str(finding["ctx"]["error"]).splitlines())
    owner, annotation = _resolve(root, location)
    option = ".".join(map(str, location))
    start = _source(option, sources)
    if finding["type"] == _UNKNOWN:
        return f"{start}unknown {'option' if location[1:] else 'section'} {option}{_advice(owner, location, root)}"
    if finding["type"] == _NOT_TEXT:
        return f"{start}{location[-1]!r} is not the name of an option; allowed: {allowed(owner)}"
    if finding["type"] == _MISSING:
        return f"{start}{option} is missing; allowed: {allowed(annotation)}"
    return f"{start}{option or 'the configuration'} is {_shown(finding['input'])}; allowed: {allowed(annotation)}"


def _resolve(root: type, location: tuple[str | int, ...]) -> tuple[Any, Any]:
    """The innermost dataclass around the option at `location`, and the option's annotation; None where it has none."""
    owner: Any = root
    annotation: Any = root
    for part in location:
        if dataclasses.is_dataclass(annotation):
            owner = annotation
            annotation = get_type_hints(owner, include_extras=True).get(str(part))
        else:  # a list's, by its number
            annotation = get_args(annotation)[0]
    return owner, annotation


def _advice(owner: type, path: tuple[str | int, ...], root: type) -> str:
    """Where the unknown option lives, else the nearest name in its section, else the nearest one anywhere. For a known
    one that YAML has read as one word with its value, how to separate them."""
    known, name = list(get_type_hints(owner)), str(path[-1])
    before, colon, after = name.partition(":")
    if colon and before in known:
        return f"; YAML wants a space after the colon: `{before}: {after}`"
    section, dot, option = name.partition(".")
    if dot and not path[1:] and name in option_names(root):
        return f"; in a file a section holds its options: `{section}: {{{option}: ...}}`"
    homes: dict[str, list[str]] = {}
    for option in option_names(root):
        if "." in option:
            homes.setdefault(option.rsplit(".", 1)[1], []).append(option)
    if name in homes:
        return f": it lives in {' and '.join(homes[name])}"
    elsewhere = difflib.get_close_matches(name, homes, n=1, cutoff=0.6)
    hint = nearest(name, known)
    if not hint and elsewhere:
        hint = f" (did you mean {homes[elsewhere[0]][0]!r}?)"
    return f"{hint}; known here: {', '.join(known)}"


def _source(option: str, sources: Mapping[str, object]) -> str:
    """The source of the option, of something in it, or of the closest thing around it."""
    parts = option.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        inside = (source for key, source in sources.items() if key == name or key.startswith(f"{name}."))
        for source in inside:
            return str(source)
    return ""


def _placed(line: str, sources: Mapping[str, object]) -> str:
    """A line about options that do not go together, after the source of the first of them that was set."""
    return next((f"{sources[name]}{line}" for name in _OPTION.findall(line) if name in sources), line)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of so many digits
        return "a whole number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
