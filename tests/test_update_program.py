"""An update that cannot fit is refused before a run samples anything, with what to change."""

import types

import jax
import pytest
from run_harness import checkpoints, one_layer_policy, rows, small_config

from qerl_jax.config import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl import trainer
from qerl_jax.rl.update_program import refuse_what_does_not_fit


class Device:
    """A GPU by its memory alone."""

    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return {"bytes_limit": self.limit}


def refused(monkeypatch, limit, argument, temporary, **optimizer):
    """The check of a program of these GB on a device with `limit` GB."""
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(limit * 1e9)])
    sizes = types.SimpleNamespace(
        argument_size_in_bytes=argument * 1e9,
        output_size_in_bytes=1e9,
        alias_size_in_bytes=1e9,
        temp_size_in_bytes=temporary * 1e9,
    )
    words = [f"optimizer.{name}={value}" for name, value in optimizer.items()]
    config = load_config("quickstart", ["generation.max_completion_length=60", *words])
    refuse_what_does_not_fit(types.SimpleNamespace(memory_analysis=lambda: sizes), config)


def test_what_fits_exactly_fits(monkeypatch):
    refused(monkeypatch, 100, 40, 60)
    with pytest.raises(UserError, match="does not fit in memory"):
        refused(monkeypatch, 99.9, 40, 60)


def test_the_message_names_the_numbers_and_every_way_out(monkeypatch):
    with pytest.raises(UserError) as caught:
        refused(monkeypatch, 100, 40, 60.5)
    assert str(caught.value) == (
        "an update does not fit in memory: weights, adapter and optimizer need 40.0 GB, and 32 rows of 100 tokens at "
        "once (optimizer.per_device_train_batch_size) 60.5 GB; the device has 100.0 GB. To change that, lower "
        "optimizer.per_device_train_batch_size, and raise gradient_accumulation_steps (now 4) as much: the step stays "
        "the same, or set optimizer.gradient_checkpointing=true, or shorten generation.max_completion_length"
    )
    with pytest.raises(
        UserError, match=r"1 row of 100 tokens .* change that, shorten generation.max_completion_length$"
    ):
        smallest = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "gradient_checkpointing": "true",
        }
        refused(monkeypatch, 100, 40, 60.5, **smallest)


def test_a_run_is_refused_before_it_samples_and_goes_on_with_less(tmp_path, monkeypatch):
    policy = one_layer_policy(tmp_path / "policy")
    config = small_config(tmp_path, policy, optimizer={"max_steps": 3}, grpo={"num_iterations": 1})
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [Device(10**5)])
        with pytest.raises(UserError, match="8 rows of 56 tokens at once"):
            trainer.train(load_config(str(config)))
    assert checkpoints(run) == [] and rows(run) == []
    less = ["optimizer.per_device_train_batch_size=4", "optimizer.gradient_accumulation_steps=4"]
    trainer.train(load_config(str(config), less))
    assert checkpoints(run)[-1] == len(rows(run)) == 3
