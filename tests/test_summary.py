"""The closing report: measurements side by side, and commands that can be pasted."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from qerl_jax.config_files import load_config
from qerl_jax.run_folder import continuing
from qerl_jax.summary import report


def measured(sampled, greedy, completion="#### 1", prompt="one?"):
    return {"sampled": sampled, "greedy": greedy, "samples": [{"prompt": prompt, "completion": completion}]}


def summary(before, after):
    return {"steps": 3, "seed": 0, "device": "cpu", "before": before, "after": after}


def cells(text, name):
    (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{name} "))
    return line.split()[1:]


def test_shares_are_percentages_and_other_rewards_are_not():
    values = {"accuracy": 0.125, "format": 1.0, "brevity": -12.34, "completions/mean_length": 7.25}
    text = report(Path("runs/x"), summary(measured(values, values), measured(values, values)), "arithmetic")
    assert cells(text, "accuracy") == ["12.5%", "->", "12.5%"] * 2
    assert cells(text, "format") == ["100.0%", "->", "100.0%"] * 2
    assert cells(text, "brevity") == ["-12.3", "->", "-12.3"] * 2
    assert cells(text, "completions/mean_length") == ["7.2", "->", "7.2"] * 2
    heading, columns, first = text.splitlines()[3:6]
    assert heading == "held-out problems of arithmetic" and columns.split() == ["sampled", "greedy"]
    assert columns.index("sampled") == first.index("12.5%") + 2


def test_an_accuracy_that_is_no_share_is_no_percentage():
    text = report(Path("x"), summary(measured({"accuracy": -2.0}, {}), measured({"accuracy": 10.0}, {})), "arithmetic")
    assert cells(text, "accuracy")[:3] == ["-2", "->", "10"]


def test_a_function_that_applied_nowhere_in_one_measurement_has_a_dash_there():
    before = measured({"mine": 1.0, "completions/mean_length": 3.0}, {"completions/mean_length": 3.0})
    after = measured({"completions/mean_length": 4.0}, {"completions/mean_length": 4.0})
    assert cells(report(Path("x"), summary(before, after), "arithmetic"), "mine") == ["1", "->", "-", "-", "->", "-"]


def test_a_prompt_of_any_text_is_quoted():
    numbers = {"completions/mean_length": 1.0}
    point = measured(numbers, numbers, prompt='Ann\'s "$5"\n\nhow  many?')
    text = report(Path("my run"), summary(point, point), "arithmetic")
    assert "--prompt 'Ann'\"'\"'s \"$5\"\n\nhow  many?'\n" in text and '\n  Ann\'s "$5" how many?\n' in text
    assert "plot 'my run'\n" in text and "train 'my run'/config.yaml run.seed=1" in text
    assert " train " not in report(Path("my run"), summary(point, point), "arithmetic", configured=False)


def test_of_a_conversation_the_last_message_is_shown_and_no_prompt_that_would_pass_the_chat_template_by():
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "how\nmany?"}]
    numbers = {"completions/mean_length": 1.0}
    point = measured(numbers, numbers, prompt=talk)
    text = report(Path("x"), summary(point, point), "arithmetic")
    assert "  how many?\n" in text and "generate" not in text
    assert "evaluate x --seed 1\n" in text and "plot x\n" in text


@pytest.mark.parametrize(("seed", "other"), [(0, 1), (1, 0), (7, 1)])
def test_what_to_do_next_is_not_the_same_run_again(seed, other):
    point = measured({"completions/mean_length": 1.0}, {"completions/mean_length": 1.0})
    text = report(Path("x"), summary(point, point) | {"seed": seed}, "arithmetic")
    assert f"evaluate x --seed {other}\n" in text
    assert f"train x/config.yaml run.seed={other} run.output_dir=x-seed{other}" in text
    here = report(Path("."), summary(point, point) | {"seed": seed}, "arithmetic")
    assert f"train ./config.yaml run.seed={other} run.output_dir={Path.cwd()}-seed{other}" in here


@pytest.mark.parametrize("name", ["run #2", "a: b", "[x]", "{a}", "*x", "&x", "@x", "my run", "'x'", "rün"])
def test_the_command_for_another_seed_can_be_pasted(name):
    point = measured({"completions/mean_length": 1.0}, {"completions/mean_length": 1.0})
    *_, last = report(Path(name), summary(point, point), "arithmetic").splitlines()
    words = shlex.split(last)
    assert words[-3:-1] == [f"{name}/config.yaml", "run.seed=1"]
    assert load_config("quickstart", words[-2:]).run.output_dir == f"{name}-seed1"


@pytest.mark.parametrize(
    ("script", "on_path", "expected"),
    [
        (".venv/bin/qerl", False, ".venv/bin/qerl plot x"),
        (".venv/bin/qerl", True, "qerl plot x"),
        (None, False, "bin/python -m qerl_jax plot x"),
    ],
)
def test_the_commands_name_the_program_as_it_can_be_called_from_here(script, on_path, expected, tmp_path, monkeypatch):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    if script:
        (tmp_path / script).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / "qerl") if on_path else None)
    point = measured({"completions/mean_length": 1.0}, {"completions/mean_length": 1.0})
    (line,) = (line for line in report(Path("x"), summary(point, point), "arithmetic").splitlines() if " plot " in line)
    assert " ".join(shlex.split(line)).endswith(expected) and (script is None or line == f"  {expected}")
    assert f"  {continuing(Path('x'))}" == line.replace("plot x", "train x/config.yaml")
