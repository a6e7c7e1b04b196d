"""Losses against TRL's own values and gradients, of 0.21.0 (grpo_loss_oracle_trl0.21.0.npz in tests/oracles) and, for
ratios of rows, cispo, delta and tokens of high entropy, of 1.16.0 (by tests/oracles/grpo_loss_levels.py)."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.losses import LossSpec, high_entropy, policy_loss, token_weights

ORACLES = Path(__file__).parent / "oracles"
ORACLE = np.load(ORACLES / "grpo_loss_oracle_trl0.21.0.npz")
VARIANTS = sorted(key.removesuffix(".loss") for key in ORACLE.files if key.endswith(".loss"))
LEVELS = dict(np.load(ORACLES / "grpo_loss_levels_trl1.16.0.npz"))
LEVEL_VARIANTS = LEVELS["variants"].tolist()


def test_every_variant_of_the_oracles_is_covered():
    assert len(VARIANTS) == 12 and len(LEVEL_VARIANTS) == len(set(LEVEL_VARIANTS)) == 84


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


def spec_of(loss_type, level, beta="0", extra="plain"):
    """With the oracle's bounds."""
    high = LEVELS["epsilon_high_cispo" if loss_type == "cispo" else "epsilon_high"]
    delta = float(LEVELS["delta"]) if extra == "delta" else None
    quantile = float(LEVELS["top_entropy_quantile"]) if extra == "top" else 1.0
    return LossSpec(loss_type, float(beta), float(LEVELS["epsilon"]), float(high), level, delta, quantile)


def loss_and_gradient(spec, logp, old, ref, advantages, mask, chosen=None):
    def loss(logp):
        before = jax.lax.stop_gradient(logp) if old is None else old
        return policy_loss(spec, logp, before, ref, advantages, mask, chosen_BC=chosen)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logp))
    return value, metrics, gradient


@pytest.mark.parametrize("variant", LEVEL_VARIANTS)
def test_levels_cispo_delta_and_high_entropy_equal_trl(variant):
    loss_type, level, beta, policy, extra = variant.split("/")
    index = LEVEL_VARIANTS.index(variant)
    advantages = LEVELS["advantages"][:, None] * (LEVELS["weights"] if extra == "weights" else 1)
    old = None if policy == "on" else LEVELS["old"]
    parts = LEVELS["new"], old, LEVELS["ref"], advantages, LEVELS["mask"]
    spec, chosen = spec_of(loss_type, level, beta, extra), None
    if extra == "top":
        chosen = high_entropy(LEVELS["entropies"], LEVELS["mask"], spec.top_entropy_quantile)
    loss, metrics, gradient = loss_and_gradient(spec, *parts, chosen)
    np.testing.assert_allclose(loss, LEVELS["loss"][index], rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, LEVELS["dlogps"][index], rtol=1e-5, atol=1e-8)
    logged = dict(zip(LEVELS["metric_names"].tolist(), LEVELS["metrics"][index], strict=True))
    assert metrics.keys() == {name for name, value in logged.items() if not np.isnan(value)}
    for name, value in metrics.items():
        np.testing.assert_allclose(value, logged[name], rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo"])
def test_where_the_ratio_is_one_a_rows_ratio_matters_to_weighted_tokens_alone(loss_type):
    """What the config's checks say of grpo.importance_sampling_level in runs of one update per rollout; tokens that are
    not chosen weigh nothing."""
    ones, chosen = np.ones((12, 1), np.float32), LEVELS["chosen"][4]
    for weights, of, differs in (
        (ones, None, False), (LEVELS["weights"], None, loss_type != "cispo"), (ones, chosen, loss_type != "cispo")
    ):  # fmt: skip
        parts = LEVELS["new"], None, None, LEVELS["advantages"][:, None] * weights, LEVELS["mask"], of
        (value, _, tokens), (other, _, rows) = (loss_and_gradient(spec_of(loss_type, level), *parts) for level in
                                                ("token", "sequence"))  # fmt: skip
        np.testing.assert_allclose(value, other, rtol=1e-6)
        np.testing.assert_allclose(tokens.sum(1), rows.sum(1), atol=1e-7)
        assert np.allclose(tokens, rows, atol=1e-7) != differs


@pytest.mark.parametrize("index", range(len(LEVELS["quantiles"])))
def test_the_tokens_of_high_entropy_are_trls(index):
    """With ties at thresholds, and thresholds between entropies. Behind a row's end anything may stand."""
    chosen, quantile, mask = LEVELS["chosen"][index], float(LEVELS["quantiles"][index]), LEVELS["mask"]
    assert chosen.sum() >= 1 + int(quantile * (mask.sum() - 1))
    for anything in (9.0, -np.inf, np.inf, np.nan):
        entropies = np.where(mask, LEVELS["entropies"], np.float32(anything))
        np.testing.assert_array_equal(high_entropy(entropies, mask, quantile), chosen)


def test_the_tokens_of_high_entropy_are_those_above_numpys_quantile():
    """In one program for batches of every number of tokens, also none."""
    entropies = np.random.default_rng(0).uniform(0, 5, (65, 8, 8)).astype(np.float32)
    masks = np.random.default_rng(1).permuted(np.arange(64) < np.arange(65)[:, None], axis=1).reshape(65, 8, 8)
    for quantile in (1e-6, 0.1, 0.2, 1 / 3, 0.4, 0.5, 0.7, 0.77, 0.999):
        found = jax.jit(jax.vmap(functools.partial(high_entropy, quantile=quantile)))(entropies, masks)
        assert not found[0].any()
        for chosen, entropy, mask in zip(found[1:], entropies[1:], masks[1:], strict=True):
            threshold = np.quantile(entropy[mask].astype(np.float64), 1 - quantile)
            # Where it is an entropy itself, it is so but for float64's rounding.
            np.testing.assert_array_equal(chosen, mask & (entropy >= threshold * (1 - 1e-9)))
            assert chosen.sum() == 1 + int(quantile * (mask.sum() - 1) + 1e-9)


@pytest.mark.parametrize(("quantile", "count"), [
    (1e-6, 2), (0.123457, 246_914), (0.4, 800_000), (0.99999, 1_999_980), (0.999999, 1_999_998)
])  # fmt: skip
def test_of_a_large_batch_as_many_are_chosen_as_of_a_small_one(quantile, count):
    entropies = np.arange(2_000_000, dtype=np.float32)[None]
    assert high_entropy(entropies, np.ones((1, 2_000_000), bool), quantile).sum() == count


def test_equal_entropies_are_all_chosen():
    mask = LEVELS["mask"]
    for entropy in (0.0, 2.5):
        np.testing.assert_array_equal(high_entropy(np.full(mask.shape, entropy, np.float32), mask, 0.01), mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_tokens_that_are_not_chosen_have_the_kl_penalty_alone_and_count_as_before(loss_type, level):
    """With all chosen the loss is bitwise that without a choice; with none it is beta times KL, clipping included."""
    parts = *(LEVELS[name] for name in ("new", "old", "ref")), LEVELS["advantages"][:, None], LEVELS["mask"]
    plain, top = spec_of(loss_type, level, "0.04"), spec_of(loss_type, level, "0.04", "top")
    expected = loss_and_gradient(plain, *parts)
    for spec in (plain, top):
        for a, b in zip(
            jax.tree.leaves(loss_and_gradient(spec, *parts, LEVELS["mask"])), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    loss, metrics, gradient = loss_and_gradient(top, *parts, np.zeros_like(LEVELS["mask"]))
    assert metrics == expected[1]
    weights = np.asarray(token_weights(LEVELS["mask"], loss_type))
    gap = np.asarray(LEVELS["ref"], np.float64) - LEVELS["new"]
    np.testing.assert_allclose(loss, np.sum(weights * 0.04 * (np.exp(gap) - gap - 1)), rtol=1e-5)
    np.testing.assert_allclose(gradient, weights * 0.04 * (1 - np.exp(gap)), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("log_ratio", [200.0, np.nan])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_a_token_that_is_not_chosen_spoils_nothing_unless_it_is_no_number(loss_type, log_ratio):
    """What overflows has no policy loss; a log-probability that is NaN still makes the gradient NaN."""
    logp, mask = jnp.array([[log_ratio, 0.1]]), jnp.ones((1, 2), bool)
    spec = LossSpec(loss_type, epsilon_high=5.0, top_entropy_quantile=0.5)
    parts = jnp.zeros((1, 2)), None, jnp.array([[-1.0]]), mask, jnp.array([[False, True]])
    loss, _, gradient = loss_and_gradient(spec, logp, *parts)
    assert np.isfinite(loss) and np.isfinite(gradient[0, 1]) and gradient[0, 1] != 0
    np.testing.assert_array_equal(gradient[0, 0], np.nan if np.isnan(log_ratio) else 0.0)


def test_delta_bounds_what_no_ratio_exceeds_however_large():
    """exp(200) is infinite in float32; the token below it shows that the rest of the row is not touched."""
    logp, mask = jnp.array([[200.0, 0.1], [200.0, 0.1]]), jnp.ones((2, 2), bool)
    parts = logp, jnp.zeros((2, 2)), None, jnp.array([[-1.0], [1.0]]), mask
    loss, metrics, gradient = loss_and_gradient(LossSpec("dapo", delta=4.0), *parts)
    np.testing.assert_allclose(loss, (4 - 1.28) / 4, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.exp(0.1) / 4 * np.array([[0, 1], [0, -1]]), rtol=1e-6)
    assert metrics["clip_ratio/high_mean"] == 0.25
    # A delta that float32 does not hold is none.
    _, _, gradient = loss_and_gradient(LossSpec("dapo", delta=1e300), *parts)
    np.testing.assert_allclose(gradient[1], [0, -np.exp(0.1) / 4], rtol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_a_ratio_that_overflows_spoils_no_gradient(loss_type):
    """Of a token that is clipped, or whose advantage is 0; nor of the others. The loss is what it is."""
    logp, mask = jnp.array([[-1.0, -1.0]] * 3), jnp.ones((3, 2), bool)
    parts = logp, jnp.array([[-200.0, -1.1]] * 3), None, jnp.array([[1.0], [0.0], [-1.0]]), mask
    spec = LossSpec(loss_type, epsilon_high=5.0 if loss_type == "cispo" else 0.28)
    loss, _, gradient = loss_and_gradient(spec, *parts)
    assert np.isfinite(loss) == (loss_type == "cispo") and np.isfinite(gradient).all()
    assert not gradient[1].any() and gradient[0, 1] != 0 and gradient[2, 1] != 0
    assert (gradient[0, 0] == 0) == (loss_type != "cispo")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("log_ratio", [79.0, 81.0, 1e4])
def test_a_loss_that_nothing_bounds_grows_until_it_is_infinite(log_ratio, level):
    """An update that is refused for its gradient at one ratio is not taken at a larger one."""
    logp, mask = jnp.full((1, 3), log_ratio), jnp.array([[True, level == "sequence", False]])
    spec = LossSpec("dapo", importance_sampling_level=level)
    value, metrics, gradient = loss_and_gradient(spec, logp, jnp.zeros((1, 3)), None, jnp.array([[-1.0]]), mask)
    assert np.isfinite(value) == (log_ratio < 80) and value > 1e34
    assert np.isfinite(gradient).all() and all(map(np.isfinite, metrics.values()))
    for bounded in (LossSpec("dapo", importance_sampling_level=level, delta=4.0), LossSpec("cispo", 0.0, 0.2, 5.0)):
        assert np.isfinite(loss_and_gradient(bounded, logp, 0 * logp, None, jnp.array([[-1.0]]), mask)[0])


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


@pytest.mark.parametrize("anything", [jnp.nan, jnp.inf, -jnp.inf, 7.0])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "spec",
    [LossSpec("dapo", 0.1), LossSpec("grpo", 0.1, importance_sampling_level="sequence", delta=3.0),
     LossSpec("cispo", 0.1, epsilon_high=5.0), LossSpec("cispo", 0.1, 0.2, 5.0, "sequence")],
)  # fmt: skip
def test_nothing_behind_a_rows_end_reaches_loss_gradient_or_metrics(spec, place, anything):
    mask = jnp.array([[True, False], [True, True]])
    clean = [jnp.array([[-1.0, 0.0], [-2.0, -3.0]]), jnp.zeros((2, 2)), jnp.full((2, 2), -0.5)]
    padded = [array.at[0, 1].set(anything) if i == place else array for i, array in enumerate(clean)]

    @jax.jit
    def run(arrays):
        def loss(logp):
            return policy_loss(spec, logp, arrays[1], arrays[2], jnp.array([[1.0], [-1.0]]), mask)

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


def test_a_token_without_an_advantage_is_not_clipped():
    parts = jnp.log(jnp.array([[0.5, 9.0]])), jnp.zeros((1, 2)), None, jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    for spec in (LossSpec(), LossSpec("cispo", epsilon_high=5.0)):
        metrics = policy_loss(spec, *parts)[1]
        assert metrics and not any(metrics.values())


def test_a_row_is_clipped_once_by_the_mean_of_its_active_tokens():
    """Rows of ratios 2, 2, 0.5, 1 and 2 with tokens far beyond; the correction has dropped the second's first token,
    all of the fourth's and, with its gain, the fifth's."""
    means = jnp.log(jnp.array([2.0, 2.0, 0.5, 1.0, 2.0]))[:, None]
    logp = means + jnp.array([[3.0, -3.0, 9.0]])
    advantages = jnp.array([[1, 1, 1], [0, 1, 1], [-1, -1, -1], [0, 0, 0], [0, 0, 1]])
    parts = logp, jnp.zeros((5, 3)), None, advantages, jnp.broadcast_to(jnp.arange(3) < 2, (5, 3))
    _, metrics = policy_loss(LossSpec(importance_sampling_level="sequence"), *parts)
    shares = {"clip_ratio/low_mean": 1 / 5, "clip_ratio/high_mean": 2 / 5, "clip_ratio/region_mean": 3 / 5}
    assert metrics.keys() == shares.keys()
    for name, share in shares.items():
        np.testing.assert_allclose(metrics[name], share, rtol=1e-6)
    loss, _ = policy_loss(LossSpec("cispo", 0.0, 0.2, 1.5, "sequence"), *parts)
    rows = 1.5 * 2 * means[0] + 1.5 * (means[1] - 3) - 0.5 * 2 * means[2]
    np.testing.assert_allclose(loss, -rows[0] / 10, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_a_row_without_active_tokens_adds_nothing(loss_type, level):
    """But for grpo's mean over rows, and the share of clipped rows, which count it as TRL does."""
    arrays = LEVELS["new"], LEVELS["old"], LEVELS["ref"], LEVELS["advantages"][:, None], LEVELS["mask"]
    empty = int(np.flatnonzero(~LEVELS["mask"].any(1))[0])
    spec = spec_of(loss_type, level, "0.1")
    loss, metrics, gradient = loss_and_gradient(spec, *arrays)
    without, fewer, rest = loss_and_gradient(spec, *(np.delete(array, empty, 0) for array in arrays))
    assert not gradient[empty].any()
    rows = 11 / 12 if loss_type == "grpo" else 1.0
    np.testing.assert_allclose(loss, rows * without, rtol=1e-6)
    np.testing.assert_allclose(np.delete(gradient, empty, 0), rows * rest, rtol=1e-6)
    for name in metrics.keys() - {"kl"}:
        assert fewer[name] > 0
        np.testing.assert_allclose(metrics[name], fewer[name] * (11 / 12 if level == "sequence" else 1), rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo"])
def test_a_batch_without_active_tokens_weighs_nothing(loss_type, level):
    arrays = (LEVELS[name] for name in ("new", "old", "ref"))
    parts = *arrays, LEVELS["advantages"][:, None], np.zeros_like(LEVELS["mask"])
    loss, metrics, gradient = loss_and_gradient(spec_of(loss_type, level, "0.1"), *parts)
    assert "kl" in metrics and not any(metrics.values()) and loss == 0 and not gradient.any()


def test_token_weights_by_hand():
    mask = jnp.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(token_weights(mask, "grpo").sum(1), [1 / 3, 1 / 3, 0])
    np.testing.assert_allclose(token_weights(mask, "dapo").sum(1), [2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(token_weights(mask, "dr_grpo").sum(1), [2 / 12, 1 / 12, 0])
    for same in (LossSpec().loss_type, "bnpo", "cispo"):
        np.testing.assert_array_equal(token_weights(mask, same), token_weights(mask, "dapo"))


def test_advantages_of_rows_are_not_taken_for_those_of_tokens():
    square = jnp.zeros((3, 3))
    with pytest.raises(ValueError, match=r"advantages have the shape \(3,\); allowed: \(3, 3\) or \(3, 1\)"):
        policy_loss(LossSpec(), square, square, None, jnp.array([1.0, 2.0, 3.0]), square == 0)
    with pytest.raises(ValueError, match=r"advantages have the shape \(1, 3\); allowed"):
        policy_loss(LossSpec(), square, square, None, jnp.array([[1.0, 2.0, 3.0]]), square == 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; allowed: grpo, bnpo, dapo, dr_grpo, cispo"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level is 'row'; allowed: token, sequence"),
        ({"loss_type": "cispo"}, "epsilon_high is 0.28; allowed with loss_type cispo: a number >= 1, the largest ratio "
                                 "itself (5 is usual)"),
        ({"loss_type": "cispo", "epsilon_high": float("nan")}, "epsilon_high is nan; allowed: above 0"),
        ({"epsilon": -0.5}, "epsilon is -0.5; allowed: above 0, to 1"),
        ({"epsilon": 0.0}, "epsilon is 0.0; allowed: above 0, to 1"),
        ({"epsilon_high": -0.5}, "epsilon_high is -0.5; allowed: above 0"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0; allowed: above 0, to 1"),
        ({"top_entropy_quantile": 20}, "top_entropy_quantile is 20; allowed: above 0, to 1"),
        ({"top_entropy_quantile": float("nan")}, "top_entropy_quantile is nan; allowed: above 0, to 1"),
        ({"top_entropy_quantile": None}, "top_entropy_quantile is None; allowed: a number of Python's or NumPy's"),
        ({"beta": -1.0}, "beta is -1.0; allowed: 0 or more"),
        ({"beta": float("nan")}, "beta is nan; allowed: 0 or more"),
        ({"beta": float("inf")}, "beta is inf; allowed: 0 or more"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 9.0}, "delta is 9.0; allowed with loss_type cispo: None"),
        ({"delta": 1.28}, "delta is 1.28; allowed: above 1 + epsilon_high, which is 1.28, or None"),
        ({"delta": -1.0, "epsilon_high": 0.5}, "delta is -1.0; allowed: above 1 + epsilon_high, which is 1.5, or None"),
        ({"delta": float("nan")}, "delta is nan; allowed: above"),
    ],
)  # fmt: skip
def test_a_spec_names_what_is_not_allowed(options, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        LossSpec(**options)


def test_the_least_bounds_are_allowed():
    assert LossSpec("cispo", epsilon_high=1.0).epsilon_high == 1.0
    assert LossSpec(delta=float(np.nextafter(1.28, 2))).delta > 1.28


def test_an_epsilon_of_one_bounds_nothing_below():
    """Not even a ratio of 0, which exp(-200) is."""
    one = jnp.ones((1, 1))
    _, metrics = policy_loss(LossSpec(epsilon=1.0), -200 * one, 0 * one, None, -one, one > 0)
    assert metrics["clip_ratio/low_mean"] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("epsilon", "epsilon_high"), [(1e-9, 0.28), (0.2, 1e-9), (1e-9, 1e-9)])
def test_a_ratio_of_one_has_its_whole_gradient_however_near_the_bounds_are(epsilon, epsilon_high, advantage):
    """1 - 1e-9 is 1 in float32."""
    spec, one = LossSpec(epsilon=epsilon, epsilon_high=epsilon_high), jnp.ones((1, 1))
    _, _, gradient = loss_and_gradient(spec, -one, None, None, advantage * one, one > 0)
    np.testing.assert_allclose(gradient, -advantage)


def test_a_missing_reference_is_refused():
    one = jnp.ones((1, 1))
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(LossSpec(beta=0.1), one, one, None, one, one)


def test_a_missing_choice_of_tokens_is_refused():
    one = jnp.ones((1, 1))
    with pytest.raises(ValueError, match=r"top_entropy_quantile is 0\.2, so the loss needs chosen_BC"):
        policy_loss(LossSpec(top_entropy_quantile=0.2), one, one, None, one, one)
