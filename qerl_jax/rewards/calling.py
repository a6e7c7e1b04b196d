"""One call of a reward function: which columns it gets, and what it may return.

Runs in the training process for built-in functions and in the worker program for a user's.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from qerl_jax.errors import UserError, nearest
from qerl_jax.rewards.functions import RewardFunction

_ARGUMENTS = ("prompts", "completions", "completion_ids")
# Beyond it the squares of a group's standard deviation leave float32's range.
LARGEST = 1e15


def call(
    spec: str,
    function: RewardFunction,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
) -> list[float | None]:
    """Calls `function` and checks what it returns; its own exceptions pass through.

    Args:
      spec: the function's name in the config, for messages.
      prompts, completions, completion_ids, columns: one entry for each completion. A function without `**columns` gets
        the columns that it names.

    Raises:
      UserError: a column that the function needs is missing, or the result is not a list of finite numbers and None,
        one for each completion.
    """
    given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    arguments = given | _accepted(spec, function, columns)
    return checked(spec, function(**arguments), len(completions))


def _accepted(spec: str, function: RewardFunction, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature to read
        return columns
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and parameter.name not in _ARGUMENTS and parameter.name not in columns:
            raise UserError(
                f"reward function {spec!r} needs a column {parameter.name!r}{nearest(parameter.name, columns)}; the "
                f"data set has {', '.join(sorted(columns)) or 'no columns besides prompt'}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    names = {parameter.name for parameter in parameters}
    return {name: values for name, values in columns.items() if name in names}


def checked(spec: str, values: Any, count: int) -> list[float | None]:
    """`values` as a list of `count` floats and None.

    Raises:
      UserError: naming the function and the row that is wrong.
    """
    if isinstance(values, (str, bytes, dict)) or not (isinstance(values, Sequence) or hasattr(values, "__array__")):
        raise UserError(
            f"reward function {spec!r} returned {_shown(values)}; expected a list of {count} numbers or None"
        )
    values = list(values)
    if len(values) != count:
        raise UserError(f"reward function {spec!r} returned {len(values)} scores; expected {count}, one per completion")
    return [_number(spec, row, value) for row, value in enumerate(values)]


def _number(spec: str, row: int, value: Any) -> float | None:
    if value is None:
        return None
    number = None
    if not isinstance(value, (str, bytes)):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is None or not abs(number) <= LARGEST:
        raise UserError(
            f"reward function {spec!r} returned {_shown(value)} for row {row}; expected a number from -{LARGEST:g} to "
            f"{LARGEST:g}, or None where it does not apply"
        )
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}... ({type(value).__name__})" if len(text) > 80 else f"{text} ({type(value).__name__})"
