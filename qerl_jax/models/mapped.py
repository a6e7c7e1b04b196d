"""From a mapped file to the device, without a second copy of a tensor in memory.

A tensor is copied a piece at a time into memory of its own, and the file's pages are released behind the copy. So
neither they nor a whole tensor in another dtype exist beside the result. On a CPU that memory becomes the device array.
"""

import mmap
from typing import Any

import jax
import numpy as np

_PIECE = 16 << 20  # bytes: long enough to read ahead, little against any tensor worth counting
_ALIGNMENT = 64  # XLA's CPU backend copies what is not aligned so


def to_device(view: np.ndarray, dtype: np.dtype | None = None) -> jax.Array:
    """`view` on the device, in `dtype` (None: as it is); nothing refers to the file afterwards.

    Args:
      view: contiguous array of any shape, commonly one of `read_safetensors`.
      dtype: conversion rounds to nearest even; what is beyond the dtype's largest number becomes infinite.
    """
    dtype = view.dtype if dtype is None else np.dtype(dtype)
    size = view.size * dtype.itemsize
    space = np.empty(size + _ALIGNMENT, np.uint8)
    start = -space.ctypes.data % _ALIGNMENT
    flat = space[start : start + size].view(dtype)
    source = view.reshape(-1)
    step = _PIECE // view.dtype.itemsize
    read_ahead(source[:step])
    for low in range(0, source.size, step):
        read_ahead(source[low + step : low + 2 * step])
        piece = source[low : low + step]
        with np.errstate(over="ignore"):
            flat[low : low + step] = piece.astype(dtype, copy=False)
        release(piece)
    return jax.block_until_ready(jax.device_put(flat.reshape(view.shape)))


def largest_magnitude(view: np.ndarray) -> np.ndarray:
    """max |x| of a floating-point array, a scalar of its dtype; infinite or NaN where an element is.

    Without the sign, the bits of floating-point numbers order as integers do, NaN last.
    """
    bits = np.dtype(f"u{view.dtype.itemsize}")
    mask = bits.type(np.iinfo(bits).max >> 1)
    source = view.reshape(-1)
    step = _PIECE // bits.itemsize
    top = bits.type(0)
    for low in range(0, source.size, step):
        read_ahead(source[low + step : low + 2 * step])
        piece = source[low : low + step]
        top = np.maximum(top, (piece.view(bits) & mask).max())
        release(piece)
    return np.asarray(top).view(view.dtype)


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two contiguous arrays hold the same bytes."""
    first, second = (view.reshape(-1).view(np.uint8) for view in (one, other))
    if first.size != second.size:
        return False
    for low in range(0, first.size, _PIECE):
        pieces = first[low : low + _PIECE], second[low : low + _PIECE]
        if not np.array_equal(*pieces):
            return False
        for piece in pieces:
            release(piece)
    return True


def read_ahead(view: np.ndarray) -> None:
    """Asks the kernel to fetch the pages of a mapped array; nothing happens for one that is not mapped."""
    _advise(view, mmap.MADV_WILLNEED)


def release(view: np.ndarray) -> None:
    """Lets go of a mapped array's pages. It stays valid: its bytes are read again if they are used again."""
    _advise(view, mmap.MADV_DONTNEED)


def _advise(view: np.ndarray, advice: int) -> None:
    base: Any = view
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else None
    if not isinstance(mapped, mmap.mmap) or not view.size:
        return
    begin = view.ctypes.data - np.frombuffer(mapped, np.uint8, 1).ctypes.data
    page = begin - begin % mmap.PAGESIZE
    mapped.madvise(advice, page, begin + view.nbytes - page)
