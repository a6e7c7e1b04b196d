"""The benchmark of prefill on a tiny network."""

import json

import pytest

from benchmarks import prefill


def test_each_case_has_its_lengths_and_tokens(tmp_path):
    output = tmp_path / "prefill.json"
    words = "--model tiny --lora-rank 4 --case 3 40 40 --case 70 40 12 --repeats 1"
    assert prefill.main([*words.split(), "--output", str(output)]) == 0
    full, short = json.loads(output.read_text())["rows"]
    assert (full["prompts"], full["mean_length"], full["tokens"]) == (3, 40, 120)
    assert short["tokens"] == 70 * short["mean_length"] == pytest.approx(70 * 12, rel=0.2)
    assert short["floor_ms"] / short["tokens"] == pytest.approx(full["floor_ms"] / full["tokens"])
    assert all(row["finite"] and row["median_ms"] > 0 and row["temporary_gb"] > 0 for row in (full, short))


@pytest.mark.parametrize(("longest", "mean", "least", "most"), [(40, 12, 1, 23), (40, 30, 20, 40), (40, 40, 40, 40)])
def test_lengths_are_drawn_around_their_mean(longest, mean, least, most):
    lengths = prefill.drawn(500, longest, mean)
    assert (min(lengths), max(lengths)) == (least, most) and abs(lengths.mean() - mean) < 1


def test_a_mean_beyond_the_greatest_length_is_refused():
    with pytest.raises(SystemExit, match="a mean of 41 tokens; allowed with a greatest length of 40: 1 to that"):
        prefill.main(["--case", "3", "40", "41"])
