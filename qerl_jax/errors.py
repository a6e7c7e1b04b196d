"""The one exception for mistakes that a user can mend, and what its messages are made with."""

import dataclasses
import difflib
import numbers
import re
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(ValueError):
    """What was wrong, where, what is allowed and what to do. The command line prints it without a traceback."""


def shown(value: object, length: int = 200) -> str:
    """Text from a file for a message: on one line whatever is in it, and cut where it is long."""
    text = str(value)
    if len(text) > length:
        text = f"{text[:length]}..."
    return text if text.isprintable() else ascii(text)[1:-1]


def on_terminal(text: str) -> str:
    """Text of several lines for a terminal, which would obey control characters (clear its screen, say, or set its
    title): all but line breaks and tabs as escapes such as `\\x1b`."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def raised_by_tokenizers(error: BaseException) -> bool:
    """Whether the tokenizers library raised it, of a malformed file: it has no narrower class, and Rust's panics are no
    Exception."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def check_fields(settings: object, *checks: tuple[str, bool, str]) -> None:
    """Raises UserError for the first field that is not as it should be: (its name, whether it is, what is allowed)."""
    for name, fine, allowed in checks:
        if not fine:
            raise UserError(f"{name} is {getattr(settings, name)!r}; allowed: {allowed}")


def check_kind(name: str, value: object, kind: type, how: str = "") -> None:
    """Raises TypeError for an argument that is of another kind; `how` says where one comes from."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} is of type {type(value).__name__}; expected {article} {kind.__name__}{how}")


def is_whole(value: object) -> bool:
    """Whether it is a whole number of Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number of Python's or NumPy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def settle_fields(settings: Any) -> None:
    """Makes Python's numbers of NumPy's in a dataclass, whose float64 would widen what it meets where JAX has 64 bits.
    Raises UserError for the first field that is annotated as a number and is none, or as a Literal and is none of its
    values. Other fields are not looked at."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise UserError(f"{field.name} is {value!r:.60}; allowed: {', '.join(get_args(hint))}")
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not (int in kinds or float in kinds) or (value is None and type(None) in kinds):
            continue
        if not (is_whole(value) or (float in kinds and is_number(value))):
            allowed = "a number" if float in kinds else "a whole number"
            raise UserError(f"{field.name} is {value!r:.60}; allowed: {allowed} of Python's or NumPy's")
        object.__setattr__(settings, field.name, int(value) if is_whole(value) else float(value))  # it may be frozen


def beginning(prompt: object) -> str:
    """How a prompt, a text or messages, begins; of messages the last one."""
    text = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    return repr(str(text)[:60])


def nearest(name: object, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """` (did you mean 'x'?)` for the known name closest to `name`, which may be no text, or an empty string when none
    is close.

    A name that is right elsewhere was not misspelt, and has none.
    """
    text = str(name)
    if text in elsewhere:
        return ""
    match = difflib.get_close_matches(text, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def nearest_beside(folder: Path) -> str:
    """As `nearest`, for a folder that is missing: the closest of those that lie where it should."""
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    return nearest(folder.name, [path.name for path in beside if path.is_dir()])
