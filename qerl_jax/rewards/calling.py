"""One call of a reward function: which columns it gets, and what it may return.

Runs in the training process for built-in functions and in the worker program for a user's.
"""

import asyncio
import atexit
import copy
import functools
import inspect
import traceback
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.errors import UserError, beginning, nearest
from qerl_jax.rewards.functions import RewardFunction

ARGUMENTS = ("prompts", "completions", "completion_ids")
# Beyond it the squares of a group's standard deviation leave float32's range.
LARGEST = 1e15


class Overdue(Exception):
    """A coroutine was cancelled at its deadline; the text says where it stood."""


def call(
    spec: str,
    function: RewardFunction,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
    deadline: float | None = None,
) -> list[float | None]:
    """Calls `function`, awaits a coroutine that it returns, and checks the values; its own exceptions pass through.

    Args:
      spec: the function's name in the config, for messages.
      prompts, completions, completion_ids, columns: one entry for each completion, of which the function gets copies. A
        function without `**columns` gets the columns that it names.
      deadline: when a coroutine is cancelled, by `time.monotonic`; None for never.

    Raises:
      Overdue: it was cancelled.
      UserError: see `accepted` and `checked`.
    """
    given = {"prompts": prompts, "completions": completions}
    given |= {name: columns[name] for name in accepted(spec, function, list(columns))}
    # A function may change what it is given. Other completions of the group, which have the same row, the next function
    # and `prompts` below must not see that.
    arguments: dict[str, Any] = {name: [copy.deepcopy(value) for value in values] for name, values in given.items()}
    # Not by deepcopy, which looks at each id: 40 ms for 256 completions of 1,024 tokens.
    values = function(**arguments, completion_ids=[list(ids) for ids in completion_ids])
    if inspect.isawaitable(values):
        values = _runner().run(_awaited(values, deadline))
    return checked(spec, values, prompts)


@functools.cache
def _runner() -> asyncio.Runner:
    """The event loop of all calls in this process: what a function has made in one (a semaphore, a client, a task) is
    good in the next."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


async def _awaited(values: Awaitable[Any], deadline: float | None) -> Any:
    where, limit = "", asyncio.timeout_at(deadline)
    try:
        async with limit:
            found = await values
    except BaseException as error:
        if not limit.expired():
            raise
        trace = traceback.format_tb((error.__cause__ or error).__traceback__)
        where = "".join(entry for entry in trace if __file__ not in entry).rstrip()
    if limit.expired():  # also where the function took its being cancelled for another failure, and gave a score
        raise Overdue(where)
    return found


def accepted(spec: str, function: RewardFunction, columns: Collection[str]) -> list[str]:
    """Those of a data set's columns that the function takes.

    Raises:
      UserError: it does not take `ARGUMENTS`, it takes something by position only, a column has the name of one of
        `ARGUMENTS`, or a column that it needs is missing.
    """
    taken = [name for name in ARGUMENTS if name in columns]
    if taken:
        raise UserError(
            f"column {taken[0]!r} has the name of what every reward function is given ({', '.join(ARGUMENTS)}); call "
            "the column something else"
        )
    try:
        parameters = _parameters(function)
    except (TypeError, ValueError):  # some callables written in C have no signature to read
        return list(columns)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(
                f"reward function {spec!r} takes {name!r} by position only; every argument is given by its name: take "
                "the / out of the function's parameters"
            )
    by_name = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for name, parameter in by_name.items():
        if parameter.default is parameter.empty and name not in (*ARGUMENTS, *columns):
            raise UserError(
                f"reward function {spec!r} needs a column {name!r}{nearest(name, columns)}; the data set has "
                f"{', '.join(sorted(columns)) or 'no columns besides prompt'}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(columns)
    missing = [name for name in ARGUMENTS if name not in by_name]
    if missing:
        raise UserError(
            f"reward function {spec!r} does not take {', '.join(missing)}; expected (prompts, completions, "
            "completion_ids, and the columns that it reads or **columns)"
        )
    return [name for name in columns if name in by_name]


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """Those that the function takes itself; of a decorator's `*args, **kwargs`, those of what it wraps."""
    own = inspect.signature(function, follow_wrapped=False).parameters
    hands_on = all(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in own.values())
    return inspect.signature(function).parameters if hands_on else own


def checked(spec: str, values: Any, prompts: Sequence[Any]) -> list[float | None]:
    """`values` as a list of floats and None, one for each prompt.

    Raises:
      UserError: naming the function, and the row that is wrong by its prompt.
    """
    count = len(prompts)
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if inspect.iscoroutine(value):
            value.close()  # or Python warns that nobody awaited it, before the message that says more
    is_list = isinstance(values, Sequence) or (hasattr(values, "__array__") and np.ndim(values) > 0)
    if isinstance(values, (str, bytes, dict)) or not is_list:
        raise UserError(
            f"reward function {spec!r} returned {_shown(values)}; expected a list of {count} numbers or None"
        )
    if len(shape := np.shape(values) if hasattr(values, "__array__") else ()) > 1:
        flat = "; .reshape(-1) makes it one" if np.prod(shape) == count else ""
        raise UserError(
            f"reward function {spec!r} returned an array of shape {tuple(shape)}; expected a list of {count} numbers "
            f"or None, or an array of shape ({count},){flat}"
        )
    values = list(values)
    if len(values) != count:
        raise UserError(f"reward function {spec!r} returned {len(values)} scores; expected {count}, one per completion")
    return [_number(spec, value, prompt) for prompt, value in zip(prompts, values, strict=True)]


def _number(spec: str, value: Any, prompt: Any) -> float | None:
    if value is None:
        return None
    number = None
    if not isinstance(value, (str, bytes, complex, np.complexfloating)):  # NumPy drops imaginary parts
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is None or not abs(number) <= LARGEST:
        raise UserError(
            f"reward function {spec!r} returned {_shown(value)} for a completion of the prompt that begins "
            f"{beginning(prompt)}; expected a number from -{LARGEST:g} to {LARGEST:g}, or None where it does not apply"
        )
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}... ({type(value).__name__})" if len(text) > 80 else f"{text} ({type(value).__name__})"
