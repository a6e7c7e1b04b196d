"""Counter-based random numbers: splitmix64 (Steele, Lea and Flood, OOPSLA 2014) as a keyed hash over arrays.

A value depends on its key alone, never on a generator's state or on the numpy version (whose `Generator` methods may
change their streams between releases).
"""

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mix(values: np.ndarray) -> np.ndarray:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def _unsigned(part: int | np.ndarray) -> np.ndarray:
    if isinstance(part, int):
        return np.full(1, part & _MASK, np.uint64)
    return np.atleast_1d(np.asarray(part)).astype(np.uint64)


def fold(*parts: int | np.ndarray) -> np.ndarray:
    """Hash of the broadcast integer `parts`, uint64 with at least one dimension."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _mix(key ^ _mix(_unsigned(part)))
    return key


def draw(key: np.ndarray, places: Sequence[int], bound: int) -> np.ndarray:
    """Integers in 0..bound-1 (bound <= 2^32), one per key [N] and place [M]: [N, M] int64.

    Multiply-shift of the upper 32 bits, so the probabilities are even to 2^-32 * bound.
    """
    bits = fold(key[:, None], np.asarray(places, np.int64)[None, :]) >> np.uint64(32)
    return ((bits * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)
