"""Training runs on one layer of the shipped policy: how they end, stop, continue, and fail."""

import json
import logging
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_harness import (
    TrainingProcess,
    checkpoints,
    differences,
    leaves,
    one_layer_policy,
    rows,
    small_config,
)

from qerl_jax import cli
from qerl_jax.config import load_config
from qerl_jax.data.dataset import load_dataset
from qerl_jax.errors import UserError
from qerl_jax.models.safetensors import read_safetensors, write_safetensors
from qerl_jax.rl import trainer, widths

ALWAYS = {
    "step", "rollout", "epoch", "num_tokens", "learning_rate", "aqn/sigma", "reward", "reward_std",
    "frac_reward_zero_std", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/mean_terminated_length", "completions/clipped_ratio", "loss", "grad_norm", "entropy", "nonfinite",
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
}  # fmt: skip


class Killed(BaseException):
    """Stands for a kill: nothing in the trainer catches it."""


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The folder of compiled programs, shared with runs that are processes of their own: JAX's usual precision, and
    short compilations are kept too."""
    changed = {"jax_default_matmul_precision": None, "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    yield jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(trainer, "plot_runs", lambda *_: [])


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return one_layer_policy(tmp_path_factory.mktemp("policy") / "one-layer")


@pytest.fixture(scope="module")
def config(policy, tmp_path_factory):
    """3 rollouts with 2 updates each, a save after each, each in another stage of the noise."""
    return config_in(tmp_path_factory.mktemp("config"), policy)


def config_in(folder, policy, **sections):
    """The config of this file with `sections` laid over it; a file of few rows, since a run checks all of them."""
    data = folder / "problems.jsonl"
    problems = load_dataset("arithmetic", size=64)
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(problems[index]) + "\n" for index in range(64)))
    base = {
        "data": {"train_dataset": str(data)},
        "optimizer": {"max_steps": 6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        "run": {"save_steps": 2, "save_total_limit": 9},
    }
    for section, options in sections.items():
        base[section] = base.get(section, {}) | options
    return small_config(folder, policy, **base)


def train(config, run, *words):
    return trainer.train(load_config(str(config), [f"run.output_dir={run}", *words]))


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run of `config` that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot_runs", lambda *_: [])
        return train(config, tmp_path_factory.mktemp("finished") / "run")


def stop_after(patch, step):
    """From now on a run dies as soon as it has saved this step."""
    save = trainer.save_checkpoint

    def save_and_die(directory, saved_step, *arguments, **options):
        save(directory, saved_step, *arguments, **options)
        if saved_step == step:
            raise Killed

    patch.setattr(trainer, "save_checkpoint", save_and_die)


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


def same_adapter(run, other, step=None):
    mine, theirs = leaves(run, step)[0], leaves(other, step)[0]
    names = [name for name in mine if name.startswith("train.adapter")]
    assert names
    return all(mine[name].tobytes() == theirs[name].tobytes() for name in names)


def test_every_step_has_a_row_with_every_metric(finished):
    assert [row["step"] for row in rows(finished)] == [1, 2, 3, 4, 5, 6]
    for row in rows(finished):
        assert row.keys() == ALWAYS | {"rewards/digits/mean", "rewards/format/mean"}
        assert row["grad_norm"] > 0 and row["nonfinite"] == 0


def test_two_reward_functions_are_summed_with_their_weights(finished):
    for row in rows(finished):
        assert row["reward"] == pytest.approx(row["rewards/digits/mean"] + 0.2 * row["rewards/format/mean"], abs=1e-6)
    completions = rows(finished, "completions.jsonl")
    assert len(completions) == 3 * 8
    for row in completions:
        digits = sum(character.isdigit() for character in row["completion"]) / 10 + len(row["completion"]) / 1000
        assert row["rewards/digits"] == pytest.approx(digits, abs=1e-6)
        assert row["reward"] == pytest.approx(digits + 0.2 * row["rewards/format"], abs=1e-6)


def test_a_finished_run_says_so_and_offers_a_fresh_one(config, finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert cli.main(["train", str(config), f"run.output_dir={finished}"]) == 0
    said = capsys.readouterr().out
    assert f"{finished} is finished" in said and "--fresh" in said and f"{finished}-2" in said
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_fresh_gives_the_same_run_beside_it(config, finished):
    again = trainer.train(load_config(str(config), [f"run.output_dir={finished}"]), fresh=True)
    assert again == finished.with_name("run-2")
    assert differences(again, finished) == []


def test_a_stopped_run_continues_to_the_same_end(config, stopped, finished, tmp_path, capsys):
    run = shutil.copytree(stopped, tmp_path / "run")
    train(config, run)
    assert f"continuing {run} from step 4 of 6" in capsys.readouterr().out
    assert differences(run, finished) == []


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


def test_no_whole_checkpoint_left_is_an_error_that_deletes_nothing(config, stopped, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="every checkpoint"):
        train(config, run)
    assert (run / "metrics.jsonl").read_bytes() == before and checkpoints(run) == [0, 2, 4]


@pytest.mark.parametrize(
    ("word", "was", "now"),
    [
        ("run.seed=1", "run.seed was 0", "is now 1"),
        ("lora.lora_r=8", "lora.lora_r was 4", "is now 8"),
        ("model.model_name_or_path=builtin:quickstart", "one-layer'", "is now 'builtin:quickstart'"),
        ("data.train_dataset=other.jsonl", "problems.jsonl'", "is now 'other.jsonl'"),
        ("optimizer.max_steps=12", "optimizer.max_steps was 6", "is now 12"),
    ],
)
def test_another_config_is_refused_with_both_values(config, stopped, word, was, now):
    with pytest.raises(UserError) as refusal:
        train(config, stopped, word)
    assert was in str(refusal.value) and now in str(refusal.value) and "--fresh" in str(refusal.value)


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


def test_a_config_may_be_corrected_while_nothing_is_saved_yet(config, finished, tmp_path):
    with pytest.raises(UserError, match="row 0 has"):
        train(config, tmp_path / "run", "data.max_prompt_length=8")
    train(config, tmp_path / "run")
    assert differences(tmp_path / "run", finished) == []


def test_ctrl_c_saves_and_the_same_command_continues(config, finished, programs, tmp_path):
    run = tmp_path / "run"
    with TrainingProcess(config, run, tmp_path / "log", programs=programs) as process:
        assert process.until(lambda: checkpoints(run) == [0])
        process.interrupt()
        assert process.wait() == 130, process.output()
        said = process.output()
    assert "Ctrl-C: saving after this rollout" in said and "Traceback" not in said
    (saved,) = re.findall(rf"saved at step (\d) of 6; the same command continues {run}", said)
    assert checkpoints(run)[-1] == len(rows(run)) == int(saved) < 6
    train(config, run)
    assert differences(run, finished) == []


@pytest.mark.parametrize(
    ("during", "call", "saved"), [("evaluate", 1, 0), ("next_examples", 1, 2), ("next_examples", 3, 6)]
)
def test_ctrl_c_stops_before_the_next_rollout_or_evaluation(
    config, finished, tmp_path, monkeypatch, during, call, saved
):
    run, work, calls = tmp_path / "run", getattr(trainer, during), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, during, interrupted)
        with pytest.raises(trainer.Interrupted, match=f"saved at step {saved} of 6; the same command continues"):
            train(config, run)
    assert checkpoints(run)[-1] == len(rows(run)) == saved
    train(config, run)
    assert differences(run, finished) == []


def test_a_second_ctrl_c_stops_at_once_and_loses_only_what_was_not_saved(config, finished, tmp_path, monkeypatch):
    rollout = trainer._Run._one_rollout

    def impatient(self):
        if int(self.state.step) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return rollout(self)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(trainer._Run, "_one_rollout", impatient)
        with pytest.raises(KeyboardInterrupt, match="goes on from its last checkpoint"):
            train(config, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoints(tmp_path / "run") == [0, 2]
    train(config, tmp_path / "run")
    assert differences(tmp_path / "run", finished) == []


def test_evaluation_on_the_way_changes_nothing_in_training(config, finished, tmp_path):
    run = train(config, tmp_path / "run", "evaluation.eval_steps=4")
    evaluated = [row for row in rows(run) if "eval/format" in row]
    assert [(row["step"], row["rollout"]) for row in evaluated] == [(4, 1)]
    assert {"eval/greedy/digits", "eval/digits", "eval/mean_length"} <= evaluated[0].keys()
    assert [row for row in rows(run) if row not in evaluated] == rows(finished)
    assert same_adapter(run, finished)
    assert (run / "summary.json").read_bytes() == (finished / "summary.json").read_bytes()


def reward_file(folder, body):
    """A reward function of a user's own, `file.py:digits`, with `body`."""
    file = folder / "rewards.py"
    file.write_text(f"calls = 0\n\n\ndef digits(prompts, completions, **columns):\n    global calls\n{body}")
    return file


COUNTED = """\
    calls += 1
    scores = [sum(character.isdigit() for character in text) / 10 + len(text) / 1000 for text in completions]
"""


def test_equal_rewards_are_counted_and_give_no_gradient(policy, tmp_path):
    config = config_in(tmp_path, policy, reward={"functions": [{"function": f"{tmp_path / 'rewards.py'}:digits"}]})
    reward_file(tmp_path, "    return [0.5] * len(completions)\n")
    run = train(config, tmp_path / "run")
    logged = rows(run)
    assert len(logged) == 6
    for row in logged:
        assert row["frac_reward_zero_std"] == 1 and row["reward_std"] == 0
        assert row["grad_norm"] == 0 and row["loss"] == 0 and row["nonfinite"] == 0
    before, after = leaves(run, 0)[0], leaves(run, 6)[0]
    # Weight decay is all that is left: A shrinks, B stays zero.
    shrunk = np.prod([1 - 0.1 * row["learning_rate"] for row in logged])
    assert shrunk < 1
    for name in before:
        if name.startswith("train.adapter"):
            np.testing.assert_allclose(after[name], shrunk * before[name], rtol=1e-6)
        elif name.startswith("train.opt_state") and not name.endswith("count"):
            assert not after[name].any(), name


def poison_batches(patch, rollouts):
    """Makes NaN of the rewards that the updates of these rollouts get, and so of their losses and gradients."""
    begin = trainer._Run._begin_or_resume

    def begun(self):
        begin(self)
        assemble = self.batch_fn

        def assembled(*arguments):
            batch = assemble(*arguments)
            return batch.replace(rewards=batch.rewards * jnp.nan) if self.progress["rollout"] in rollouts else batch

        self.batch_fn = assembled

    patch.setattr(trainer._Run, "_begin_or_resume", begun)


def test_updates_that_are_never_finite_are_refused_and_stop_the_run(config, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    poison_batches(monkeypatch, range(10))
    with pytest.raises(UserError, match=r"not finite in 3 updates in a row, at step 1 \(rollout 1\)"):
        train(config, run)
    assert [(row["step"], row["rollout"], row["nonfinite"]) for row in rows(run)] == [(1, 0, 1), (1, 0, 1), (1, 1, 1)]
    assert len(rows(run, "completions.jsonl")) == 2 * 8
    assert capsys.readouterr().out.count("step 1: loss or gradient is not finite; this update was refused") == 3
    assert checkpoints(run) == [0]


def test_a_refused_update_leaves_the_state_alone_and_the_run_reaches_its_last_step(config, tmp_path, monkeypatch):
    poison_batches(monkeypatch, [0])
    states = []
    rollout = trainer._Run._one_rollout

    def watched(self):
        states.append(jax.device_get(self.state))
        return rollout(self)

    monkeypatch.setattr(trainer._Run, "_one_rollout", watched)
    run = train(config, tmp_path / "run")
    logged = rows(run)
    assert [row["nonfinite"] for row in logged] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert [row["step"] for row in logged] == [1, 1, 1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(row["loss"]) for row in logged[2:]) and logged[0]["loss"] is None
    before, after, later = map(jax.tree.leaves, states[:3])
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(after, later, strict=True))


def test_a_refused_update_amid_a_rollout_is_named_and_adds_no_step(config, tmp_path, monkeypatch, capsys):
    compiled = trainer.compiled_update

    def with_a_bad_update(*arguments):
        update = compiled(*arguments)

        def refuse_the_second(state, model, batch):
            if int(state.step) != 1 or int(batch.rollout_step) != 0:
                return update(state, model, batch)
            _, metrics = update(jax.tree.map(jnp.copy, state), model, batch)
            return state, metrics | {"nonfinite": 1}

        return refuse_the_second

    monkeypatch.setattr(trainer, "compiled_update", with_a_bad_update)
    run = train(config, tmp_path / "run")
    assert [(row["rollout"], row["step"], row["nonfinite"]) for row in rows(run)] == [
        (0, 1, 0), (0, 2, 1), (1, 2, 0), (1, 3, 0), (2, 4, 0), (2, 5, 0), (3, 6, 0)
    ]  # fmt: skip
    assert capsys.readouterr().out.count("step 2: loss or gradient is not finite; this update was refused") == 1
    assert json.loads((run / "summary.json").read_text())["steps"] == 6
    assert checkpoints(run)[-1] == 6


def test_a_failing_reward_function_loses_nothing_and_the_run_continues_once_it_is_fixed(policy, finished, tmp_path):
    config, run = config_in(tmp_path, policy), tmp_path / "run"
    failures = [
        # What goes wrong, on which call since the process began, what is said, and the step saved by then.
        ("raise ValueError('no such unit')", 4, "raised on rows 0 to 7 of the batch.*no such unit", 2),
        ("scores[5] = float('nan')", 2, r"returned nan \(float\) for row 5", 4),
        ("scores = scores[1:]", 1, "returned 7 scores; expected 8", 4),
        ("scores[3] = float('inf')", 2, r"returned inf \(float\) for row 3", 6),  # in the evaluation after the run
    ]
    for wrong, call, message, saved in failures:
        reward_file(tmp_path, COUNTED + f"    if calls == {call}:\n        {wrong}\n    return scores\n")
        with pytest.raises(UserError, match=f"(?s)rewards.py:digits' {message}"):
            train(config, run)
        assert checkpoints(run)[-1] == saved == len(rows(run)) == len(rows(run, "completions.jsonl")) / 4
    reward_file(tmp_path, COUNTED + "    return scores\n")
    train(config, run)
    assert differences(run, finished) == []


def arithmetic_rows(folder, count):
    file = folder / "rows.jsonl"
    lines = [{"prompt": f"Ann has {n} pens. She buys 3. How many now?", "answer": n + 3} for n in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        (["lora.train_norms=true", "grpo.beta=0.1", "optimizer.gradient_checkpointing=true"], {"kl"}),
        (
            ["grpo.sampler_correction.level=token", "grpo.num_iterations=1", "grpo.steps_per_generation=2"],
            {"sampling/importance_sampling_ratio/mean", "sampling/truncated_fraction"},
        ),
        (
            [
                "grpo.old_logprobs=sampler",
                "grpo.mask_truncated_completions=true",
                "generation.top_p=0.9",
                "optimizer.length_buckets=2",
            ],
            set(),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_options_run_and_log_what_they_add(config, tmp_path, monkeypatch, words, metrics):
    if "optimizer.length_buckets=2" in words:
        monkeypatch.setattr(widths, "NARROWEST", 16)
    run = train(config, tmp_path / "run", *words)
    logged = rows(run)
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert [row["rollout"] for row in logged] == [0, 0, 1, 1, 2, 2]
    for row in logged:
        assert row.keys() == ALWAYS | metrics | {"rewards/digits/mean", "rewards/format/mean"}
        assert all(value is not None and np.isfinite(value) for value in row.values())
    before, after = leaves(run, 0)[0], leaves(run, 6)[0]
    adapter = [name for name in before if name.startswith("train.adapter")]
    assert any("norm" in name for name in adapter) == ("lora.train_norms=true" in words)
    assert all(before[name].tobytes() != after[name].tobytes() for name in adapter)


def test_fewer_slots_than_completions_draw_the_same(config, finished, tmp_path):
    short = ["optimizer.max_steps=2", "noise.num_stages=2", "generation.max_slots=3"]
    run = train(config, tmp_path / "run", *short)
    texts = [row["completion"] for row in rows(run, "completions.jsonl")]
    assert len(texts) == 8
    assert texts == [row["completion"] for row in rows(finished, "completions.jsonl") if row["rollout"] == 0]


def test_a_cache_too_small_for_one_completion_is_refused(config, tmp_path):
    with pytest.raises(UserError, match=r"not one completion fits in memory: 8 tokens .* generation.kv_cache_gb"):
        train(config, tmp_path / "run", "generation.kv_cache_gb=1e-6")


def test_epochs_over_a_file_of_rows(config, tmp_path):
    data = arithmetic_rows(tmp_path, 4)
    epochs = ["optimizer.max_steps=null", "optimizer.num_train_epochs=1.5", f"data.train_dataset={data}"]
    logged = rows(train(config, tmp_path / "run", *epochs))
    # 2 prompts a rollout of the 4 rows.
    assert [row["epoch"] for row in logged] == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    prompts = [row["prompt"] for row in rows(tmp_path / "run", "completions.jsonl")][::4]
    assert len(set(prompts[:4])) == 4 and set(prompts[4:]) <= set(prompts[:4])


def test_training_goes_on_from_an_adapter(config, finished, tmp_path):
    run = train(config, tmp_path / "run", f"lora.adapter={finished / 'adapter'}")
    first, last = leaves(run, 0)[0], leaves(finished, 6)[0]
    adapter = [name for name in first if name.startswith("train.adapter")]
    assert all(first[name].tobytes() == last[name].tobytes() for name in adapter)
    assert not same_adapter(run, finished, 6)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
