"""The log of a loop's steps."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.rollout import log


def test_what_was_recorded_is_read_bit_for_bit():
    tokens = jnp.array([[3, -2], [7, 2**31 - 1], [0, 5]], jnp.int32)
    logps = jnp.array([[-0.5, -np.inf], [np.nan, 1e-40], [-0.0, 1.5]], jnp.float32)

    def run():
        return jax.lax.fori_loop(0, 3, lambda i, kept: log.recorded(kept, i, tokens[i], logps[i]), log.empty(4, 2, 2))

    kept = jax.jit(run)()
    assert kept.shape == (4, 2, 2) and kept.dtype == jnp.int32
    first, second = log.read(kept, [jnp.int32, jnp.float32])
    np.testing.assert_array_equal(first, [[3, -2], [7, 2**31 - 1], [0, 5], [0, 0]])
    assert second.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(second)[:3].view(np.int32), np.asarray(logps).view(np.int32))
    np.testing.assert_array_equal(second[3], [0, 0])
