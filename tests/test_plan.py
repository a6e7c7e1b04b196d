"""What a plan says of the memory that a run takes; an update that cannot fit is refused, with what to change."""

import dataclasses

import pytest

from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl.plan import RunMemory, refuse_what_does_not_fit


def refused(monkeypatch, limit, kept, temporary, *words):
    """The check of a program of these GB on a device with `limit` GB."""
    sizes = {"weights": kept - 1, "trained": 1, "rollout": 0, "update": temporary, "limit": limit}
    memory = RunMemory(slots=1, samples=1, **{name: size * 10**9 for name, size in sizes.items()})
    refuse_what_does_not_fit(memory, load_config("quickstart", ["generation.max_completion_length=60", *words]))


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


def test_what_a_plan_says_of_memory():
    memory = RunMemory(5_900_000_000, 970_000_000, 180, 256, 44_600_000_000, 22_300_000_000, 139_800_000_000)
    assert str(memory) == (
        "memory: weights 5.9 GB, adapter with gradient and optimizer 970.0 MB; beside them by turns a rollout, "
        "180 of 256 completions at once, 44.6 GB, and an update, 22.3 GB: 51.5 GB at most; the device has 139.8 GB"
    )
    assert str(dataclasses.replace(memory, slots=256, update=None, limit=None)).endswith(
        "a rollout, all 256 completions at once, 44.6 GB: 51.5 GB at most; what the device has is not known"
    )
