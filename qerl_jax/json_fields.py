"""Typed reading of a JSON object; an error names the file and the key."""

from collections.abc import Mapping
from typing import Any

from qerl_jax.errors import UserError, shown

_ALLOWED = {int: "a positive integer", float: "a positive number", bool: "true or false"}


class Fields:
    """The values of a JSON object. Null is the same as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def get[T: (int, float, bool)](self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`, `default` where it is absent. Numbers must be positive; an integer serves as a number.

        Raises:
          UserError: absent without a default, of another type, zero or negative, infinite or NaN, or an integer of
            2^63 or more.
        """
        value: Any = self._values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self._where}: {key} is missing")
            return default
        # From 2^63 on an integer is a mistake, and from 10^309 on no number that a float can hold.
        positive = isinstance(value, int | float) and 0 < value < (2**63 if type(value) is int else float("inf"))
        if positive and kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or not (positive or kind is bool):
            raise UserError(f"{self._where}: {key} is {shown(repr(value))}; expected {_ALLOWED[kind]}")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """The object at `key`, an empty one where it is absent.

        Raises:
          UserError: it is something else.
        """
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{self._where}: {key} is {shown(repr(value))}; expected an object")
        return value or {}
