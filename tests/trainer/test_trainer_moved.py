"""A run whose folder is moved, deleted or replaced while it goes on stops, and writes nothing more."""

import re

import pytest
from run_harness import checkpoints, differences, rows
from training_runs import COUNTED, config_in, reward_file, train

from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.rl import trainer


@pytest.mark.parametrize(
    ("work", "call", "saved", "replaced"),
    [
        ("evaluate", 1, [], False),  # before the first checkpoint
        ("save_checkpoint", 2, [0, 2], False),
        ("save_checkpoint", 2, [0, 2], True),
        ("save_checkpoint", 4, [0, 2, 4, 6], True),
        ("evaluate", 2, [0, 2, 4, 6], False),  # before the adapter is written
    ],
)
def test_a_folder_that_is_moved_amid_its_run_stops_it_and_is_not_made_again(
    config, finished, tmp_path, monkeypatch, work, call, saved, replaced
):
    run, moved, done, calls = tmp_path / "run", tmp_path / "moved", getattr(trainer, work), []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").touch()

    def done_and_moved(*arguments, **options):
        calls.append(arguments)
        found = done(*arguments, **options)
        if len(calls) == call:
            run.rename(moved)
            if replaced:
                (tmp_path / "other").rename(run)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(trainer, work, done_and_moved)
        message = r": the run's folder is no longer there: it was moved,.* `.*qerl.* train NEW/config.yaml`"
        with pytest.raises(UserError, match=re.escape(str(run)) + message):
            train(config, run)
    assert checkpoints(moved) == saved and len(rows(moved)) == max(saved, default=0)
    assert not (moved / "adapter").exists()
    assert [path.name for path in tmp_path.rglob("run/*")] == ([".lock"] if replaced else [])
    trainer.train(load_config(f"{moved}/config.yaml"))
    assert differences(moved, finished) == []


@pytest.mark.parametrize("work", ["assemble", "warn_of_missing_rows"])
@pytest.mark.parametrize("replaced", [False, True])
def test_nor_is_one_that_is_moved_while_the_model_is_loaded(config, finished, tmp_path, monkeypatch, replaced, work):
    """Or before its files are opened for rows."""
    done, run = getattr(trainer, work), tmp_path / "run"
    rows = {name: (finished / name).read_bytes() for name in ("metrics.jsonl", "completions.jsonl")}

    def moved_and_done(*arguments):
        run.rename(tmp_path / "moved")
        if replaced:
            run.mkdir()
            for name, content in rows.items():
                (run / name).write_bytes(content)
        return done(*arguments)

    monkeypatch.setattr(trainer, work, moved_and_done)
    with pytest.raises(UserError, match="the run's folder is no longer there"):
        train(config, run)
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("run/*")} == (rows if replaced else {})
    assert (tmp_path / "moved/config.yaml").is_file()


def test_a_failing_reward_function_is_told_even_where_nothing_can_be_saved(policy, tmp_path):
    config, run = config_in(tmp_path, policy), tmp_path / "run"
    move = f"__import__('os').rename({str(run)!r}, {str(tmp_path / 'moved')!r})"
    reward_file(
        tmp_path,
        COUNTED + f"    if calls == 4:\n        {move}\n        raise ValueError('no such unit')\n    return scores\n",
    )
    with pytest.raises(UserError, match=r"(?s)no such unit.*\n.*the run's folder is no longer there"):
        train(config, run)
    assert not run.exists() and checkpoints(tmp_path / "moved") == [0, 2]
