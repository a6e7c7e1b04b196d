"""Pytrees whose text is short: of an array it gives dtype and shape, as the arrays themselves may be gigabytes."""

import dataclasses
import itertools
from typing import Any

import flax.struct
import jax
import numpy as np


class Tree(flax.struct.PyTreeNode):
    """A pytree node for weights and what is trained. Its text reads no array, so nothing is copied from the device and
    one that was donated has a text too; equal neighbours, as layers are, are shown once with their number."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(repr=False, **options)

    def __repr__(self) -> str:
        return _text(self)


def _text(value: Any) -> str:
    if isinstance(value, Tree):
        names = (field.name for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(f'{name}={_text(getattr(value, name))}' for name in names)})"
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # of a NamedTuple, as optax's states are
        parts = (f"{name}={_text(part)}" for name, part in zip(value._fields, value, strict=True))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_text(part)}' for name, part in value.items())}}}"
    if isinstance(value, tuple | list):
        runs = [(text, len(list(run))) for text, run in itertools.groupby(map(_text, value))]
        return f"[{', '.join(text if count == 1 else f'{count} x {text}' for text, count in runs)}]"
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
