"""An update that cannot fit is refused before a run samples anything, with what to change."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_harness import checkpoints, one_layer_policy, rows, small_config
from tiny import Device, tiny_adapter, tiny_model

from benchmarks.update import random_batch
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl import trainer, widths
from qerl_jax.rl.correction import SamplerCorrection
from qerl_jax.rl.losses import LossSpec
from qerl_jax.rl.optimizer import OptimizerSpec, make_optimizer
from qerl_jax.rl.update import UpdateSettings, init_state, update_step
from qerl_jax.rl.update_program import Update, refuse_what_does_not_fit
from qerl_jax.rollout import memory


def refused(monkeypatch, limit, kept, temporary, *words):
    """The check of a program of these GB on a device with `limit` GB."""
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(limit * 10**9)])
    kinds = ("temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes")
    programs = []
    for gigabytes in ((temporary - 3, 2, 2), (temporary - 2, 7, 5), (0, 1, 1)):  # the second needs most
        sizes = types.SimpleNamespace(**{kind: n * 10**9 for kind, n in zip(kinds, gigabytes, strict=True)})
        programs.append(types.SimpleNamespace(memory_analysis=lambda sizes=sizes: sizes))
    config = load_config("quickstart", ["generation.max_completion_length=60", *words])
    refuse_what_does_not_fit(programs, kept * 10**9, config)


@pytest.mark.parametrize("buckets, size, level", [(1, 4, "none"), (3, 2, "sequence"), (3, 12, "token")])
def test_an_update_in_programs_of_its_own_is_the_same_update(monkeypatch, buckets, size, level):
    monkeypatch.setattr(widths, "NARROWEST", 16)
    model = tiny_model()
    batch = random_batch(model.config, 12, 6, 58, [3, 5, 58, 4, 9, 2, 30, 1, 12, 7, 6, 20])
    batch = batch.replace(old_logps=-4 + 0.1 * jax.random.normal(jax.random.key(0), batch.mask.shape))
    correction = SamplerCorrection(level, "truncate", 2.0)
    settings = UpdateSettings(4, 1.0, size, loss=LossSpec("grpo"), correction=correction, length_buckets=buckets)
    optimizer = make_optimizer(OptimizerSpec(1e-2, 100))
    expected = init_state(tiny_adapter(model, train_norms=True), optimizer)
    state = jax.tree.map(jnp.copy, expected)
    step = jax.jit(functools.partial(update_step, optimizer=optimizer, settings=settings))
    experiment = types.SimpleNamespace(
        config=types.SimpleNamespace(row_tokens=64),
        settings=types.SimpleNamespace(update=settings),
        optimizer=optimizer,
    )
    update = Update(experiment)
    for _ in range(2):  # on the policy of the rollout, then off it
        before = state.adapter
        expected, of_step = step(expected, model, batch)
        state, metrics = update(state, model, batch)
        assert metrics["nonfinite"] == 0 and metrics["grad_norm"] > 1e-3
        for a, b in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((expected, of_step)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_what_fits_exactly_fits(monkeypatch):
    refused(monkeypatch, 100, 40, 60)
    with pytest.raises(UserError, match="does not fit in memory"):
        refused(monkeypatch, 99, 40, 60)


def test_the_message_names_the_numbers_and_every_way_out(monkeypatch):
    with pytest.raises(UserError) as caught:
        refused(monkeypatch, 100, 40, 320)
    assert str(caught.value) == (
        "an update does not fit in memory: weights, adapter and optimizer need 40.0 GB, and 32 rows of 100 tokens at "
        "once (optimizer.per_device_train_batch_size) 320.0 GB; the device has 100.0 GB. Try "
        "optimizer.per_device_train_batch_size=4 optimizer.gradient_accumulation_steps=32 "
        "grpo.steps_per_generation=32, which is the same step and may fit; or optimizer.gradient_checkpointing=true; "
        "or a lower generation.max_completion_length"
    )
    with pytest.raises(UserError, match=r"_accumulation_steps=16 grpo.steps_per_generation=32, which is"):
        refused(monkeypatch, 100, 40, 180, "grpo.steps_per_generation=8")


@pytest.mark.parametrize("kept, words", [
    (40, ["optimizer.per_device_train_batch_size=1", "optimizer.gradient_accumulation_steps=8"]), (101, [])
])  # fmt: skip
def test_fewer_rows_are_no_way_out_where_there_are_none(monkeypatch, kept, words):
    with pytest.raises(UserError, match=r"GB\. Try a lower generation.max_completion_length$"):
        refused(monkeypatch, 100, kept, 61, "optimizer.gradient_checkpointing=true", *words)


def test_a_run_is_refused_before_it_samples_and_goes_on_with_less(tmp_path, monkeypatch):
    policy = one_layer_policy(tmp_path / "policy")
    config = small_config(tmp_path, policy, optimizer={"max_steps": 3}, grpo={"num_iterations": 1})
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [Device(10**5)])
        patch.setattr(memory, "_device_bytes", lambda *_: 10**9)  # rollouts fit
        with pytest.raises(UserError, match="8 rows of 56 tokens at once"):
            trainer.train(load_config(str(config)))
    assert checkpoints(run) == [] and rows(run) == []
    less = ["optimizer.per_device_train_batch_size=4", "optimizer.gradient_accumulation_steps=4"]
    trainer.train(load_config(str(config), less))
    assert checkpoints(run)[-1] == len(rows(run)) == 3
