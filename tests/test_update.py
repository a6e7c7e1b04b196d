"""The update: accumulation, masks, refusal of what is not finite."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_step import (
    MODEL,
    PROMPTS,
    SETTINGS,
    SGD,
    UPDATE,
    assert_trees_close,
    batch_of,
    sampled,
    state_of,
)

from qerl_jax.models.transformer import in_turn
from qerl_jax.noise import NoiseSchedule
from qerl_jax.rl import update as update_module
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.optimizer import OptimizerSpec, make_optimizer
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import make_batch
from qerl_jax.rl.update import update_step
from qerl_jax.rollout import Rollout


@functools.partial(jax.jit, static_argnames=("settings", "loss_fn"))
def update(state, batch, settings=UPDATE, loss_fn=None):
    return update_step(state, MODEL, batch, optimizer=SGD, settings=settings, loss_fn=loss_fn)


# Of the updates below one program.
BY_SAMPLER = dataclasses.replace(UPDATE, old_logprobs="sampler", loss=LossSpec(epsilon=0.05, epsilon_high=0.05))


def moved(state, new):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, new.adapter, state.adapter)))


def test_accumulation_equals_the_full_batch():
    """Unequal lengths, masked rows, and a micro-batch (rows 4..5 of size 2) in which everything is masked."""
    settings = dataclasses.replace(UPDATE, loss=LossSpec("grpo", beta=0.05))
    state = state_of(train_norms=True)
    batch = batch_of(dataclasses.replace(SETTINGS, update=settings), state)
    batch = batch.replace(mask=batch.mask.at[4:6].set(False).at[9].set(False))
    assert len(set(np.asarray(batch.completion_lengths).tolist())) > 2
    whole, whole_metrics = update(state, batch, settings)
    for size, loss_fn in ((2, None), (4, functools.partial(policy_loss, settings.loss))):
        cut, metrics = update(state, batch, dataclasses.replace(settings, micro_batch_size=size), loss_fn)
        assert_trees_close(cut.adapter, whole.adapter, rtol=1e-4, atol=1e-6)
        assert_trees_close(metrics, whole_metrics, rtol=1e-4, atol=1e-5)  # the gap to the sampler is rounding itself
    assert moved(state, whole) > 1e-3


@pytest.fixture
def by_token(monkeypatch):
    """The state of a learner, a number, that knows a token's log-probability by the token alone; and an update of it,
    which is compiled in no time."""

    def learner(model, x, prompt, prompt_lengths, completion, *rest, **options):
        return x * jnp.sin(completion) - 2, jnp.cos(completion)

    monkeypatch.setattr(update_module, "completion_logps", learner)

    def run(state, batch, settings=UPDATE, loss_fn=None):
        step_of = functools.partial(update_step, optimizer=SGD, settings=settings, loss_fn=loss_fn)
        return jax.jit(step_of)(state, MODEL, batch)

    return init_state(jnp.float32(0.5), SGD), run


@pytest.mark.parametrize(("loss_type", "level"), [("dapo", "sequence"), ("dr_grpo", "none")])
def test_accumulation_equals_the_full_batch_in_other_losses(by_token, loss_type, level):
    """The same of a learner that knows a token's log-probability by the token alone."""
    tokens = jax.random.randint(jax.random.key(0), (12, 6), 0, MODEL.config.vocab_size)
    recorded = -2.5 + 0.5 * jax.random.normal(jax.random.key(1), (3, 12, 6))
    completions = Rollout(tokens, 1 + jnp.arange(12) % 6, jnp.ones(12, bool), recorded[0], None)
    batch = make_batch(PROMPTS, completions, jnp.arange(12.0) ** 2, jnp.int32(0), SETTINGS)
    mask = batch.mask.at[4:6].set(False).at[9].set(False)
    batch = batch.replace(old_logps=recorded[1], ref_logps=recorded[2], mask=mask)
    state, run = by_token
    state = state.replace(step=jnp.int32(3))
    settings = dataclasses.replace(
        UPDATE, loss=LossSpec(loss_type, beta=0.05), correction=SamplerCorrection(level, "truncate", 2.0)
    )
    whole, whole_metrics = run(state, batch, settings)
    cut, metrics = run(state, batch, dataclasses.replace(settings, micro_batch_size=2))
    assert_trees_close((cut.adapter, metrics), (whole.adapter, whole_metrics), rtol=1e-5, atol=1e-6)
    assert abs(float(whole.adapter) - 0.5) > 1e-3


@pytest.mark.parametrize(
    ("loss_fn", "size", "quantile", "passes"),
    [(None, 4, 1.0, 1), (None, 12, 1.0, 1), (functools.partial(policy_loss, LossSpec()), 12, 1.0, 1),
     (functools.partial(policy_loss, LossSpec()), 4, 1.0, 2), (None, 4, 0.2, 2), (None, 12, 0.2, 1)],
)  # fmt: skip
def test_only_a_loss_that_looks_across_several_micro_batches_takes_a_second_pass(
    monkeypatch, loss_fn, size, quantile, passes
):
    traced = []

    def counting(*args, **options):
        traced.append(args)
        return completion_logps(*args, **options)

    monkeypatch.setattr(update_module, "completion_logps", counting)
    settings = dataclasses.replace(UPDATE, micro_batch_size=size, loss=LossSpec(top_entropy_quantile=quantile))
    run = functools.partial(update_step, optimizer=SGD, settings=settings, loss_fn=loss_fn)
    jax.eval_shape(run, state_of(), MODEL, batch_of())
    assert len(traced) == passes


def of_high_entropy(quantile, **options):
    return dataclasses.replace(UPDATE, loss=LossSpec(top_entropy_quantile=quantile, **options))


@pytest.mark.parametrize("size", [12, 5])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.95])
def test_tokens_of_high_entropy_alone_have_a_gradient(by_token, quantile, size):
    """Those of the whole batch, by NumPy's quantile. The average, as the entropy, is that over all tokens."""
    (state, run), batch = by_token, batch_of()
    batch = batch.replace(mask=batch.mask.at[2].set(False))  # a row without a token that counts
    mask, tokens = np.asarray(batch.mask), np.asarray(batch.completion, np.float64)
    entropies = np.cos(tokens)
    settings = dataclasses.replace(of_high_entropy(quantile), micro_batch_size=size)
    new, metrics = run(state, batch.replace(advantages=jnp.arange(12.0) - 5), settings)
    threshold = np.quantile(entropies[mask], 1 - quantile)
    chosen = mask & (entropies >= threshold - 1e-6)
    assert 0 < chosen.sum() < mask.sum()
    gains = np.where(chosen, (np.arange(12.0) - 5)[:, None], 0)
    np.testing.assert_allclose(metrics["loss"], -np.mean(gains[mask]), rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], np.mean(entropies[mask]), rtol=1e-5)
    np.testing.assert_allclose(new.adapter, 0.5 + 0.1 * np.mean((np.sin(tokens) * gains)[mask]), rtol=1e-5)


@pytest.mark.parametrize("size", [12, 4])
def test_a_batch_without_tokens_that_count_has_none_of_high_entropy(by_token, size):
    (state, run), batch = by_token, batch_of()
    settings = dataclasses.replace(of_high_entropy(0.2), micro_batch_size=size)
    new, metrics = run(state, batch.replace(mask=jnp.zeros_like(batch.mask)), settings)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == int(metrics["nonfinite"]) == 0
    assert float(new.adapter) == 0.5


@pytest.mark.parametrize("size", [12, 4])
def test_a_loss_of_ones_own_is_of_all_tokens(by_token, size):
    (state, run), batch = by_token, batch_of()
    own = functools.partial(policy_loss, LossSpec())
    some, every = (dataclasses.replace(settings, micro_batch_size=size) for settings in (of_high_entropy(0.2), UPDATE))
    assert_trees_close(run(state, batch, some, own), run(state, batch, every, own), rtol=0, atol=0)


def test_updates_of_high_entropy_under_vmap_are_those_alone(by_token):
    """Two batches, each with its own threshold and another number of packs."""
    (state, run), batch = by_token, batch_of()
    shorter = batch.replace(completion_lengths=jnp.ones_like(batch.completion_lengths))
    settings = dataclasses.replace(of_high_entropy(0.3, loss_type="grpo"), micro_batch_size=4)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), batch, shorter)
    step_of = functools.partial(update_step, optimizer=SGD, settings=settings)
    found = jax.jit(jax.vmap(step_of, in_axes=(None, None, 0)))(state, MODEL, both)
    for i, alone in enumerate((batch, shorter)):
        of_one = jax.tree.map(lambda leaf, i=i: leaf[i], found)
        assert_trees_close(of_one, run(state, alone, settings), rtol=1e-5, atol=1e-7)


def test_a_layers_gradients_are_there_before_the_layers_below_begin():
    """In the program that goes to the compiler each layer's gradients, of its pairs and of the stream, pass a barrier
    together."""
    state, batch = state_of(), batch_of()
    run = functools.partial(update_step, optimizer=SGD, settings=UPDATE)
    barriers = re.findall(r":(\d+) = stablehlo.optimization_barrier", jax.jit(run).lower(state, MODEL, batch).as_text())
    gradients = len(jax.tree.leaves(state.adapter.lora[0])) + 3  # and those of two norms and of the stream
    assert barriers.count(str(gradients)) == MODEL.config.num_hidden_layers
    value, gradient = jax.value_and_grad(lambda tree: jnp.sum(in_turn(tree)[0] * 2 + in_turn(tree)[1]))((1.0, 3.0))
    assert float(value) == 5.0 and jax.tree.map(float, gradient) == (2.0, 1.0)


def test_old_logprobs_sampler_uses_what_the_rollout_recorded():
    noisy = dataclasses.replace(SETTINGS, noise=NoiseSchedule(2, 0.3, 0.3, 4))
    batch = batch_of(noisy, step=2)
    _, metrics = update(state_of(), batch, BY_SAMPLER)
    assert float(metrics["clip_ratio/region_mean"]) > 0
    _, clean = update(state_of(), batch)
    gaps = [float(found["sampling/sampling_logp_difference/mean"]) for found in (metrics, clean)]
    assert gaps[0] == gaps[1] > 0.01  # between sampler and learner, whatever the ratio is of


def test_advantages_of_a_whole_rollout_stay_with_its_parts(by_token):
    """With scale_rewards batch the deviation is that of all completions of a rollout, as TRL takes it."""
    by_batch = functools.partial(group_advantages, scale_rewards="batch")
    out, _ = sampled(MODEL, state_of().adapter, PROMPTS, jax.random.key(2), jnp.int32(0), settings=SETTINGS)
    rewards = jnp.arange(12.0) ** 2
    whole = make_batch(PROMPTS, out, rewards, jnp.int32(0), SETTINGS, by_batch)
    of_four = dataclasses.replace(UPDATE, micro_batch_size=4)

    def spy(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sum(advantages * logp * mask), {"seen": advantages[:, 0]}

    parts = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 4] if leaf.ndim else leaf, whole) for i in (0, 4, 8)]
    state, run = by_token
    seen = [run(state, part, of_four, spy)[1]["seen"] for part in parts]
    np.testing.assert_allclose(np.concatenate(seen), by_batch(rewards.reshape(3, 4)).reshape(-1), rtol=1e-6)
    with pytest.raises(ValueError, match="the batch has advantages"):
        update_step(state_of(), MODEL, whole, optimizer=SGD, settings=UPDATE, advantage_fn=by_batch)


def test_advantages_of_tokens_are_those_of_their_rows_where_all_are_equal(by_token):
    """In one pack and in several, by a configured loss and by another; behind a completion's end they may be NaN."""
    (state, run), batch = by_token, batch_of()
    of_rows = jnp.arange(12.0) / 3 - 2
    of_tokens = jnp.where(batch.mask, of_rows[:, None], jnp.nan)
    spec = LossSpec("grpo")
    for size, loss_fn in ((12, None), (4, None), (4, functools.partial(policy_loss, spec))):
        settings = dataclasses.replace(
            UPDATE, micro_batch_size=size, loss=spec, correction=SamplerCorrection("token", "mask")
        )
        (rows, of_row), (tokens, of_token) = (
            run(state, batch.replace(advantages=given), settings, loss_fn) for given in (of_rows, of_tokens)
        )
        assert moved(state, rows) > 1e-3 and int(of_token["nonfinite"]) == 0
        assert_trees_close((tokens, of_token), (rows, of_row), rtol=1e-6, atol=1e-8)
        _, poisoned = run(state, batch.replace(advantages=of_tokens.at[3, 0].set(jnp.nan)), settings, loss_fn)
        assert int(poisoned["nonfinite"]) == 1


@pytest.mark.parametrize("size", [12, 5])
def test_advantages_of_tokens_weigh_each_tokens_gradient(by_token, size):
    """At a ratio of 1 the gradient of dapo is that of -sum(A logp) over the number of tokens."""
    batch, shaped = batch_of(), np.cos(np.arange(72.0)).reshape(12, 6)
    state, run = by_token
    settings = dataclasses.replace(UPDATE, micro_batch_size=size)
    new, metrics = run(state, batch.replace(advantages=jnp.asarray(shaped, jnp.float32)), settings)
    mask, slopes = np.asarray(batch.mask), np.sin(np.asarray(batch.completion, np.float64))
    np.testing.assert_allclose(metrics["loss"], -np.mean(shaped[mask]), rtol=1e-5)
    np.testing.assert_allclose(new.adapter, 0.5 + 0.1 * np.mean((slopes * shaped)[mask]), rtol=1e-5)


def test_advantages_of_rows_of_which_nothing_counts_may_be_anything(by_token):
    state, run = by_token
    batch = batch_of().replace(advantages=jnp.arange(12.0) - 5)
    batch = batch.replace(mask=batch.mask.at[2].set(False).at[7].set(False))
    poisoned = batch.replace(advantages=batch.advantages.at[2].set(jnp.nan).at[7].set(jnp.inf))
    assert_trees_close(run(state, poisoned), run(state, batch), rtol=0, atol=0)


def test_an_advantage_function_may_give_one_for_each_token(by_token):
    later, (state, _) = jnp.arange(6.0), by_token  # as a discount does

    def shaped(rewards):
        return rewards[:, :, None] * later

    batch = batch_of()
    states = [
        update_step(state, MODEL, of, optimizer=SGD, settings=UPDATE, advantage_fn=function)[0]
        for of, function in (
            (batch, shaped),
            (batch.replace(advantages=batch.rewards[:, None] * later), None),
        )
    ]
    assert_trees_close(*states, rtol=0, atol=0)
    out = Rollout(batch.completion, batch.completion_lengths, jnp.ones(12, bool), batch.sampled_logps, None)
    made = make_batch(PROMPTS, out, batch.rewards, jnp.int32(0), SETTINGS, shaped)
    np.testing.assert_array_equal(made.advantages, batch.rewards[:, None] * later)
    with pytest.raises(ValueError, match=r"gave the shape \(3, 4, 5\); expected \(3, 4\), .*, or \(3, 4, 6\), one for"):
        make_batch(PROMPTS, out, batch.rewards, jnp.int32(0), SETTINGS, lambda rewards: shaped(rewards)[..., :5])
    with pytest.raises(ValueError, match=r"advantages have the shape \(12, 5\); expected \(12,\) or \(12, 6\)"):
        update_step(state_of(), MODEL, batch.replace(advantages=jnp.ones((12, 5))), optimizer=SGD, settings=UPDATE)


def test_a_loss_may_be_bound_to_what_a_batch_has_in_the_batchs_order(by_token):
    def loss(logp, old_logp, ref_logp, advantages, mask, sampled_logp):
        return jnp.sum(jnp.where(mask, logp * sampled_logp, 0.0)), {}

    state, _ = by_token
    batch = batch_of()

    @functools.partial(jax.jit, static_argnames="size")
    def run(batch, size):
        of_batch = functools.partial(loss, sampled_logp=batch.sampled_logps)
        settings = dataclasses.replace(UPDATE, micro_batch_size=size)
        return update_step(state, MODEL, batch, optimizer=SGD, settings=settings, loss_fn=of_batch)[0].adapter

    mask, slopes = np.asarray(batch.mask), np.sin(np.asarray(batch.completion, np.float64))
    for size in (12, 5):
        np.testing.assert_allclose(
            run(batch, size), 0.5 - 0.1 * np.sum((slopes * batch.sampled_logps)[mask]), rtol=1e-5
        )


def test_masked_truncated_rows_still_count_in_their_group(by_token):
    settings = dataclasses.replace(SETTINGS, mask_truncated_completions=True)
    batch, plain = batch_of(settings), batch_of()
    open_rows = ~np.asarray(jnp.any(batch.mask, 1))
    assert 0 < open_rows.sum() < 12
    np.testing.assert_array_equal(batch.rewards, plain.rewards)
    np.testing.assert_array_equal(np.asarray(batch.mask)[~open_rows], np.asarray(plain.mask)[~open_rows])

    def spy(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sum(advantages * logp * mask), {"advantages": advantages}

    state, run = by_token
    masked, unmasked = (np.asarray(run(state, rows, loss_fn=spy)[1]["advantages"]) for rows in (batch, plain))
    np.testing.assert_array_equal(masked[~open_rows], unmasked[~open_rows])
    assert not masked[open_rows].any()


def test_a_mask_says_which_of_a_completions_tokens_count(by_token):
    """Not how much, nor of those behind its end."""
    state, run = by_token
    batch = batch_of()
    assert not batch.mask.all()
    new, metrics = run(state, batch)
    for mask in (jnp.ones_like(batch.mask), batch.mask.astype(jnp.int32)):
        again, same = run(state, batch.replace(mask=mask))
        assert_trees_close(again.adapter, new.adapter, rtol=0)
        assert float(same["loss"]) == float(metrics["loss"])
    with pytest.raises(ValueError, match="the batch's mask is float32; expected bool"):
        run(state, batch.replace(mask=0.5 * batch.mask))


def test_a_batch_of_numpys_arrays_and_lists_outside_of_jit():
    state, batch = state_of(), batch_of()
    advantages = np.linspace(-1, 1, 12, dtype=np.float32)
    expected, _ = update(state, batch.replace(advantages=advantages))
    of_numpy = jax.tree.map(np.asarray, batch)
    for given in (advantages, advantages.tolist()):
        new, _ = update_step(state, MODEL, of_numpy.replace(advantages=given), optimizer=SGD, settings=UPDATE)
        assert_trees_close(new.adapter, expected.adapter, atol=1e-6)


def test_equal_rewards_give_no_gradient():
    batch = batch_of()
    state = state_of()
    new, metrics = update(state, batch.replace(rewards=jnp.full(12, 0.3, jnp.float32)))
    assert moved(state, new) == 0.0 and float(metrics["grad_norm"]) == 0.0


@pytest.mark.parametrize("poison", ["rewards", "sampled_logps"])
def test_what_is_not_finite_is_refused_and_the_state_untouched(poison):
    batch = batch_of()
    batch = batch.replace(**{poison: getattr(batch, poison).at[0].set(jnp.inf if poison == "rewards" else jnp.nan)})
    state = state_of()
    new, metrics = update(state, batch, BY_SAMPLER)
    assert int(metrics["nonfinite"]) == 1
    assert_trees_close(new, state, rtol=0, atol=0)


SLOPES = jax.random.normal(jax.random.key(8), (12, 6))


@pytest.fixture
def learned(monkeypatch):
    """An update of 12 rows of 6 slots whose learner is one number x: log-probabilities x times SLOPES - 2, and
    entropies of SLOPES squared."""

    def learner(model, x, prompt, prompt_lengths, completion, *rest, **options):
        return x * SLOPES - 2, SLOPES**2

    monkeypatch.setattr(update_module, "completion_logps", learner)
    tokens, lengths = jnp.zeros((12, 6), jnp.int32), 1 + jnp.arange(12) % 6
    completions = Rollout(tokens, lengths, lengths < 6, jnp.full((12, 6), -2.5), None)
    batch = make_batch(PROMPTS, completions, jnp.arange(12.0) ** 2, jnp.int32(0), SETTINGS)

    def run(loss_fn, step=0, settings=UPDATE, **of_batch):
        state = init_state(jnp.float32(0.5), SGD).replace(step=jnp.int32(step))
        step_of = functools.partial(update_step, optimizer=SGD, settings=settings, loss_fn=loss_fn)
        return state, *jax.jit(step_of)(state, MODEL, batch.replace(**of_batch)), np.asarray(batch.mask)

    return run


def test_an_update_by_hand(learned):
    def loss(logp, old_logp, ref_logp, advantages, mask):
        return -jnp.sum(jnp.where(mask, logp * advantages, 0.0)), {"advantages": advantages}

    _, new, metrics, mask = learned(loss)
    rewards = np.arange(12.0).reshape(3, 4) ** 2
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(metrics["advantages"], np.repeat(advantages.reshape(12, 1), 6, 1), rtol=1e-5)
    slope = -np.sum((SLOPES * advantages.reshape(12, 1))[mask])
    np.testing.assert_allclose(metrics["grad_norm"], abs(slope), rtol=1e-5)
    np.testing.assert_allclose(new.adapter, 0.5 - 0.1 * slope, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], np.mean(SLOPES[mask] ** 2), rtol=1e-5)
    gaps = np.abs(0.5 * SLOPES[mask] - 2 + 2.5)
    np.testing.assert_allclose(metrics["sampling/sampling_logp_difference/mean"], gaps.mean(), rtol=1e-5)
    assert int(new.step) == 1 and int(metrics["nonfinite"]) == 0


def test_the_gap_to_the_sampler_is_that_of_the_rollouts_policy_or_not_known(learned):
    """A later update's learner has moved: what it says now is no gap between sampler and learner."""
    name, recorded = "sampling/sampling_logp_difference/mean", -2.5
    for old_logprobs, stored, later in (
        ("learner", -2.2 + 0.3 * SLOPES, "stored"), ("sampler", None, "unknown"), ("learner", None, "unknown"),
    ):  # fmt: skip
        settings = dataclasses.replace(UPDATE, old_logprobs=old_logprobs)
        for step in (0, 3):
            _, _, metrics, mask = learned(None, step, settings, old_logps=stored)
            learner = 0.5 * SLOPES - 2 if step == 0 else stored if later == "stored" else np.nan
            expected = np.mean(np.abs(np.broadcast_to(learner, mask.shape) - recorded)[mask])
            np.testing.assert_allclose(metrics[name], expected, rtol=1e-5)


@pytest.mark.parametrize(("old_logprobs", "level"), [("learner", "token"), ("sampler", "none")])
def test_advantages_are_weighted_by_the_old_policy_over_the_sampler(learned, old_logprobs, level):
    """At the rollout's own step the old policy is the learner; later it is the batch's, or the sampler."""

    def loss(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sum(jnp.where(mask, logp, 0.0)), {"logp": logp, "old": old_logp, "advantages": advantages}

    settings = dataclasses.replace(UPDATE, old_logprobs=old_logprobs, correction=SamplerCorrection(level))
    sampled, stored = -2.5 + 0.3 * SLOPES[::-1], -2.2 + 0.3 * SLOPES[:, ::-1]
    given = {"sampled_logps": sampled, "old_logps": stored, "advantages": jnp.arange(12.0) - 5}
    for step in (0, 3):
        _, _, seen, mask = learned(loss, step, settings, **given)
        old = sampled if old_logprobs == "sampler" else stored if step else seen["logp"]
        np.testing.assert_array_equal(np.asarray(seen["old"])[mask], np.asarray(old)[mask])
        weights = np.minimum(np.exp(np.asarray(old - sampled, np.float64)), 2)
        expected = (np.arange(12.0) - 5)[:, None] * weights
        np.testing.assert_allclose(np.asarray(seen["advantages"])[mask], expected[mask], rtol=1e-5)


@pytest.mark.parametrize("first_two", [(0.0, 0.0), (1.0, jnp.inf)], ids=["gradient", "loss"])
def test_either_of_loss_and_gradient_that_is_not_finite_is_enough(learned, first_two):
    def loss(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sqrt(advantages[0, 0] * jnp.sum(logp**2)) + advantages[1, 0], {}

    state, new, metrics, _ = learned(loss, advantages=jnp.zeros(12).at[:2].set(jnp.array(first_two)))
    finite = [bool(jnp.isfinite(metrics[name])) for name in ("loss", "grad_norm")]
    assert sorted(finite) == [False, True] and finite[0] == (first_two[1] == 0)
    assert int(metrics["nonfinite"]) == 1
    assert_trees_close(new, state, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", [make_optimizer(OptimizerSpec(1e-3, 4)), optax.sign_sgd(1e-3)])
def test_finite_gradients_whose_norm_is_not_are_refused(optimizer):
    """Clipping would make zeros of them, and leave weight decay alone; and their signs are finite all the same."""

    def loss(logp, old_logp, ref_logp, advantages, mask):
        return 1e25 * jnp.sum(logp * mask), {}

    state = init_state(state_of().adapter, optimizer)
    new, metrics = update_step(state, MODEL, batch_of(), optimizer=optimizer, settings=UPDATE, loss_fn=loss)
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"]) and int(metrics["nonfinite"]) == 1
    assert_trees_close(new, state, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", [optax.sgd(jnp.inf), optax.adam(lambda count: jnp.nan * count)])
def test_what_an_optimizer_makes_of_finite_gradients_is_looked_at_too(by_token, optimizer):
    state = init_state(by_token[0].adapter, optimizer)
    new, metrics = update_step(state, MODEL, batch_of(), optimizer=optimizer, settings=UPDATE)
    assert np.isfinite(metrics["grad_norm"]) and int(metrics["nonfinite"]) == 1
    assert_trees_close(new, state, rtol=0, atol=0)


@pytest.mark.parametrize(("loss", "message"), [
    (lambda *of: jnp.sum(of[0]), r"loss_fn gave .*\[\]; expected two: the loss, a real scalar, and a dictionary"),
    (lambda *of: (jnp.sum(of[0]), None), r"loss_fn gave .*\[\], NoneType; expected"),
    (lambda *of: (of[0], {}), r"loss_fn gave .*\[12, 6\], dict; expected two: the loss, a real scalar"),
    (lambda *of: ({"loss": jnp.sum(of[0])}, {}), "loss_fn gave dict, dict; expected"),
    (lambda *of: (jnp.sum(of[4]), {}), "a real scalar"),
    (lambda *of: (jnp.sum(of[0]), {"entropy": 1.0, "mine": 2.0}), r"names the update has itself: entropy\b"),
    (lambda *of: (jnp.sum(of[0]), {"sampling/sampling_logp_difference/mean": 1.0}), "names the update has itself"),
    (lambda *of: (jnp.sum(of[0]), {"note": "mine"}), "gave the metric 'note', a str; expected a text, and numbers"),
    (lambda *of: (jnp.sum(of[0]), {7: 1.0}), "gave the metric 7, a float; expected a text, and numbers"),
])  # fmt: skip
def test_what_a_loss_gives_back_is_looked_at(learned, loss, message):
    with pytest.raises(ValueError, match=message):
        learned(loss)


def test_rows_of_several_rollouts_have_each_its_own_step(by_token):
    """The new rollout's rows have a ratio of exactly 1, those of the one before the ratio to what drew them."""
    state, run = by_token
    state, batch = state.replace(step=jnp.int32(1)), batch_of()
    batch = batch.replace(old_logps=0.3 * jnp.sin(batch.completion) - 2)  # the policy of the first rollout
    both = jax.tree.map(lambda rows: jnp.concatenate([rows, rows]) if rows.ndim else rows, batch)
    steps = jnp.repeat(jnp.array([1, 0]), 12)

    def gaps(logp, old_logp, ref_logp, advantages, mask):
        expected = jnp.where(jnp.arange(24)[:, None] < 12, 0, (0.5 - 0.3) * jnp.sin(both.completion))
        gap = jnp.where(mask, logp - old_logp, 0)
        found = {"new": jnp.abs(gap[:12]).max(), "wrong": jnp.abs(gap - jnp.where(mask, expected, 0)).max()}
        return jnp.sum(jnp.where(mask, logp, 0)), found

    for size in (24, 8):
        settings = dataclasses.replace(UPDATE, micro_batch_size=size)
        _, metrics = run(state, both.replace(rollout_step=steps), settings, gaps)
        assert float(metrics["new"]) == 0.0 and float(metrics["wrong"]) < 1e-6 and int(metrics["nonfinite"]) == 0
    with pytest.raises(ValueError, match=r"rollout_step has the shape \(3,\); expected \(\), or \(24,\) of each row"):
        run(state, both.replace(rollout_step=steps[:3]))


def test_a_token_drawn_from_logits_that_are_no_numbers_is_enough():
    """What the learner makes of it may be finite. Behind a completion's end anything may stand."""
    state, batch = state_of(), batch_of()
    batch = batch.replace(sampled_logps=jnp.where(batch.mask, batch.sampled_logps, jnp.nan))
    assert int(update(state, batch)[1]["nonfinite"]) == 0
    new, metrics = update(state, batch.replace(sampled_logps=batch.sampled_logps.at[7, 0].set(jnp.nan)))
    assert int(metrics["nonfinite"]) == 1 and np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
    assert np.isnan(metrics["sampling/sampling_logp_difference/mean"])
    assert_trees_close(new, state, rtol=0, atol=0)
