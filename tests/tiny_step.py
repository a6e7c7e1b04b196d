"""A rollout of a tiny network and its batch, for tests of the update and of the whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny import tiny_adapter, tiny_model

from qerl_jax.rl.state import UpdateSettings, init_state
from qerl_jax.rl.step import StepSettings, make_batch, sample_rollout, with_policies
from qerl_jax.rollout import Prompts, SamplingSettings

MODEL = tiny_model()
PROMPTS = Prompts(
    jnp.array([[5, 9, 11, 0], [7, 0, 0, 0], [20, 21, 22, 23]], jnp.int32), jnp.array([3, 1, 4]), jnp.arange(3)
)
SAMPLING = SamplingSettings(6, (3, 4, 10, 12, 50), 0)
UPDATE = UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=12)
SETTINGS = StepSettings(SAMPLING, UPDATE)
SGD = optax.sgd(0.1)


sampled = jax.jit(sample_rollout, static_argnames="settings")
scored = jax.jit(with_policies, static_argnames=("settings", "several_updates"))


def state_of(**kwargs):
    return init_state(tiny_adapter(MODEL, **kwargs), SGD)


def few_small_ids(prompts, completions):
    mask = jnp.arange(6) < completions.lengths[:, None]
    return jnp.sum(jnp.where(mask, completions.tokens < 30, 0), 1) / completions.lengths


def batch_of(settings=SETTINGS, state=None, several=False, step=0):
    state = state_of() if state is None else state
    out, _ = sampled(MODEL, state.adapter, PROMPTS, jax.random.key(2), jnp.int32(step), settings=settings)
    batch = make_batch(PROMPTS, out, few_small_ids(PROMPTS, out), jnp.int32(0), settings)
    return scored(MODEL, state.adapter, batch, settings=settings.update, several_updates=several)


def assert_trees_close(a, b, **tolerance):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, err_msg=jax.tree_util.keystr(path), **tolerance)
