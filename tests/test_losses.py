"""Losses against TRL 0.21.0's own values and gradients (tests/oracles/grpo_loss_oracle_trl0.21.0.npz)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.losses import LossSpec, policy_loss, token_weights

ORACLE = np.load(Path(__file__).parent / "oracles" / "grpo_loss_oracle_trl0.21.0.npz")
VARIANTS = sorted(key.removesuffix(".loss") for key in ORACLE.files if key.endswith(".loss"))


def test_every_variant_of_the_oracle_is_covered():
    assert len(VARIANTS) == 12


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_gradient_and_metrics_equal_trl(variant):
    loss_type, beta, policy = variant.replace("beta0.04", "beta004").replace("beta0.0", "beta000").split(".")
    spec = LossSpec(loss_type, 0.04 if beta == "beta004" else 0.0, 0.2, 0.28)
    new, mask = jnp.asarray(ORACLE["new"]), jnp.asarray(ORACLE["completion_mask"])
    old = new if policy == "on" else jnp.asarray(ORACLE["old"])
    advantages = jnp.asarray(ORACLE["advantages"])[:, None]
    (loss, metrics), grad = jax.value_and_grad(
        lambda logp: policy_loss(spec, logp, old, jnp.asarray(ORACLE["ref"]), advantages, mask), has_aux=True
    )(new)
    np.testing.assert_allclose(loss, ORACLE[variant + ".loss"], rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(grad, ORACLE[variant + ".dlogps"], rtol=1e-5, atol=1e-8)
    for name, key in (("clip_ratio/region_mean", ".clip_ratio/region_mean"), ("kl", ".kl")):
        if variant + key in ORACLE.files:
            np.testing.assert_allclose(metrics[name], ORACLE[variant + key], rtol=1e-5)


def test_dapo_is_bnpo_over_the_whole_batch():
    arrays = [jnp.asarray(ORACLE[name]) for name in ("new", "old", "ref")]
    rest = jnp.asarray(ORACLE["advantages"])[:, None], jnp.asarray(ORACLE["completion_mask"])
    assert (
        policy_loss(LossSpec("dapo", 0.04), *arrays, *rest)[0] == policy_loss(LossSpec("bnpo", 0.04), *arrays, *rest)[0]
    )


def test_advantages_equal_trl():
    rewards = jnp.asarray(ORACLE["rewards"]).reshape(2, 4)
    np.testing.assert_allclose(group_advantages(rewards).reshape(-1), ORACLE["advantages"], rtol=1e-6)


def test_padding_values_never_reach_the_loss():
    spec = LossSpec("dapo", 0.1)
    mask = jnp.array([[True, False], [True, True]])
    logp = jnp.array([[-1.0, -jnp.inf], [-2.0, -3.0]])
    zeros = jnp.zeros((2, 2))
    (loss, _), grad = jax.value_and_grad(
        lambda x: policy_loss(spec, x, zeros, zeros, jnp.ones((2, 1)), mask), has_aux=True
    )(logp)
    assert jnp.isfinite(loss) and jnp.all(jnp.isfinite(grad)) and grad[0, 1] == 0


@pytest.mark.parametrize("anything", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nothing_behind_a_rows_end_reaches_loss_gradient_or_metrics(place, anything):
    mask = jnp.array([[True, False], [True, True]])
    clean = [jnp.array([[-1.0, 0.0], [-2.0, -3.0]]), jnp.zeros((2, 2)), jnp.full((2, 2), -0.5)]
    padded = [array.at[0, 1].set(anything) if i == place else array for i, array in enumerate(clean)]

    @jax.jit
    def run(arrays):
        def loss(logp):
            return policy_loss(LossSpec("dapo", 0.1), logp, arrays[1], arrays[2], jnp.array([[1.0], [-1.0]]), mask)

        return jax.value_and_grad(loss, has_aux=True)(arrays[0])

    for a, b in zip(jax.tree.leaves(run(padded)), jax.tree.leaves(run(clean)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.all(np.isfinite(a))


def test_clipped_tokens_are_counted_by_side():
    """Ratios 0.7, 0.79, 0.81, 1.27, 1.29 and 2 with the default limits 0.8 and 1.28; the last column is masked."""
    ratios = jnp.array([0.7, 0.79, 0.81, 1.27, 1.29, 2.0, 9.0])
    logp, mask = (jnp.broadcast_to(x, (3, 7)) for x in (jnp.log(ratios), jnp.arange(7) < 6))
    advantages = jnp.array([[1.0], [-1.0], [-1.0]])
    # A token is clipped where that takes a gain away: upwards in the first row, downwards in the others.
    for begin, low, high, active in ((0, 4, 2, 18), (2, 0, 2, 12)):
        parts = logp[:, begin:], jnp.zeros((3, 7 - begin)), None, advantages, mask[:, begin:]
        _, metrics = policy_loss(LossSpec(), *parts)
        np.testing.assert_allclose(metrics["clip_ratio/low_mean"], low / active)
        np.testing.assert_allclose(metrics["clip_ratio/high_mean"], high / active)
        np.testing.assert_allclose(metrics["clip_ratio/region_mean"], (low + high) / active)
    assert "kl" not in metrics


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_a_batch_without_active_tokens_weighs_nothing(loss_type):
    np.testing.assert_array_equal(token_weights(jnp.zeros((2, 3), bool), loss_type), np.zeros((2, 3)))


def test_token_weights_by_hand():
    mask = jnp.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(token_weights(mask, "grpo").sum(1), [1 / 3, 1 / 3, 0])
    np.testing.assert_allclose(token_weights(mask, "dapo").sum(1), [2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(token_weights(mask, "dr_grpo").sum(1), [2 / 12, 1 / 12, 0])
    np.testing.assert_array_equal(token_weights(mask, LossSpec().loss_type), token_weights(mask, "dapo"))


def test_advantages_of_rows_are_not_taken_for_those_of_tokens():
    square = jnp.zeros((3, 3))
    with pytest.raises(ValueError, match=r"advantages have the shape \(3,\); allowed: \(3, 3\) or \(3, 1\)"):
        policy_loss(LossSpec(), square, square, None, jnp.array([1.0, 2.0, 3.0]), square == 0)


def test_unknown_loss_and_missing_reference_are_refused():
    with pytest.raises(ValueError, match="allowed: grpo"):
        LossSpec("ppo")
    one = jnp.ones((1, 1))
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(LossSpec(beta=0.1), one, one, None, one, one)
