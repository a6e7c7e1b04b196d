"""A configured run with a loss and an advantage function of one's own."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from run_harness import checkpoints, differences, leaves, rows
from training_runs import Killed, same_adapter, stop_after
from training_runs import train as configured

from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl import learner, trainer
from qerl_jax.rl.advantages import group_advantages
from qerl_jax.rl.losses import LossSpec, policy_loss
from qerl_jax.rl.plan import plan_run


def train(config, run, *words, **functions):
    return trainer.train(load_config(str(config), [f"run.output_dir={run}", *words]), **functions)


def winners(logp, old_logp, ref_logp, advantages, mask):
    kept = mask & (advantages > 0)
    gain = jnp.minimum(jnp.exp(jnp.where(kept, logp - old_logp, 0.0)), 1.2) * advantages
    metrics = {"winners": kept.sum() / mask.sum(), "reference": jnp.float32(ref_logp is not None)}
    return -jnp.sum(jnp.where(kept, gain, 0.0)) / mask.sum(), metrics


def centred(rewards):
    return rewards - rewards.mean(1, keepdims=True)


def of_tokens(rewards):
    return centred(rewards)[:, :, None] * 0.9 ** jnp.arange(8)


def for_all_tokens(rewards):
    return jnp.repeat(centred(rewards)[:, :, None], 8, 2)


def test_the_configured_functions_given_by_hand_make_the_same_run(config, finished, tmp_path):
    """But for rounding in another order, since a function of one's own sums all of the batch at once."""
    loss = functools.partial(policy_loss, LossSpec())
    run = train(config, tmp_path / "run", loss_fn=loss, advantage_fn=group_advantages)
    mine, theirs = leaves(run)[0], leaves(finished)[0]
    for name in theirs:
        if name.startswith("train.adapter"):
            np.testing.assert_allclose(mine[name], theirs[name], atol=1e-4)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]


def test_a_run_of_own_functions_is_stopped_and_continued_bit_by_bit_with_them_alone(config, tmp_path, monkeypatch):
    own = {"loss_fn": winners, "advantage_fn": of_tokens}
    whole, run = train(config, tmp_path / "whole", **own), tmp_path / "run"
    assert len(rows(whole)) == 6
    for row in rows(whole):
        assert 0 < row["winners"] < 1 and row["reference"] == 0 and row["nonfinite"] == 0
        assert "clip_ratio/region_mean" not in row
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Killed):
            train(config, run, **own)
    for others, changed in (
        ({}, "loss function was 'winners, sha256 .*', is now 'as configured'\n  advantage function was 'of_tokens, "),
        (own | {"advantage_fn": centred}, "advantage function was 'of_tokens, sha256 .*', is now 'centred, sha256 "),
        (own | {"loss_fn": functools.partial(winners, ref_logp=None)}, "loss function was 'winners, .* 'winners, "),
    ):
        with pytest.raises(UserError, match=f"(?s)belong to a run on something else:\n  {changed}"):
            train(config, run, **others)
    folder = load_config(f"{run}/config.yaml")
    plan, refused = plan_run(folder)
    assert refused and "loss function was 'winners, " in plan
    plan, refused = plan_run(folder, **own)
    assert not refused and f"run: continues {run} from step 2 of 6" in plan
    train(config, run, **own)
    assert differences(run, whole) == []
    other = train(config, tmp_path / "other", loss_fn=winners, advantage_fn=for_all_tokens)
    assert not same_adapter(other, whole)
    # Finished, it is no run of other functions either.
    assert train(config, run, **own) == run
    with pytest.raises(
        UserError, match=f"(?s){re.escape(str(run))} is finished, .* other functions:\n  loss function was 'winners, "
    ):
        train(config, run, advantage_fn=of_tokens)
    plan, refused = plan_run(folder)
    assert refused and "is finished, and was trained with other functions" in plan
    plan, refused = plan_run(folder, **own)
    assert not refused and f"{run} is finished" in plan


def test_a_run_that_was_begun_without_is_not_continued_with_them(config, tmp_path, monkeypatch):
    """Nor one of a build that wrote none down."""
    run = tmp_path / "run"
    identity = trainer.Experiment.identity
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        without = {"loss function", "advantage function"}
        patch.setattr(
            trainer.Experiment, "identity", lambda self: {k: v for k, v in identity(self).items() if k not in without}
        )
        with pytest.raises(Killed):
            configured(config, run)
    with pytest.raises(UserError, match="loss function was 'as configured', is now 'winners, sha256 "):
        trainer.train(load_config(f"{run}/config.yaml"), loss_fn=winners)
    trainer.train(load_config(f"{run}/config.yaml"))
    assert checkpoints(run)[-1] == 6


def test_beta_gives_a_loss_the_reference_and_a_stop_says_how_to_go_on(config, tmp_path):
    def fails(logp, old_logp, ref_logp, advantages, mask):
        loss, metrics = winners(logp, old_logp, ref_logp, advantages, mask)
        return loss * jnp.nan, metrics

    run = tmp_path / "run"
    again = f"saved at step 0 of 6; `train` of {run}/config.yaml, with the same functions, continues it"
    with pytest.raises(UserError, match=f"(?s)not finite in 3 updates.*{re.escape(again)}"):
        train(config, run, "grpo.beta=0.1", loss_fn=fails)
    assert all(row["reference"] == 1 for row in rows(run))
    # before the first step nothing was made with it: another one may take its place
    train(config, run, "grpo.beta=0.1", loss_fn=winners)
    assert checkpoints(run)[-1] == 6


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"each": jnp.ones(3)}, UserError, r"gave the metric 'each' of the shape \(3,\); a run logs numbers"),
        (
            {"reward": 1.0, "mine": 1.0, "rollout": 1.0, "eval/mine": 1.0},
            UserError,
            "gave metrics whose names the run has itself: eval/mine, reward, rollout$",
        ),
    ],
)
def test_metrics_that_a_run_cannot_log_are_refused_before_it_begins(config, tmp_path, metrics, error, message):
    def loss(logp, old_logp, ref_logp, advantages, mask):
        return jnp.sum(jnp.where(mask, logp, 0.0)), metrics

    with pytest.raises(error, match=message):
        train(config, tmp_path / "run", loss_fn=loss)
    assert not checkpoints(tmp_path / "run")


def test_all_names_of_a_row_are_kept_from_a_loss(finished):
    own = {"loss", "grad_norm", "entropy", "nonfinite", "kl"}
    for name in rows(finished)[0]:
        of_update = name in own or name.startswith(("sampling/", "clip_ratio/", "cispo_clip_ratio"))
        assert of_update != (name in learner._OF_RUN or name.startswith(learner._PARTS_OF_RUN)), name


def test_what_is_no_function_is_refused_before_there_is_a_folder(config, tmp_path):
    with pytest.raises(UserError, match="the loss function is 7; expected a function"):
        train(config, tmp_path / "run", loss_fn=7)
    assert not (tmp_path / "run").exists()
