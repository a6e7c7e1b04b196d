"""`benchmarks.awq --text-model` from nothing: text, tokenizer, training, quantization, result, at a tiny size."""

import json

import pytest
from folders import HF

import benchmarks.awq
import benchmarks.text_model
from qerl_jax.models.config import ModelConfig

LINES = ("def add(a, b):\n    return a + b\n", "class Pair:\n    first = 0\n    second = 1\n")


def test_the_one_command_trains_quantizes_and_writes_the_result_and_keeps_what_is_there(tmp_path, monkeypatch, capsys):
    config = ModelConfig.from_hf(HF | {"vocab_size": 280, "tie_word_embeddings": True})
    size = benchmarks.text_model.Size(config, length=16, rows=4, steps=40, learning_rate=1e-2)
    monkeypatch.setitem(benchmarks.text_model.SIZES, "tiny", size)
    monkeypatch.setattr(benchmarks.text_model, "CALIBRATION_CHARACTERS", 12)
    monkeypatch.setattr(
        benchmarks.text_model, "library_texts", lambda: ([LINES[i % 2] * 4 for i in range(64)], [LINES[0] * 9] * 2)
    )
    folder, output = tmp_path / "tiny", tmp_path / "results" / "awq.json"
    words = ["--text-model", f"tiny={folder}", "--sequences", "16", "--output", str(output)]
    benchmarks.awq.main(words)
    result = json.loads(output.read_text())
    assert result["command"] == " ".join(["python -m benchmarks.awq", *words]) and result["model"] == "tiny"
    assert result["training"]["steps"] == 40 and result["training"]["tokens"] == 40 * 4 * 16
    assert result["training"]["distinct_tokens"] == 40 * 4 * 17  # there are more rows than steps take
    assert result["training"]["last_loss"] < 3 < 5.6  # log 280, where it begins
    assert result["text"]["plain"]["perplexity"] < 280  # pieces begin anywhere: harder than what was learnt
    assert result["mean"]["output_error_calibration"]["awq"] < result["mean"]["output_error_calibration"]["rtn"]
    assert [layer["layer"] for layer in result["layers"]] == [0, 1]
    for where in result["not_lower_with_awq"]["output_error_calibration"]:
        _, layer, name = where.split()
        row = result["layers"][int(layer)]["projections"][name]["output_error_calibration"]
        assert row["awq"] >= row["rtn"]
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    benchmarks.awq.main(words)
    assert "step" not in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == made
    again = json.loads(output.read_text())
    assert again["mean"] == result["mean"]


def test_a_size_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        benchmarks.awq.main(["--text-model", "27M=folder"])
    assert "27M=folder: SIZE is one of 26M, 9M, 3M" in capsys.readouterr().err
