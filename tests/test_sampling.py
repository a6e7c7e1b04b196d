import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_squared import BOUND, exactly, pvalue

from qerl_jax.errors import UserError
from qerl_jax.rollout import sampling
from qerl_jax.rollout.sampling import GROUP, SamplingSettings, joined_at_once, joined_by_passes, sample, truncate

drawn = jax.jit(sample, static_argnums=2)
LOGITS = jnp.log(jnp.array([[0.5, 0.2, 0.15, 0.1, 0.05]]))


def settings(**kwargs):
    return SamplingSettings(**({"max_completion_length": 4, "eos_token_ids": (1,), "pad_token_id": 0} | kwargs))


def allowed(**kwargs):
    s = settings(**kwargs)
    return np.flatnonzero(np.isfinite(np.asarray(truncate(LOGITS / s.temperature, s)))[0]).tolist()


def test_eos_ids_may_be_a_list():
    assert hash(SamplingSettings(4, [1], 0)) == hash(SamplingSettings(4, (1,), 0))


def test_truncation_by_hand():
    assert allowed(top_k=2) == [0, 1]
    assert allowed(top_k=4) == [0, 1, 2, 3]
    assert allowed(top_k=99) == [0, 1, 2, 3, 4]
    assert allowed(top_p=0.69) == [0, 1]
    assert allowed(top_p=0.71) == [0, 1, 2]
    assert allowed(top_p=1e-6) == [0]
    assert allowed(min_p=0.25) == [0, 1, 2]
    assert allowed(top_k=4, top_p=0.8, min_p=0.35) == [0, 1]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("joined", [joined_by_passes, joined_at_once])
def test_of_logits_that_are_no_numbers_the_log_probabilities_are_none(monkeypatch, options, joined):
    monkeypatch.setattr(sampling, "_joined", joined)
    rows = jax.random.normal(jax.random.key(0), (4, 3 * GROUP))
    rows = rows.at[0, GROUP + 3].set(jnp.nan).at[1].set(jnp.nan).at[2, 5].set(jnp.inf)
    _, *logps = sample(rows, jax.random.split(jax.random.key(1), 4), settings(**options))
    for logps_B in filter(lambda found: found is not None, logps):
        assert np.isnan(logps_B).tolist() == [True, True, True, False]


MANY = 60_000
SPREAD = np.linspace(3, -3, 96)  # logits; probabilities from 0.06 down, less than 0.02 where top-p cuts


@functools.cache
def draws(group, **kwargs):
    """Tokens' places among `SPREAD`, and their log-probabilities; drawn by groups of so many."""
    order = np.random.default_rng(8).permutation(len(SPREAD))  # so that the vocabulary is not sorted
    run = jax.jit(lambda *given: sample(*given), static_argnums=2)
    rows = jnp.broadcast_to(jnp.asarray(SPREAD[order], jnp.float32), (MANY, len(SPREAD)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "GROUP", group)
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


@pytest.mark.parametrize("group", [7, GROUP])
@pytest.mark.parametrize("kwargs", CASES, ids=str)
def test_frequencies_and_recorded_logps_match_exact_probabilities(kwargs, group):
    exact = exactly(SPREAD, **kwargs)
    tokens, logps, renormalised = draws(group, **kwargs)
    assert pvalue(tokens, exact) > BOUND
    np.testing.assert_allclose(logps, np.log(exactly(SPREAD, kwargs.get("temperature", 1.0)))[tokens], rtol=1e-5)
    if exact.min() == 0:
        np.testing.assert_allclose(renormalised, np.log(exact[tokens]), rtol=1e-5, atol=1e-6)
    else:
        assert renormalised is None


@pytest.mark.parametrize("kwargs", CASES, ids=str)
def test_slightly_wrong_sampling_would_be_noticed(kwargs):
    """A temperature 5% off, a top-p off by 0.02, a top-k by one, a min-p by 0.02: the same draws do not fit."""
    tokens, _, _ = draws(GROUP, **kwargs)
    temperature = kwargs.get("temperature", 1.0)
    wrong = [{"temperature": temperature * 1.05}, {"temperature": temperature / 1.05}]
    rules = [name for name in ("top_k", "top_p", "min_p") if name in kwargs]
    for name, by in zip(("top_k", "top_p", "min_p"), (1, 0.02, 0.02), strict=True):
        if rules[-1:] == [name]:  # a rule may be hidden by those that come after it
            wrong += [{name: kwargs[name] + by}, {name: kwargs[name] - by}]
    for change in wrong:
        assert pvalue(tokens, exactly(SPREAD, **(kwargs | change))) < BOUND, change


def test_the_least_temperature_is_as_good_as_greedy():
    tokens, logps, _ = drawn(LOGITS, jax.random.split(jax.random.key(0), 1), settings(temperature=1e-30))
    assert tokens[0] == jnp.argmax(LOGITS)
    assert logps[0] == 0.0


def test_greedy_takes_the_largest_and_records_temperature_one():
    tokens, logps, _ = drawn(LOGITS, jax.random.split(jax.random.key(0), 1), settings(temperature=0.0))
    assert tokens.tolist() == [0]
    np.testing.assert_allclose(logps, [np.log(0.5)], rtol=1e-5)


def test_a_row_draws_from_its_own_key():
    keys = jax.random.split(jax.random.key(3), 6)
    rows = jax.random.normal(jax.random.key(4), (6, 50))
    together, _, _ = drawn(rows, keys, settings())
    apart = [int(drawn(rows[i : i + 1], keys[i : i + 1], settings())[0][0]) for i in range(6)]
    assert together.tolist() == apart


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-40}, "temperature is 1e-40; allowed: 0 \\(greedy\\), or 1e-30 or more"),
        ({"max_completion_length": 0}, "max_completion_length is 0; allowed: 1 or more"),
        ({"max_completion_length": 8.0}, "max_completion_length is 8.0; allowed: a whole number"),
        ({"pad_token_id": None}, "pad_token_id is None; allowed: a whole number"),
        ({"eos_token_ids": None}, r"eos_token_ids is \(None,\); allowed: token ids, or \(\) for none"),
        ({"eos_token_ids": [True]}, r"eos_token_ids is \(True,\); allowed: token ids"),
        ({"eos_token_ids": [2, -1]}, r"eos_token_ids is \(2, -1\); allowed: token ids, or \(\) for none"),
        ({"eos_token_ids": "ab"}, r"eos_token_ids is \('a', 'b'\); allowed: token ids, or \(\) for none"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1e-40}, "top_p is 1e-40; allowed: 1e-30 to 1"),
        ({"top_p": 1.5}, "top_p is 1.5; allowed: 1e-30 to 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5; allowed: a whole number"),
        ({"top_k": True}, "top_k is True; allowed: a whole number"),
        ({"temperature": "1"}, "temperature is '1'; allowed: a number"),
        ({"temperature": jnp.float32(1)}, "temperature is Array.*; allowed: a number"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'; allowed: auto, fp8_values, fp8"),
        ({"temperature": 0.0, "top_k": 5}, "no effect"),
    ],
)
def test_bad_settings_are_named(kwargs, message):
    with pytest.raises(UserError, match=message):
        settings(**kwargs)


def test_numbers_of_numpys_are_pythons():
    """A float64, as `np.linspace` gives them, would be refused in a float32 network where JAX has 64 bits."""
    given = settings(max_completion_length=np.int64(4), temperature=np.float64(0.7), top_k=np.uint8(3))
    assert given == settings(max_completion_length=4, temperature=0.7, top_k=3)
    assert [type(n) for n in (given.max_completion_length, given.temperature, given.top_k)] == [int, float, int]
    with jax.enable_x64(True):
        _, logps, _ = sample(jnp.zeros((2, 8), jnp.float32), jax.random.split(jax.random.key(0), 2), given)
    assert logps.dtype == jnp.float32


def test_ids_beyond_the_vocabulary_are_named():
    settings(eos_token_ids=(7, 8, 9), pad_token_id=9).check_ids(10)
    with pytest.raises(UserError, match=r"eos_token_ids is \(9, 10\); allowed: ids below the vocabulary's 10, or \(\)"):
        settings(eos_token_ids=(9, 10)).check_ids(10)
    with pytest.raises(UserError, match=r"pad_token_id is 10; allowed: an id below the vocabulary's 10"):
        settings(pad_token_id=10).check_ids(10)


@pytest.mark.parametrize("given", [7, np.int32(7), [7], np.array([7])])
def test_one_eos_id_may_stand_alone(given):
    assert settings(eos_token_ids=given) == settings(eos_token_ids=(7,))


def test_settings_at_their_limits():
    assert not settings(top_p=1.0, temperature=1e-30).truncated
    assert allowed(min_p=1.0) == allowed(top_k=1) == [0] and settings(min_p=1.0).truncated


@pytest.mark.parametrize("counted", [1, 2])
def test_parts_of_a_row_are_joined_alike_at_once_and_by_passes(counted):
    """GPUs take the one, CPUs the other; also where a part has nothing, and where numbers are of another size."""
    largest = (6 * jax.random.normal(jax.random.key(0), (16, 5, 70))).at[1].add(1000.0).at[2].add(-1000.0)
    largest = largest.at[3, :, ::2].set(jnp.finfo(jnp.float32).min)
    sums = [jax.random.uniform(jax.random.key(1 + i), largest.shape) for i in range(counted)]
    got, expected = (jax.jit(f)(largest, *sums) for f in (joined_at_once, joined_by_passes))
    assert len(got) == 1 + counted and got[1].shape == (16, 5)
    np.testing.assert_array_equal(got[0], np.max(largest, -1))
    np.testing.assert_allclose(got[1], (np.exp(np.float64(largest) - got[0][..., None]) * sums[0]).sum(-1), rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_groups_of_tokens_are_joined_to_the_vocabulary(kwargs):
    """3001 tokens, so that the last of 24 groups is not full."""
    logits = 3 * jax.random.normal(jax.random.key(0), (64, 3001))
    temperature = kwargs.get("temperature") or 1.0
    tokens, logps, renormalised = drawn(logits, jax.random.split(jax.random.key(1), 64), settings(**kwargs))
    assert tokens.dtype == jnp.int32 and len(set((np.asarray(tokens) // GROUP).tolist())) > 10

    def picked(logits):
        return np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(tokens)[:, None], 1)[:, 0]

    np.testing.assert_allclose(logps, picked(logits / temperature), rtol=1e-5, atol=2e-6)
    if temperature != 1:
        np.testing.assert_allclose(
            renormalised, picked(truncate(logits / 0.7, settings(**kwargs))), rtol=1e-5, atol=2e-6
        )
    elif kwargs:
        np.testing.assert_array_equal(tokens, np.argmax(logits, -1))


def test_of_equal_logits_greedy_takes_the_first():
    logits = jnp.zeros((2, 300)).at[0, [5, 290]].set(1.0).at[1, [200, 210, 299]].set(2.0)
    tokens, _, _ = drawn(logits, jax.random.split(jax.random.key(0), 2), settings(temperature=0.0))
    assert tokens.tolist() == [5, 200]


def test_excluded_and_broken_logits():
    """By hand: of 0, ln 3 and two that are excluded, the second has probability 3/4; a NaN is not hidden."""
    logits = jnp.array([[-jnp.inf, 0.0, np.log(3.0), -jnp.inf], [0.0, jnp.nan, 1.0, 2.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    for greedy, least in ((settings(temperature=0.0), 2), (settings(), 1)):
        tokens, logps, _ = drawn(logits, keys, greedy)
        assert tokens[0] in range(least, 3) and tokens[1] == 1
        np.testing.assert_allclose(logps[0], np.log([0.25, 0.75])[tokens[0] - 1], rtol=1e-6)
        assert np.isnan(logps[1])
    tokens, [logp], _ = drawn(jnp.full((1, 200), -jnp.inf), keys[:1], settings())
    assert logp < -1e30  # nothing to choose from: not NaN, and nothing to learn from


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_a_gpu_samples_what_a_cpu_samples(kwargs):
    """But where two scores are as good as equal, as their logarithms differ in the last bit."""
    logits = 3 * jax.random.normal(jax.random.key(0), (256, 152064))
    keys = jax.random.split(jax.random.key(1), 256)
    run = jax.jit(sample, static_argnames="settings")
    tokens, logps, renormalised = run(logits, keys, settings(**kwargs))
    with jax.default_device(jax.devices("cpu")[0]):
        expected, *_ = run(*jax.device_get((logits, jax.random.key_data(keys))), settings(**kwargs))
    assert np.mean(np.asarray(tokens) == np.asarray(expected)) > 0.98
    scaled = np.asarray(logits) / (kwargs.get("temperature") or 1.0)
    picked = np.take_along_axis(scaled, np.asarray(tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(logps, picked - np.logaddexp.reduce(np.float64(scaled), axis=1), rtol=1e-5)
    assert (renormalised is None) == (kwargs.get("temperature") != 0.7)
    if renormalised is not None:
        assert (np.asarray(renormalised) > np.asarray(logps)).all()
