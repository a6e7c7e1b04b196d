"""The counters through which CTAs of a kernel wait for each other, as the kernel is given them."""

import numpy as np


def first_counters(count: int) -> np.ndarray:
    """uint32 [count + 1], zeros, which every kernel leaves behind as it found them.

    The last word is no counter but one: with it XLA keeps the array as a constant, where zeros would be written anew by
    a kernel before each call.
    """
    words = np.zeros(count + 1, np.uint32)
    words[-1] = 1
    return words
