"""Functions of a user's own in the place of a run's configured loss and advantages, and how a run knows them again.

They are known by their source: a function's own, that of the functions of its module which it calls, and the values
which it has bound, closes over or reads there. Functions of other modules are known by name, other objects by their
type.
"""

import dataclasses
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.rl.advantages import AdvantageFn
from qerl_jax.rl.losses import LossFn
from qerl_jax.run_folder import NO_OWN_FUNCTIONS


class OwnFunctions(NamedTuple):
    """A loss and an advantage function, where a run has its own: see `qerl_jax.rl.update.update_step`."""

    loss_fn: LossFn | None = None
    advantage_fn: AdvantageFn | None = None

    def identity(self) -> dict[str, str]:
        """What a run's identity holds of them.

        Raises:
          UserError: one of them is no function, or has no source.
        """
        own = dict(zip(NO_OWN_FUNCTIONS, self, strict=True))
        return NO_OWN_FUNCTIONS | {
            name: _digest(name, function) for name, function in own.items() if function is not None
        }


NO_FUNCTIONS = OwnFunctions()


def _digest(what: str, function: Any) -> str:
    called = function
    while not isinstance(called, FunctionType) and (inner := _inside(called)) is not None:
        called = inner
    if not isinstance(called, FunctionType):
        raise UserError(
            f"the {what} is {function!r:.60}; expected a function of Python's, or functools.partial or jax.jit of one"
        )
    digest = hashlib.sha256("\n".join(_lines(function, called.__module__, set())).encode())
    return f"{called.__qualname__}, sha256 {digest.hexdigest()[:16]}"


def _inside(function: Any) -> Any:
    """What functools.partial or jax.jit has made `function` of; None where neither has."""
    return function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


def _lines(value: Any, module: str, seen: set[FunctionType]) -> Iterator[str]:
    """A text of a value that is the same where the value is; functions are read in `module` alone."""
    if isinstance(value, functools.partial):
        yield "partial"
        for part in (value.func, value.args, value.keywords):
            yield from _lines(part, module, seen)
    elif isinstance(value, FunctionType) and value.__module__ == module:
        yield value.__qualname__
        if value not in seen:
            seen.add(value)
            yield _source(value)
            yield from _lines((value.__defaults__, value.__kwdefaults__, dict(_used(value))), module, seen)
    elif isinstance(value, FunctionType | ModuleType | type):
        yield f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', value.__name__)}"
    elif callable(value) and (inner := _inside(value)) is not None:
        yield from _lines(inner, module, seen)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield repr(name)
            yield from _lines(part, module, seen)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for part in value:
            yield from _lines(part, module, seen)
    elif dataclasses.is_dataclass(value):
        yield type(value).__qualname__
        for field in dataclasses.fields(value):
            yield from _lines(getattr(value, field.name), module, seen)
    elif isinstance(value, int | float | complex | str | bytes | None):
        yield repr(value)
    elif hasattr(value, "dtype") and hasattr(value, "__array__"):
        array = np.asarray(value)
        yield f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    else:
        yield type(value).__qualname__


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function.__code__))  # of itself, not of what it wraps
    except OSError:
        raise UserError(
            f"{function.__qualname__} has no source to read, by which a run that is continued would know it; write it "
            "into a file"
        ) from None


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names that a function reads outside of itself, and their values by now."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents
    for name in sorted(set(_names(function.__code__)) & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
