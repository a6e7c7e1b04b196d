"""AQN: the schedule by hand, and noise of the norms that are in force (what it scales: test_families)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_adapter, tiny_model

from qerl_jax.models.init import init_adapter
from qerl_jax.models.params import Norms, norms_of
from qerl_jax.models.transformer import forward, head, logits
from qerl_jax.noise import NoiseSchedule, perturb_norms, sigma_at
from qerl_jax.rl.state import UpdateSettings
from qerl_jax.rl.step import StepSettings, rollout_norms
from qerl_jax.rollout import SamplingSettings

TOKENS = jax.random.randint(jax.random.key(7), (3, 9), 0, 61)


def sigmas(**kwargs):
    schedule = NoiseSchedule(**({"num_stages": 4, "sigma_start": 1e-2, "sigma_end": 1e-4, "total_steps": 8} | kwargs))
    return [float(sigma_at(schedule, t)) for t in range(schedule.total_steps)]


def test_exponential_stages_by_hand():
    np.testing.assert_allclose(sigmas(), [0, 0, 1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4], rtol=1e-6)


def test_other_decays_by_hand():
    np.testing.assert_allclose(sigmas(schedule="linear")[::2], [0, 1e-2, 5.05e-3, 1e-4], rtol=1e-6)
    np.testing.assert_allclose(sigmas(schedule="cosine")[::2], [0, 1e-2, 5.05e-3, 1e-4], rtol=1e-6)
    fifths = sigmas(schedule="cosine", num_stages=5, sigma_start=0.05, sigma_end=0.01, total_steps=5)
    np.testing.assert_allclose(fifths, [0, 0.05, 0.04, 0.02, 0.01], rtol=1e-6)  # cos 60° = 1/2
    middle = 1e-2 + (1e-4 - 1e-2) * np.log(2) / np.log(3)
    np.testing.assert_allclose(sigmas(schedule="logarithmic")[::2], [0, 1e-2, middle, 1e-4], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine", "logarithmic"])
def test_one_and_two_stages(schedule):
    assert sigmas(num_stages=1, schedule=schedule) == [0.0] * 8
    np.testing.assert_allclose(sigmas(num_stages=2, schedule=schedule), [0.0] * 4 + [1e-2] * 4, rtol=1e-6)


@pytest.mark.parametrize(("K", "T"), [(3, 7), (10, 10), (10, 64), (7, 100)])
def test_stage_is_the_floor_formula(K, T):
    schedule = NoiseSchedule(K, 1e-2, 1e-4, T)
    stages = schedule.stage_sigmas()
    for t in range(T + 3):
        assert float(sigma_at(schedule, t)) == np.float32(stages[min(K - 1, t * K // T)])


def test_fewer_steps_than_stages_is_an_error():
    with pytest.raises(ValueError, match="num_stages is 10 and total_steps 9"):
        NoiseSchedule(10, 1e-2, 1e-4, 9)


@pytest.mark.parametrize("sigmas", [(float("nan"), 1e-4), (1e-2, float("inf")), (0.0, 1e-4), (1e-2, -1e-4)])
def test_a_sigma_that_is_no_positive_number_is_an_error(sigmas):
    with pytest.raises(ValueError, match=r"sigma_(start|end) is .*; allowed: above 0 and finite"):
        NoiseSchedule(4, *sigmas, 8)


def test_sigma_is_traced_so_no_stage_recompiles():
    schedule = NoiseSchedule(4, 1e-2, 1e-4, 8)
    step = jax.jit(lambda norms, t, key: perturb_norms(norms, sigma_at(schedule, t), key))
    norms = norms_of(tiny_model(), None)
    for t in range(8):
        step(norms, t, jax.random.key(0))
    assert step._cache_size() == 1


def test_noise_is_a_function_of_the_key_and_sigma_zero_is_clean():
    norms = norms_of(tiny_model(), None)
    first, again, other = (perturb_norms(norms, 0.1, jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first.input[0], again.input[0])
    assert float(jnp.abs(first.input[0] - other.input[0]).max()) > 0
    assert (
        float(jnp.abs((first.input[0] - norms.input[0]) - (first.post_attention[0] - norms.post_attention[0])).max())
        > 0
    )
    np.testing.assert_array_equal(perturb_norms(norms, 0.0, jax.random.key(1)).input[1], norms.input[1])
    np.testing.assert_array_equal(first.final, norms.final)
    assert float(jnp.abs(perturb_norms(norms, 0.1, jax.random.key(1), final_norm=True).final - norms.final).max()) > 0


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_noise_and_adapters_of_a_key_are_the_same_under_vmap(impl):
    """JAX draws a batch's numbers of `rbg` from the batch's first key."""
    model, keys = tiny_model(), jnp.stack([jax.random.key(seed, impl=impl) for seed in (1, 2, 3)])

    def drawn(key):
        return perturb_norms(norms_of(model, None), 0.1, key), init_adapter(key, model, 4).lora

    together = jax.vmap(drawn)(keys)
    for i, key in enumerate(keys):
        jax.tree.map(lambda alone, of_all, i=i: np.testing.assert_array_equal(alone, of_all[i]), drawn(key), together)


def test_noise_has_the_stated_standard_deviation():
    norms = Norms((jnp.ones(20000),), (jnp.ones(20000),), jnp.ones(20000))
    noise = perturb_norms(norms, 1e-3, jax.random.key(0)).input[0] - 1
    assert abs(float(noise.std()) - 1e-3) < 3e-5 and abs(float(noise.mean())) < 3e-5


def test_every_norm_has_a_draw_of_its_own():
    clean = Norms((jnp.ones(500),) * 3, (jnp.ones(500),) * 3, jnp.ones(500))
    norms = perturb_norms(clean, 0.1, jax.random.key(0), final_norm=True)
    apart = np.corrcoef(np.stack([*norms.input, *norms.post_attention, norms.final])) - np.eye(7)
    assert np.abs(apart).max() < 0.25


def test_noise_of_1e_4_acts_on_a_bfloat16_model():
    model = tiny_model(dtype=jnp.bfloat16)
    norms = norms_of(model, None)
    noisy = perturb_norms(norms, 1e-4, jax.random.key(0))
    assert all(bool(jnp.all(a != b)) for a, b in zip(noisy.input, norms.input, strict=True))
    hidden, _ = forward(model, None, TOKENS, norms=noisy)
    changed = head(model, hidden.reshape(-1, 32)) != logits(model, TOKENS).reshape(-1, 61)
    assert float(changed.mean()) > 0.01


@pytest.mark.parametrize("narrow", range(3))
def test_sixteen_bit_scales_are_refused(narrow):
    first, second, final = (jnp.ones(4, jnp.bfloat16 if i == narrow else jnp.float32) for i in range(3))
    with pytest.raises(TypeError, match="float32"):
        perturb_norms(Norms((first,), (second,), final), 1e-3, jax.random.key(0))


def test_what_is_no_sigma_and_what_are_no_norms():
    norms = Norms((jnp.ones(4),), (jnp.ones(4),), jnp.ones(4))
    for sigma, found in ((-0.1, "-0.1"), (jnp.inf, "inf"), (jnp.nan, "nan")):
        with pytest.raises(ValueError, match=f"sigma is {found}; allowed: 0 or more, and finite"):
            perturb_norms(norms, sigma, jax.random.key(0))
    with pytest.raises(ValueError, match=r"sigma has the shape \(2, 1\); expected one number"):
        perturb_norms(norms, jnp.ones((2, 1)), jax.random.key(0))
    with pytest.raises(TypeError, match="norms is of type tuple; expected a Norms"):
        perturb_norms((), 0.1, jax.random.key(0))


def test_trained_norms_are_the_ones_perturbed():
    """By the noise that the base's own would get; the final norm is the base's."""
    model = tiny_model()
    adapter = tiny_adapter(model, train_norms=True)
    sampling, update = SamplingSettings(4, (3,), 0), UpdateSettings(2, 1.0, 2)
    settings = StepSettings(sampling, update, noise=NoiseSchedule(2, 0.1, 0.1, 2))
    clean, trained, base = (
        norms_of(model, adapter),
        *(rollout_norms(model, of, jax.random.key(0), jnp.int32(1), settings)[0] for of in (adapter, None)),
    )
    np.testing.assert_array_equal(clean.final, model.base.final_norm)
    for i, layer in enumerate(model.base.layers):
        for name, scale in (("input", layer.input_norm), ("post_attention", layer.post_attention_norm)):
            noise = getattr(base, name)[i] - scale
            np.testing.assert_array_equal(getattr(clean, name)[i], getattr(adapter.norms, name)[i])
            np.testing.assert_allclose(getattr(trained, name)[i] - getattr(clean, name)[i], noise, atol=1e-6)
            assert float(jnp.abs(noise).max()) > 0.1
