"""The library under other settings of JAX, and outside of jit."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_adapter, tiny_model

import qerl_jax as qerl
from qerl_jax.rl.losses import high_entropy

MODEL = tiny_model(layers=1)
ADAPTER = tiny_adapter(MODEL)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 7)), jnp.int32)
PROMPTS = qerl.Prompts(jnp.array([[5, 9], [7, 0]]), jnp.array([2, 1]), jnp.arange(2))
SAMPLING = qerl.SamplingSettings(4, (3,), 0)
SETTINGS = qerl.StepSettings(SAMPLING, qerl.UpdateSettings(num_generations=2, temperature=1.0, micro_batch_size=2))


def compiled(function):
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record) if "Finished XLA compilation" in record.getMessage() else None
    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    try:
        with jax.log_compiles(True):
            function()
    finally:
        logger.removeHandler(handler)
    return len(found)


def test_functions_outside_of_jit_compile_once():
    def sampled(seed):
        out = qerl.generate(MODEL, ADAPTER, PROMPTS, jax.random.key(seed), SAMPLING, 2)
        batch = qerl.make_batch(PROMPTS, out, [1.0, 0.0, 1.0, 0.0], 0, SETTINGS)
        return qerl.with_policies(MODEL, ADAPTER, batch, SETTINGS.update, True)

    assert compiled(lambda: sampled(0)) > 0 == compiled(lambda: sampled(1))


def test_generate_inside_of_jit_is_a_part_of_it_also_where_all_is_closed_over():
    key = jax.random.key(0)
    alone = qerl.generate(MODEL, ADAPTER, PROMPTS, key, SAMPLING, 2)
    inside = jax.jit(lambda: qerl.generate(MODEL, ADAPTER, PROMPTS, key, SAMPLING, 2))()
    np.testing.assert_array_equal(inside.tokens, alone.tokens)
    engine = qerl.Engine(MODEL, SAMPLING, max_prompt_length=2)
    with pytest.raises(TypeError, match=r"cannot be called inside of jax\.jit"):
        jax.jit(lambda: engine.rollout(ADAPTER, PROMPTS, key, 2))()


def test_the_temperature_has_a_gradient():
    def by_logits(temperature):
        logps = jax.nn.log_softmax(qerl.logits(MODEL, TOKENS, adapter=ADAPTER)[:, :-1] / temperature)
        return jnp.take_along_axis(logps, TOKENS[:, 1:, None], -1).sum()

    def by_chunks(temperature):
        return qerl.per_token_logps(MODEL, TOKENS, adapter=ADAPTER, temperature=temperature).sum()

    np.testing.assert_allclose(jax.grad(by_chunks)(0.9), jax.grad(by_logits)(0.9), rtol=1e-4)
    with pytest.raises(ValueError, match="temperature is 0; allowed: a number above 0"):
        by_chunks(0)


def test_log_probabilities_are_of_float32_whatever_the_temperature_is():
    def logps(norms):
        return qerl.per_token_logps(MODEL, TOKENS, norms=norms, temperature=np.float64(0.9))

    with jax.enable_x64(True):
        norms = qerl.norms_of(MODEL, None)
        assert jax.eval_shape(logps, norms).dtype == jnp.float32
        gradient = jax.eval_shape(jax.grad(lambda norms: logps(norms).sum()), norms)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}


def test_ids_outside_are_the_nearest_one_in_a_trace():
    outside = TOKENS.at[0, 3].set(-1).at[1, 3].set(61).at[1, 4].set(-100)
    inside = jnp.clip(outside, 0, 60)
    for function in (qerl.logits, qerl.per_token_logps):
        traced = jax.jit(lambda tokens, f=function: f(MODEL, tokens, adapter=ADAPTER))
        np.testing.assert_array_equal(traced(outside), traced(inside))


def test_promotion_may_be_strict():
    optimizer = optax.sgd(0.1)
    state = qerl.init_state(ADAPTER, optimizer)

    def step(state, model, prompts, key):
        def reward(prompts, completions):
            return jnp.sum(completions.tokens < 30, axis=1)

        return qerl.grpo_step(state, model, prompts, key, reward_fn=reward, optimizer=optimizer, settings=SETTINGS)

    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(step, state, MODEL, PROMPTS, jax.random.key(0))
        assert qerl.informative_groups(np.array([[True, False], [True, True]])).tolist() == [True, False]
        for kind in ("dapo", "cispo"):
            for level in ("token", "sequence"):
                spec = qerl.LossSpec(loss_type=kind, epsilon_high=5.0, importance_sampling_level=level)
                x = jnp.zeros((2, 3))
                mask = jnp.ones((2, 3), bool)
                qerl.policy_loss(spec, x, x, None, jnp.ones((2, 1)), mask, chosen_BC=high_entropy(x, mask, 0.2))


def test_groups_are_compared_exactly_and_without_infinities():
    with jax.debug_infs(True):
        scores = np.array([[1.0, np.nan], [1.0, 0.0], [np.nan, np.nan]], np.float32)
        assert qerl.informative_groups(scores).tolist() == [False, True, False]
    assert qerl.informative_groups(np.array([[2**24, 2**24 + 1]])).tolist() == [True]


def test_sigmas_of_several_steps():
    schedule = qerl.NoiseSchedule(4, 1e-2, 1e-3, 8)
    found = qerl.sigma_at(schedule, jnp.arange(8))
    np.testing.assert_array_equal(found, [qerl.sigma_at(schedule, step) for step in range(8)])
