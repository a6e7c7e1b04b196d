"""What runs do in a step and log of it: metrics, rewards, refused updates, options, data."""

import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_harness import checkpoints, differences, leaves, rows
from training_runs import config_in, reward_file, same_adapter, train

from qerl_jax import evaluation
from qerl_jax.config_files import load_config
from qerl_jax.errors import UserError
from qerl_jax.metrics import read_rows
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl import assembly, experience, trainer
from qerl_jax.rl.assembly import assemble, sampling_engine
from qerl_jax.rl.experience import Collector
from qerl_jax.rl.learner import Learner
from qerl_jax.rl.losses import LossSpec

ALWAYS = {
    "step", "rollout", "epoch", "num_tokens", "learning_rate", "aqn/sigma", "reward", "reward_std",
    "frac_reward_zero_std", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "completions/clipped_ratio", "loss", "grad_norm", "entropy", "nonfinite",
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
}  # fmt: skip

OF_REWARDS = {f"rewards/{function}/{what}" for function in ("digits", "format") for what in ("mean", "std")}


def test_every_step_has_a_row_with_every_metric(finished):
    assert [row["step"] for row in rows(finished)] == [1, 2, 3, 4, 5, 6]
    for row in rows(finished):
        assert row.keys() == ALWAYS | OF_REWARDS
        assert row["grad_norm"] > 0 and row["nonfinite"] == 0


def test_times_are_those_of_a_rollout_and_its_updates_and_tokens_those_of_completions(finished):
    for row in read_rows(finished / "metrics.jsonl"):
        seconds = 2 * row["step_time"]  # of two updates
        parts = [row[f"perf/{part}_time"] for part in ("rollout", "reward", "update")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(seconds)
        assert row["perf/throughput"] * seconds == pytest.approx(8 * row["completions/mean_length"])


def test_another_seed_draws_another_adapter_other_prompts_and_for_each_rollout_another_key(
    config, finished, tmp_path, monkeypatch
):
    collect, keys = Collector.collect, []

    def watched(self, state, key, cursor):
        keys.append(jax.random.key_data(key).tolist())
        return collect(self, state, key, cursor)

    monkeypatch.setattr(Collector, "collect", watched)
    run = train(config, tmp_path / "run", "run.seed=1")
    assert len({tuple(key) for key in keys}) == len(keys) == 3
    assert not np.array_equal(leaves(run)[0]["key"], leaves(finished)[0]["key"])
    assert not same_adapter(run, finished, 0)
    mine, theirs = ([row["prompt"] for row in rows(folder, "completions.jsonl")] for folder in (run, finished))
    assert len(mine) == len(theirs) and mine != theirs


def test_a_multiple_is_reached_also_by_a_rollout_that_steps_over_it():
    """As where an update was refused."""
    assert trainer._reached(4, 3, 5) and trainer._reached(4, 2, 4) and not trainer._reached(4, 4, 7)
    assert not trainer._reached(4, 4, 4) and not trainer._reached(None, 0, 8)


def test_two_reward_functions_are_summed_with_their_weights(finished):
    for row in rows(finished):
        assert row["reward"] == pytest.approx(row["rewards/digits/mean"] + 0.2 * row["rewards/format/mean"], abs=1e-6)
    completions = rows(finished, "completions.jsonl")
    assert len(completions) == 3 * 8
    for row in completions:
        digits = sum(character.isdigit() for character in row["completion"]) / 10 + len(row["completion"]) / 1000
        assert row["rewards/digits"] == pytest.approx(digits, abs=1e-6)
        assert row["reward"] == pytest.approx(digits + 0.2 * row["rewards/format"], abs=1e-6)


@pytest.mark.parametrize(("every", "at"), [(4, [(0, -1), (4, 1)]), (2, [(0, -1), (2, 0), (4, 1), (6, 2)])])
def test_evaluation_on_the_way_changes_nothing_in_training(config, finished, tmp_path, capsys, every, at):
    run = train(config, tmp_path / "run", f"evaluation.eval_steps={every}")
    evaluated = [row for row in rows(run) if "eval/format" in row]
    assert [(row["step"], row["rollout"]) for row in evaluated] == at
    for row in evaluated:
        assert {"eval/greedy/digits", "eval/digits", "eval/completions/mean_length"} <= row.keys()
    # Before training, on the way and at the end, where one evaluation serves for both.
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluating ")]
    assert len(said) == len({step for step, _ in at} | {6})
    assert said[0] == f"evaluating before training, on held-out problems of {config.parent / 'held_out.jsonl'}"
    assert [row for row in rows(run) if row not in evaluated] == rows(finished)
    assert same_adapter(run, finished)
    assert (run / "summary.json").read_bytes() == (finished / "summary.json").read_bytes()


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
    """Makes NaN of the advantages that the updates of these rollouts get, and so of their losses and gradients."""
    assemble, numbers = Learner.batch, itertools.count()

    def assembled(self, *arguments):
        batch = assemble(self, *arguments)
        return batch.replace(advantages=batch.advantages * jnp.nan) if next(numbers) in rollouts else batch

    patch.setattr(Learner, "batch", assembled)


def test_updates_that_are_never_finite_are_refused_and_stop_the_run(config, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    poison_batches(monkeypatch, range(10))
    with pytest.raises(UserError, match=r"not finite in 5 updates in a row, at step 1 \(rollout 2\)"):
        train(config, run, "run.max_nonfinite_steps=5")
    found = [(row["step"], row["rollout"], row["nonfinite"]) for row in rows(run)]
    assert found == [(1, rollout, 1) for rollout in (0, 0, 1, 1, 2)]
    assert len(rows(run, "completions.jsonl")) == 3 * 8
    assert capsys.readouterr().out.count("step 1: loss or gradient is not finite; this update was refused") == 5
    assert checkpoints(run) == [0]


def test_what_was_learned_before_updates_that_are_never_finite_is_saved(config, finished, tmp_path, monkeypatch):
    """Also where nothing is saved on the way. The run continues as one that nothing stopped: rollouts of which no
    update was made are made again."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        poison_batches(patch, range(1, 10))
        with pytest.raises(UserError, match=r"(?s)at step 3 \(rollout 2\).*\nsaved at step 2 of 6; `.*` continues it"):
            train(config, run, "run.save_steps=null")
    assert checkpoints(run) == [0, 2] and len(rows(run)) == 5
    assert leaves(run)[1]["rollout"] == 1
    train(config, run, "run.save_steps=null")
    assert checkpoints(run) == [0, 2, 6] and differences(run, finished) == []


def test_a_run_that_refused_updates_have_stopped_counts_them_anew(config, tmp_path, monkeypatch):
    """Also where its newest step was saved amid them."""
    step, run = Learner.step, tmp_path / "run"

    def refusing_all_but_two(self, state, part):
        if int(state.step) == int(part.rollout_step) < 2:
            return step(self, state, part)
        _, metrics = step(self, jax.tree.map(jnp.copy, state), part)
        return state, metrics | {"nonfinite": 1.0}

    monkeypatch.setattr(Learner, "step", refusing_all_but_two)
    for last in (2, 3):
        match = rf"(?s)in 3 updates in a row, at step 3 \(rollout {last}\).*\nsaved at step 2 of 6"
        with pytest.raises(UserError, match=match):
            train(config, run)
        assert checkpoints(run) == [0, 2]
        assert (leaves(run)[1]["rollout"], leaves(run)[1]["nonfinite"]) == (2, 0)


def test_a_state_that_is_not_finite_itself_is_not_saved(config, tmp_path, monkeypatch):
    step, run = Learner.step, tmp_path / "run"

    def diverging(self, state, part):
        state, row = step(self, state, part)
        if int(state.step) < 3:
            return state, row
        return state.replace(adapter=jax.tree.map(lambda leaf: leaf * jnp.inf, state.adapter)), row

    monkeypatch.setattr(Learner, "step", diverging)
    with pytest.raises(UserError, match="not finite in 3 updates in a row") as caught:
        train(config, run, "run.save_steps=6")
    assert "saved at" not in str(caught.value) and checkpoints(run) == [0]


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
    step = Learner.step

    def refusing_the_second(self, state, part):
        if int(state.step) != 1 or int(part.rollout_step) != 0:
            return step(self, state, part)
        _, metrics = step(self, jax.tree.map(jnp.copy, state), part)
        return state, metrics | {"nonfinite": 1.0}

    monkeypatch.setattr(Learner, "step", refusing_the_second)
    run = train(config, tmp_path / "run")
    assert [(row["rollout"], row["step"], row["nonfinite"]) for row in rows(run)] == [
        (0, 1, 0), (0, 2, 1), (1, 2, 0), (1, 3, 0), (2, 4, 0), (2, 5, 0), (3, 6, 0)
    ]  # fmt: skip
    assert capsys.readouterr().out.count("step 2: loss or gradient is not finite; this update was refused") == 1
    assert json.loads((run / "summary.json").read_text())["steps"] == 6
    assert checkpoints(run)[-1] == 6


def arithmetic_rows(folder, count):
    file = folder / "rows.jsonl"
    lines = [{"prompt": f"Ann has {n} pens. She buys 3. How many now?", "answer": n + 3} for n in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        (
            [
                "lora.train_norms=true",
                "grpo.beta=0.1",
                "grpo.importance_sampling_level=sequence",
                "grpo.delta=4.0",
                "grpo.sampler_correction.level=token",
                "grpo.num_iterations=1",
                "grpo.steps_per_generation=2",
                "optimizer.gradient_checkpointing=true",
            ],
            {f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "min", "max")}
            | {"sampling/truncated_fraction", "kl"},
        ),
        (
            [
                "generation.kv_cache_dtype=fp8_values",
                "grpo.old_logprobs=sampler",
                "grpo.mask_truncated_completions=true",
                "generation.top_p=0.9",
                "evaluation.temperature=0.6",
                "evaluation.top_p=0.95",
                "grpo.loss_type=cispo",
                "grpo.epsilon_high=5.0",
                "grpo.top_entropy_quantile=0.2",
                "optimizer.per_device_train_batch_size=4",
                "optimizer.gradient_accumulation_steps=2",
            ],
            {"cispo_clip_ratio"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_options_run_and_log_what_they_add(config, tmp_path, monkeypatch, words, metrics):
    caches, draws = ({"rollout": set(), "evaluation": set()} for _ in range(2))

    def engine(of, config, policy, settings, *rest, **more):
        caches[of].add(settings.kv_cache_dtype)
        draws[of].add((settings.temperature, settings.top_p))
        return sampling_engine(config, policy, settings, *rest, **more)

    monkeypatch.setattr(experience, "sampling_engine", functools.partial(engine, "rollout"))
    monkeypatch.setattr(evaluation, "sampling_engine", functools.partial(engine, "evaluation"))
    run = train(config, tmp_path / "run", *words)
    narrow = "generation.kv_cache_dtype=fp8_values" in words
    assert caches == {"rollout": {"fp8_values" if narrow else "auto"}, "evaluation": {"auto"}}
    cut = "generation.top_p=0.9" in words
    sampled = (0.6, 0.95) if cut else (1.0, 1.0)
    assert draws == {"rollout": {(1.0, 0.9 if cut else 1.0)}, "evaluation": {sampled, (0.0, 1.0)}}
    logged = rows(run)
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert [row["rollout"] for row in logged] == [0, 0, 1, 1, 2, 2]
    always = {name for name in ALWAYS if not (name.startswith("clip_ratio/") and "cispo_clip_ratio" in metrics)}
    for row in logged:
        assert row.keys() == always | metrics | OF_REWARDS
        # The learner of the rollout is not kept then, and the one of its second update has moved.
        unknown = "grpo.old_logprobs=sampler" in words and row["step"] % 2 == 0
        for name, value in row.items():
            known = not (unknown and name.startswith("sampling/sampling_logp_difference/"))
            assert (value is not None and np.isfinite(value)) == known
    before, after = leaves(run, 0)[0], leaves(run, 6)[0]
    adapter = [name for name in before if name.startswith("train.adapter")]
    assert any("norm" in name for name in adapter) == ("lora.train_norms=true" in words)
    assert all(before[name].tobytes() != after[name].tobytes() for name in adapter)


def test_long_completions_are_punished_in_training_and_in_evaluation(config, tmp_path):
    punished = "reward.functions=[{function: format}, {function: soft_overlong_punishment, weight: 0.5}]"
    run = train(config, tmp_path / "run", punished, "reward.soft_punish_cache=4")
    completions = rows(run, "completions.jsonl")
    found = {row["rewards/soft_overlong_punishment"] for row in completions}
    assert found <= {0.0, -0.25, -0.5, -0.75, -1.0} and -1.0 in found and len(found) > 1
    for row in completions:
        assert row["reward"] == pytest.approx(row["rewards/format"] + 0.5 * row["rewards/soft_overlong_punishment"])
    after = json.loads((run / "summary.json").read_text())["after"]
    assert -1 <= after["sampled"]["soft_overlong_punishment"] < 0
    measured = evaluation.evaluate_run(run, 0)
    assert measured == {
        f"{mode}/{name}": value for mode in ("sampled", "greedy") for name, value in after[mode].items()
    }


def test_the_options_of_the_loss_reach_the_update(config):
    names = {
        "loss_type": "grpo", "beta": 0.1, "epsilon": 0.15, "epsilon_high": 0.4, "importance_sampling_level": "sequence",
        "delta": 3.5, "top_entropy_quantile": 0.2,
    }  # fmt: skip
    options = load_config(str(config), [f"grpo.{name}={value}" for name, value in names.items()])
    with RewardFunctions(options.reward) as rewards:
        assert assemble(options, rewards).settings.update.loss == LossSpec(**names)


def test_an_evaluation_on_other_data_or_on_that_of_training_is_told(config, tmp_path, caplog):
    few, more, held_out = arithmetic_rows(tmp_path, 3), tmp_path / "more.jsonl", tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "What is 2 and 2?", "answer": 4}\n')
    more.write_text(few.read_text() + '{"prompt": "What is 2 and 2?", "answer": 4}\n')
    other = f"the run is trained on {few}, but evaluated on arithmetic, the default of evaluation.eval_dataset; name a"
    for evaluated, said in (("arithmetic", other), (held_out, None), (more, "3 of the 4 problems of the evaluation")):
        words = [f"data.train_dataset={few}", f"evaluation.eval_dataset={evaluated}", "evaluation.num_problems=4"]
        options = load_config(str(config), words)
        caplog.clear()
        with RewardFunctions(options.reward) as rewards:
            assemble(options, rewards)
        assert [record.getMessage()[: len(said)] for record in caplog.records] == [said] if said else not caplog.records


def test_a_chat_template_that_reads_the_date_is_told(config, tmp_path, caplog, monkeypatch):
    rows, template = tmp_path / "rows.jsonl", "{{ messages[0]['content'] }}{{ date_string or strftime_now('%d') }}"
    rows.write_text('{"prompt": [{"role": "user", "content": "What is 2 and 2?"}], "answer": 4}\n')
    made = assembly.configured_policy

    def with_template(config):
        policy = made(config)
        policy.tokenizer.chat_template = template
        return policy

    monkeypatch.setattr(assembly, "configured_policy", with_template)
    words = [f"data.train_dataset={rows}", f"evaluation.eval_dataset={rows}", "evaluation.num_problems=1"]
    for kwargs, told in ([], 1), (["data.chat_template_kwargs={date_string: '1'}"], 0):
        options = load_config(str(config), words + kwargs)
        caplog.clear()
        with RewardFunctions(options.reward) as rewards:
            assemble(options, rewards)
        assert sum("reads the date" in record.getMessage() for record in caplog.records) == told


def test_fewer_slots_than_completions_draw_the_same(config, finished, tmp_path):
    run = train(config, tmp_path / "run", "generation.max_slots=3")
    texts, whole = (
        [row["completion"] for row in rows(folder, "completions.jsonl") if row["rollout"] == 0]
        for folder in (run, finished)
    )
    assert texts == whole and len(texts) == 8


def test_a_cache_too_small_for_one_completion_is_refused(config, tmp_path):
    with pytest.raises(UserError, match=r"not one completion fits in memory: 8 tokens .* generation.kv_cache_gb"):
        train(config, tmp_path / "run", "generation.kv_cache_gb=1e-6")


def test_8_bit_keys_are_refused_before_anything_is_sampled(config, tmp_path):
    with pytest.raises(UserError, match=r"kv_cache_dtype is fp8, and the keys of qwen2 have biases"):
        train(config, tmp_path / "run", "generation.kv_cache_dtype=fp8")
    assert rows(tmp_path / "run") == []


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


def test_what_a_run_has_read_at_its_start_is_what_it_evaluates_and_names(config, finished, tmp_path, monkeypatch):
    """The file of the problems changes while it trains, and the adapter that it began with goes."""
    problems, first = arithmetic_rows(tmp_path, 4), shutil.copytree(finished / "adapter", tmp_path / "first")
    rollout, read = trainer._Run._one_rollout, []

    def meanwhile(self):
        problems.write_text(problems.read_text().replace("Ann", "Tom"))
        shutil.rmtree(first, ignore_errors=True)
        return rollout(self)

    monkeypatch.setattr(trainer._Run, "_one_rollout", meanwhile)
    run = train(config, tmp_path / "run", f"evaluation.eval_dataset={problems}", f"lora.adapter={first}")
    summary = json.loads((run / "summary.json").read_text())
    before, after = ([row["prompt"] for row in summary[when]["samples"]] for when in ("before", "after"))
    assert before == after and "Ann" in before[0]
    assert summary["identity"] == leaves(run)[1]["identity"] and "initial adapter" in summary["identity"]

    load = evaluation.evaluation_data
    monkeypatch.setattr(evaluation, "evaluation_data", lambda *arguments: read.append(arguments) or load(*arguments))
    evaluation.evaluate_run(run, 0)
    assert len(read) == 1
