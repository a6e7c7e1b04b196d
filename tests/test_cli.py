"""The command line: what each command passes on, what it prints, and its exit codes. (Errors: test_cli_ends.py.)"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from qerl_jax.cli import main
from qerl_jax.commands.command import take_device
from qerl_jax.config import GenerationOptions
from qerl_jax.config_files import load_config, save_yaml
from qerl_jax.data.dataset import load_dataset


def answer(prompt, sample, text, error=None):
    reason = "error" if error else "eos"
    return types.SimpleNamespace(
        prompt=prompt, sample=sample, text=text, ids=[5, 6], logps=[-0.5, -1.25], finish_reason=reason, error=error
    )


@pytest.fixture
def calls(monkeypatch):
    """Stands in for the functions behind the commands and records how they are called."""
    seen: list[tuple] = []

    def fake(module: str, name: str, result: object) -> None:
        def function(*args, **kwargs):
            seen.append((name, args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result(*args, **kwargs) if callable(result) else result

        stand_in = types.ModuleType(module)
        setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)

    seen_and_fake = types.SimpleNamespace(seen=seen, fake=fake)
    fake("qerl_jax.rl.trainer", "train", Path("runs/x"))
    fake("qerl_jax.evaluation", "evaluate_run", {"eval/arithmetic/pass@1": 0.654321, "problems": 512})
    fake(
        "qerl_jax.generation",
        "generate_texts",
        lambda model, prompts, n, **_: (
            answer(number, i, f"{prompt} -> {i}") if prompt else answer(number, 0, "", error="the prompt is empty")
            for number, prompt in enumerate(prompts)
            for i in reversed(range(n))
        ),
    )
    return seen_and_fake


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run1"
    folder.mkdir()
    save_yaml(load_config("quickstart", ["generation.temperature=0.7"]), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_help_and_options_are_quick_because_they_do_not_import_jax():
    code = "import sys\nfrom qerl_jax import cli, config\n"
    code += "try: cli.main(['--help'])\nfinally: print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
    for command in ("train", "plan", "generate", "evaluate", "export", "plot", "quantize"):
        assert command in result.stdout


@pytest.mark.parametrize("command", ["train", "plan", "generate", "evaluate", "plot", "quantize"])
def test_help_of_each_command_gives_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"  qerl {command}" in capsys.readouterr().out.split("example")[1]


def test_train_takes_config_overrides_and_switches_in_any_order(calls):
    assert main(["train", "quickstart", "--fresh", "run.seed=3", "--profile", "/tmp/t", "lora.lora_r=4"]) == 0
    ((name, (config,), options),) = calls.seen
    assert name == "train"
    assert (config.run.seed, config.lora.lora_r, config.run.output_dir) == (3, 4, "runs/quickstart")
    assert options == {"fresh": True, "profile": "/tmp/t"}


def test_train_without_a_config_is_the_quickstart(calls):
    assert main(["train", "run.seed=1"]) == 0
    ((_, (config,), options),) = calls.seen
    assert (config.run.output_dir, config.run.seed) == ("runs/quickstart", 1)
    assert options == {"fresh": False, "profile": None}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "nope.yaml"], "qerl train: nope.yaml: no such file"),
        (["train", "quickstart", "b"], "found quickstart and b; expected one config"),
        (["train", "learning_rate=1"], "it lives in optimizer.learning_rate"),
        (["generate", "m", "--prompt", "p", "--n", "0"], "--n is 0; allowed: a whole number from 1 to 1000000"),
        (["generate", "m", "--prompt", "p", "--stop", ""], "--stop is empty"),
        (["generate", "m", "--prompt", "p", "--logprobs"], "--logprobs has no effect on text; add --output FILE"),
        (["generate", "m", "--prompt", "p", "--greedy", "--n", "2"], "--n is 2; allowed with --greedy: 1"),
        (["generate", "m", "--prompt", "p", "--greedy", "--min-p", "0.1"], "--min-p has no effect with --greedy"),
        (["generate", "m", "--prompt", "p", "--greedy", "--seed", "0"], "--seed has no effect with --greedy"),
        (["generate", "m", "--prompt", "p", "--seed", "9" * 20], f"--seed is {'9' * 20}; allowed: a whole"),
        (["generate", "m", "--prompt", "p", "--seed", "-1"], "--seed is -1; allowed: a whole number from 0 to 2^32"),
        (["evaluate", "missing", "--seed", "4294967296"], "--seed is 4294967296; allowed: a whole number from 0"),
        (["evaluate", ".", "--n", "0"], "--n is 0; allowed: a whole number from 1 to 1000000"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, expected, calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert not calls.seen


def test_no_command_is_a_mistake_that_help_answers(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2
    assert "unknown command 'trian' (did you mean 'train'?)" in capsys.readouterr().err


def test_generate_prints_text_and_uses_the_settings_of_the_run(calls, run, capsys):
    assert main(["generate", str(run), "--prompt", "1+1", "--top-k", "5", "--seed", "9"]) == 0
    ((_, args, options),) = calls.seen
    assert args == (str(run), ["1+1"])
    assert options == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.0,
        "max_completion_length": 48,
        "adapter": None,
        "weight_format": None,
        "seed": 9,
        "greedy": False,
        "stop": [],
        "stream": True,
        "chat_template_kwargs": None,
    }
    printed = capsys.readouterr()
    assert printed.out == "1+1 -> 0\n"
    assert printed.err.startswith("1 completions, 2 tokens in ") and " tokens/s" in printed.err


def test_generate_takes_no_settings_from_another_programs_config_in_a_models_folder(calls, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text("base_model: x\n")
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 0
    assert calls.seen[0][2]["temperature"] == GenerationOptions().temperature
    assert calls.seen[0][2]["max_completion_length"] is None


def test_generate_many_prints_rows(calls, tmp_path, capsys):
    calls.fake("qerl_jax.data.dataset", "load_prompts", lambda name: ["a", "é"])
    assert main(["generate", "some/model", "--prompts", "file.jsonl", "--n", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == {"row": 0, "prompt": "a", "sample": 1, "completion": "a -> 1", "finish_reason": "eos"}
    assert rows[3] == {"row": 1, "prompt": "é", "sample": 0, "completion": "é -> 0", "finish_reason": "eos"}


def test_generate_tells_of_prompts_that_failed_in_their_rows_and_by_its_exit_code(calls, tmp_path, capsys):
    calls.fake("qerl_jax.data.dataset", "load_prompts", lambda name: ["", "b"])
    words = ["generate", "some/model", "--prompts", "file.jsonl", "--logprobs", "--output", str(tmp_path / "out.jsonl")]
    assert main(words) == 3
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0] == {"row": 0, "prompt": "", "error": "the prompt is empty"}
    assert rows[1].items() >= {"completion": "b -> 0", "ids": [5, 6], "logprobs": [-0.5, -1.25]}.items()
    printed = capsys.readouterr()
    assert printed.out == "" and "1 of 2 prompts not answered" in printed.err
    assert printed.err.startswith("1 completions, ")
    assert main(["generate", "some/model", "--prompt", ""]) == 2
    assert "qerl generate: the prompt is empty" in capsys.readouterr().err


def test_generate_replaces_its_output_at_the_first_row_and_keeps_what_came_before_an_interruption(calls, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")

    def interrupted(model, prompts, **options):
        assert output.read_text() == "old\n"
        yield answer(0, 0, "one")
        assert [json.loads(line)["completion"] for line in output.read_text().splitlines()] == ["one"]
        raise KeyboardInterrupt

    calls.fake("qerl_jax.generation", "generate_texts", interrupted)
    assert main(["generate", "some/model", "--prompt", "a", "--output", str(output)]) == 130
    assert json.loads(output.read_text())["completion"] == "one"


def test_two_processes_do_not_write_one_output(calls, tmp_path, capsys):
    words = ["generate", "some/model", "--prompt", "a", "--output", str(tmp_path / "link.jsonl")]
    (tmp_path / "link.jsonl").symlink_to("out.jsonl")

    def slowly(model, prompts, **options):
        for number in range(2):
            assert main([*words[:-1], str(tmp_path / "out.jsonl")]) == 2
            yield answer(0, number, "one")

    calls.fake("qerl_jax.generation", "generate_texts", slowly)
    assert main(words) == 0
    said = f"--output {tmp_path}/out.jsonl: another process is writing it; wait for it or choose another name"
    assert capsys.readouterr().err.count(said) == 2
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"link.jsonl", "out.jsonl"}


def test_an_output_may_be_a_pipe_or_lie_where_no_other_file_may(calls, tmp_path, monkeypatch):
    reading, writing = os.pipe()
    output, real = tmp_path / "out.jsonl", os.access
    output.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))

    def alone(model, prompts, **options):
        assert os.listdir(tmp_path) == ["out.jsonl"]
        yield answer(0, 0, "one")

    calls.fake("qerl_jax.generation", "generate_texts", alone)
    for name in (output, f"/dev/fd/{writing}"):
        assert main(["generate", "some/model", "--prompt", "a", "--output", str(name)]) == 0
    assert os.read(reading, 1000).decode() == output.read_text()
    os.close(reading)
    os.close(writing)


def test_the_help_of_export_says_which_adapters_not_all_servers_take(capsys):
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "may not take those, nor rsLoRA: then merge" in capsys.readouterr().out


def test_the_help_says_that_an_output_is_replaced_and_its_examples_are_what_a_shell_takes(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    printed = capsys.readouterr().out
    assert "an existing one is replaced" in " ".join(printed.split())
    assert "--stop $'\\n\\n'" in printed
    # A problem of the kind that the quickstart's policy has learned.
    assert f'"{load_dataset("arithmetic", split="eval", seed=0)[0]["prompt"]}"' in printed


def test_generate_prints_several_texts_in_their_order(calls, capsys):
    words = ["generate", "m", "--prompts", "a text", "--n", "2", "--stop", "x", "--stop", "y", "--max-new-tokens", "9"]
    assert main(words) == 0
    assert capsys.readouterr().out == "--- 1 of 2\na text -> 0\n--- 2 of 2\na text -> 1\n"
    ((_, args, options),) = calls.seen
    assert args[1] == ["a text"]
    assert (options["stop"], options["max_completion_length"], options["stream"]) == (["x", "y"], 9, False)


@pytest.mark.parametrize("name", ["p.txt", "no.txt", "no/file", "no/where.json", "some", "x" * 300 + ".csv"])
def test_prompts_that_look_like_a_file_are_no_text(name, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a prompt")
    (tmp_path / "some").mkdir()
    assert main(["generate", "m", "--prompts", name]) == 2
    expected = (
        f"--prompts {name}: looks like the name of a file; expected a .jsonl or .ndjson file with a `prompt` in each"
    )
    assert expected in capsys.readouterr().err
    assert main(["generate", "m", "--prompt", name]) == 0
    ((_, (_, prompts), _),) = calls.seen
    assert prompts == [name]


@pytest.mark.parametrize("text", ["Why?", "What is 1/2 of p.txt", "3.14", "and so on...", "e.g.", "a long text " * 99])
def test_prompts_takes_a_text(text, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "m", "--prompts", text]) == 0
    ((_, (_, prompts), _),) = calls.seen
    assert prompts == [text]


def test_a_word_longer_than_the_name_of_a_file_may_be(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.jsonl").touch()
    assert main(["train", f"model.model_name_or_path={'x' * 300}"]) == 0
    assert main(["generate", "m", "--prompts", "a long text " * 99, "--output", "out.jsonl"]) == 0
    (_, (config,), _), (_, (_, prompts), _) = calls.seen
    assert (config.model.model_name_or_path, prompts) == ("x" * 300, ["a long text " * 99])


def test_evaluate_prints_what_it_measured(calls, run, capsys):
    assert main(["evaluate", str(run), "--seed", "7"]) == 0
    assert capsys.readouterr().out == "eval/arithmetic/pass@1: 0.6543\nproblems: 512\n"
    assert main(["evaluate", str(run), "--n", "4"]) == 0
    assert calls.seen == [("evaluate_run", (run, 7, None), {}), ("evaluate_run", (run, 0, 4), {})]


def test_plot_writes_beside_one_run_and_elsewhere_for_several(calls, run, capsys):
    calls.fake("qerl_jax.plots", "plot_runs", lambda runs, output: [output / "overview.png"])
    assert main(["plot", str(run)]) == 0
    assert main(["plot", str(run), str(run), "--output", "out"]) == 0
    assert [call[1] for call in calls.seen] == [([run], run / "plots"), ([run, run], Path("out"))]
    assert capsys.readouterr().out == f"{run / 'plots' / 'overview.png'}\nout/overview.png\n"


def test_runs_and_files_may_lie_at_home(calls, run, tmp_path, monkeypatch, capsys):
    """A shell expands no ~ behind a =."""
    calls.fake("qerl_jax.plots", "plot_runs", lambda runs, output: [])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["evaluate", "~/run1"]) == main(["plot", "~/run1", "--output=~/drawn"]) == 0
    assert main(["generate", "~/run1", "--prompts=~/q.jsonl", "--output=~/out.jsonl"]) == 0
    assert main(["train", "~/run1/config.yaml", "--profile=~/trace"]) == 0
    evaluated, drawn, generated, trained = calls.seen
    assert evaluated[1] == (run, 0, None) and drawn[1] == ([run], tmp_path / "drawn")
    assert generated[1][1] == ["a"] and generated[2]["temperature"] == 0.7
    assert (tmp_path / "out.jsonl").read_text().count("a -> 0") == 1
    assert trained[1][0].generation.temperature == 0.7 and trained[2]["profile"] == str(tmp_path / "trace")
    assert main(["generate", "~/run1", "--prompts=~/q.jsonl", "--output=q.jsonl"]) == 2
    assert "q.jsonl is the file of the prompts, which would be lost" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["foo/bar--baz", "foo/bar.git", "foo/" + "b" * 200, "~nobody-has-this-name/model"])
def test_names_that_cannot_be_on_the_hub(name, tmp_path, capsys):
    assert main(["export", name, str(tmp_path / "x"), "--format", "bf16"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_prompts_are_not_replaced_by_their_answers(tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"prompt": "a", "id": 3}\n')
    (tmp_path / "link").symlink_to("q.jsonl")
    files = ["--prompts", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "link")]
    assert main(["generate", "builtin:quickstart", *files]) == 2
    assert "is the file of the prompts, which would be lost" in capsys.readouterr().err
    assert "id" in (tmp_path / "q.jsonl").read_text()


def test_a_config_whose_folder_has_an_equals_sign(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-3").mkdir()
    (tmp_path / "lr=1e-3" / "config.yaml").write_text("nothing: {}")
    assert main(["train", "lr=1e-3/config.yaml"]) == 2
    assert "lr=1e-3/config.yaml, line 1: unknown section nothing" in capsys.readouterr().err
    assert main(["train", "runs/lr=1e-3/config.yaml"]) == 2
    assert "runs/lr=1e-3/config.yaml: no such file" in capsys.readouterr().err


def test_of_several_gpus_a_command_takes_the_first_or_those_that_jax_has_been_given():
    for given, taken in (("all", "0"), ("2", "2")):
        jax.config.update("jax_cuda_visible_devices", given)
        try:
            take_device()
            assert jax.config.read("jax_cuda_visible_devices") == taken
        finally:
            jax.config.update("jax_cuda_visible_devices", "all")
