"""The commands on a real run of the shipped policy: train, evaluate, generate, plot, as a user goes through them."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import shlex
import shutil
import struct
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from command_line import CONFIG, MODEL, run_main, write_rows
from full_disk import full_disk
from tiny import Device
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from qerl_jax import evaluation, generation, run_files, run_folder
from qerl_jax.cli import main
from qerl_jax.commands import generate
from qerl_jax.data.dataset import load_dataset
from qerl_jax.data.prompts import prompt_ids
from qerl_jax.errors import UserError
from qerl_jax.metrics import read_rows
from qerl_jax.models.init import init_adapter
from qerl_jax.models.loading import load_model
from qerl_jax.models.peft import load_adapter, save_adapter
from qerl_jax.models.source import resolve
from qerl_jax.models.tokenizer import Tokenizer
from qerl_jax.policy import load_policy
from qerl_jax.rollout.requests import Completion

# As long as the run's own: left out, it follows from the prompts, and each length is compiled by itself.
LENGTH = ("--max-completion-length", 40)
TENSORBOARD = ["run.report_to=[tensorboard]"] if importlib.util.find_spec("tensorboardX") else []


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, the command that made it and what it printed."""
    folder = tmp_path_factory.mktemp("command line")  # a path with a space in it
    (folder / "my.yaml").write_text(CONFIG)
    command = ["train", folder / "my.yaml", f"run.output_dir={folder / 'run'}", *TENSORBOARD]
    return types.SimpleNamespace(out=run_main(*command), folder=folder / "run", command=command)


@pytest.fixture(scope="module")
def summary(trained):
    return json.loads((trained.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def other_adapter(trained, tmp_path_factory):
    """A PEFT folder that answers otherwise: the trained adapter, thrice as strong."""
    path = tmp_path_factory.mktemp("other") / "adapter"
    adapter = load_adapter(trained.folder / "adapter", load_model(MODEL, "nvfp4"))
    save_adapter(jax.tree.map(lambda leaf: 3 * leaf, adapter), path, MODEL)
    return path


@pytest.fixture(scope="module")
def prompts():
    dataset = load_dataset("arithmetic", split="eval", seed=5)
    return [dataset[i]["prompt"] for i in range(3)]


def test_a_run_leaves_everything_in_its_folder(trained, summary):
    folder = trained.folder
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert {
        "adapter",
        "checkpoints",
        "completions.jsonl",
        "config.yaml",
        "metrics.jsonl",
        "plots",
        "summary.json",
    } <= found
    rows = list(read_rows(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["aqn/sigma"] for row in rows] == [0, 0, pytest.approx(1e-2)]
    assert sum(row["grad_norm"] > 0 and row["nonfinite"] == 0 for row in rows) >= 2
    assert len(list(read_rows(folder / "completions.jsonl"))) == 3 * 8
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step_00000000",
        "step_00000002",
        "step_00000003",
    ]
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "qerl_adapter.json",
    ]
    assert summary["steps"] == 3 and summary["seed"] == 3
    for when in ("before", "after"):
        for mode in ("sampled", "greedy"):
            assert summary[when][mode].keys() == {"accuracy", "format", "completions/mean_length"}
            assert all(0 <= summary[when][mode][name] <= 1 for name in ("accuracy", "format"))
    assert summary["before"] != summary["after"]


def test_a_run_tells_its_story_and_ends_with_what_to_do_next(trained, summary):
    out = trained.out
    for text in ("step 1/3", "step 3/3", "held-out problems", "greedy completions of the same prompts"):
        assert text in out
    for when in ("before", "after"):
        assert len(summary[when]["samples"]) == 3
        for sample in summary[when]["samples"]:
            assert sample["prompt"] in out and sample["completion"].strip() in out
    accuracy = next(line for line in out.splitlines() if line.startswith("  accuracy"))
    shown = [f"{summary[when][mode]['accuracy']:.1%}" for mode in ("sampled", "greedy") for when in ("before", "after")]
    assert accuracy.replace("->", " ").split()[1:] == shown
    commands = []
    for line in out.partition("next:\n")[2].splitlines():
        words = shlex.split(line)
        (start,) = (words.index(name) for name in ("evaluate", "generate", "plot", "train") if name in words)
        commands.append(words[start:])
    folder = str(trained.folder)
    assert commands == [
        ["evaluate", folder, "--seed", "1"],
        ["generate", folder, "--n", "3", "--prompt", summary["after"]["samples"][0]["prompt"]],
        ["plot", folder],
        ["train", f"{folder}/config.yaml", "run.seed=1", f"run.output_dir={folder}-seed1"],
    ]


@pytest.mark.skipif(not TENSORBOARD, reason="tensorboardX is not installed")
def test_tensorboard_has_the_metrics(trained):
    (events,) = (trained.folder).rglob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"aqn/sigma" in content and b"completions/mean_length" in content


def test_the_same_command_again_changes_nothing(trained):
    before = {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*") if path.is_file()}
    out = run_main(*trained.command)
    assert f"{trained.folder} is finished" in out and "--fresh" in out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_evaluating_with_the_seed_of_the_run_gives_its_summary_again(trained, summary):
    expected = [
        f"{mode}/{name}: {value:.4g}"
        for mode in ("sampled", "greedy")
        for name, value in summary["after"][mode].items()
    ]
    assert run_main("evaluate", trained.folder, "--seed", 3).splitlines() == expected
    other = run_main("evaluate", trained.folder, "--seed", 4).splitlines()
    assert [line.split(":")[0] for line in other] == [line.split(":")[0] for line in expected]
    assert other != expected
    assert json.loads((trained.folder / "summary.json").read_text()) == summary


@pytest.fixture
def trained_on_another(trained, tmp_path):
    """A function: the folder of a run like `trained`, whose summary names another value for a part of its identity."""

    def changed(name):
        folder = Path(shutil.copytree(trained.folder, tmp_path / "run"))
        summary = json.loads((folder / run_files.SUMMARY).read_text())
        summary["identity"][name] = "other"
        (folder / run_files.SUMMARY).write_text(json.dumps(summary))
        return folder

    return changed


def test_a_run_remembers_the_base_it_was_trained_on(summary):
    assert summary["identity"]["base weights"] == load_policy(MODEL, "nvfp4", "auto").fingerprint


@pytest.mark.parametrize("name", ["base weights", "tokenizer and chat template", "EOS and pad ids"])
def test_a_run_is_not_measured_on_another_model(trained_on_another, name):
    folder = trained_on_another(name)
    for words in (["evaluate", folder], ["generate", folder, "--prompt", "x"]):
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            assert main([str(word) for word in words]) == 2
        assert f"{name} was 'other', is now" in error.getvalue() and "--fresh" not in error.getvalue()


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("weight_format: nvfp4", "weight_format: mxfp4", "model.weight_format was 'nvfp4', is now 'mxfp4'"),
        ("lora_r: 4", "lora_r: 8", "lora.lora_r was 4, is now 8"),
    ],
)
def test_an_option_edited_since_is_named(trained, tmp_path, ended, old, new, change):
    folder = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    if not ended:
        (folder / "summary.json").unlink()
    stored = folder / "config.yaml"
    stored.write_text(stored.read_text().replace(old, new))
    exports = [["export", folder, tmp_path / "out", "--format", name] for name in ("peft", "bf16", "nvfp4")]
    for words in (["evaluate", folder], ["generate", folder, "--prompt", "x"], *exports):
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            assert main([str(word) for word in words]) == 2
        assert error.getvalue() == (
            f"qerl {words[0]}: {folder} was begun with another config:\n  {change}\n"
            f"Go back to the old values in {stored}\n"
        )
    own = ["--adapter", trained.folder / "adapter", "--greedy", "--prompt", "x"]
    assert run_main("generate", folder, *own, *LENGTH)  # which says itself what it is


def test_other_problems_than_the_run_was_measured_on_are_told(trained, trained_on_another, caplog):
    run_main("evaluate", trained.folder, "--seed", 4)
    assert not caplog.records
    folder = trained_on_another("evaluation data")
    run_main("evaluate", folder, "--seed", 3)
    assert [record.message for record in caplog.records] == [
        f"{folder}: the evaluation data (arithmetic) has changed since the run: what is measured now may not "
        "compare with what it measured"
    ]


def test_a_problem_that_is_too_long_for_the_run_is_named_by_its_line(trained, tmp_path, monkeypatch):
    rows = [{"prompt": "2 pens", "answer": "2"}, {"prompt": " pens" * 200, "answer": "1"}]
    data = load_dataset(str(write_rows(tmp_path / "rows.jsonl", rows)))
    monkeypatch.setattr(evaluation, "evaluation_data", lambda *_: data)
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: has 200 tokens; allowed: 1 to \d+"):
        evaluation.evaluate_run(trained.folder, 3)


def test_of_a_run_that_is_not_finished_the_newest_checkpoint_is_taken(trained, summary, tmp_path, caplog, monkeypatch):
    folder = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    (folder / run_files.SUMMARY).unlink()  # which is written last: the adapter is there
    assert run_main("evaluate", folder, "--seed", 3) == run_main("evaluate", trained.folder, "--seed", 3)
    assert caplog.records == []
    shutil.rmtree(folder / run_files.ADAPTER)
    verified = []
    read = run_folder.newest_progress
    monkeypatch.setattr(run_folder, "newest_progress", lambda path: verified.append(path) or read(path))
    evaluated = run_main("evaluate", folder, "--seed", 3)
    assert len(verified) == 1  # each time all of a checkpoint is read
    assert evaluated == run_main("evaluate", trained.folder, "--seed", 3)
    sample = summary["after"]["samples"][0]
    answer = run_main("generate", folder, "--greedy", *LENGTH, "--prompt", sample["prompt"])
    assert answer == sample["completion"] + "\n"
    shutil.rmtree(folder / "checkpoints/step_00000003")
    assert run_main("evaluate", folder, "--seed", 3) != evaluated
    said = f"{folder} is of a run that has not ended: taking the checkpoint's of step {{}} of 3"
    assert [record.message for record in caplog.records] == [said.format(2)]
    shutil.copytree(trained.folder / run_files.ADAPTER, folder / run_files.ADAPTER)  # of whatever run
    assert run_main("evaluate", folder, "--seed", 3) != evaluated
    assert [record.message for record in caplog.records] == [said.format(2)] * 2


def test_generate_answers_as_the_evaluation_did(trained, summary):
    for sample in summary["after"]["samples"]:
        out = run_main("generate", trained.folder, "--greedy", *LENGTH, "--prompt", sample["prompt"])
        assert out == sample["completion"] + "\n"


def test_generate_on_a_full_disk_names_the_file(tmp_path):
    answer = generation.Answer(0, 0, "a" * 9999, [1], np.zeros(1, np.float32), "eos")
    with pytest.raises(OSError, match=f"File too large: '{re.escape(str(tmp_path))}/out.jsonl'"), full_disk():
        generate._write_file(iter([answer]), ["x"], False, str(tmp_path / "out.jsonl"))


def test_generate_from_a_file_and_what_the_seed_and_the_neighbours_change(trained, prompts, tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt, "more": 1} for prompt in prompts])
    words = ("generate", trained.folder, "--prompts", file, "--n", 3)
    out = run_main(*words)
    rows = sorted((json.loads(line) for line in out.splitlines()), key=lambda row: (row["row"], row["sample"]))
    assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(3)]
    assert all(row.keys() == {"row", "sample", "prompt", "completion", "finish_reason"} for row in rows)
    assert len({row["completion"] for row in rows}) > 3
    assert run_main(*words, "--seed", 0) == out != run_main(*words, "--seed", 1)
    alone = run_main("generate", trained.folder, "--prompt", prompts[0], "--n", 3).splitlines()
    assert alone[::2] == ["--- 1 of 3", "--- 2 of 3", "--- 3 of 3"]
    assert alone[1::2] == [row["completion"] for row in rows[:3]]


def test_generate_takes_conversations(trained, prompts, tmp_path):
    # The shipped policy's chat template joins the messages' texts.
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": prompt} for prompt in prompts])
    chat = write_rows(tmp_path / "chat.jsonl", [{"prompt": talk} for talk in talks])
    answers = []
    for file in (plain, chat):
        out = run_main("generate", trained.folder, "--greedy", *LENGTH, "--prompts", file)
        answers.append(sorted((json.loads(line) for line in out.splitlines()), key=lambda row: row["row"]))
    assert [row["prompt"] for row in answers[1]] == talks
    assert [row["completion"] for row in answers[1]] == [row["completion"] for row in answers[0]]


def test_generate_with_another_adapter(trained, other_adapter, prompts, tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    words = ("generate", trained.folder, "--greedy", *LENGTH, "--prompts", file)
    own = run_main(*words)
    assert run_main(*words, "--adapter", trained.folder / "adapter") == own
    other = run_main(*words, "--adapter", other_adapter)
    assert other != own
    # A model's folder takes an adapter too; this one's weights are stored unquantized.
    assert len(run_main("generate", MODEL, *words[2:], "--adapter", other_adapter).splitlines()) == 3


def test_generate_with_the_models_weights_as_a_run_had_them(trained, prompts, tmp_path, caplog):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    words = ("--greedy", *LENGTH, "--prompts", file, "--logprobs", "--output")
    adapter = ("--adapter", trained.folder / "adapter")

    def answers(*source):
        run_main("generate", *source, *words, tmp_path / "out.jsonl")
        return sorted((tmp_path / "out.jsonl").read_text().splitlines())

    own = answers(trained.folder)
    model = (MODEL, *adapter)
    assert answers(*model, "--weight-format", "nvfp4") == own and not caplog.records
    assert answers(*model) != own
    (record,) = caplog.records
    assert record.message.endswith(
        f"adapter/qerl_adapter.json: the adapter was trained on nvfp4 weights, and those of {MODEL} are bf16 here: it "
        f"answers otherwise; take {MODEL} with weight_format (--weight-format) nvfp4"
    )


def test_a_weight_format_that_cannot_be(trained, prompts):
    run, said = str(trained.folder), "is a run, which keeps the one it was trained with, nvfp4; leave it out, or give a"
    with pytest.raises(UserError, match=rf"weight_format \(--weight-format\) is 'bf16', but .* {said} model"):
        list(generation.generate_texts(run, prompts, weight_format="bf16"))
    with pytest.raises(UserError, match=r"weight_format is 'nvpf4'; allowed: nvfp4, .*did you mean 'nvfp4'"):
        list(generation.generate_texts(MODEL, prompts, weight_format="nvpf4"))


def test_generate_of_a_model_has_lengths_that_fit_it(prompts):
    """The shipped policy has 128 positions, fewer than a model's usual 256 tokens of a completion."""
    assert "####" in run_main("generate", MODEL, "--greedy", "--prompt", prompts[0])


def test_a_long_prompt_beside_another_one_leaves_it_its_length(prompts):
    """Both have the model's 128 positions for themselves."""
    ids = load_policy(MODEL, None, "auto").tokenizer
    long = prompts[1]
    while len(prompt_ids(ids, f"{long} a")) <= 126:
        long += " a"
    (alone,) = generation.generate_texts(MODEL, prompts[:1], greedy=True)
    beside, cut = generation.generate_texts(MODEL, [prompts[0], long], greedy=True)
    assert (beside.text, beside.finish_reason) == (alone.text, "eos")
    assert cut.finish_reason == "length" and len(cut.ids) == 2


def test_completions_have_the_memory_that_an_optimizer_would_take(prompts, tmp_path, monkeypatch):
    """A plan has 8.1 of 9 MB: 5.1 go to packed and decoded weights, a prefill and the adapter, whose optimizer's state
    would be 3.5."""
    model = load_model(MODEL, "nvfp4")
    save_adapter(init_adapter(jax.random.key(0), model, 64, 64.0), tmp_path / "adapter", MODEL, weight_format="nvfp4")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(9 * 10**6)])
    options = {"adapter": str(tmp_path / "adapter"), "weight_format": "nvfp4", "max_completion_length": 40}
    [answer] = generation.generate_texts(MODEL, prompts[:1], greedy=True, **options)
    assert answer.finish_reason == "eos"


def test_an_empty_stop_text_is_refused(prompts):
    with pytest.raises(UserError, match="stop holds an empty text"):
        list(generation.generate_texts(MODEL, prompts, stop=("!", "")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "1 + 1"}, "prompts is the text '1 .*; expected a list of texts, or of lists of messages"),
        ({"stop": "!!"}, "stop is the text '!!'; expected a list of texts"),
        ({"n": 0}, "n is 0; allowed: a whole number, 1 or more"),
        ({"n": 2.0}, "n is 2.0; allowed"),
        ({"n": True}, "n is True; allowed"),
    ],
)
def test_one_text_for_a_list_and_a_number_of_completions_that_is_none_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        next(generation.generate_texts(MODEL, **{"prompts": ["1 + 1"], **options}))


def test_a_special_token_ends_a_completion_as_an_eos_does(prompts, tmp_path):
    """Base models with a chat template name one EOS and end an answer with another token, which no text holds."""
    folder = shutil.copytree(resolve(MODEL), tmp_path / "base")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|pad|>"}))
    [expected] = generation.generate_texts(MODEL, prompts[:1], greedy=True)
    for stop in (["<|endoftext|>"], ["!", "<|endoftext|>"]):
        [found] = generation.generate_texts(str(folder), prompts[:1], greedy=True, stop=stop)
        assert (found.text, found.ids, found.finish_reason) == (expected.text, expected.ids, "eos")
    with pytest.raises(UserError, match=r"stop .* is '<\|endoftext\|>\\n', which no .* give '<\|endoftext\|>' alone"):
        list(generation.generate_texts(str(folder), prompts[:1], stop=["<|endoftext|>\n"]))


def test_a_length_that_leaves_nothing_is_refused(prompts):
    with pytest.raises(UserError, match=r"max_completion_length \(.*\) is 0; allowed: 1 or more, and less"):
        list(generation.generate_texts(MODEL, prompts, max_completion_length=0))


def test_generate_shows_a_text_as_it_grows_and_cuts_it_at_a_stop_string(trained, prompts):
    words = ("generate", trained.folder, "--greedy", *LENGTH, "--prompt", prompts[0])
    pieces = []

    class Terminal(io.StringIO):
        def flush(self):
            pieces.append(self.getvalue())

    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        assert main([str(word) for word in words]) == 0
    whole = terminal.getvalue()
    assert len(set(pieces)) > 3 and all(whole.startswith(piece) for piece in pieces)
    stop = whole[3:6]
    assert run_main(*words, "--stop", stop) == whole[: whole.index(stop)] + "\n"


def test_a_stop_string_that_no_look_has_found_is_cut_off_in_the_end(monkeypatch):
    """A look makes no whole text; with special tokens amid of it a stop string may be as long as one."""
    ids = load_policy(MODEL, None, "auto").tokenizer("1 + 2 = 3!")["input_ids"]
    logps = np.zeros(len(ids), np.float32)
    logps[-1] = np.nan  # of what is cut off
    whole = Completion(0, 0, ids, logps, None, "length")
    monkeypatch.setattr(generation.Engine, "generate", lambda *_, **__: iter([whole]))
    [answer] = generation.generate_texts(MODEL, ["1 + 1"], max_completion_length=20, stop=[" ="])
    assert (answer.text, answer.finish_reason, len(answer.logps)) == ("1 + 2", "stop", len(answer.ids))
    assert len(answer.ids) < len(ids)


def test_generate_writes_the_same_rows_whatever_runs_beside_them(trained, prompts, tmp_path, monkeypatch):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    words = ("generate", trained.folder, "--prompts", file, "--n", 3, "--logprobs", "--output")
    outputs = []
    for slots in (64, 3):
        monkeypatch.setattr(generation, "_MAX_SLOTS", slots)
        run_main(*words, tmp_path / f"{slots}.jsonl")
        outputs.append(sorted((tmp_path / f"{slots}.jsonl").read_text().splitlines()))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 3 * len(prompts)


def test_plot_one_run_and_two(trained, tmp_path):
    second = shutil.copytree(trained.folder, tmp_path / "second")
    names = ["accuracy.png", "entropy.png", "lengths.png", "overview.png", "reward.png", "sigma.png"]
    for words, folder in (
        ((second,), second / "plots"),
        ((trained.folder, second, "--output", tmp_path / "both"), tmp_path / "both"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        printed = run_main("plot", *words).splitlines()
        assert sorted(printed) == [str(folder / name) for name in names]
        for name in names:
            data = (folder / name).read_bytes()
            assert data.startswith(b"\x89PNG")
            width, height = struct.unpack(">II", data[16:24])
            assert width >= 600 and height >= 400
    assert (tmp_path / "both" / "reward.png").read_bytes() != (second / "plots" / "reward.png").read_bytes()


def test_a_sample_that_is_no_number_is_answered_once_also_in_a_stream(monkeypatch):
    load = generation.load_policy

    def broken(*arguments):
        policy = load(*arguments)
        base = policy.model.base
        spoilt = base.replace(final_norm=base.final_norm * float("nan"))
        return dataclasses.replace(policy, model=policy.model.replace(base=spoilt))

    monkeypatch.setattr(generation, "load_policy", broken)
    answers = list(generation.generate_texts(MODEL, ["1 + 1"], n=2, max_completion_length=20, stream=True))
    assert [(answer.sample, answer.finish_reason) for answer in answers] == [(0, "error"), (1, "error")]


def test_a_stream_repeats_no_character_that_half_of_another_hides_for_a_while(monkeypatch, capsys):
    """As in Llama 2's tokenizer, where a run of bytes is a text only as a whole."""
    pieces = Backend(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer, load = Tokenizer(tokenizer_object=pieces), generation.load_policy
    monkeypatch.setattr(
        generation, "load_policy", lambda *arguments: dataclasses.replace(load(*arguments), tokenizer=tokenizer)
    )
    ids = list("a\n😀好é🚀".encode())

    def growing(*_, **__):
        for count in range(1, len(ids) + 1):
            reason = "length" if count == len(ids) else None
            yield Completion(0, 0, ids[:count], np.zeros(count, np.float32), None, reason)

    monkeypatch.setattr(generation.Engine, "generate", growing)
    generate._print_texts(generation.generate_texts(MODEL, ["a"], max_completion_length=20, stream=True), 1)
    assert capsys.readouterr().out == "a\n😀好é🚀\n"


def test_a_stream_makes_no_long_text_anew_for_each_piece(monkeypatch):
    policy, sizes = load_policy(MODEL, None, "auto"), []
    monkeypatch.setattr(generation, "load_policy", lambda *_: policy)
    ids, decode = policy.tokenizer("1 + 2 = 3! " * 100)["input_ids"], policy.tokenizer.decode

    def counted(ids, **options):
        sizes.append(len(ids))
        return decode(ids, **options)

    def growing(*_, until, **__):
        for count in range(4, len(ids), 4):
            assert until(ids[:count]) is None
            yield Completion(0, 0, ids[:count], np.zeros(count, np.float32), None, None)

    monkeypatch.setattr(policy.tokenizer, "decode", counted)
    monkeypatch.setattr(generation.Engine, "generate", growing)
    for number, answer in enumerate(generation.generate_texts(MODEL, ["1 + 1"], stop=["STOP"], stream=True), 1):
        assert answer.text == decode(ids[: 4 * number])
    assert number > 100 and max(sizes) < 80


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_completion(monkeypatch, capsys, n, terminal):
    text = "a\x1b[2J\n\tb\x9b3J\r\x7fé"
    grown = [text[:2], text[:8]] if n == 1 else []
    answers = [generation.Answer(0, 0, part, [], np.zeros(0, np.float32), None) for part in grown]
    answers += [generation.Answer(0, sample, text, [], np.zeros(0, np.float32), "stop") for sample in range(n)]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    generate._print_texts(iter(answers), n)
    expected = "a\\x1b[2J\n\tb\\x9b3J\\r\\x7fé\n" if terminal else f"{text}\n"
    titles = ["--- 1 of 2\n", "--- 2 of 2\n"] if n == 2 else [""]
    assert capsys.readouterr().out == "".join(title + expected for title in titles)
