"""The benchmark of refilled slots on a tiny network."""

import json

import numpy as np
import pytest

from benchmarks import refill


def test_lengths_have_a_long_tail():
    lengths = np.array(refill.long_tailed(1000, 64, 4096))
    assert (lengths.min(), lengths.max()) == (64, 4096)
    # A density of 1 / length^2: half are below twice the shortest, and the mean is shortest x (1 + ln 64).
    assert 127 <= np.median(lengths) <= 128 and abs(lengths.mean() - 64 * (1 + np.log(64))) < 3


def test_what_compiles_goes_through_all_sizes_of_the_tail():
    """With 8 completions of a prompt: 32 samples are left behind the second token, 8 behind the tenth. A move is worth
    8192 slot-steps: from 32 to 8 slots 342 of the longest sample, from 16 to 8 1024."""
    assert refill.compiling(64, 8, 64, 4096, [8, 32]) == [2] * 60 + [10] * 3 + [20 + 160 + 342]
    assert refill.compiling(64, 8, 16, 4096, [8, 32])[-1] == 20 + 160 + 1024
    assert refill.compiling(64, 8, 16, 600, [8, 32])[-1] == 600
    assert refill.compiling(64, 8, 8, 4096, [8, 32])[-1] == 20  # no move
    assert refill.compiling(4, 8, 64, 4096, []) == [2] * 4


def test_both_runs_draw_what_they_should_and_long_tails_keep_slots_full(tmp_path):
    output = tmp_path / "refill.json"
    words = "--model tiny --slots 4 --prompts 24 --num-generations 2 --prompt 6 --shortest 4 --longest 64 --lora-rank 4"
    assert refill.main([*words.split(), "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    lengths = refill.long_tailed(24, 4, 64)
    tail, equal = result["long_tail"], result["equal"]
    assert tail["tokens"] == 2 * sum(lengths) and equal["tokens"] == 48 * result["lengths"]["mean"]
    assert equal["while_some_wait"]["occupancy"] == 1
    assert tail["while_some_wait"]["occupancy"] >= 0.97
    # Tokens are counted where they are drawn, and so one for each slot and step.
    waiting = tail["while_some_wait"]
    assert waiting["tokens_per_s"] * waiting["seconds"] == pytest.approx(waiting["occupancy"] * 4 * waiting["steps"])
    assert 0 < tail["steps"] - waiting["steps"] <= 64  # the end is no longer than the longest completion
    assert tail["end"]["steps"] == tail["steps"] - waiting["steps"]
    end_drawn = tail["end"]["tokens_per_s"] * tail["end"]["seconds"]
    assert end_drawn == pytest.approx(tail["tokens"] - waiting["tokens_per_s"] * waiting["seconds"])
    assert end_drawn == pytest.approx(tail["end"]["occupancy"] * 4 * tail["end"]["steps"])
    assert (tail["prompts"], tail["prefills"]) == (24, 12)
    assert result["lengths"]["mean_at_work"] == round(sum(np.square(lengths)) / sum(lengths))
    assert result["slots"] == 4 and result["ratio"] > 0 and result["ratio_while_some_wait"] > 0
    # Four waves of the four slots, of which the last is the end.
    alike = result["equal_at_work"]
    assert alike["occupancy"] == 1 and alike["steps"] >= 3 * (result["lengths"]["mean_at_work"] - 1)
    assert result["ratio_at_work"] == pytest.approx(waiting["tokens_per_s"] / alike["tokens_per_s"])
