"""An update that cannot fit is refused before a run samples anything, with what to change."""

import types

import jax
import pytest
from run_harness import checkpoints, one_layer_policy, rows, small_config
from tiny import Device

from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl import trainer
from qerl_jax.rl.update_memory import refuse_what_does_not_fit
from qerl_jax.rollout import memory


def refused(monkeypatch, limit, kept, temporary, *words):
    """The check of a program of these GB on a device with `limit` GB."""
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(limit * 10**9)])
    kinds = ("temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes")
    sizes = {kind: n * 10**9 for kind, n in zip(kinds, (temporary - 2, 7, 5), strict=True)}
    program = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**sizes))
    config = load_config("quickstart", ["generation.max_completion_length=60", *words])
    refuse_what_does_not_fit(program, kept * 10**9, config)


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
