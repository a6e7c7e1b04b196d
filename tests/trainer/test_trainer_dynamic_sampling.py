"""Dynamic sampling in a run: which prompts are sampled, trained on and used up, what is logged, and resuming."""

import json

import jax
import numpy as np
import pytest
from run_harness import differences, leaves, rows
from training_runs import Killed, config_in, reward_file, same_adapter, stop_after, train

from qerl_jax.data.dataset import load_dataset
from qerl_jax.data.prompts import encode_prompts
from qerl_jax.models.tokenizer import load_tokenizer
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl import trainer
from qerl_jax.rl.learner import Learner

# One score for a whole group, or one for its first completion and another one for the rest, as a row's column says.
# Held-out problems have no such column.
SPREAD = """\
    differ = columns.get("differ", [True] * len(completions))
    return [float(differ[i] and i % 4 == 0) for i in range(len(completions))]
"""
# Of the 10 prompts: whether their completions' scores differ.
DIFFER = [1, 1, 1, 0, 1, 1, 0, 0, 0, 1]


def config_of(folder, policy, differ, **options):
    """6 steps of 2 updates a rollout, 2 prompts a rollout, in the order of the file."""
    config = config_in(
        folder,
        policy,
        data={"train_dataset": str(folder / "differ.jsonl"), "shuffle": False},
        grpo={"num_iterations": 2, "dynamic_sampling": {"metric": "digits"} | options},
    )
    reward_file(folder, SPREAD)
    problems = load_dataset("arithmetic", size=len(differ))
    lines = [json.dumps(problems[i] | {"differ": bool(flag)}) for i, flag in enumerate(differ)]
    (folder / "differ.jsonl").write_text("\n".join(lines))
    return config


@pytest.fixture(scope="module")
def dynamic(policy, tmp_path_factory):
    return config_of(tmp_path_factory.mktemp("dynamic"), policy, DIFFER)


@pytest.fixture(scope="module")
def undisturbed(dynamic, tmp_path_factory):
    """A run of `dynamic`, and what each of its rollouts trained on, with the cursor after it."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot_runs", lambda *_: [])
        rollout, assemble = trainer._Run._one_rollout, Learner.batch

        def watched(self):
            logged = rollout(self)
            seen[-1]["cursor"] = self.progress["cursor"]
            return logged

        def batched(self, state, found):
            trained_on = {"prompts": found.prompts, "completions": found.completions, "rewards": found.rewards}
            seen.append(jax.device_get(trained_on))
            return assemble(self, state, found)

        patch.setattr(trainer._Run, "_one_rollout", watched)
        patch.setattr(Learner, "batch", batched)
        run = train(dynamic, tmp_path_factory.mktemp("undisturbed") / "run")
    return run, seen


# By hand from DIFFER, two prompts a round. Rollout 0: 11 at once -> places 0 and 1. Rollout 1: 10 | 11 -> 2 and 4, and
# place 5 is left for rollout 2, which samples it again: 10 | 00 | 11 -> 5 and 9. After the last prompt comes the first.
SAMPLED = [[0, 1], [2, 3, 4, 5], [5, 6, 7, 8, 9, 0]]
CHOSEN = [[0, 1], [2, 4], [5, 9]]
CURSORS = [2, 5, 10]


def test_prompts_without_differences_are_replaced_by_the_next_ones(policy, undisturbed):
    run, batches = undisturbed
    tokenizer = load_tokenizer(policy, 464)
    problems = load_dataset("arithmetic", size=len(DIFFER))
    completions = rows(run, "completions.jsonl")
    for rollout, batch in enumerate(batches):
        assert batch["prompts"].places.tolist() == CHOSEN[rollout]
        assert batch["cursor"] == CURSORS[rollout]
        logged = [row for row in completions if row["rollout"] == rollout]
        prompts = [problems[place]["prompt"] for place in SAMPLED[rollout] for _ in range(4)]
        assert [row["prompt"] for row in logged] == prompts
        differing = [float(DIFFER[place] and sample == 0) for place in SAMPLED[rollout] for sample in range(4)]
        assert [row["rewards/digits"] for row in logged] == differing
        trained_on = [place in CHOSEN[rollout] for place in SAMPLED[rollout] for _ in range(4)]
        assert [row["trained_on"] for row in logged] == trained_on
        kept = [row for row in logged if row["trained_on"]]
        np.testing.assert_array_equal(batch["rewards"], np.float32([row["reward"] for row in kept]))
        drawn = zip(batch["completions"].tokens, batch["completions"].lengths, strict=True)
        texts = tokenizer.batch_decode([tokens[:length] for tokens, length in drawn], skip_special_tokens=True)
        assert texts == [row["completion"] for row in kept]
    assert len(completions) == 4 * sum(map(len, SAMPLED))


def test_the_metrics_count_everything_sampled(policy, undisturbed):
    run, _ = undisturbed
    logged, completions = rows(run)[::2], rows(run, "completions.jsonl")
    assert [row["dynamic_sampling/rounds"] for row in logged] == [1, 2, 3]
    assert [row["dynamic_sampling/informative"] for row in logged] == [1.0, 0.75, 0.5]
    for rollout, row in enumerate(logged):
        of_it = [entry for entry in completions if entry["rollout"] == rollout]
        for name in ("reward", "rewards/digits", "rewards/format"):
            mean = np.mean([entry[name] for entry in of_it])
            assert row[name if name == "reward" else f"{name}/mean"] == pytest.approx(mean, abs=1e-6)
        groups = np.reshape([entry["reward"] for entry in of_it], (-1, 4))
        assert row["reward_std"] == pytest.approx(groups.std(ddof=1), abs=1e-6)
        assert row["frac_reward_zero_std"] == np.mean(groups.max(1) == groups.min(1))
        assert row["epoch"] == CURSORS[rollout] / len(DIFFER)
    problems = load_dataset("arithmetic", size=len(DIFFER))
    _, lengths = encode_prompts(load_tokenizer(policy, 464), [problem["prompt"] for problem in problems], 48)
    expected = [
        4 * sum(lengths[place] for place in places) + round(4 * len(places) * row["completions/mean_length"])
        for places, row in zip(SAMPLED, logged, strict=True)
    ]
    assert np.diff([0, *(row["num_tokens"] for row in logged)]).tolist() == expected


def test_one_round_only_measures(policy, tmp_path):
    measured = config_of(tmp_path, policy, DIFFER, max_rounds=1)
    run = train(measured, tmp_path / "run")
    off = train(measured, tmp_path / "off", "grpo.dynamic_sampling={metric: null}")
    assert [row["dynamic_sampling/informative"] for row in rows(run)[::2]] == [1.0, 0.5, 1.0]
    logged = rows(run)
    assert all(row.pop("dynamic_sampling/rounds") == 1 and row.pop("dynamic_sampling/informative") for row in logged)
    assert logged == rows(off)
    assert same_adapter(run, off)
    assert all(row["trained_on"] for row in rows(run, "completions.jsonl"))
    assert not any("trained_on" in row for row in rows(off, "completions.jsonl"))


def test_too_few_informative_groups_are_filled_up_after_max_rounds(policy, tmp_path):
    """One informative group in the first rollout, none in the others."""
    config = config_of(tmp_path, policy, [0, 0, 0, 0, 0, 1] + [0] * 12, max_rounds=3)
    run = train(config, tmp_path / "run")
    logged, completions = rows(run)[::2], rows(run, "completions.jsonl")
    assert [row["dynamic_sampling/rounds"] for row in logged] == [3, 3, 3]
    np.testing.assert_allclose([row["dynamic_sampling/informative"] for row in logged], [1 / 6, 0, 0])
    places = [[i for i in range(6) if completions[4 * (6 * rollout + i)]["trained_on"]] for rollout in range(3)]
    assert places == [[0, 5], [0, 1], [0, 1]]
    assert [row["epoch"] for row in logged] == [6 / 18, 12 / 18, 1.0]
    assert all(row["nonfinite"] == 0 for row in logged) and logged[0]["grad_norm"] > 0
    assert len(rows(run)) == 6


def test_a_run_stopped_between_rollouts_or_amid_rounds_continues_to_the_same_end(
    dynamic, undisturbed, tmp_path, monkeypatch
):
    whole, run = undisturbed[0], tmp_path / "run"
    score = RewardFunctions.__call__
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Killed):
            train(dynamic, run)
    assert leaves(run)[1]["cursor"] == 2

    calls = []

    def die_in_the_second_round(self, examples, *arguments):
        # Rollout 1 has two rounds, and rollout 2 three of them.
        calls.append(len(examples))
        if len(calls) == 4:
            raise Killed
        return score(self, examples, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RewardFunctions, "__call__", die_in_the_second_round)
        with pytest.raises(Killed):
            train(dynamic, run)
    assert leaves(run)[1]["cursor"] == 5 and [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    train(dynamic, run)
    assert differences(run, whole) == []
