"""The weights for samples of another policy than the learner's, by hand, and how far the two are apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.correction import SamplerCorrection, correction_weights, gap_metrics


def test_correction_weights_by_hand():
    learner, sampled = jnp.log(jnp.array([[3.0, 1.0, 9.0]])), jnp.zeros((1, 3))
    mask = jnp.array([[True, True, False]])
    for level, mode, expected, share in (
        ("none", "truncate", [1, 1, 1], None),
        ("token", "truncate", [2, 1, 1], 0.5),
        ("token", "mask", [0, 1, 1], 0.5),
        ("sequence", "truncate", [2, 2, 2], 1.0),
        ("sequence", "mask", [0, 0, 0], 1.0),
    ):
        weights, metrics = correction_weights(SamplerCorrection(level, mode, 2.0), learner, sampled, mask)
        np.testing.assert_allclose(weights[0], expected, rtol=1e-6)
        if share is not None:
            name = "masked" if mode == "mask" else "truncated"
            np.testing.assert_allclose(metrics[f"sampling/{name}_fraction"], share)
            applied = np.mean(expected[:2]) if level == "token" else expected[0]
            np.testing.assert_allclose(metrics["sampling/importance_sampling_ratio/mean"], applied)
    gap = gap_metrics(learner, sampled, mask)
    np.testing.assert_allclose(gap["sampling/sampling_logp_difference/max"], np.log(3), rtol=1e-6)


@pytest.mark.parametrize("mode, weight", [("truncate", 2.0), ("mask", 0.0)])
def test_a_row_whose_ratio_overflows_has_finite_weights_behind_its_end_too(mode, weight):
    learner, mask = jnp.full((2, 4), 40.0), jnp.array([[True, True, True, False], [False] * 4])
    weights, metrics = correction_weights(SamplerCorrection("sequence", mode), learner, jnp.zeros((2, 4)), mask)
    np.testing.assert_array_equal(weights, [[weight] * 4, [1.0] * 4])
    assert float(metrics["sampling/importance_sampling_ratio/mean"]) == weight  # of the one row that counts


def test_how_far_learner_and_sampler_are_apart_counts_active_tokens_alone():
    learner = jnp.array([[-1.0, -2.0, jnp.nan], [-3.0, -jnp.inf, 0.0]])
    sampled = jnp.array([[-1.5, -1.0, 0.0], [-3.25, 0.0, 50.0]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    gap = gap_metrics(learner, sampled, mask)
    np.testing.assert_allclose(gap["sampling/sampling_logp_difference/mean"], (0.5 + 1 + 0.25) / 3)
    np.testing.assert_allclose(gap["sampling/sampling_logp_difference/max"], 1)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weights_are_constants_up_to_their_cap(level):
    learner = jnp.log(jnp.array([[0.5, 2.0], [2.5, 1.0]]))
    correction, mask = SamplerCorrection(level), jnp.ones((2, 2), bool)

    def total(learner):
        return jnp.sum(correction_weights(correction, learner, jnp.zeros((2, 2)), mask)[0])

    value, gradient = jax.value_and_grad(total)(learner)
    # 2 itself is not cut, 2.5 is; the first row's ratio is 1 and the second's 2.5.
    np.testing.assert_allclose(value, 0.5 + 2 + 2 + 1 if level == "token" else 1 + 1 + 2 + 2, rtol=1e-6)
    assert not gradient.any()


def test_a_ratio_at_the_cap_is_not_above_it():
    same, mask = jnp.full((2, 3), -1.5), jnp.ones((2, 3), bool)
    for level in ("token", "sequence"):
        weights, metrics = correction_weights(SamplerCorrection(level, "mask", 1.0), same, same, mask)
        assert np.all(weights == 1) and float(metrics["sampling/masked_fraction"]) == 0


def test_a_row_counts_once_in_the_mean_of_its_weights_however_long_it_is():
    mask = jnp.array([[True, True, True], [False, True, False], [False] * 3])
    learner = jnp.log(jnp.array([[2.0, 2.0, 1.0], [9.0, 0.5, 9.0], [9.0] * 3]))
    for level, expected in (("sequence", (2 + 0.5) / 2), ("token", (2 + 2 + 1 + 0.5) / 4)):
        _, metrics = correction_weights(SamplerCorrection(level, "truncate", 2.0), learner, jnp.zeros((3, 3)), mask)
        np.testing.assert_allclose(metrics["sampling/importance_sampling_ratio/mean"], expected, rtol=1e-6)
        extremes = [float(metrics[f"sampling/importance_sampling_ratio/{name}"]) for name in ("min", "max")]
        np.testing.assert_allclose(extremes, [0.5, 2.0], rtol=1e-6)
    _, metrics = correction_weights(SamplerCorrection("token"), learner, jnp.zeros((3, 3)), jnp.zeros((3, 3), bool))
    assert [float(metrics[f"sampling/importance_sampling_ratio/{name}"]) for name in ("min", "mean", "max")] == [0] * 3


@pytest.mark.parametrize("wrong", [{"level": "tokens"}, {"mode": "cut"}, {"cap": 0.0}, {"cap": float("nan")}])
def test_a_correction_that_does_not_exist(wrong):
    with pytest.raises(ValueError, match="allowed"):
        SamplerCorrection(**wrong)
