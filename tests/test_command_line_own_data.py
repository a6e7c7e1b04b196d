"""A run on data, a reward function and variables of the chat template of one's own, by the command line."""

import functools
import shutil

import pytest
from command_line import CONFIG, MODEL, run_main, write_rows

from qerl_jax.metrics import read_rows
from qerl_jax.models.source import resolve
from qerl_jax.models.tokenizer import Tokenizer


def test_ones_own_data_and_reward_with_a_trace(tmp_path, monkeypatch, caplog):
    """Conversations from a file, a reward function from a file that reads a column of it, a variable of the chat
    template, and --profile."""
    model = shutil.copytree(resolve(MODEL), tmp_path / "model")
    apply, seen = Tokenizer.apply_chat_template, []
    asking = "{{ messages[0].content }}{% if enable_thinking is false %} How many?{% endif %}"
    (model / "chat_template.jinja").write_text(asking)

    @functools.wraps(apply)
    def watched(*args, **kwargs):
        seen.append(apply(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(Tokenizer, "apply_chat_template", watched)
    data = write_rows(
        tmp_path / "mine.jsonl",
        [{"prompt": [{"role": "user", "content": f"Ann has {n} pens."}], "target": n} for n in range(10, 26)],
    )
    (tmp_path / "mine.py").write_text(
        "def near(prompts, completions, target, **columns):\n"
        "    texts = [messages[0]['content'] for messages in completions]\n"
        "    return [-abs(len(text) - wanted) / 10 for text, wanted in zip(texts, target)]\n"
    )
    (tmp_path / "mine.yaml").write_text(
        CONFIG
        + f"model: {{model_name_or_path: {model}}}\n"
        + f"data: {{train_dataset: {data}, chat_template_kwargs: {{enable_thinking: false}}}}\n"
        + f"reward: {{functions: [{{function: '{tmp_path / 'mine.py'}:near', weight: 2.0}}]}}\n"
    )
    words = (f"evaluation.eval_dataset={data}", f"run.output_dir={tmp_path / 'run'}")
    out = run_main("train", tmp_path / "mine.yaml", *words, "--profile", tmp_path / "trace")
    assert "Ann has 10 pens." in out
    completions = list(read_rows(tmp_path / "run" / "completions.jsonl"))
    assert len(completions) == 3 * 8
    for row in completions:
        wanted = int(row["prompt"][0]["content"].split()[2])
        assert row["rewards/near"] == pytest.approx(-abs(len(row["completion"]) - wanted) / 10, abs=1e-6)
        assert row["reward"] == pytest.approx(2 * row["rewards/near"], abs=1e-6)
    metrics = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert len(metrics) == 3
    for row in metrics:
        assert row["reward"] == pytest.approx(2 * row["rewards/near/mean"], abs=1e-5)
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    # All rows are checked and evaluated, before and after, twice 16 each, and 2 sampled from in each step.
    assert len(seen) == 4 * 16 + 3 * 2 and all(text.endswith(" pens. How many?") for text in seen)
    caplog.clear()
    run_main("evaluate", tmp_path / "run")
    assert not any("the source of reward function" in record.message for record in caplog.records)
    with (tmp_path / "mine.py").open("a") as source:
        source.write("\n")
    run_main("evaluate", tmp_path / "run")
    told = f"{tmp_path / 'run'}: the source of reward function near has changed since the run: what is "
    assert sum(record.message.startswith(told) for record in caplog.records) == 1
    run, answers, given = tmp_path / "run", ("--prompts", data, "--max-new-tokens", 2), "--chat-template-kwargs"
    for asked, words in {
        True: (["evaluate", run], ["generate", run], ["generate", model, given, '{"enable_thinking": false}']),
        False: (["generate", model], *(["generate", run, given, other] for other in ('{"enable_thinking": 0}', "{}"))),
    }.items():
        for command, *rest in words:
            seen.clear()
            run_main(command, *rest, *(answers if command == "generate" else ()))
            assert seen and all(text.endswith("?") == asked for text in seen)
