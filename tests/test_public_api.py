"""The names that scripts use: complete, documented, quick to import, and usable under jit, grad and vmap."""

import dataclasses
import functools
import importlib
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import CONFIG, tiny_adapter, tiny_model

import qerl_jax as qerl
from qerl_jax.formats.nvfp4 import NVFP4Weight
from qerl_jax.rl.plan import plan_run
from qerl_jax.rl.trainer import train
from qerl_jax.rollout import Rollout

MODEL = tiny_model()
PROMPTS = qerl.Prompts(np.array([[5, 9, 11, 0], [7, 0, 0, 0]], np.int32), np.array([3, 1], np.int32), np.arange(2))
KEY = jax.random.key(0)
LONG = {"max_prompt_length": 8}
SETTINGS = qerl.StepSettings(qerl.SamplingSettings(6, (3, 4, 10, 12, 50), 0), qerl.UpdateSettings(4, 1.0, 8))


@pytest.mark.parametrize("name", qerl.__all__)
def test_every_name_is_what_its_module_has_and_is_documented(name):
    # All of them: a subpackage takes the place of an export of the same name as soon as it is imported.
    for module in set(qerl._MODULE_OF.values()):
        importlib.import_module(module)
    value = getattr(qerl, name)
    assert value is getattr(importlib.import_module(qerl._MODULE_OF[name]), name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert not value.__doc__.startswith(f"{name}("), "a signature, which dataclasses write where there is no docstring"


def test_the_names_of_the_readme_are_there_and_others_are_not():
    named = {
        "load_model", "quantize", "init_adapter", "logits", "sample_rollout", "update_step", "grpo_step",
        "perturb_norms", "TrainState", "save_checkpoint", "restore_checkpoint", "with_policies",
    }  # fmt: skip
    assert named <= set(qerl.__all__) <= set(dir(qerl))
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = qerl.load_modle


def test_importing_the_package_does_not_import_jax():
    code = "import sys, qerl_jax; print([n for n in ('jax', 'numpy', 'transformers', 'pydantic') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def assert_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


def test_logits_under_jit_vmap_and_grad():
    tokens = jnp.array([[5, 9, 11, 20, 3, 1], [7, 8, 2, 2, 40, 6]])
    adapters = [tiny_adapter(MODEL, seed) for seed in (1, 2, 3)]
    run = jax.jit(qerl.logits)
    several = jax.vmap(lambda adapter: run(MODEL, tokens, adapter=adapter))(stacked(adapters))
    assert several.shape == (3, 2, 6, CONFIG.vocab_size) and several.dtype == jnp.float32
    for adapter, found in zip(adapters, several, strict=True):
        np.testing.assert_allclose(found, run(MODEL, tokens, adapter=adapter), rtol=1e-4, atol=1e-4)
    assert float(jnp.abs(several[0] - several[1]).max()) > 1e-2

    @jax.jit
    def loss(adapter):
        return -jax.nn.log_softmax(qerl.logits(MODEL, tokens, adapter=adapter))[:, :-1].mean()

    grads = jax.jit(jax.grad(loss))(adapters[0])
    assert jax.tree.structure(grads) == jax.tree.structure(adapters[0])
    steepness = optax.tree.norm(grads)

    def along(h):
        return loss(jax.tree.map(lambda a, g: a + h * g / steepness, adapters[0], grads))

    np.testing.assert_allclose((along(1e-2) - along(-1e-2)) / 2e-2, steepness, rtol=1e-2)


def test_logits_have_second_derivatives():
    tokens, adapter = jnp.array([[5, 9, 11, 20]]), tiny_adapter(MODEL)

    @jax.jit
    def along(h):
        return jnp.mean(jnp.sin(qerl.logits(MODEL, tokens, adapter=jax.tree.map(lambda leaf: leaf + h, adapter))))

    slope = jax.jit(jax.grad(along))
    expected = (slope(1e-3) - slope(-1e-3)) / 2e-3
    for second in (jax.grad(jax.grad(along)), jax.hessian(along)):
        np.testing.assert_allclose(jax.jit(second)(0.0), expected, rtol=1e-2)


def test_the_wrong_kind_is_named_and_what_may_be_left_out_is_given_by_name(tmp_path):
    """Functions differ in what comes third: by position an adapter would be a mask, a base's name a flag."""
    tokens, adapter, rollout = jnp.array([[5, 9, 11]]), tiny_adapter(MODEL), Rollout(*[jnp.zeros(1)] * 4, None)
    updated = functools.partial(qerl.update_step, optimizer=optax.sgd(0.1), settings=SETTINGS.update)
    state = qerl.init_state(adapter, optax.sgd(0.1))
    for call in (
        lambda: qerl.logits(MODEL, adapter, tokens),
        lambda: qerl.logits(MODEL, tokens, adapter),
        lambda: qerl.load_adapter(tmp_path, MODEL, "a/base"),
        lambda: qerl.save_adapter(adapter, tmp_path, "a/base", "bf16"),
        lambda: qerl.save_model(MODEL, tmp_path, "bf16"),
        lambda: qerl.save_merged(MODEL, adapter, tmp_path, jnp.bfloat16),
        lambda: qerl.restore_checkpoint(tmp_path, 3, {}),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()
    for wrong, call in (
        ("tokens are of type Adapter; expected an array", lambda: qerl.logits(MODEL, adapter)),
        ("tokens are of type list; expected an array", lambda: qerl.logits(MODEL, [[5, 9]])),
        ("model is of type Adapter; expected a Model", lambda: qerl.logits(adapter, tokens)),
        ("adapter is of type dict; expected an Adapter, or None", lambda: qerl.logits(MODEL, tokens, adapter={})),
        ("model is of type Adapter", lambda: qerl.norms_of(adapter, MODEL)),
        ("model is of type Adapter", lambda: qerl.merge_adapter(adapter, MODEL)),
        ("adapter is of type Prompts", lambda: qerl.generate(MODEL, PROMPTS, adapter, KEY, SETTINGS.sampling)),
        ("model is of type str; expected a Model .`load_model`", lambda: qerl.Engine("x", SETTINGS.sampling, **LONG)),
        ("settings is of type StepSettings; expected a SamplingSettings", lambda: qerl.Engine(MODEL, SETTINGS, **LONG)),
        ("sampling is of type UpdateSettings", lambda: qerl.StepSettings(SETTINGS.update, SETTINGS.sampling)),
        ("settings is of type UpdateSettings", lambda: qerl.make_batch(PROMPTS, rollout, [0.0], 0, SETTINGS.update)),
        ("completions is of type tuple; expected a Rollout", lambda: qerl.make_batch(PROMPTS, (), [0.0], 0, SETTINGS)),
        (
            "settings is of type StepSettings; expected an UpdateSettings .`StepSettings.update`",
            lambda: qerl.update_step(None, MODEL, None, optimizer=None, settings=SETTINGS),
        ),
        ("state is of type Adapter; expected a TrainState", lambda: updated(adapter, MODEL, None)),
        ("model is of type NoneType; expected a Model", lambda: updated(state, None, None)),
        ("batch is of type Rollout; expected a Batch", lambda: updated(state, MODEL, rollout)),
        (
            "settings is of type UpdateSettings; expected a StepSettings",
            lambda: qerl.sample_rollout(MODEL, adapter, PROMPTS, KEY, 0, SETTINGS.update),
        ),
        (
            "settings is of type StepSettings; expected an UpdateSettings .`StepSettings.update`",
            lambda: qerl.with_policies(MODEL, adapter, None, SETTINGS, several_updates=True),
        ),
        (
            "noise is of type float; expected a NoiseSchedule, or None",
            lambda: dataclasses.replace(SETTINGS, noise=0.01),
        ),
        ("adapter is of type NoneType; expected an Adapter", lambda: qerl.merge_adapter(MODEL, None)),
        ("config is of type str; expected a Config .`load_config`", lambda: train("quickstart")),
        ("config is of type dict; expected a Config", lambda: plan_run({})),
    ):
        with pytest.raises(TypeError, match=wrong):
            call()
    for wrong, call in (
        (r"tokens are int32 \[3\]; expected whole numbers \[B, T\]", lambda: qerl.logits(MODEL, tokens[0])),
        (r"tokens are float32 \[1, 3\]; expected whole", lambda: qerl.logits(MODEL, tokens.astype(jnp.float32))),
        (r"tokens are int32 \[0, 3\]; .* one row and one token or more", lambda: qerl.logits(MODEL, tokens[:0])),
        (r"tokens are int32 \[1, 0\]; .* one row and one token or more", lambda: qerl.logits(MODEL, tokens[:, :0])),
        ("weight_format is 'None'; allowed: ", lambda: qerl.quantize(MODEL, None)),
        (
            "weight_format is None; written are bf16, nvfp4",
            lambda: qerl.save_model(MODEL, tmp_path, weight_format=None),
        ),
        (
            "num_generations is 2.5; allowed: a whole",
            lambda: qerl.generate(MODEL, None, PROMPTS, KEY, SETTINGS.sampling, 2.5),
        ),
        (
            "prompts have places of float64; expected whole",
            lambda: qerl.generate(MODEL, None, PROMPTS.replace(places=np.array([0.2, 0.7])), KEY, SETTINGS.sampling),
        ),
        ("tokens have the id 61; allowed: 0 to 60", lambda: qerl.logits(MODEL, tokens.at[0, 1].set(61))),
        ("tokens have the id -100; allowed: 0 to 60", lambda: qerl.logits(MODEL, np.array([[3, -100]]))),
        (
            r"attention_mask is \[1, 2\]; expected \[1, 3\], as tokens",
            lambda: qerl.logits(MODEL, tokens, attention_mask=jnp.ones((1, 2))),
        ),
    ):
        with pytest.raises(ValueError, match=wrong):
            call()


def test_norms_of_another_network_are_refused():
    """They would be broadcast, or layers left out."""
    norms, engine = qerl.norms_of(MODEL, None), qerl.Engine(MODEL, SETTINGS.sampling, **LONG)
    calls = (
        lambda norms: qerl.generate(MODEL, None, PROMPTS, KEY, SETTINGS.sampling, norms=norms),
        lambda norms: engine.rollout(None, PROMPTS, KEY, 1, norms),
        lambda norms: next(engine.generate(None, [], KEY, norms=norms)),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"norms is of type tuple; expected a Norms .`norms_of` gives them"):
            call(())
        for counts, wrong in (
            ("1 and 2", norms.replace(input=norms.input[:1])),
            ("3 and 2", norms.replace(input=(*norms.input, norms.final))),
            ("2 and 2", norms.replace(final=jnp.ones(1))),
        ):
            with pytest.raises(ValueError, match=f"norms are of another network: {counts} scales .* expected 2 and 2"):
                call(wrong)


def test_quantize_under_jit_equals_quantize():
    dense = qerl.init_model(jax.random.key(0), CONFIG, std=0.3)
    eager, jitted = qerl.quantize(dense), jax.jit(qerl.quantize)(dense)
    weights = jax.tree.leaves(jitted.base.layers, is_leaf=lambda leaf: isinstance(leaf, NVFP4Weight))
    assert sum(isinstance(weight, NVFP4Weight) for weight in weights) == 7 * CONFIG.num_hidden_layers
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def small_ids(prompts, completions):
    return -completions.tokens[:, 0].astype(jnp.float32)


@pytest.fixture(scope="module")
def batch():
    """Eight completions of unequal lengths, in two groups."""
    tokens = jax.random.randint(jax.random.key(3), (8, 6), 13, CONFIG.vocab_size)
    lengths = jnp.array([6, 3, 1, 4, 2, 6, 5, 3])
    logps = jnp.full((8, 6), -2.0)
    completions = qerl.Rollout(tokens, lengths, lengths < 6, logps, None)
    return qerl.make_batch(PROMPTS, completions, small_ids(PROMPTS, completions), jnp.int32(0), SETTINGS)


def test_a_learning_rate_schedule_that_does_not_exist():
    allowed = "cosine, linear, constant, constant_with_warmup"
    with pytest.raises(ValueError, match=f"lr_scheduler_type is 'cosin'; allowed: {allowed}"):
        qerl.OptimizerSpec(1e-3, total_steps=5, lr_scheduler_type="cosin")


def test_rewards_are_any_numbers_one_for_each_completion():
    completions = qerl.Rollout(
        jnp.zeros((8, 6), jnp.int32), jnp.full(8, 6), jnp.zeros(8, bool), jnp.zeros((8, 6)), None
    )
    make = functools.partial(qerl.make_batch, PROMPTS, completions, step=0, settings=SETTINGS)
    assert make(range(8)).rewards.tolist() == list(range(8)) and make([True] * 8).rewards.dtype == jnp.float32
    for wrong in (np.zeros(7), np.zeros((2, 4))):
        with pytest.raises(ValueError, match=r"rewards have the shape .*; allowed: \(8,\), one for each completion"):
            make(wrong)


def test_update_step_takes_any_loss_advantage_and_optimizer(batch):
    """REINFORCE with the batch's mean as baseline, and steps by the gradient's sign: against a gradient by hand."""

    def reinforce(logp, old_logp, ref_logp, advantages, mask):
        return -jnp.sum(jnp.where(mask, advantages * logp, 0.0)), {"mine": jnp.sum(advantages)}

    def over_the_batch(rewards_NG):
        return rewards_NG - rewards_NG.mean()

    optimizer = optax.sign_sgd(1e-3)
    state = qerl.init_state(tiny_adapter(MODEL), optimizer)
    step = functools.partial(
        qerl.update_step, optimizer=optimizer, settings=SETTINGS.update, loss_fn=reinforce, advantage_fn=over_the_batch
    )
    new, metrics = jax.jit(step)(state, MODEL, batch)

    rows, at, drawn, advantage = [], [], [], []
    for row in range(8):
        prompt = batch.prompt[row, : batch.prompt_lengths[row]].tolist()
        rows.append((prompt + batch.completion[row].tolist() + [0] * 4)[:10])
        for t in range(int(batch.completion_lengths[row])):
            at.append((row, len(prompt) + t - 1))
            drawn.append(int(batch.completion[row, t]))
            advantage.append(float(batch.rewards[row] - batch.rewards.mean()))

    @jax.jit
    @jax.value_and_grad
    def by_hand(adapter):
        logps = jax.nn.log_softmax(qerl.logits(MODEL, jnp.array(rows), adapter=adapter))
        return -jnp.vdot(jnp.array(advantage), logps[*jnp.array(at).T, jnp.array(drawn)])

    loss, grads = by_hand(state.adapter)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-3)
    assert abs(float(metrics["mine"])) < 1e-3
    for after, before, grad in zip(*map(jax.tree.leaves, (new.adapter, state.adapter, grads)), strict=True):
        clear = np.abs(grad) > 1e-3 * np.abs(grad).max()
        np.testing.assert_allclose((after - before)[clear], -1e-3 * np.sign(grad)[clear], rtol=1e-3)
    assert int(new.step) == 1


@pytest.mark.parametrize("optimizer", [optax.contrib.prodigy(), optax.scale_by_lbfgs(4)], ids=["prodigy", "lbfgs"])
def test_a_state_can_be_donated_whose_optimizer_keeps_the_first_parameters(optimizer):
    """The update is the optimizer's own; that of the network is left out."""
    adapter = tiny_adapter(MODEL)
    state = qerl.init_state(adapter, optimizer)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        updates, opt_state = optimizer.update(state.adapter, state.opt_state, state.adapter)
        return state.replace(adapter=optax.apply_updates(state.adapter, updates), opt_state=opt_state)

    state = step(step(state))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.adapter))
    step(qerl.init_state(adapter, optimizer))  # which another state may begin with
    assert_close(adapter, tiny_adapter(MODEL), atol=0)


def test_update_step_under_vmap_over_learning_rates(batch):
    """A sweep: the learning rate is a traced number of an `optax.inject_hyperparams` state."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    adapter = tiny_adapter(MODEL)

    def one(rate):
        state = qerl.init_state(adapter, optimizer)
        state = state.replace(opt_state=state.opt_state._replace(hyperparams={"learning_rate": rate}))
        new, metrics = qerl.update_step(state, MODEL, batch, optimizer=optimizer, settings=SETTINGS.update)
        return jax.tree.map(jnp.subtract, new.adapter, adapter), metrics["loss"]

    moved, losses = jax.jit(jax.vmap(one))(jnp.array([0.0, 0.1, 0.2]))
    assert len(set(np.asarray(losses).tolist())) == 1
    for leaf in jax.tree.leaves(moved):
        assert not leaf[0].any()
        np.testing.assert_allclose(leaf[2], 2 * leaf[1], rtol=1e-2, atol=1e-7)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(moved)) > 1e-4


def test_grpo_step_takes_them_too():
    """Traced only: tests/test_step.py runs it."""
    seen = {}

    def loss(logp, old_logp, ref_logp, advantages, mask):
        seen["logp"], seen["reference"] = logp.shape, ref_logp
        return jnp.sum(advantages * logp * mask), {"mine": jnp.max(advantages)}

    def as_they_are(rewards_NG):
        seen["rewards"] = rewards_NG.shape
        return rewards_NG

    optimizer = optax.sgd(1e-2)
    state = qerl.init_state(tiny_adapter(MODEL), optimizer)
    step = functools.partial(
        qerl.grpo_step,
        reward_fn=small_ids,
        optimizer=optimizer,
        settings=SETTINGS,
        loss_fn=loss,
        advantage_fn=as_they_are,
    )
    new, metrics = jax.eval_shape(step, state, MODEL, PROMPTS, jax.random.key(0))
    assert seen == {"logp": (8, 6), "reference": None, "rewards": (2, 4)}
    assert metrics["mine"].shape == () and {"reward", "aqn/sigma", "grad_norm"} <= metrics.keys()
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_joined_rows_are_read_as_they_were_sampled():
    adapter, B, P = tiny_adapter(MODEL), 8, 4
    rollout = qerl.generate(MODEL, adapter, PROMPTS, KEY, SETTINGS.sampling, 4)
    assert len(set(np.asarray(rollout.lengths).tolist())) > 1  # rows end at different places
    tokens, is_completion = jax.jit(qerl.join_rows)(PROMPTS, rollout)
    found = qerl.per_token_logps(MODEL, tokens, adapter=adapter)
    for row in range(B):
        prompt = PROMPTS.tokens[row // 4, : PROMPTS.lengths[row // 4]].tolist()
        completion = rollout.tokens[row, : rollout.lengths[row]].tolist()
        whole = prompt + completion
        assert tokens[row].tolist() == whole + [0] * (P + 6 - len(whole))
        assert tokens[row, is_completion[row]].tolist() == completion
        np.testing.assert_allclose(
            found[row, is_completion[row, 1:]], rollout.logps[row, : rollout.lengths[row]], rtol=1e-4, atol=1e-4
        )
    with pytest.raises(ValueError, match="there are 7 completions of 2 prompts; allowed: equally many of each"):
        qerl.join_rows(PROMPTS, jax.tree.map(lambda leaf: leaf[:7], rollout))
