"""An update on a CUDA device, of two layers in 7B's shapes: its gradients, the same bits each time, beside those of the
same weights multiplied by XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.shapes import MODELS, random_adapter, random_model
from benchmarks.update import random_batch
from qerl_jax.models.flash_attention import deterministic_jit
from qerl_jax.rl.state import UpdateSettings, init_state
from qerl_jax.rl.update import update_step

CONFIG = dataclasses.replace(MODELS["qwen2.5-7b"], num_hidden_layers=2, vocab_size=1024)
SGD = optax.sgd(1.0)  # whose changes are the gradients


def differences(config, batch, settings):
    """Of every array of an adapter the difference of both gradients over the size of the one without kernels."""
    step = deterministic_jit(functools.partial(update_step, optimizer=SGD, settings=settings))
    changes = []
    for kernels in (True, False):
        model = random_model(config, jnp.dtype(jnp.bfloat16), kernels=kernels)
        state = init_state(random_adapter(model, 32), SGD)
        after, metrics = step(state, model, batch)
        assert metrics["nonfinite"] == 0
        again, _ = step(state, model, batch)
        assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True))
        changes.append(jax.tree.map(lambda new, old: np.asarray(new - old, np.float64), after.adapter, state.adapter))
    return jax.tree.map(lambda a, b: float(((a - b) ** 2).mean() ** 0.5 / (b**2).mean() ** 0.5), *changes)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, size, checkpointed", [
    ([2048] * 2, 1, False),
    ([2048, 1500, 300, 33, 32, 900], 2, False),  # packs that are not full
    ([2048] * 4, 4, True),
])  # fmt: skip
def test_gradients_beside_those_without_kernels(lengths, size, checkpointed):
    batch = random_batch(CONFIG, len(lengths), 64, 2048, lengths)
    settings = UpdateSettings(len(lengths), 1.0, size, gradient_checkpointing=checkpointed)
    found = jax.tree_util.tree_leaves_with_path(differences(CONFIG, batch, settings))
    assert max(found, key=lambda entry: entry[1])[1] <= 0.1, found
