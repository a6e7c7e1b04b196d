import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from qerl_jax.errors import UserError
from qerl_jax.rollout.sampling import SamplingSettings, sample, truncate

LOGITS = jnp.log(jnp.array([[0.5, 0.2, 0.15, 0.1, 0.05]]))
DRAWS = 20000


def settings(**kwargs):
    return SamplingSettings(max_completion_length=4, eos_token_ids=(1,), pad_token_id=0, **kwargs)


def allowed(**kwargs):
    s = settings(**kwargs)
    return np.flatnonzero(np.isfinite(np.asarray(truncate(LOGITS / s.temperature, s)))[0]).tolist()


def test_truncation_by_hand():
    assert allowed(top_k=2) == [0, 1]
    assert allowed(top_k=99) == [0, 1, 2, 3, 4]
    assert allowed(top_p=0.69) == [0, 1]
    assert allowed(top_p=0.71) == [0, 1, 2]
    assert allowed(top_p=1e-6) == [0]
    assert allowed(min_p=0.25) == [0, 1, 2]
    assert allowed(top_k=4, top_p=0.8, min_p=0.35) == [0, 1]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_frequencies_and_recorded_logps_match_exact_probabilities(kwargs):
    s = settings(**kwargs)
    scaled = np.asarray(LOGITS[0], np.float64) / s.temperature
    full = np.exp(scaled) / np.exp(scaled).sum()
    live = np.isfinite(np.asarray(truncate(LOGITS / s.temperature, s))[0])
    exact = np.where(live, full, 0) / full[live].sum()
    tokens, logps, renormalised = sample(
        jnp.broadcast_to(LOGITS, (DRAWS, 5)), jax.random.split(jax.random.key(0), DRAWS), s
    )
    counts = np.bincount(np.asarray(tokens), minlength=5)
    assert counts[~live].sum() == 0
    assert chisquare(counts[live], exact[live] * DRAWS).pvalue > 1e-3
    np.testing.assert_allclose(logps, np.log(full)[np.asarray(tokens)], rtol=1e-5)
    if s.truncated:
        np.testing.assert_allclose(renormalised, np.log(exact[np.asarray(tokens)]), rtol=1e-4, atol=1e-6)
    else:
        assert renormalised is None


def test_greedy_takes_the_largest_and_records_temperature_one():
    tokens, logps, _ = sample(LOGITS, jax.random.split(jax.random.key(0), 1), settings(temperature=0.0))
    assert tokens.tolist() == [0]
    np.testing.assert_allclose(logps, [np.log(0.5)], rtol=1e-5)


def test_a_row_draws_from_its_own_key():
    keys = jax.random.split(jax.random.key(3), 6)
    rows = jax.random.normal(jax.random.key(4), (6, 50))
    together, _, _ = sample(rows, keys, settings())
    apart = [int(sample(rows[i : i + 1], keys[i : i + 1], settings())[0][0]) for i in range(6)]
    assert together.tolist() == apart


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"temperature": 0.0, "top_k": 5}, "no effect"),
    ],
)
def test_bad_settings_are_named(kwargs, message):
    with pytest.raises(UserError, match=message):
        settings(**kwargs)
