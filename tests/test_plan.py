"""What a plan says of the memory that a run takes; what cannot fit is refused, with what to change."""

import dataclasses

import pytest

from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl.plan import RunMemory, Sampling, refuse_what_does_not_fit


def refused(limit, kept, temporary, *words):
    """The check of a program of these GB on a device with `limit` GB."""
    sizes = {"weights": kept - 1, "trained": 1, "update": temporary, "limit": limit}
    memory = RunMemory(
        rollout=Sampling(1, 1, 0),
        evaluation=Sampling(1, 1, 0),
        longest_prompt=40,
        max_prompt_length=40,
        **{name: size * 10**9 for name, size in sizes.items()},
    )
    refuse_what_does_not_fit(memory, load_config("quickstart", ["generation.max_completion_length=60", *words]))


def test_what_fits_exactly_fits():
    refused(100, 40, 60)
    with pytest.raises(UserError, match="does not fit in memory"):
        refused(99, 40, 60)


def test_the_message_names_the_numbers_and_every_way_out():
    with pytest.raises(UserError) as caught:
        refused(100, 40, 320)
    assert str(caught.value) == (
        "an update does not fit in memory: weights, adapter and optimizer need 40.0 GB, and 32 rows of 100 tokens at "
        "once (optimizer.per_device_train_batch_size) 320.0 GB; the device has 100.0 GB. Try "
        "optimizer.per_device_train_batch_size=4 optimizer.gradient_accumulation_steps=32 "
        "grpo.steps_per_generation=32, which is the same step and may fit; or optimizer.gradient_checkpointing=true; "
        "or a lower generation.max_completion_length"
    )
    with pytest.raises(UserError, match=r"_accumulation_steps=16 grpo.steps_per_generation=32, which is"):
        refused(100, 40, 180, "grpo.steps_per_generation=8")


@pytest.mark.parametrize("kept, words", [
    (40, ["optimizer.per_device_train_batch_size=1", "optimizer.gradient_accumulation_steps=8"]), (101, [])
])  # fmt: skip
def test_fewer_rows_are_no_way_out_where_there_are_none(kept, words):
    with pytest.raises(UserError, match=r"GB\. Try a lower generation.max_completion_length$"):
        refused(100, kept, 61, "optimizer.gradient_checkpointing=true", *words)


MEMORY = RunMemory(
    weights=5_900_000_000,
    trained=970_000_000,
    rollout=Sampling(180, 256, 44_600_000_000),
    evaluation=Sampling(128, 128, 30_100_000_000),
    update=22_300_000_000,
    limit=139_800_000_000,
    longest_prompt=1025,
    max_prompt_length=2048,
)


def test_what_a_plan_says_of_memory():
    assert str(MEMORY) == (
        "memory: weights 5.9 GB, adapter and optimizer 970.0 MB; beside them by turns a rollout, "
        "180 of 256 completions at once, 44.6 GB, an evaluation, all 128 completions at once, 30.1 GB, and an update, "
        "22.3 GB: 51.5 GB at most; the device has 139.8 GB"
    )
    assert str(dataclasses.replace(MEMORY, update=None, limit=None)).endswith(
        "a rollout, 180 of 256 completions at once, 44.6 GB, and an evaluation, all 128 completions at once, 30.1 GB: "
        "51.5 GB at most; what the device has is not known"
    )


def test_room_for_prompts_of_twice_the_length_is_told_of():
    assert str(dataclasses.replace(MEMORY, longest_prompt=1024)) == (
        f"{MEMORY}. No prompt has more than 1,024 tokens, and each takes the memory of 2,048: a lower "
        "data.max_prompt_length saves it"
    )


def test_the_most_may_be_an_evaluations():
    memory = dataclasses.replace(MEMORY, evaluation=Sampling(128, 512, 60_000_000_000))
    assert "an evaluation, 128 of 512 completions at once, 60.0 GB, and an update, 22.3 GB: 66.9 GB at most" in str(
        memory
    )


@pytest.mark.parametrize(
    ("part", "option"), [("rollout", "generation.max_slots"), ("evaluation", "evaluation.batch_size")]
)
def test_sampling_beyond_the_device_is_refused_where_the_cache_is_of_a_size_of_its_own(part, option):
    memory = dataclasses.replace(MEMORY, **{part: Sampling(128, 512, 132_930_000_000)})
    given = load_config("quickstart", ["generation.kv_cache_gb=133"])
    refuse_what_does_not_fit(memory, given)  # fits exactly
    more = dataclasses.replace(memory, **{part: Sampling(128, 512, 132_930_000_001)})
    with pytest.raises(UserError) as caught:
        refuse_what_does_not_fit(more, given)
    assert str(caught.value) == (
        f"{'a rollout' if part == 'rollout' else 'an evaluation'} does not fit in memory: weights, adapter and "
        "optimizer need 6.9 GB, and 128 of 512 completions at once, 132.9 GB with generation.kv_cache_gb 133; the "
        f"device has 139.8 GB. Try a lower {option}; or generation.kv_cache_gb=null, which takes what the device has "
        "left"
    )
    refuse_what_does_not_fit(dataclasses.replace(more, limit=None), given)
