"""What the tests on a GPU share."""

import secrets

import numpy as np
import pytest


@pytest.fixture(scope="module")
def rng():
    """Fresh numbers in each run; the seed is shown where a test fails."""
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)
