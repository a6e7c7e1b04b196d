import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_squared import BOUND, exactly, pvalue

from qerl_jax.errors import UserError
from qerl_jax.rollout.sampling import SamplingSettings, chosen_in_one_pass, chosen_in_turn, sample, truncate

LOGITS = jnp.log(jnp.array([[0.5, 0.2, 0.15, 0.1, 0.05]]))


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


MANY = 60_000
SPREAD = np.linspace(3, -3, 96)  # logits; probabilities from 0.06 down, less than 0.02 where top-p cuts


@functools.cache
def draws(**kwargs):
    order = np.random.default_rng(8).permutation(len(SPREAD))  # so that the vocabulary is not sorted
    run = jax.jit(sample, static_argnames="settings")
    rows = jnp.broadcast_to(jnp.asarray(SPREAD[order], jnp.float32), (MANY, len(SPREAD)))
    tokens, logps, renormalised = run(rows, jax.random.split(jax.random.key(0), MANY), settings(**kwargs))
    return order[np.asarray(tokens)], logps, renormalised


CASES = [
    {},
    {"temperature": 0.6},
    {"top_k": 40},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 60},
    {"temperature": 0.7, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 70, "top_p": 0.95, "min_p": 0.3},
]


@pytest.mark.parametrize("kwargs", CASES, ids=str)
def test_frequencies_and_recorded_logps_match_exact_probabilities(kwargs):
    exact = exactly(SPREAD, **kwargs)
    tokens, logps, renormalised = draws(**kwargs)
    assert pvalue(tokens, exact) > BOUND
    np.testing.assert_allclose(logps, np.log(exactly(SPREAD, kwargs.get("temperature", 1.0)))[tokens], rtol=1e-5)
    if exact.min() == 0:
        np.testing.assert_allclose(renormalised, np.log(exact[tokens]), rtol=1e-5, atol=1e-6)
    else:
        assert renormalised is None


@pytest.mark.parametrize("kwargs", CASES, ids=str)
def test_slightly_wrong_sampling_would_be_noticed(kwargs):
    """A temperature 5% off, a top-p off by 0.02, a top-k by one, a min-p by 0.02: the same draws do not fit."""
    tokens, _, _ = draws(**kwargs)
    temperature = kwargs.get("temperature", 1.0)
    wrong = [{"temperature": temperature * 1.05}, {"temperature": temperature / 1.05}]
    rules = [name for name in ("top_k", "top_p", "min_p") if name in kwargs]
    for name, by in zip(("top_k", "top_p", "min_p"), (1, 0.02, 0.02), strict=True):
        if rules[-1:] == [name]:  # a rule may be hidden by those that come after it
            wrong += [{name: kwargs[name] + by}, {name: kwargs[name] - by}]
    for change in wrong:
        assert pvalue(tokens, exactly(SPREAD, **(kwargs | change))) < BOUND, change


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
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'; allowed: auto, fp8_values, fp8"),
        ({"temperature": 0.0, "top_k": 5}, "no effect"),
    ],
)
def test_bad_settings_are_named(kwargs, message):
    with pytest.raises(UserError, match=message):
        settings(**kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5, "min_p": 0.01}], ids=str)
def test_one_pass_gives_what_one_for_each_result_gives(kwargs):
    """GPUs take the one, CPUs the other; 700 logits of size 6, of which the first row has equal ones."""
    scaled = 6 * jax.random.normal(jax.random.key(0), (16, 700))
    scaled = scaled.at[0, ::3].set(30.0).at[1].add(1000.0).at[2].add(-1000.0)
    allowed = truncate(scaled, settings(**kwargs)) if kwargs else None
    noisy = (scaled if allowed is None else allowed) + jax.random.gumbel(jax.random.key(1), scaled.shape)
    noisy = noisy.at[0].set(scaled[0])  # where equal ones are the largest
    tokens, logps, renormalised = jax.jit(chosen_in_one_pass)(noisy, scaled, allowed)
    expected = chosen_in_turn(noisy, scaled, allowed)
    assert tokens.dtype == expected[0].dtype == jnp.int32 and tokens[0] == 0
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(logps, expected[1], rtol=1e-5, atol=1e-4)
    assert (renormalised is None) == (expected[2] is None) == (not kwargs)
    if kwargs:
        np.testing.assert_allclose(renormalised, expected[2], rtol=1e-5, atol=1e-4)


def test_one_pass_over_excluded_and_broken_logits():
    """By hand: of 0, ln 3 and two that are excluded, the second has probability 3/4; a NaN is not hidden."""
    scaled = jnp.array([[-jnp.inf, 0.0, np.log(3.0), -jnp.inf], [0.0, jnp.nan, 1.0, 2.0]])
    tokens, logps, renormalised = chosen_in_one_pass(scaled, scaled, scaled)
    assert tokens.tolist() == [2, 1]
    np.testing.assert_allclose(logps[0], np.log(0.75), rtol=1e-6)
    np.testing.assert_allclose(renormalised[0], np.log(0.75), rtol=1e-6)
    assert np.isnan(logps[1])
    best, [logp], _ = chosen_in_one_pass(scaled[:1, :1], scaled[:1, :1], None)
    assert best.tolist() == [0] and logp < -1e30  # nothing to choose from: not NaN, and nothing to learn from


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_a_gpu_samples_what_one_pass_for_each_result_gives(kwargs):
    logits = 3 * jax.random.normal(jax.random.key(0), (8, 152064))
    keys = jax.random.split(jax.random.key(1), 8)

    def in_turn(logits, keys):
        scaled = logits / settings(**kwargs).temperature
        allowed = truncate(scaled, settings(**kwargs)) if len(kwargs) > 1 else None
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
        return chosen_in_turn((scaled if allowed is None else allowed) + noise, scaled, allowed)

    tokens, *logps = jax.jit(sample, static_argnames="settings")(logits, keys, settings(**kwargs))
    expected, *expected_logps = jax.jit(in_turn)(logits, keys)
    np.testing.assert_array_equal(tokens, expected)
    assert len(jax.tree.leaves(logps)) == (2 if len(kwargs) > 1 else 1)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), logps, expected_logps)
