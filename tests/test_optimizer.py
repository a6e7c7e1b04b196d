"""The learning rate's schedule by hand, and AdamW steps against the formula in NumPy."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from qerl_jax.models.params import Adapter, LoRA, TrainedNorms
from qerl_jax.rl.optimizer import OptimizerSpec, learning_rate_schedule, make_optimizer


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 10 steps, of which 2 rise; then 8 fall from the full rate, and would reach 0 at the eleventh.
        ("linear", [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]),
        ("constant", [1] * 11),
        ("constant_with_warmup", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("cosine", [0.5, 1, *((1 + np.cos(np.pi * np.arange(9) / 8)) / 2)]),
    ],
)
@pytest.mark.parametrize("ratio", [0.2, 0.11])  # 1.1 steps are rounded up
def test_the_rate_rises_and_falls(kind, expected, ratio):
    schedule = learning_rate_schedule(OptimizerSpec(3e-4, 10, kind, ratio))
    np.testing.assert_allclose([schedule(t) for t in range(11)], 3e-4 * np.array(expected), rtol=1e-5, atol=1e-10)
    np.testing.assert_allclose(schedule(12), 3e-4 * expected[-1], atol=1e-10)


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, [1, 0.75, 0.5, 0.25]), (1.0, [0.25, 0.5, 0.75, 1])])
def test_no_warm_up_and_nothing_but_warm_up(ratio, expected):
    schedule = learning_rate_schedule(OptimizerSpec(1.0, 4, "linear", ratio))
    np.testing.assert_allclose([schedule(t) for t in range(4)], expected, rtol=1e-6)


def adapter_of(seed):
    a, b, first, second = (jax.random.normal(key, (2, 3)) for key in jax.random.split(jax.random.key(seed), 4))
    return Adapter(({"q_proj": LoRA(a, b.T, 2.0)},), TrainedNorms(input=(first[0],), post_attention=(second[1],)))


@pytest.mark.parametrize("max_grad_norm", [0.2, 100.0])
def test_steps_are_those_of_adamw_which_decays_no_norm(max_grad_norm):
    spec = OptimizerSpec(1e-2, 4, "constant", 0.0, 0.1, 0.8, 0.95, 1e-3, max_grad_norm)
    optimizer, adapter = make_optimizer(spec), adapter_of(0)
    state = optimizer.init(adapter)
    expected = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(adapter)]
    decays = [0.1 if leaf.ndim == 2 else 0.0 for leaf in expected]
    means, squares = ([np.zeros_like(leaf) for leaf in expected] for _ in range(2))
    for t in (1, 2, 3):
        grads = adapter_of(t)
        updates, state = optimizer.update(grads, state, adapter)
        adapter = optax.apply_updates(adapter, updates)
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
        for i, leaf in enumerate(leaves):
            grad = leaf * min(1, max_grad_norm / norm)
            means[i] = 0.8 * means[i] + 0.2 * grad
            squares[i] = 0.95 * squares[i] + 0.05 * grad**2
            step = means[i] / (1 - 0.8**t) / (np.sqrt(squares[i] / (1 - 0.95**t)) + 1e-3)
            expected[i] = expected[i] - 1e-2 * (step + decays[i] * expected[i])
    for found, leaf in zip(jax.tree.leaves(adapter), expected, strict=True):
        np.testing.assert_allclose(found, leaf, rtol=2e-5)


def test_the_recipes_values_are_the_defaults():
    """QeRL's scripts: betas 0.9 and 0.99, weight decay 0.1, gradients clipped to 0.2, cosine after 10% of warm-up."""
    expected = {
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "max_grad_norm": 0.2,
    }
    assert dataclasses.asdict(OptimizerSpec(1e-5, 100)).items() >= expected.items()


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"total_steps": 0}, "1 or more"),
        ({"total_steps": 10.5}, "a whole number"),
        ({"learning_rate": None}, "a number"),
        ({"warmup_ratio": 10}, "0 to 1"),
        ({"warmup_ratio": -0.1}, "0 to 1"),
        ({"learning_rate": -1.0}, "above 0"),
        ({"learning_rate": float("nan")}, "above 0"),
        ({"weight_decay": -0.1}, "0 or more"),
        ({"adam_beta1": 1.5}, "0 to below 1"),
        ({"adam_beta2": 1.0}, "0 to below 1"),
        ({"adam_epsilon": 0.0}, "above 0"),
        ({"max_grad_norm": 0.0}, "above 0"),
    ],
)
def test_an_optimizer_that_cannot_be(wrong, allowed):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value}; allowed: {allowed}"):
        OptimizerSpec(**{"learning_rate": 1e-5, "total_steps": 100} | wrong)
