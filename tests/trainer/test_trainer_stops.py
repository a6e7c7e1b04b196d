"""How runs end, stop and continue: to the same bytes as an undisturbed one, or with an error that costs nothing."""

import gc
import json
import logging
import os
import re
import shlex
import shutil
import signal
import threading
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from run_harness import TrainingProcess, checkpoints, differences, rows
from training_runs import Killed, config_in, reward_file, stop_after, train

from qerl_jax import run_options
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.interrupt import interrupt_flag
from qerl_jax.metrics import MetricsWriter
from qerl_jax.models.safetensors import read_safetensors, write_safetensors
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl import experience, plan, trainer
from qerl_jax.rl.assembly import Experiment


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """A run of `config` that died after step 4; copy it before continuing."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Killed):
            train(config, run)
    assert checkpoints(run) == [0, 2, 4]
    return run


@pytest.mark.parametrize("error", [UserError("mine"), KeyboardInterrupt("mine"), jax.errors.JaxRuntimeError("mine")])
def test_an_error_that_is_kept_keeps_no_model(config, tmp_path, monkeypatch, error):
    """As a notebook keeps the last one, while its cell is run again."""
    models = []

    def fails(run):
        models.append(weakref.ref(run.experiment.policy.model))
        try:
            raise ValueError("first")
        except ValueError:
            raise error from None

    def caller():
        found = "the caller's"
        assert found
        raise LookupError

    monkeypatch.setattr(trainer._Run, "_compile", fails)
    with pytest.raises(type(error), match="mine") as kept:
        try:
            caller()
        except LookupError:
            train(config, tmp_path / "run")
    gc.collect()
    assert [model() for model in models] == [None]
    handled = kept.value.__context__.__context__
    assert handled.__traceback__.tb_next.tb_frame.f_locals == {"found": "the caller's"}


def test_a_profile_that_can_be_no_folder_is_refused_before_anything(config, tmp_path):
    (tmp_path / "trace").touch()
    given = load_config(str(config), [f"run.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=r"profile \(--profile\): .*trace is a file; expected a folder"):
        trainer.train(given, profile=str(tmp_path / "trace"))
    assert not (tmp_path / "run").exists()


def test_a_profile_may_lie_in_the_folder_of_its_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "assemble", lambda *_: (_ for _ in ()).throw(Killed))
    given = load_config(str(config), [f"run.output_dir={tmp_path / 'run'}"])
    with pytest.raises(Killed):
        trainer.train(given, profile=str(tmp_path / "run" / "trace"))
    assert (tmp_path / "run" / "trace").is_dir()


def test_fresh_gives_the_same_run_beside_it(config, finished):
    again = trainer.train(load_config(str(config), [f"run.output_dir={finished}"]), fresh=True)
    assert again == finished.with_name("run-2")
    assert differences(again, finished) == []


def test_a_stopped_run_continues_to_the_same_end(config, stopped, finished, tmp_path, capsys):
    run = shutil.copytree(stopped, tmp_path / "run")
    train(config, run)
    assert f"continuing {run} from step 4 of 6" in capsys.readouterr().out
    assert differences(run, finished) == []


def test_a_stopped_run_in_float16_continues_to_the_same_end(policy, tmp_path, caplog):
    config = config_in(tmp_path, policy, model={"dtype": "float16"})
    whole, run = train(config, tmp_path / "whole"), tmp_path / "run"
    logged = rows(whole)
    assert all(row["nonfinite"] == 0 and row["grad_norm"] > 0 for row in logged) and not caplog.records
    assert all(row["sampling/sampling_logp_difference/mean"] > 0 for row in logged)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Killed):
            train(config, run)
    train(config, run)
    assert differences(run, whole) == []


@pytest.mark.parametrize("damage", ["flipped bit", "cut"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    config, stopped, finished, tmp_path, capsys, caplog, damage
):
    run = shutil.copytree(stopped, tmp_path / "run")
    largest = max((run / "checkpoints/step_00000004/arrays").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    with caplog.at_level(logging.WARNING):
        train(config, run)
    assert "checkpoint step 4 is damaged and skipped" in caplog.text
    assert f"continuing {run} from step 2 of 6" in capsys.readouterr().out
    assert differences(run, finished) == []


def test_rows_that_were_lost_are_told_once_the_run_goes_on(config, stopped, tmp_path, caplog, monkeypatch):
    run = shutil.copytree(stopped, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    lines = (run / "completions.jsonl").read_text().splitlines(keepends=True)
    (run / "completions.jsonl").write_text("".join(line for line in lines if json.loads(line)["rollout"] != 1))
    stop_after(monkeypatch, 6)
    with pytest.raises(Killed):
        train(config, run)
    assert [record.message for record in caplog.records] == [
        f"{run}/metrics.jsonl: the rows of steps 1 to 4 are missing: they were lost or removed since; the run goes on "
        "without them (to have them, stop it and put them back, before the others)",
        f"{run}/completions.jsonl: the rows of rollout 1 are missing: they were lost or removed since, or "
        "run.log_completions was false; the run goes on without them (to have them, stop it and put them back, before "
        "the others)",
    ]


def test_completions_that_are_not_logged_are_not_missed(config, tmp_path, caplog, monkeypatch):
    for step in (2, 4):
        stop_after(monkeypatch, step)
        with pytest.raises(Killed):
            train(config, tmp_path / "run", "run.log_completions=false")
    assert not caplog.records and len(rows(tmp_path / "run")) == 4
    assert rows(tmp_path / "run", "completions.jsonl") == []


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_on_them(config, tmp_path, monkeypatch):
    sync, save, order = MetricsWriter.sync, trainer.save_checkpoint, []

    def saved(directory, step, *arguments, **options):
        order.append(step)
        return save(directory, step, *arguments, **options)

    monkeypatch.setattr(MetricsWriter, "sync", lambda self: order.append("rows") or sync(self))
    monkeypatch.setattr(trainer, "save_checkpoint", saved)
    stop_after(monkeypatch, 2)
    with pytest.raises(Killed):
        train(config, tmp_path / "run")
    assert order[:4] == ["rows", 0, "rows", 2]


def test_no_whole_checkpoint_left_is_an_error_that_deletes_nothing(config, stopped, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="every checkpoint"):
        train(config, run)
    assert (run / "metrics.jsonl").read_bytes() == before and checkpoints(run) == [0, 2, 4]


def test_a_config_edited_amid_its_run_is_refused_as_the_same_overrides_are(config, stopped, finished, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    stored = run / "config.yaml"
    with pytest.raises(UserError) as by_override:
        train(stored, run, "lora.lora_alpha=3200.0", "optimizer.learning_rate=1.0e-9")
    before, text = load_config(str(stored)), stored.read_text()
    text = re.sub("lora_alpha: .*", "lora_alpha: 3200.0", text)
    stored.write_text(re.sub("learning_rate: .*", "learning_rate: 1.0e-9", text))
    with pytest.raises(UserError) as by_file:
        trainer.train(load_config(str(stored)))
    assert str(by_file.value) == str(by_override.value)
    changes = "\n  lora.lora_alpha was 8.0, is now 3200.0\n  optimizer.learning_rate was 0.01, is now 1e-09\n"
    assert changes in str(by_file.value)
    # What began the run still continues it, and puts its file right.
    train(config, run)
    assert load_config(str(stored)) == before and differences(run, finished) == []


def test_other_weights_or_data_under_the_same_name_are_refused(policy, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"Ann has {n} pens. How many pens now?", "answer": str(n)}) for n in range(10, 20)]
    data.write_text("\n".join(lines))
    base = shutil.copytree(policy, tmp_path / "policy")
    config, run = config_in(tmp_path, base, data={"train_dataset": str(data)}), tmp_path / "run"
    stop_after(monkeypatch, 0)
    with pytest.raises(Killed):
        train(config, run)

    data.write_text("\n".join(lines[:-1]))
    with pytest.raises(UserError, match=r"training data was '\w{64}', is now '\w{64}'"):
        train(config, run)
    data.write_text("\n".join(lines))

    arrays = {name: np.array(array) for name, array in read_safetensors(base / "model.safetensors").items()}
    specs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    arrays["model.embed_tokens.weight"][5, 7] *= 2
    write_safetensors(base / "model.safetensors", specs, arrays.__getitem__)
    with pytest.raises(UserError, match=r"base weights was '\w{16}', is now '\w{16}'"):
        train(config, run)


def test_other_problems_tokenizer_or_ends_of_completions_are_refused(policy, tmp_path, monkeypatch):
    data = tmp_path / "held_out.jsonl"
    problem = {"prompt": "Ann has 3 pens. How many pens now?", "answer": "3"}
    data.write_text(4 * f"{json.dumps(problem)}\n")  # as many as the other runs evaluate on
    base = shutil.copytree(policy, tmp_path / "policy")
    config, run = config_in(tmp_path, base, evaluation={"eval_dataset": str(data)}), tmp_path / "run"
    stop_after(monkeypatch, 0)
    with pytest.raises(Killed):
        train(config, run)

    ends = json.loads((base / "generation_config.json").read_text())
    digests = r"was '\w{64}', is now '\w{64}'"
    for file, text, message in (
        (data, data.read_text().replace("3", "4"), f"evaluation data {digests}"),
        (base / "chat_template.jinja", "{{ messages }}", f"tokenizer and chat template {digests}"),
        (base / "generation_config.json", json.dumps(ends | {"eos_token_id": 5}), r"EOS and pad ids was \[.*\[5, "),
    ):
        before = file.read_text() if file.exists() else None
        file.write_text(text)
        with pytest.raises(UserError, match=message) as refusal:
            train(config, run)
        assert str(refusal.value).count(", is now ") == 1
        file.unlink() if before is None else file.write_text(before)


def test_a_run_begun_before_so_much_was_written_down_continues_and_adds_it(
    config, finished, tmp_path, monkeypatch, caplog
):
    identity = Experiment.identity
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        kept = ("base weights", "training data", "total optimizer steps")
        patch.setattr(Experiment, "identity", lambda self: {name: identity(self)[name] for name in kept})
        patch.setattr(RewardFunctions, "sources", {})
        patch.setattr(run_options, "options_to_keep", lambda config: {})
        with pytest.raises(Killed):
            train(config, tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Killed):
            train(config, tmp_path / "run")
    assert "the checkpoint of step 2 was saved by an earlier version" in caplog.text
    caplog.clear()
    train(config, tmp_path / "run")
    assert "earlier version" not in caplog.text
    assert differences(tmp_path / "run", finished) == []


def test_a_changed_reward_function_is_named_once(policy, tmp_path, monkeypatch, caplog):
    config, run = config_in(tmp_path, policy), tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Killed):
            train(config, run)
    reward_file(tmp_path, "    return [0.5] * len(completions)\n")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Killed):
            train(config, run)
    assert "the source of reward function digits has changed since step 2 was saved" in caplog.text
    caplog.clear()
    train(config, run)
    assert "has changed" not in caplog.text


def open_files(folder):
    """Files below `folder` that this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return [link.readlink() for link in links if link.is_symlink() and link.readlink().is_relative_to(folder)]


def test_a_reward_module_that_cannot_be_imported_stops_the_run_with_nothing_left_open(policy, tmp_path):
    config, run = config_in(tmp_path, policy), tmp_path / "run"
    (tmp_path / "rewards.py").write_text("raise RuntimeError('no such unit')")
    with pytest.raises(UserError, match=r"(?s)raised while it was imported.*no such unit"):
        train(config, run)
    assert open_files(run) == []


def test_a_config_may_be_corrected_while_nothing_is_saved_yet(config, finished, tmp_path):
    with pytest.raises(UserError, match=r"problems\.jsonl, line 1: has"):
        train(config, tmp_path / "run", "data.max_prompt_length=8")
    train(config, tmp_path / "run")
    assert differences(tmp_path / "run", finished) == []


@pytest.fixture
def with_a_terminal():
    """Also where the tests themselves run under nohup, which what they start would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_ctrl_c_saves_and_the_command_that_it_names_continues(config, finished, programs, tmp_path):
    run = tmp_path / "run"
    with TrainingProcess(config, run, tmp_path / "log", programs=programs) as process:
        assert process.until(lambda: checkpoints(run) == [0])
        process.interrupt()
        assert process.wait() == 130, process.output()
        said = process.output()
    assert "Ctrl-C: saving after this rollout" in said and "Traceback" not in said
    named = re.escape(shlex.quote(f"{run}/config.yaml"))
    (saved,) = re.findall(rf"saved at step (\d) of 6; `.*qerl.* train {named}` continues it", said)
    assert checkpoints(run)[-1] == len(rows(run)) == int(saved) < 6
    trainer.train(load_config(f"{run}/config.yaml"))
    assert differences(run, finished) == []


@pytest.mark.usefixtures("with_a_terminal")
@pytest.mark.parametrize(
    ("number", "module", "during", "call", "saved"),
    [
        (signal.SIGINT, plan, "lowered_evaluation", 1, 0),
        (signal.SIGTERM, trainer, "evaluate", 1, 0),
        (signal.SIGHUP, experience, "next_examples", 1, 2),
        (signal.SIGINT, experience, "next_examples", 3, 6),
    ],
)
def test_a_signal_stops_before_the_next_rollout_or_evaluation(
    config, finished, tmp_path, monkeypatch, capsys, number, module, during, call, saved
):
    run, work, calls = tmp_path / "run", getattr(module, during), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, during, interrupted)
        if during == "lowered_evaluation":
            patch.setattr(trainer, "evaluate", None)  # what compiled was interrupted: nothing is sampled any more
        with pytest.raises(trainer.Interrupted, match=f"saved at step {saved} of 6; `.* train .* continues it"):
            train(config, run)
    assert checkpoints(run)[-1] == len(rows(run)) == saved
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert f"\n{name}: saving after this rollout" in capsys.readouterr().err
    train(config, run)
    assert differences(run, finished) == []


def test_a_signal_stops_before_an_evaluation_on_the_way(config, finished, tmp_path, monkeypatch):
    """The scheduler that sent it may not wait until that has ended."""
    run, rollout, every = tmp_path / "run", trainer._Run._one_rollout, "evaluation.eval_steps=4"

    def interrupted(self):
        if int(self.state.step) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return rollout(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer._Run, "_one_rollout", interrupted)
        with pytest.raises(trainer.Interrupted, match="saved at step 4 of 6"):
            train(config, run, "run.save_steps=6", every)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    train(config, run, every)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4, 4, 5, 6]
    assert [row for row in rows(run) if "loss" in row] == rows(finished)


def test_a_step_to_be_saved_is_saved_before_it_is_evaluated(config, tmp_path, monkeypatch):
    evaluate, calls = trainer.evaluate, []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise Killed
        return evaluate(*arguments)

    monkeypatch.setattr(trainer, "evaluate", killed)
    with pytest.raises(Killed):
        train(config, tmp_path / "run", "evaluation.eval_steps=2")
    assert checkpoints(tmp_path / "run") == [0, 2]


def test_a_fresh_run_that_was_stopped_continues_in_its_own_folder(config, stopped, finished, tmp_path, monkeypatch):
    began = shutil.copytree(stopped, tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Killed):
            trainer.train(load_config(str(config), [f"run.output_dir={began}"]), fresh=True)
    fresh = tmp_path / "run-2"
    assert trainer.train(load_config(str(fresh / "config.yaml"))) == fresh
    assert differences(fresh, finished) == []
    assert checkpoints(began) == [0, 2, 4]


def test_a_second_ctrl_c_stops_at_once_and_loses_only_what_was_not_saved(config, finished, tmp_path, monkeypatch):
    rollout = trainer._Run._one_rollout

    def impatient(self):
        if int(self.state.step) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return rollout(self)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(trainer._Run, "_one_rollout", impatient)
        with pytest.raises(KeyboardInterrupt, match="goes on from its last checkpoint"):
            train(config, tmp_path / "run")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert checkpoints(tmp_path / "run") == [0, 2]
    train(config, tmp_path / "run")
    assert differences(tmp_path / "run", finished) == []


def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(config, finished, programs, tmp_path):
    run, (reader, writer) = tmp_path / "run", os.pipe()
    with TrainingProcess(config, run, tmp_path / "log", programs=programs, stdout=writer) as process:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        assert process.wait() == 0, process.output()
    said = "nothing more can be written to the output; the run goes on, and its metrics go on"
    assert process.output() == f"{said} in {run}/metrics.jsonl\n"
    assert differences(run, finished) == [] and (run / "summary.json").is_file()


@pytest.mark.usefixtures("with_a_terminal")
def test_a_hangup_comes_twice_or_before_sigterm_without_stopping_at_once_and_is_ignored_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    with interrupt_flag() as pressed:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert pressed == [signal.SIGHUP]
        os.kill(os.getpid(), signal.SIGTERM)  # of a logout
        with pytest.raises(KeyboardInterrupt, match="stopped at once"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt_flag() as pressed:
            os.kill(os.getpid(), signal.SIGHUP)
            assert pressed == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_ignored_stays_ignored(number):
    """A script's shell has what it starts with & ignore Ctrl-C."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interrupt_flag() as pressed:
            os.kill(os.getpid(), number)
            assert pressed == []
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_in_another_thread_ctrl_c_is_left_to_the_main_one():
    """Python lets no other thread ask for a signal."""
    before, found = signal.getsignal(signal.SIGINT), []

    def run():
        with interrupt_flag() as pressed:
            found.append((list(pressed), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [([], before)]
