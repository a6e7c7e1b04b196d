"""A run killed at any instant and started again with the same command ends with bitwise the same result."""

import json
import shutil

import pytest
from random_kills import random_kills, summary
from run_harness import (
    TrainingProcess,
    checkpoints,
    differences,
    half_saved,
    one_layer_policy,
    rows,
    small_config,
    train_to_the_end,
)

pytestmark = pytest.mark.usefixtures("compiled_for_users")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A config, a run of it that nobody disturbed, and its compiled programs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config, programs = small_config(folder, one_layer_policy(folder / "policy")), folder / "programs"
    train_to_the_end(config, folder / "run", folder / "log", programs=programs)
    return config, folder / "run", programs


def test_the_undisturbed_run_meets_what_resuming_could_get_wrong(uninterrupted):
    _, run, _ = uninterrupted
    steps = rows(run)
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["rollout"] for row in steps] == [i // 2 for i in range(12)]
    sigmas = [round(row["aqn/sigma"], 6) for row in steps]
    assert sigmas == [0.0] * 4 + [0.01] * 4 + [0.001] * 4
    assert all(row["grad_norm"] > 0 and row["frac_reward_zero_std"] < 1 for row in steps)
    assert len({row["completion"] for row in rows(run, "completions.jsonl")}) > 20
    assert checkpoints(run) == [8, 12]


def test_killed_while_compiling_while_updating_and_while_saving(uninterrupted, tmp_path):
    config, whole, shared = uninterrupted
    # A copy: one of the programs is damaged below.
    programs = shutil.copytree(shared, tmp_path / "programs")
    run = tmp_path / "run"

    def start():
        return TrainingProcess(config, run, tmp_path / "log", programs=programs)

    with start() as process:
        assert process.until(lambda: "compiling\n" in process.output())
        process.kill()
    assert checkpoints(run) == [] and "evaluating" not in process.output()

    def has_rows_to_lose():
        return len(rows(run)) >= 6 and rows(run)[-1]["step"] > checkpoints(run)[-1]

    # On a busy machine a kill may come late; then there is another chance.
    for _ in range(2):
        with start() as process:
            assert process.until(has_rows_to_lose)
            process.kill()
        if has_rows_to_lose():
            break
    assert has_rows_to_lose(), "no kill lost rows"
    assert checkpoints(run)[-1] > 0

    for _ in range(3):
        with start() as process:
            assert process.until(lambda: checkpoints(run)[-1] > 0 and half_saved(run))
            process.kill()
        if half_saved(run):
            break
    assert half_saved(run), "no kill hit a save"
    assert checkpoints(run)[-1] < 12

    # What a kill during the write of a compiled program leaves.
    torn = max(programs.glob("jit_gather_gradients-*"), key=lambda path: path.stat().st_size)
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    train_to_the_end(config, run, tmp_path / "log", programs=programs)
    assert "persistent compilation cache entry for 'jit_gather_gradients'" in (tmp_path / "log").read_text()
    assert differences(run, whole) == []
    assert not half_saved(run)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_twenty_random_instants_of_them_five_during_a_save(tmp_path):
    results = random_kills(tmp_path)
    figures = summary(results)
    print(json.dumps(figures, indent=1))
    assert [run["differences"] for run in results["runs"]] == [[]] * len(results["runs"])
    assert figures["kills"] >= 20 and figures["kills_during_a_save"] >= 5
