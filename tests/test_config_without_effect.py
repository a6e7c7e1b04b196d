"""Options that would have no effect: which they are, how they are told, what silences them."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_config import CISPO, message

from qerl_jax.config import (
    Config,
    GrpoOptions,
    LoraOptions,
    NoiseOptions,
    OptimizerOptions,
    RunOptions,
)
from qerl_jax.config_checks import options_without_effect
from qerl_jax.config_files import load_config, settled_config
from qerl_jax.errors import UserError
from qerl_jax.option_names import LossType
from qerl_jax.rl.losses import LossSpec, high_entropy, policy_loss


@pytest.mark.parametrize(
    "overrides",
    [
        ["noise.sigma_start=1e-2", "noise.num_stages=1"],
        ["noise.final_norm=true", "noise.num_stages=1"],
        ["noise.sigma_end=1e-3", "noise.num_stages=2"],
        ["noise.schedule=linear", "noise.num_stages=3"],
        ["grpo.epsilon=0.1"],
        ["grpo.epsilon_high=0.3"],
        ["grpo.delta=4.0"],
        ["grpo.epsilon=0.1", *CISPO],
        ["grpo.epsilon=0.1", *CISPO, "grpo.num_iterations=2"],
        ["grpo.delta=9.0", *CISPO],
        ["grpo.delta=9.0", *CISPO, "grpo.num_iterations=2"],
        ["grpo.importance_sampling_level=sequence"],
        ["grpo.importance_sampling_level=sequence", "grpo.sampler_correction.level=sequence"],
        ["grpo.importance_sampling_level=sequence", "grpo.sampler_correction.level=token", *CISPO],
        ["grpo.importance_sampling_level=sequence", "grpo.top_entropy_quantile=0.2", *CISPO],
        ["grpo.sampler_correction.cap=3.0"],
        ["grpo.sampler_correction.mode=mask"],
        ["grpo.sampler_correction.level=token", "grpo.old_logprobs=sampler"],
        ["grpo.sampler_correction.level=sequence", "grpo.old_logprobs=sampler"],
        ["run.save_total_limit=2", "run.save_steps=null"],
        ["lora.lora_r=8", "lora.adapter=some/folder"],
        ["lora.use_rslora=true", "lora.adapter=some/folder"],
        ["generation.max_slots=128"],
        ["grpo.dynamic_sampling.max_rounds=4"],
        ["reward.soft_punish_cache=8"],
        ["optimizer.warmup_ratio=0.2", "optimizer.lr_scheduler_type=constant"],
    ],
)
def test_an_option_without_effect_is_an_error(overrides):
    assert f"command line: {overrides[0].split('=')[0]} has no effect in this run: " in message(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.epsilon=0.1", "grpo.num_iterations=2"],
        ["grpo.delta=4.0", "grpo.num_iterations=2"],
        CISPO,
        [*CISPO, "grpo.num_iterations=2"],
        ["grpo.importance_sampling_level=sequence", "grpo.num_iterations=2"],
        ["grpo.importance_sampling_level=sequence", "grpo.old_logprobs=sampler"],
        ["grpo.importance_sampling_level=sequence", "grpo.sampler_correction.level=token"],
        ["grpo.importance_sampling_level=sequence", "grpo.top_entropy_quantile=0.2"],
        ["grpo.importance_sampling_level=sequence", "grpo.num_iterations=2", *CISPO],
        ["grpo.top_entropy_quantile=0.2"],
        ["grpo.top_entropy_quantile=0.2", *CISPO],
        ["grpo.epsilon=0.1", "grpo.old_logprobs=sampler"],
        ["grpo.epsilon=0.1", "grpo.steps_per_generation=8", "optimizer.per_device_train_batch_size=16"],
        ["grpo.sampler_correction={level: token, cap: 3.0}"],
        ["noise.schedule=linear"],
        ["generation.max_slots=127"],
        ["grpo.dynamic_sampling={metric: accuracy, max_rounds: 1}"],
        ["grpo.dynamic_sampling.metric=f", "reward.functions=[{function: 'm:f'}]"],
        ["reward.soft_punish_cache=47", "reward.functions=[{function: soft_overlong_punishment}]"],
        ["optimizer.warmup_ratio=0.2", "optimizer.lr_scheduler_type=constant_with_warmup"],
    ],
)
def test_the_same_option_with_effect_is_not(overrides):
    assert load_config("quickstart", overrides) != load_config("quickstart")


# Another value of each option of the loss, for each kind of loss.
OF_LOSS = {
    "epsilon": 0.05, "epsilon_high": 1.5, "delta": 3.0, "importance_sampling_level": "sequence", "beta": 0.1,
    "top_entropy_quantile": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(LossSpec) if field.name != "loss_type"])
def test_an_option_of_the_loss_changes_it_or_is_named_as_one_without_effect(option, loss_type):
    cispo = loss_type == "cispo"
    logp, old, ref = jnp.asarray(np.random.default_rng(0).normal(0, 1.5, (3, 6, 9)), jnp.float32)
    advantages, mask = jnp.linspace(-1, 1, 6)[:, None], jnp.ones((6, 9), bool)

    def loss(**options):
        spec = LossSpec(loss_type, **{"epsilon_high": 1.2, **options})
        chosen = high_entropy(jnp.abs(old), mask, spec.top_entropy_quantile)
        return policy_loss(spec, logp, old, ref, advantages, mask, chosen_BC=chosen)[0]

    config = load_config("quickstart", ["grpo.num_iterations=2", *(CISPO if cispo else [])])
    if f"grpo.{option}" in options_without_effect(config):
        assert cispo
    else:
        assert abs(loss(**{option: OF_LOSS[option]}) - loss()) > 1e-4


def test_the_level_without_effect_is_that_of_one_advantage_a_completion():
    """Those of tokens would each get their row's mean, which a config, knowing no advantage_fn, does not claim."""
    old, advantages = jnp.asarray(np.random.default_rng(0).normal(0, 1, (2, 6, 9)), jnp.float32)
    mask = jnp.ones((6, 9), bool)

    def gradient(level, advantages):
        spec = LossSpec(importance_sampling_level=level)
        return jax.grad(lambda logp: policy_loss(spec, logp, old, None, advantages, mask)[0])(old)

    for given, same in ((advantages[:, :1], True), (advantages, False)):
        np.testing.assert_allclose(
            gradient("sequence", given), -given.mean(1, keepdims=True).repeat(9, 1) / 54, atol=1e-8
        )
        assert np.allclose(gradient("token", given), gradient("sequence", given), atol=1e-6) == same
    said = message("grpo.importance_sampling_level=sequence")
    assert "of tokens and of rows, and the gradient of a completion's one advantage is the same" in said


def test_an_option_without_effect_is_an_error_in_a_config_made_in_a_script_too():
    steps = OptimizerOptions(max_steps=10)
    with pytest.raises(UserError) as caught:
        settled_config(Config(optimizer=steps, grpo=GrpoOptions(epsilon=0.5, delta=9.0)))
    why = "with one update per rollout and grpo.old_logprobs learner the ratio is exactly 1 and is never clipped"
    assert str(caught.value).splitlines() == [
        f"{option} has no effect in this run: {why}; leave it out" for option in ("grpo.epsilon", "grpo.delta")
    ]
    with pytest.raises(UserError, match=r"^lora\.lora_r has no effect in this run: it comes from lora\.adapter 'a'"):
        settled_config(Config(optimizer=steps, lora=LoraOptions(lora_r=8, adapter="a")))
    grpo, noise = GrpoOptions(epsilon=0.5, delta=9.0, num_iterations=2), NoiseOptions(num_stages=5)
    given = Config(optimizer=steps, grpo=grpo, noise=noise)
    assert settled_config(given).grpo == dataclasses.replace(given.grpo, steps_per_generation=4)
    cispo = Config(optimizer=steps, grpo=GrpoOptions(loss_type="cispo", epsilon_high=5.0))
    assert settled_config(cispo).grpo == dataclasses.replace(cispo.grpo, steps_per_generation=4)


def test_save_steps_null_is_told_as_it_is():
    said = message("run.save_total_limit=2", "run.save_steps=null")
    assert "only the first state, that where it stops early and the last are saved" in said


def test_an_override_may_silence_options_of_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optimizer: {max_steps: 20}\nnoise: {num_stages: 5, sigma_start: 0.02}\n")
    config = load_config(str(path), ["noise.num_stages=1"])
    assert config.noise == NoiseOptions(num_stages=1)
    path.write_text("optimizer: {max_steps: 20}\nrun: {save_total_limit: 2}\n")
    assert load_config(str(path), ["run.save_steps=null"]).run.save_total_limit == RunOptions().save_total_limit
    path.write_text("optimizer: {max_steps: 20}\nnoise:\n  num_stages: 1\n  sigma_start: 0.02\n")
    assert f"{path}, line 4: noise.sigma_start has no effect" in message(recipe=str(path))
    path.write_text("optimizer: {max_steps: 20}\nnoise:\n  <<: {sigma_start: 0.02}\n  num_stages: 1\n")
    assert f"{path}, line 3: noise.sigma_start has no effect" in message(recipe=str(path))


def test_an_override_of_the_loss_may_silence_its_bounds(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "optimizer: {max_steps: 20}\nnoise: {num_stages: 5}\n"
        "grpo: {num_iterations: 2, epsilon: 0.1, delta: 4.0, importance_sampling_level: sequence}\n"
    )
    plain = GrpoOptions(steps_per_generation=4)
    cispo = load_config(str(path), CISPO).grpo
    assert (cispo.epsilon, cispo.delta, cispo.importance_sampling_level) == (plain.epsilon, None, "sequence")
    assert load_config(str(path), ["grpo.num_iterations=1"]).grpo == plain
    path.write_text("optimizer: {max_steps: 20}\nnoise: {num_stages: 5}\ngrpo: {loss_type: cispo, epsilon_high: 5.0}\n")
    assert load_config(str(path), ["grpo.loss_type=dapo"]).grpo == plain
    assert load_config(str(path)).grpo.epsilon_high == 5.0
    file = path.read_text().replace("5.0}", "5.0, delta: 9.0}")
    path.write_text(file)
    assert "grpo.delta has no effect in this run: with grpo.loss_type cispo only grpo.epsilon_high bounds" in message(
        recipe=str(path)
    )
