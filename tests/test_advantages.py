import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.advantages import deviation, group_advantages, informative_groups

REWARDS = jnp.array([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]])


def test_group_scale_by_hand():
    std = np.sqrt(4 * 0.25 / 3)
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    assert np.all(np.asarray(group_advantages(REWARDS, scale)[1]) == 0.0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_whose_mean_is_not_theirs_in_float32_give_exactly_zero(scale):
    rewards = jnp.array([[0.1] * 8, [0.3] * 8])
    assert np.any(np.asarray(rewards - rewards.mean(1, keepdims=True)))
    assert not np.any(np.asarray(group_advantages(rewards, scale)))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("offset, step", [(1e8, 8), (-3e6, 0.25), (1000, 2**-10)])
def test_large_rewards_are_centred_exactly(offset, step, scale):
    rewards = np.array([[0, 1, 5, 2], [3, np.nan, 1, 9]], np.float64) * step + offset
    above = rewards - np.nanmean(rewards, 1, keepdims=True)
    by_group = np.nanstd(rewards, 1, ddof=1, keepdims=True)
    size = {"group": by_group + 1e-4, "batch": np.nanstd(rewards, ddof=1) + 1e-4, "none": 1.0}[scale]
    found = group_advantages(jnp.asarray(rewards, jnp.float32), scale)
    np.testing.assert_allclose(found, np.nan_to_num(above / size), rtol=1e-5, atol=1e-6 * step)
    np.testing.assert_allclose(deviation(jnp.asarray(rewards, jnp.float32)), np.nanstd(rewards, ddof=1), rtol=1e-5)


def test_a_deviation_does_not_depend_on_how_float32_rounds_the_mean():
    above = 2 * jnp.arange(6.0)  # of a mean of 5, which 2^24 + 5 is not
    np.testing.assert_allclose(deviation(2.0**24 + above[None]), np.std(above, ddof=1), rtol=1e-6)


def test_batch_and_none():
    np.testing.assert_allclose(group_advantages(REWARDS, "none")[0], [0.5, -0.5, -0.5, 0.5])
    std = np.std(np.asarray(REWARDS), ddof=1)
    np.testing.assert_allclose(group_advantages(REWARDS, "batch")[0, 0], 0.5 / (std + 1e-4), rtol=1e-5)


def test_one_completion_per_group_is_refused():
    with pytest.raises(ValueError, match="num_generations G >= 2"):
        group_advantages(jnp.ones((4, 1)))
    with pytest.raises(ValueError, match="allowed: group"):
        group_advantages(REWARDS, "std")


def test_a_group_is_informative_if_two_of_its_scores_differ():
    nan = jnp.nan
    scores = jnp.array(
        [[0, 0, 0], [1, 1, 1], [0, 0, 1], [0.1, 0.1, 0.1], [nan, nan, nan], [nan, 2, nan], [nan, -1, -1], [nan, -1, -2]]
    )
    expected = [False, False, True, False, False, False, False, True]
    assert informative_groups(scores).tolist() == jax.jit(informative_groups)(scores).tolist() == expected
    assert informative_groups(jnp.array([[0, 0], [3, 4]])).tolist() == [False, True]


def test_groups_of_one_completion_are_never_informative_and_so_refused():
    with pytest.raises(ValueError, match=r"scores must be \[N, G\] with num_generations G >= 2, got \(4, 1\)"):
        informative_groups(jnp.ones((4, 1)))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_completions_that_cannot_be_scored_have_no_advantage_and_are_in_no_mean(scale):
    """As TRL 1.16 takes them: nanmean, nanstd and then 0."""
    nan = jnp.nan
    found = group_advantages(
        jnp.array([[0.0, nan, 3.0, nan], [nan] * 4, [nan, 1.0, nan, nan], [2.0, 4.0, 6.0, 8.0]]), scale
    )
    first, last = np.array([-1.5, 1.5]), np.array([-3.0, -1.0, 1.0, 3.0])
    by = {
        "group": (np.std([0, 3], ddof=1) + 1e-4, np.std([2, 4, 6, 8], ddof=1) + 1e-4),
        "batch": (np.std([0, 3, 1, 2, 4, 6, 8], ddof=1) + 1e-4,) * 2,
        "none": (1, 1),
    }[scale]
    np.testing.assert_allclose(found[0, jnp.array([0, 2])], first / by[0], rtol=1e-5)
    np.testing.assert_allclose(found[3], last / by[1], rtol=1e-5)
    assert not np.asarray(found)[[0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [1, 3, 0, 1, 2, 3, 0, 1, 2, 3]].any()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32])
def test_advantages_are_float32_of_any_numbers(dtype):
    """In float16 the squares of a thousand are infinite."""
    rewards = jnp.array([[1000, 0, 0, 0]], dtype)
    found = group_advantages(rewards)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5)
    np.testing.assert_array_equal(
        group_advantages([[1000.0, 0.0, 0.0, 0.0]]), group_advantages(rewards.astype("float32"))
    )
