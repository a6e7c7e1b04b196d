"""What a run compiles before it begins is what it calls."""

import contextlib
import functools

import jax
import pytest
from large_programs import large_programs
from run_harness import rows
from training_runs import config_in, train

from qerl_jax.rl import trainer


@pytest.mark.parametrize("options", [{}, {"grpo": {"num_iterations": 1, "beta": 0.1}}])
def test_a_run_compiles_nothing_large_after_its_start(policy, tmp_path, monkeypatch, options):
    """From the start and continued from a checkpoint, whose arrays are others."""
    config = config_in(tmp_path, policy, **options)
    compile_ahead, later = trainer._Run._compile, []

    def watched(run):
        compile_ahead(run)
        later.append(stack.enter_context(large_programs()))

    monkeypatch.setattr(trainer._Run, "_compile", watched)
    monkeypatch.setattr(trainer._Run, "_stop_if_interrupted", functools.partialmethod(stop_once, at=2, done=[]))
    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        train(config, tmp_path / "run")
    assert later == [[], []]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def stop_once(run, *, at, done):
    if not done and int(run.state.step) >= at:
        run._save()
        done.append(True)
        raise KeyboardInterrupt
