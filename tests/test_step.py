"""The whole step and its parts but the update: noise, batch, policies, metrics."""

import dataclasses
import functools
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_adapter, tiny_model
from tiny_step import (
    MODEL,
    PROMPTS,
    SAMPLING,
    SETTINGS,
    SGD,
    UPDATE,
    assert_trees_close,
    batch_of,
    few_small_ids,
    scored,
    state_of,
)

from qerl_jax.errors import UserError
from qerl_jax.noise import NoiseSchedule
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rl.losses import LossSpec
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import (
    StepSettings,
    grpo_step,
    make_batch,
    reward_metrics,
    rollout_norms,
    sample_rollout,
    with_policies,
)
from qerl_jax.rollout import Prompts, Rollout

norms_at = jax.jit(rollout_norms, static_argnames="settings")
learners = jax.jit(completion_logps)

OF_ONE_TOKEN = Rollout(
    jnp.zeros((12, 3), jnp.int32), jnp.ones(12, jnp.int32), jnp.ones(12, bool), jnp.zeros((12, 3)), None
)  # four completions of each prompt


def test_noise_is_of_the_rollout_alone_and_the_learner_and_the_reference_are_clean():
    noisy = dataclasses.replace(
        SETTINGS,
        noise=NoiseSchedule(2, 0.3, 0.3, 4),
        update=dataclasses.replace(UPDATE, loss=LossSpec(beta=0.1)),
    )
    state = state_of()
    first, sigma = norms_at(MODEL, state.adapter, jax.random.key(5), jnp.int32(2), settings=noisy)
    again, _ = norms_at(MODEL, state.adapter, jax.random.key(5), jnp.int32(3), settings=noisy)
    assert_trees_close(first, again, rtol=0, atol=0)
    assert (
        float(sigma) == np.float32(0.3) and float(jnp.abs(first.input[0] - MODEL.base.layers[0].input_norm).max()) > 0
    )
    batch = batch_of(noisy, state, several=True, step=2)
    rows = batch.prompt, batch.prompt_lengths, batch.completion, batch.completion_lengths
    clean, _ = learners(MODEL, None, *rows, 1.0)
    learner, _ = learners(MODEL, state.adapter, *rows, 1.0)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(np.asarray(batch.ref_logps)[mask], np.asarray(clean)[mask], atol=1e-5)
    np.testing.assert_allclose(np.asarray(batch.old_logps)[mask], np.asarray(learner)[mask], atol=1e-5)
    assert np.abs(np.asarray(batch.sampled_logps) - np.asarray(learner))[mask].max() > 0.01


def test_ids_beyond_the_vocabulary_are_refused_before_anything_is_sampled():
    settings = dataclasses.replace(SETTINGS, sampling=dataclasses.replace(SAMPLING, eos_token_ids=(3, 61)))
    sample = jax.jit(functools.partial(sample_rollout, settings=settings))
    with pytest.raises(UserError, match=r"eos_token_ids is \(3, 61\); allowed: ids below the vocabulary's 61"):
        sample(MODEL, None, PROMPTS, jax.random.key(0), 0)


def test_metrics_of_a_rollout_by_hand():
    """Rewards whose squared deviations sum up to 10, one group without any; lengths of which the last two are cut."""
    lengths, terminated = jnp.array([2, 5, 3, 3, 1, 6]), jnp.array([True] * 4 + [False] * 2)
    completions = Rollout(jnp.zeros((6, 6), jnp.int32), lengths, terminated, jnp.zeros((6, 6)), None)
    found = reward_metrics(jnp.array([[1.0, 3.0], [2.0, 2.0], [0.0, 4.0]]), completions)
    expected = {
        "reward": 2,
        "reward_std": np.sqrt(10 / 5),
        "frac_reward_zero_std": 1 / 3,
        "completions/mean_length": 20 / 6,
        "completions/min_length": 1,
        "completions/max_length": 6,
        "completions/mean_terminated_length": 13 / 4,
        "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 5,
        "completions/clipped_ratio": 1 / 3,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=1e-6)
    cut = reward_metrics(jnp.zeros((3, 2)), completions.replace(terminated=jnp.zeros(6, bool)))
    assert [float(cut[f"completions/{name}_terminated_length"]) for name in ("mean", "min", "max")] == [0, 0, 0]
    assert float(cut["completions/clipped_ratio"]) == 1
    unscored = reward_metrics(jnp.array([[1.0, jnp.nan], [2.0, 2.0], [jnp.nan, 4.0]]), completions)
    assert [float(unscored[name]) for name in ("reward", "frac_reward_zero_std")] == [9 / 4, 1]
    np.testing.assert_allclose(unscored["reward_std"], np.std([1, 2, 2, 4], ddof=1), rtol=1e-6)


def test_a_completion_that_cannot_be_scored_has_no_reward():
    rewards = [0.5, None, *range(10)]
    batch = make_batch(PROMPTS, OF_ONE_TOKEN, rewards, jnp.int32(0), SETTINGS)
    np.testing.assert_array_equal(batch.rewards, [0.5, np.nan, *range(10)])


@pytest.mark.parametrize(("rewards", "message"), [
    ([1.0, float("inf"), *range(10)], r"reward 1 is inf; allowed: -1e\+15 to 1e\+15"),
    (np.arange(12.0) * 1e25, r"reward 1 is 1e\+25; allowed"),
    (["1.0"] * 12, "rewards are of the dtype <U3; expected numbers, NaN or None"),
    (np.ones(12, complex), "rewards are of the dtype complex128; expected numbers"),
])  # fmt: skip
def test_rewards_that_are_no_numbers_or_too_large_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        make_batch(PROMPTS, OF_ONE_TOKEN, rewards, jnp.int32(0), SETTINGS)


def test_a_batch_is_of_arrays_where_prompts_are_lists():
    lists = Prompts(PROMPTS.tokens.tolist(), PROMPTS.lengths.tolist(), range(3))
    found, right = (make_batch(of, OF_ONE_TOKEN, np.ones(12), jnp.int32(0), SETTINGS) for of in (lists, PROMPTS))
    assert found.prompt.dtype == jnp.int32
    assert_trees_close(found, right, rtol=0, atol=0)


def test_a_batch_outlives_the_state_whose_step_it_is_of():
    step = jnp.int32(3)
    batch = make_batch(PROMPTS, OF_ONE_TOKEN, jnp.arange(12.0), step, SETTINGS)
    step.delete()  # as an update does that is donated the state
    assert batch.rollout_step == 3


def test_rewards_of_any_kind_of_number_are_taken():
    half = np.float32([0.5] * 12)
    for rewards in (
        [Fraction(1, 2)] * 12,
        [Decimal("0.5")] * 12,
        np.array([0.5] * 12, object),
        [jnp.float16(0.5)] * 12,
    ):
        np.testing.assert_array_equal(make_batch(PROMPTS, OF_ONE_TOKEN, rewards, jnp.int32(0), SETTINGS).rewards, half)
    mixed = make_batch(PROMPTS, OF_ONE_TOKEN, np.array([0.5, None] * 6, object), jnp.int32(0), SETTINGS).rewards
    np.testing.assert_array_equal(mixed, [0.5, np.nan] * 6)
    ranks = make_batch(
        PROMPTS, OF_ONE_TOKEN, [-np.inf] * 12, jnp.int32(0), SETTINGS, lambda rewards: 0 * jnp.sign(rewards)
    )
    assert float(jnp.abs(ranks.advantages).max()) == 0
    with pytest.raises(ValueError, match="rewards are of the dtype complex64"):
        make_batch(PROMPTS, OF_ONE_TOKEN, [jnp.complex64(1)] * 12, jnp.int32(0), SETTINGS)


def test_a_step_of_groups_of_one_and_of_a_reward_that_is_a_list():
    """REINFORCE, whose advantages are a function of its own; and metrics of a loss that the step has too."""
    of_one = dataclasses.replace(SETTINGS, update=dataclasses.replace(UPDATE, num_generations=1))
    step = functools.partial(
        grpo_step,
        reward_fn=lambda prompts, completions: [*few_small_ids(prompts, completions)],
        optimizer=SGD,
        settings=of_one,
        advantage_fn=lambda rewards: rewards,
    )
    _, metrics = jax.jit(step)(state_of(), MODEL, PROMPTS, jax.random.key(0))
    assert float(metrics["grad_norm"]) > 0 and float(metrics["frac_reward_zero_std"]) == 1

    def loss(logp, old, ref, advantages, mask):
        return -(logp * advantages * mask).sum(), {"reward": jnp.float32(-7)}

    with pytest.raises(ValueError, match="loss_fn gave metrics whose names the step has itself: reward"):
        jax.eval_shape(functools.partial(step, loss_fn=loss), state_of(), MODEL, PROMPTS, jax.random.key(0))


def test_a_loss_of_ones_own_asks_for_the_reference_without_a_beta():
    seen = []

    def loss(logp, old, ref, advantages, mask):
        seen.append(ref is not None)
        return -(logp * advantages * mask).sum(), {}

    state, batch = state_of(), batch_of()
    no_beta, beta = UPDATE, dataclasses.replace(UPDATE, loss=LossSpec(beta=0.1))
    of = functools.partial(with_policies, MODEL, state.adapter, batch, several_updates=False)
    for settings, asked, expected in (
        (no_beta, None, False), (no_beta, True, True), (no_beta, False, False),
        (beta, None, True), (beta, True, True), (beta, False, False),
    ):  # fmt: skip
        found = jax.eval_shape(functools.partial(of, settings=settings, reference=asked))
        assert (found.ref_logps is not None) == expected and found.old_logps is None
        seen.clear()
        of_step = dataclasses.replace(SETTINGS, update=settings)
        step = functools.partial(grpo_step, reward_fn=few_small_ids, optimizer=SGD, settings=of_step, loss_fn=loss)
        jax.eval_shape(functools.partial(step, reference=asked), state, MODEL, PROMPTS, jax.random.key(0))
        assert set(seen) == {expected}


def test_another_networks_log_probabilities_need_its_vocabulary():
    batch, teacher = batch_of(), tiny_model(seed=5)
    mine, theirs = (
        with_policies(model, None, batch, UPDATE, several_updates=False, reference=True).ref_logps
        for model in (MODEL, teacher)
    )
    assert bool(jnp.any(mine != theirs)) and bool(jnp.isfinite(theirs).all())
    largest = int(batch.completion.max())
    small = teacher.replace(config=dataclasses.replace(teacher.config, vocab_size=largest))
    with pytest.raises(ValueError, match=f"completion has the token {largest}; the model's vocabulary has {largest}"):
        with_policies(small, None, batch, UPDATE, several_updates=False, reference=True)
    spoilt = batch.replace(completion=jnp.where(batch.mask, batch.completion, 10**6))  # padding is no token
    with_policies(teacher, None, spoilt, UPDATE, several_updates=False)
    with pytest.raises(ValueError, match="the adapter has 3 layers, the model 2"):
        wrong = state_of().adapter
        with_policies(teacher, wrong.replace(lora=(*wrong.lora, {})), batch, UPDATE, several_updates=True)


def test_a_batch_is_prompt_major_and_masked_by_length():
    completions = Rollout(
        jnp.zeros((6, 4), jnp.int32),  # all of them the pad id, which may be a token like others
        jnp.array([4, 1, 2, 4, 3, 4]),
        jnp.array([True, True, True, False, True, False]),
        jnp.arange(24.0).reshape(6, 4),
        None,
    )
    rewards, two = jnp.arange(6.0), dataclasses.replace(UPDATE, num_generations=2)
    for masks, lengths in ((False, [4, 1, 2, 4, 3, 4]), (True, [4, 1, 2, 0, 3, 0])):
        settings = StepSettings(SAMPLING, two, mask_truncated_completions=masks)
        batch = make_batch(PROMPTS, completions, rewards, jnp.int32(7), settings)
        assert batch.mask.sum(1).tolist() == lengths and not bool(jnp.any(batch.mask[1:3, 2:]))
        assert batch.prompt[:, 0].tolist() == [5, 5, 7, 7, 20, 20]
        assert batch.prompt_lengths.tolist() == [3, 3, 1, 1, 4, 4]
        assert batch.completion_lengths.tolist() == [4, 1, 2, 4, 3, 4] and int(batch.rollout_step) == 7
        np.testing.assert_array_equal(batch.sampled_logps, completions.logps)
    for G in (1, 3):
        settings = dataclasses.replace(SETTINGS, update=dataclasses.replace(UPDATE, num_generations=G))
        with pytest.raises(ValueError, match=f"3 prompts with num_generations {G} have {3 * G} completions; there are"):
            make_batch(PROMPTS, completions, rewards, jnp.int32(7), settings)


def test_advantages_keep_the_places_of_their_rewards():
    completions = Rollout(jnp.zeros((12, 4), jnp.int32), jnp.full(12, 4), jnp.zeros(12, bool), jnp.zeros((12, 4)), None)
    make = functools.partial(make_batch, PROMPTS, completions, jnp.arange(12.0), jnp.int32(0), SETTINGS)
    np.testing.assert_array_equal(make(lambda rewards: np.asarray(rewards) - 1).advantages, np.arange(12.0) - 1)
    with pytest.raises(ValueError, match=r"advantage_fn gave the shape \(4, 3\); expected \(3, 4\)"):
        make(lambda rewards: rewards.T)


@pytest.mark.parametrize(("drawn_at", "recorded_at"), [(0.7, 0.7), (1.0, 1.0), (0.0, 1.0)])
def test_an_update_has_the_temperature_of_the_recorded_log_probabilities(drawn_at, recorded_at):
    sampling = dataclasses.replace(SAMPLING, temperature=drawn_at)
    StepSettings(sampling, dataclasses.replace(UPDATE, temperature=recorded_at))
    with pytest.raises(ValueError, match=f"update.temperature is 0.9; allowed: {recorded_at}"):
        StepSettings(sampling, dataclasses.replace(UPDATE, temperature=0.9))


@pytest.mark.parametrize("final_norm", [False, True])
def test_the_final_norm_gets_noise_where_the_schedule_says_so(final_norm):
    settings = dataclasses.replace(SETTINGS, noise=NoiseSchedule(2, 0.3, 0.3, 4, final_norm=final_norm))
    for step, sigma in ((0, 0.0), (2, 0.3)):
        norms, found = norms_at(MODEL, None, jax.random.key(5), jnp.int32(step), settings=settings)
        noise = norms.final - MODEL.base.final_norm
        assert float(found) == np.float32(sigma) and bool(jnp.any(noise)) == (final_norm and step == 2)


@pytest.mark.parametrize("size", [5, 24])
def test_any_number_of_rows_at_once_gives_the_same_log_probabilities(size):
    """One that does not divide the batch, and one that is more than the batch has."""
    found = [
        scored(
            MODEL,
            None,
            batch_of(),
            settings=dataclasses.replace(UPDATE, micro_batch_size=n),
            several_updates=True,
        )
        for n in (size, 12)
    ]
    mask = np.asarray(found[0].mask)
    np.testing.assert_allclose(*(np.asarray(batch.old_logps)[mask] for batch in found), atol=1e-5)


def test_adapter_and_moments_are_float32_on_a_bfloat16_model():
    model = tiny_model(dtype=jnp.bfloat16)
    state = init_state(tiny_adapter(model, train_norms=True), optax.adamw(1e-3))
    step = functools.partial(grpo_step, reward_fn=few_small_ids, optimizer=optax.adamw(1e-3), settings=SETTINGS)
    state, _ = jax.eval_shape(step, state, model, PROMPTS, jax.random.key(0))
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


def test_a_step_names_arguments_of_another_kind():
    """At once and in a trace."""
    state, key = state_of(), jax.random.key(0)
    step = functools.partial(grpo_step, reward_fn=few_small_ids, optimizer=SGD, settings=SETTINGS)
    no_key = r"the key is .*; expected one PRNG key, as jax\.random\.key\(seed\)"
    for call in (step, jax.jit(step)):
        with pytest.raises(TypeError, match="state is of type Model; expected a TrainState"):
            call(MODEL, state, PROMPTS, key)
        with pytest.raises(TypeError, match="state is of type Adapter; expected a TrainState"):
            call(state.adapter, MODEL, PROMPTS, key)
        with pytest.raises(TypeError, match="model is of type Adapter; expected a Model"):
            call(state, state.adapter, PROMPTS, key)
        for wrong in (0, jax.random.split(key, 2)):
            with pytest.raises(ValueError, match=no_key):
                call(state, MODEL, PROMPTS, wrong)
    with pytest.raises(TypeError, match="settings is of type SamplingSettings; expected a StepSettings"):
        step(state, MODEL, PROMPTS, key, settings=SAMPLING)


def test_grpo_step_raises_its_reward_under_one_jit():
    optimizer = optax.adam(3e-2)
    step = jax.jit(
        functools.partial(
            grpo_step,
            reward_fn=few_small_ids,
            optimizer=optimizer,
            settings=dataclasses.replace(SETTINGS, noise=NoiseSchedule(3, 1e-2, 1e-3, 30)),
        ),
        donate_argnums=0,
    )
    state, rewards, sigmas = init_state(tiny_adapter(MODEL), optimizer), [], []
    for i in range(30):
        state, metrics = step(state, MODEL, PROMPTS, jax.random.key(i))
        rewards.append(float(metrics["reward"]))
        sigmas.append(float(metrics["aqn/sigma"]))
    np.testing.assert_allclose(sigmas, np.repeat([0, 1e-2, 1e-3], 10), rtol=1e-6)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert int(state.step) == 30 and step._cache_size() == 1


def test_four_seeds_by_vmap_equal_four_runs():
    optimizer = optax.sgd(0.1)
    step = functools.partial(grpo_step, reward_fn=few_small_ids, optimizer=optimizer, settings=SETTINGS)
    states = [init_state(tiny_adapter(MODEL, seed=s), optimizer) for s in range(4)]
    keys = jnp.stack([jax.random.key(s) for s in range(4)])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    many, metrics = jax.jit(jax.vmap(step, in_axes=(0, None, None, 0)))(stacked, MODEL, PROMPTS, keys)
    for s in range(4):
        one, alone = jax.jit(step)(states[s], MODEL, PROMPTS, keys[s])
        assert_trees_close(jax.tree.map(lambda leaf, s=s: leaf[s], many.adapter), one.adapter, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(metrics["reward"][s], alone["reward"], rtol=1e-6)
