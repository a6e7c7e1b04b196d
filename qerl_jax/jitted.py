"""Functions with loops that scripts also call outside of jit."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_Function = TypeVar("_Function", bound=Callable[..., Any])


def jitted_unless_traced(*static: str) -> Callable[[_Function], _Function]:
    """Decorates a function that is a program of its own where it is called outside of jit, and else a part of the
    caller's.

    Outside of jit a bare loop would be traced and compiled in every call, and its program kept, until the process has
    no room for another.

    Args:
      static: the arguments that are no arrays, which must be hashable.
    """

    def decorate(function: _Function) -> _Function:
        program = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
            return (function if traced else program)(*arguments)

        return call  # type: ignore[return-value]

    return decorate
