"""Functions of a user's own in place of a run's configured loss and advantages, and how a run recognizes them.

A function is recognized by its source, by that of the functions and classes of its module which it uses, and by the
values that it has bound, closes over or reads there. Functions and classes of other modules are recognized by name, and
what such a module has made, as optax makes schedules, by the values that it holds too. A value that another process
could not compare is refused.
"""

import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import logging
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from qerl_jax.config import Config, GrpoOptions
from qerl_jax.errors import UserError
from qerl_jax.rl.advantages import AdvantageFn
from qerl_jax.rl.losses import LossFn, LossSpec
from qerl_jax.run_folder import NO_OWN_FUNCTIONS

_log = logging.getLogger(__name__)


class OwnFunctions(NamedTuple):
    """A loss and an advantage function, where a run has its own: see `qerl_jax.rl.update.update_step`."""

    loss_fn: LossFn | None = None
    advantage_fn: AdvantageFn | None = None

    def identity(self) -> dict[str, str]:
        """What a run's identity holds of them.

        Raises:
          UserError: one of them is no function, has no source, or reads what another process could not compare.
        """
        own = dict(zip(NO_OWN_FUNCTIONS, self, strict=True))
        return NO_OWN_FUNCTIONS | {
            name: _digest(name, function) for name, function in own.items() if function is not None
        }

    def warn_of_options(self, config: Config) -> None:
        """Warns of options that were set, but that one of the functions replaces."""
        options = {"loss_fn": _OF_LOSS, "advantage_fn": ("scale_rewards",)}
        for name, replaced in options.items():
            given = [option for option in replaced if getattr(config.grpo, option) != getattr(GrpoOptions(), option)]
            if given and getattr(self, name) is not None:
                _log.warning("%s takes the place of %s", name, ", ".join(f"grpo.{option}" for option in given))


NO_FUNCTIONS = OwnFunctions()
# But for beta, which says whether a loss of one's own is given the reference.
_OF_LOSS = [field.name for field in dataclasses.fields(LossSpec) if field.name != "beta"]
_RULES = "fwd", "bwd", "jvp"  # of jax.custom_vjp and jax.custom_jvp
_READING = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}  # the last by type parameters in a class


def _digest(what: str, function: Any) -> str:
    called = function
    while not _is_own(called) and (inner := _inside(called)) is not None:
        called = inner
    if not isinstance(called, FunctionType):
        raise UserError(
            f"the {what} is {function!r:.60}; expected a function of Python's, or functools.partial or jax.jit of one"
        )
    try:
        lines = "\n".join(_lines(function, _home(called), set()))
    except _Unknown as unknown:
        raise UserError(
            f"the {what} {called.__qualname__} reads {unknown}, which a run that is continued could not know again; "
            "expected numbers, texts, arrays, enums, and dataclasses, lists, tuples, sets and dictionaries of them"
        ) from None
    except RecursionError:
        raise UserError(f"the {what} {called.__qualname__} reads something that holds itself") from None
    return f"{called.__qualname__}, sha256 {hashlib.sha256(lines.encode()).hexdigest()[:16]}"


class _Unknown(Exception):
    """A value of which another process could not tell whether it has the same."""


def _home(function: FunctionType) -> str:
    """The module that a function is written in. Its __module__ may be another's, copied by functools.wraps."""
    return str(function.__globals__.get("__name__"))


def _is_own(value: Any) -> bool:
    """Whether it is a function, and not a wrapper that another module has made."""
    return isinstance(value, FunctionType) and _home(value) == value.__module__


def _inside(function: Any) -> Any:
    """What functools.partial or a transformation such as jax.jit has made `function` of; None where neither has."""
    return function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


def _lines(value: Any, module: str, seen: set[Any]) -> Iterator[str]:
    """A text that is the same for equal values; only functions and classes of `module` are read, others are named."""
    if not isinstance(value, type) and type(value).__module__ == module:
        yield from _lines(type(value), module, seen)
    if isinstance(value, functools.partial):
        yield "partial"
        for part in (value.func, value.args, value.keywords):
            yield from _lines(part, module, seen)
    elif isinstance(value, FunctionType) and _home(value) == module:
        yield value.__qualname__
        if value not in seen:
            seen.add(value)
            yield _source(value)
            yield from _lines((value.__defaults__, value.__kwdefaults__, dict(_used(value))), module, seen)
    elif isinstance(value, type) and value.__module__ == module:
        yield value.__qualname__
        if value not in seen:
            seen.add(value)
            yield from _lines((value.__bases__, list(_members(value))), module, seen)
    elif isinstance(value, MethodType):
        yield from _lines((value.__self__, value.__func__), module, seen)
    elif callable(value) and not isinstance(value, type) and (inner := _inside(value)) is not None:
        yield type(value).__qualname__
        for part in (inner, *(getattr(value, rule, None) for rule in _RULES)):
            yield from _lines(part, module, seen)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _lines(name, module, seen)
            yield from _lines(part, module, seen)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for part in value:
            yield from _lines(part, module, seen)
    elif isinstance(value, set | frozenset):
        # Each by itself: whatever order a set has, none is shorter because another one came before it.
        yield from sorted("\n".join(_lines(part, module, set(seen))) for part in value)
    elif isinstance(value, enum.Enum | range | slice | int | float | complex | str | bytes | np.dtype | None):
        yield repr(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__
        for field in dataclasses.fields(value):
            yield from _lines(getattr(value, field.name), module, seen)
    elif hasattr(value, "dtype") and hasattr(value, "__array__"):
        array = np.asarray(value)
        yield f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    elif isinstance(value, ModuleType | type) or (callable(value) and type(value).__module__ != module):
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
        yield f"{getattr(value, '__module__', '')} {name}"
        if id(value) not in seen:
            yield from _lines(_held(value), module, seen | {id(value)})
    else:
        raise _Unknown(f"{value!r:.60}")


def _held(value: Any) -> Any:
    """What a function or an object that code of another module has made holds; nothing of what has a name there."""
    if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
        return value.__defaults__ or (), value.__kwdefaults__ or {}, dict(_closed_over(value))
    if isinstance(value, ModuleType | type) or hasattr(value, "__name__"):
        return {}
    return getattr(value, "__dict__", {})


def _members(own: type) -> Iterator[tuple[str, Any]]:
    """A class's functions that somebody wrote, and its values; not what Python keeps or generates for it."""
    for name, member in vars(own).items():
        if isinstance(member, property):
            parts = [member.fget, member.fset]
        elif isinstance(member, functools.cached_property):
            parts = [member.func]
        else:
            parts = [getattr(member, "__func__", member)]  # of static and class methods
        for part in parts:
            if isinstance(part, FunctionType):
                is_read = not _is_generated(part)
            else:
                kept = name.startswith("__") or name == "_abc_impl"
                is_read = not kept and (callable(part) or not hasattr(part, "__get__"))
            if is_read:
                yield name, part


def _is_generated(function: FunctionType) -> bool:
    """Whether nobody wrote it, as those of a dataclass. What is typed into Python or IPython has no file either, but
    the name that it was compiled with."""
    code = inspect.unwrap(function).__code__
    return code.co_filename.startswith("<") and code.co_qualname != function.__qualname__


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function.__code__))  # of itself, not of what it wraps
    except OSError:
        raise UserError(
            f"{function.__qualname__} has no source to read, by which a run that is continued would know it; write it "
            "into a file"
        ) from None


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names that a function reads from outside, with their present values."""
    yield from _closed_over(function)
    for name in sorted(set(_names(function.__code__)) & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is bound to it yet
            yield name, cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    """Names that are read as globals, which attributes and imports in `co_names` are not."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in _READING)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
