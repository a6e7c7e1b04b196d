"""The built-in reward functions.

A reward function has the signature `f(prompts, completions, completion_ids, **columns) -> list[float | None]`: one
score for each completion, None where it does not apply. `columns` are the data set's other columns, one entry for each
completion. For conversational prompts a completion is `[{"role": "assistant", "content": ...}]`. The built-in functions
name the columns that they read, since those that a function takes are copied for each call.

What a built-in function takes by position only, in front, are its parameters: options of the config of the same names,
which `with_parameters` binds. So a column may have the name of a parameter.
"""

import decimal
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from qerl_jax.errors import UserError

RewardFunction = Callable[..., list[float | None]]

MARKER = "####"
# Digits, with or without commas between thousands, a decimal part, a power of ten; a sign and a divisor where they are.
_SIGN, _EXPONENT = r"[-+\u2212]", r"[eE]([-+]?[0-9]+)"
_UNSIGNED = rf"(?:(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:{_EXPONENT})?"
_SIGNED = rf"{_SIGN}?(?>{_UNSIGNED}(?:/{_UNSIGNED})?)"
_NUMBER = re.compile(_SIGNED)
# In a text: not where digits go on before or after it, behind a comma, nor in a power. Between numbers a - is no sign.
_WHOLE = rf"(?<![0-9,^])(?<![0-9]\.)(?<![,^]{_SIGN}){_SIGNED}(?![0-9^]|[.,][0-9])"
_IN_TEXT = re.compile(_WHOLE)
_NO_LETTER_BEFORE = re.compile(rf"(?<!\w)(?<![^\W\d]{_SIGN}){_WHOLE}")
_SIGNED_DOLLARS = re.compile(rf"({_SIGN})\$")
# More digits than any answer has, written out or as a power of ten; Python itself refuses to convert more than 4300.
_MOST_DIGITS = 1000


def completion_text(completion: str | Sequence[dict[str, str]]) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number_value(text: str) -> Fraction | None:
    """The exact value of a text that is one number as `final_number` knows it, None where it is none, or has no value
    (x/0, or absurdly long)."""
    return _value(text) if _NUMBER.fullmatch(text) else None


def _value(text: str) -> Fraction | None:
    """The exact value of a matched number, None where it has none (x/0, or absurdly long)."""
    if len(text) > _MOST_DIGITS or any(abs(int(power)) > _MOST_DIGITS for power in re.findall(_EXPONENT, text)):
        return None
    numerator, _, denominator = text.replace(",", "").replace("\u2212", "-").partition("/")
    divisor = Fraction(denominator or 1)
    return Fraction(numerator) / divisor if divisor else None


def final_number(text: str) -> Fraction | None:
    """The last number after the last `####`, None where there is none.

    `1,234.50`, `-3`, `.5`, `3/4` and `1.5e-3` are numbers, with a hyphen or U+2212 for the minus; `-$3` is `$-3`.
    Anything else beside a number, such as a unit, is passed over.

    No part of `1,2345`, `1.2.3`, `3,4` or `2^10` is a number: none is written as one, and one cannot tell which is
    meant. In `5-7` the last number is 7. A number right behind a letter, as in `12 m2` and `5 s-1`, belongs to the
    unit; it counts only where there is no other (`Rs50`).
    """
    _, marker, tail = text.rpartition(MARKER)
    tail = _SIGNED_DOLLARS.sub(r"\1", tail) if marker else ""
    found = list(_NO_LETTER_BEFORE.finditer(tail)) or list(_IN_TEXT.finditer(tail))
    return _value(found[-1][0]) if found else None


def _expected(answer: Any, row: int) -> Fraction:
    """The value of an entry of column `answer`: a number, or a text that is one or ends in `#### number`."""
    number: Fraction | None = None
    if isinstance(answer, (int, Fraction, decimal.Decimal)) and not isinstance(answer, bool):
        number = Fraction(answer)
    elif isinstance(answer, float):
        # 0.1 means the decimal the user wrote, not its binary neighbour.
        number = Fraction(repr(answer)) if abs(answer) < float("inf") else None
    elif isinstance(answer, str):
        text = _SIGNED_DOLLARS.sub(r"\1", answer.rpartition(MARKER)[2]).strip().removeprefix("$")
        number = number_value(text)
    if number is None:
        raise UserError(
            f"reward accuracy: column answer of row {row} (counted from 0) is {answer!r}; expected a number, a text "
            f"such as '1,234.5', or one that ends in '{MARKER} 1234.5'"
        )
    return number


def accuracy(
    prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[Any]
) -> list[float | None]:
    """1 where the completion's final number (see `final_number`) equals column `answer` exactly, else 0.

    Whole numbers are compared as fractions: `12` is not `1`, and `12.0`, `12` and `24/2` are one answer. None where the
    row's answer is None.

    Raises:
      UserError: an entry of `answer` that is not a number.
    """
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        if expected is None:
            scores.append(None)
            continue
        scores.append(float(final_number(completion_text(completion)) == _expected(expected, row)))
    return scores


def format(prompts: list[Any], completions: list[Any], completion_ids: list[Any]) -> list[float | None]:
    """1 where the completion is well-formed, else 0: it holds `####` once, then one number, then nothing."""
    return [float(well_formed(completion_text(completion))) for completion in completions]


def well_formed(text: str) -> bool:
    """Whether `text` ends in `#### number` and holds `####` only there."""
    head, _, tail = text.partition(MARKER)
    return len(head) < len(text) and _NUMBER.fullmatch(tail.strip()) is not None


def soft_overlong_punishment(
    max_completion_length: int,
    soft_punish_cache: int,
    /,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
) -> list[float | None]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4, equation 13), by the tokens of a completion.

    0 up to max_completion_length - soft_punish_cache tokens, the EOS included, then falling linearly to -1 at
    max_completion_length.
    """
    longest_free = max_completion_length - soft_punish_cache
    return [min(0.0, max(-1.0, (longest_free - len(ids)) / soft_punish_cache)) for ids in completion_ids]


BUILTIN: dict[str, RewardFunction] = {
    "accuracy": accuracy,
    "format": format,
    "soft_overlong_punishment": soft_overlong_punishment,
}


def with_parameters(name: str, parameters: Mapping[str, int | None]) -> RewardFunction:
    """The built-in function `name`, its parameters bound to those of `parameters`, which may hold more."""
    function = BUILTIN[name]
    taken = [key for key, p in inspect.signature(function).parameters.items() if p.kind is p.POSITIONAL_ONLY]
    return functools.partial(function, *(parameters[key] for key in taken)) if taken else function
