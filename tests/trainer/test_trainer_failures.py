"""What a run has saved when a reward function, an evaluation or a service fails, and that it goes on from there."""

import importlib.machinery
import json
import sys
import types

import pytest
from run_harness import checkpoints, differences, leaves, rows
from training_runs import COUNTED, config_in, reward_file, train

from qerl_jax.errors import UserError
from qerl_jax.interrupt import Interrupted
from qerl_jax.metrics import MetricsWriter
from qerl_jax.rl import trainer


def test_a_failing_reward_function_loses_nothing_and_the_run_continues_once_it_is_fixed(policy, finished, tmp_path):
    config, run = config_in(tmp_path, policy), tmp_path / "run"
    failures = [
        # What goes wrong, on which call since the process began, what is said, and the step saved by then.
        ("raise ValueError('no such unit')", 4, "raised on 8 completions, of prompts from the one .*no such unit", 2),
        ("scores[5] = float('nan')", 2, r"returned nan \(float\) for a completion of the prompt that begins 'Ann", 4),
        ("scores = scores[1:]", 1, "returned 7 scores; expected 8", 4),
        ("scores[3] = float('inf')", 2, r"returned inf \(float\) for a completion", 6),  # evaluating
    ]
    for wrong, call, message, saved in failures:
        reward_file(tmp_path, COUNTED + f"    if calls == {call}:\n        {wrong}\n    return scores\n")
        with pytest.raises(UserError, match=f"(?s)rewards.py:digits' {message}"):
            train(config, run)
        assert checkpoints(run)[-1] == saved == len(rows(run)) == len(rows(run, "completions.jsonl")) / 4
    reward_file(tmp_path, COUNTED + "    return scores\n")
    train(config, run)
    found = differences(run, finished)
    assert len(found) == 2 and found[0].startswith("progress") and found[1] == "summary.json differs"
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, finished)]
    for mine, theirs in ((leaves(run)[1], leaves(finished)[1]), summaries):
        assert mine.pop("rewards").keys() == theirs.pop("rewards").keys() == {"digits"}
        assert mine == theirs


def test_after_a_stop_between_them_the_multiples_of_save_steps_are_saved(policy, tmp_path):
    config, run = config_in(tmp_path, policy, run={"save_steps": 4}), tmp_path / "run"
    reward_file(tmp_path, COUNTED + "    if calls > 3:\n        1 / 0\n    return scores\n")
    with pytest.raises(UserError, match="saved at step 2 of 6"):
        train(config, run)
    reward_file(tmp_path, COUNTED + "    return scores\n")
    train(config, run)
    assert checkpoints(run) == [0, 2, 4, 6]


def test_what_was_learned_before_a_reward_function_failed_is_saved_in_any_case(policy, finished, tmp_path):
    config, run, saved = config_in(tmp_path, policy, run={"save_steps": 6}), tmp_path / "run", [0]
    for calls in (3, 1):  # of the process
        reward_file(tmp_path, COUNTED + f"    if calls > {calls}:\n        1 / 0\n    return scores\n")
        with pytest.raises(UserError, match=r"(?s)ZeroDivisionError.*\nsaved at step \d of 6; `.*qerl.* train "):
            train(config, run)
        assert saved[-1] < checkpoints(run)[-1] == len(rows(run)) < 6
        saved = checkpoints(run)
    reward_file(tmp_path, COUNTED + "    return scores\n")
    train(config, run)
    mine, theirs = leaves(run)[0], leaves(finished)[0]
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.parametrize(("call", "saved"), [(1, 0), (4, 2)])
def test_a_signal_to_each_process_of_a_job_is_an_interruption(policy, finished, tmp_path, call, saved):
    """A scheduler's, at the end of a job's time, in the evaluation before training and in the second rollout."""
    config = config_in(tmp_path, policy)
    both = "import os, time; [os.kill(process, 15) for process in (os.getppid(), os.getpid())]; time.sleep(30)"
    reward_file(tmp_path, COUNTED + f"    if calls == {call}:\n        {both}\n    return scores\n")
    with pytest.raises(Interrupted, match=rf"(?s)its process ended by SIGTERM on .*\nsaved at step {saved} of 6; `"):
        train(config, tmp_path / "run")
    reward_file(tmp_path, COUNTED + "    return scores\n")
    train(config, tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [row["step"] for row in rows(finished)]


def test_so_it_is_where_a_reward_function_is_only_being_imported(policy, tmp_path):
    config = config_in(tmp_path, policy)
    whole = (tmp_path / "rewards.py").read_text()
    both = "import os, time\n[os.kill(process, 15) for process in (os.getppid(), os.getpid())]\ntime.sleep(30)\n"
    (tmp_path / "rewards.py").write_text(both + whole)
    with pytest.raises(Interrupted, match="its process ended by SIGTERM while it was imported"):
        train(config, tmp_path / "run")
    assert not checkpoints(tmp_path / "run")


def test_what_was_learned_before_an_evaluation_failed_is_saved_and_the_evaluation_made_up_for(policy, tmp_path):
    config = config_in(tmp_path, policy, run={"save_steps": 6}, evaluation={"eval_steps": 2})
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    for call, saved in ((5, 2), (8, 6)):  # of the process; each time the greedy completions' of an evaluation
        reward_file(tmp_path, COUNTED + f"    if calls == {call}:\n        1 / 0\n    return scores\n")
        with pytest.raises(UserError, match=rf"(?s)ZeroDivisionError.*\nsaved at step {saved} of 6; `.*qerl.* train "):
            train(config, run)
        assert checkpoints(run)[-1] == saved and "loss" in rows(run)[-1]
    reward_file(tmp_path, COUNTED + "    return scores\n")
    train(config, run)
    train(config, undisturbed)
    assert rows(run) == rows(undisturbed) and [row["step"] for row in rows(run)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    mine, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (run, undisturbed))
    assert mine["after"] == theirs["after"] and mine["before"] == theirs["before"]


def test_the_evaluation_before_training_is_logged_once_whenever_the_run_dies(policy, tmp_path, monkeypatch):
    config, run = config_in(tmp_path, policy, run={"save_steps": 6}, evaluation={"eval_steps": 6}), tmp_path / "run"
    evaluated, save = trainer._Run._log_evaluation, trainer._Run._save

    def interrupted(self, *_):  # saved without the evaluation, of which there is a row
        evaluated(self, *_)
        self.progress["before"] = None
        save(self)
        raise KeyboardInterrupt

    def killed(self, *_):  # before anything is saved
        raise KeyboardInterrupt

    for patched, method in (("_save", killed), ("_log_evaluation", interrupted)):
        monkeypatch.setattr(trainer._Run, patched, method)
        with pytest.raises(KeyboardInterrupt):
            train(config, run)
        assert [row["step"] for row in rows(run)] == [0]
        monkeypatch.undo()
    train(config, run)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_what_was_learned_before_completions_could_not_be_written_is_saved(config, finished, tmp_path, monkeypatch):
    def full(writer, rows):
        if (number := next(iter(rows))["rollout"]) == 1:
            raise UserError(f"completions of rollout {number}: No space left on device")

    monkeypatch.setattr(MetricsWriter, "log_completions", full)
    with pytest.raises(UserError, match=r"(?s)No space left on device\nsaved at step 4 of 6; "):
        train(config, tmp_path / "run", "run.save_steps=null")
    monkeypatch.undo()
    train(config, tmp_path / "run", "run.save_steps=null")
    found = json.loads((tmp_path / "run/summary.json").read_text())["after"]
    assert found == json.loads((finished / "summary.json").read_text())["after"]


def test_what_was_learned_before_a_service_failed_is_saved(config, finished, tmp_path, monkeypatch):
    started = []

    def log(numbers, step):
        if step == 3:
            raise BrokenPipeError(32, "Broken pipe")

    stand_in = types.ModuleType("wandb")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="here")
    run = types.SimpleNamespace(log=log, finish=lambda: None)
    stand_in.init = lambda **options: (started.append(options["config"]), run)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with pytest.raises(UserError, match=r"(?s)wandb failed, BrokenPipeError: .*\nsaved at step \d of 6; "):
        train(config, tmp_path / "run", "run.save_steps=null", "run.report_to=[wandb]")
    assert checkpoints(tmp_path / "run")[-1] >= 3
    (options,) = started
    assert (options["optimizer"]["max_steps"], options["run"]["report_to"]) == (6, ["wandb"])
    train(config, tmp_path / "run", "run.save_steps=null")
    assert differences(tmp_path / "run", finished) == []
