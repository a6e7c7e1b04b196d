"""Random networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG

from qerl_jax.models.init import init_model


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_weights_have_no_mean_and_the_asked_deviation(dtype):
    base = init_model(jax.random.key(0), CONFIG, dtype, std=0.02).base
    for weight in (base.embed, base.layers[0].up_proj, base.layers[1].q_proj):
        assert weight.dtype == dtype
        w = np.asarray(weight, np.float64)
        assert abs(w.mean()) < 4 * 0.02 / w.size**0.5
        assert w.std() == pytest.approx(0.02, rel=0.05)
        assert np.abs(w).max() > 3 * 0.02
