"""Pictures: which files appear, with what in them, and the ways in which a run cannot be drawn."""

import json
import os
import re

import numpy as np
import pytest
from full_disk import full_disk
from matplotlib.figure import Figure
from matplotlib.image import imread

from qerl_jax import plots
from qerl_jax.cli import main
from qerl_jax.errors import UserError
from qerl_jax.plots import plot_runs


def make_run(folder, steps=12, **columns):
    folder.mkdir(parents=True)
    defaults = {"reward": 0.5, "rewards/accuracy/mean": 0.4, "entropy": 1.0, "completions/mean_length": 20.0}
    rows = [
        {"step": t + 1, "rollout": t, "aqn/sigma": 0.0 if t < 3 else 1e-2} | defaults | columns for t in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the figures that were saved."""
    figures: dict[str, Figure] = {}
    save = plots._save

    def keep(figure, path):
        figures[path.stem] = figure
        return save(figure, path)

    monkeypatch.setattr(plots, "_save", keep)
    return figures


def test_one_run_gives_a_picture_per_quantity_and_an_overview(tmp_path, drawn):
    run = make_run(tmp_path / "run")
    summary = {
        "before": {"sampled": {"accuracy": 0.25}, "greedy": {"accuracy": 0.2}, "samples": []},
        "after": {"sampled": {"accuracy": 0.65}, "greedy": {"accuracy": 0.9}, "samples": []},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    files = plot_runs([run], run / "plots")
    assert [path.stem for path in files] == ["reward", "accuracy", "entropy", "sigma", "lengths", "overview"]
    height, width, _ = imread(files[0]).shape
    assert (height, width) == (600, 960)
    (accuracy,) = drawn["accuracy"].axes
    points = [
        line.get_xydata().tolist() for line in accuracy.lines if line.get_marker() in "os" and len(line.get_xdata())
    ]
    assert points == [[[0, 0.25], [12, 0.65]], [[0, 0.2], [12, 0.9]]]
    labels = accuracy.get_legend_handles_labels()[1]
    assert labels == ["training batches", "held-out problems, sampled", "held-out problems, greedy"]
    (sigma,) = drawn["sigma"].axes
    assert sigma.get_yscale() == "log"
    assert np.isnan(sigma.lines[0].get_ydata()[:3]).all()


def test_an_accuracy_that_is_no_share_is_drawn_as_it_is(tmp_path, drawn):
    summary = {"before": {"greedy": {"accuracy": 0.25}}, "after": {"greedy": {"accuracy": 2.8}}}
    plot_runs([make_run(tmp_path / "run", **{"rewards/accuracy/mean": -2.0})], tmp_path / "out", summary=summary)
    (axes,) = drawn["accuracy"].axes
    low, high = axes.get_ylim()
    assert low <= -2 and high >= 2.8 and "%" not in axes.yaxis.get_major_formatter()(0.5, 0)


def test_periodic_evaluations_and_a_summary_not_yet_written(tmp_path, drawn):
    run = make_run(tmp_path / "run", steps=3, **{"eval/arithmetic/sampled/accuracy": 0.5})
    plot_runs([run], tmp_path / "out", summary={"before": {"sampled": {"accuracy": 0.1}}})
    (points,) = [line for line in drawn["accuracy"].axes[0].lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert points.get_xydata().tolist() == [[0, 0.1], [1, 0.5], [2, 0.5], [3, 0.5]]


def test_a_run_that_has_only_been_evaluated_has_an_axis_from_step_0(tmp_path, drawn, recwarn):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "rollout": -1, "eval/accuracy": 0.5}\n')
    assert [path.stem for path in plot_runs([run], tmp_path / "out")] == ["accuracy", "overview"]
    assert drawn["accuracy"].axes[0].get_xlim() == (0, 1.02)
    assert not recwarn


def test_several_runs_share_axes_and_are_told_apart(tmp_path, drawn):
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", steps=100)
    plot_runs([first, second], tmp_path / "out")
    assert drawn["reward"].axes[0].get_legend_handles_labels()[1] == ["a/run", "b/run"]
    assert len({line.get_color() for line in drawn["reward"].axes[0].lines}) == 2
    assert len(drawn["overview"].axes) == 6
    with_legend = [axes.get_title(loc="left") for axes in drawn["overview"].axes if axes.get_legend() is not None]
    assert with_legend == ["Reward", "Accuracy"]  # whose markers have a meaning


def test_a_long_run_has_no_more_means_than_its_picture_shows(tmp_path, drawn):
    plot_runs([make_run(tmp_path / "run", steps=5000)], tmp_path / "out")
    each, means = drawn["reward"].axes[0].lines
    assert len(each.get_xdata()) == 5000
    assert means.get_xdata().tolist() == list(range(1, 5001, 5)) and set(means.get_ydata()) == {0.5}


def test_a_mean_is_of_the_steps_on_both_sides_of_its_own(tmp_path, drawn):
    """A twentieth of the steps, here five, and fewer at the ends."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "rollout": {step}, "reward": {step}}}\n' for step in range(1, 101))
    )
    plot_runs([tmp_path], tmp_path / "out")
    _, means = drawn["reward"].axes[0].lines
    assert means.get_ydata().tolist() == [2, 2.5, *range(3, 99), 98.5, 99]


def test_quantities_nobody_recorded_have_no_picture_and_null_is_a_gap(tmp_path, drawn):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "rollout": 0, "reward": null}\n{"step": 2, "rollout": 1, "reward": 2}\n'
    )
    assert [path.stem for path in plot_runs([run], tmp_path / "out")] == ["reward", "overview"]
    np.testing.assert_array_equal(drawn["reward"].axes[0].lines[0].get_ydata(), [np.nan, 2.0])


def test_runs_that_cannot_be_drawn(tmp_path):
    run = make_run(tmp_path / "run", steps=0)
    with pytest.raises(UserError, match="no step was recorded yet"):
        plot_runs([run], tmp_path / "out")
    with pytest.raises(UserError, match="cannot be read"):
        plot_runs([tmp_path], tmp_path / "out")


def test_a_run_that_may_not_be_written_to_is_drawn_elsewhere(tmp_path, monkeypatch, capsys):
    run, real = make_run(tmp_path / "run"), os.access  # who is root may write everything
    monkeypatch.setattr(os, "access", lambda path, mode: path != run and real(path, mode))
    assert main(["plot", str(run)]) == 2
    assert capsys.readouterr().err == f"qerl plot: {run} may not be written; --output DIR puts the pictures elsewhere\n"
    assert main(["plot", str(run), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "overview.png").exists() and not (run / "plots").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not valid JSON \(Expecting property name"),
        ("[" * 100_000, r"not valid JSON \("),
        ("[1]", "expected a JSON object, found list"),
        ('{"before": [0.5]}', r"before is \[0\.5\]; expected an object"),
        ('{"after": {"greedy": 0.5}}', r"after: greedy is 0\.5; expected an object"),
        ('{"after": {"greedy": {"accuracy": "half"}}}', r'after: greedy: accuracy is "half"; expected a number'),
        ('{"after": {"greedy": {"accuracy": NaN}}}', r"after: greedy: accuracy is NaN; expected a number or null"),
    ],
)
def test_a_damaged_summary_is_told_before_anything_is_drawn(tmp_path, text, message):
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text(text)
    with pytest.raises(UserError, match=rf"run/summary\.json: {message}"):
        plot_runs([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"loss": 1.0}', r'no `step`, a whole number, in \{"loss": 1\.0\}; expected a run\'s metrics'),
        ('{"step": 1.5}', r"no `step`, a whole number, in"),
        ('{"step": true}', r"`step` is true; expected a number or null"),
        ('{"step": 2, "reward": "much"}', r'`reward` is "much"; expected a number or null; correct or remove the line'),
        ('{"step": 2, "eval/greedy/accuracy": [0.5]}', r"`eval/greedy/accuracy` is \[0\.5\]; expected a number"),
        ('{"step": 2, "reward": 1e308}', r"`reward` is 1e\+308; expected a number or null"),
        ('{"step": 2, "reward": 1e999}', r"`reward` is Infinity; expected a number or null"),
        ('{"step": 1' + 400 * "0" + "}", r"`step` is 10{199}\.\.\.; expected a number or null"),
        ("nonsense", r"found nonsense; expected a JSON object; correct or remove the line"),
        ("[1]", r"found \[1\]; expected a JSON object"),
        ("", r"found an empty line; expected a JSON object"),
    ],
)
def test_a_damaged_line_is_told_before_anything_is_drawn(tmp_path, line, message):
    run = make_run(tmp_path / "run", steps=1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match=rf"run/metrics\.jsonl, line 2: {message}"):
        plot_runs([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_where_the_disk_is_full_the_picture_is_named_and_those_of_before_stay(tmp_path):
    run = make_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in plot_runs([run], tmp_path / "out")}
    with pytest.raises(OSError, match=re.escape(f"File too large: '{tmp_path}/out/reward.png'")), full_disk():
        plot_runs([run], tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_two_processes_draw_one_run_at_once(tmp_path, monkeypatch):
    """As `qerl plot` does, again and again, and the run itself when it ends."""
    run, save = make_run(tmp_path / "run"), Figure.savefig

    def while_another_draws(figure, path, **options):
        save(figure, path, **options)
        monkeypatch.setattr(Figure, "savefig", save)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            plot_runs([run], tmp_path / "out")

    monkeypatch.setattr(Figure, "savefig", while_another_draws)
    assert set(plot_runs([run], tmp_path / "out")) == set((tmp_path / "out").iterdir())


def test_names_that_matplotlib_would_read_otherwise(tmp_path, drawn):
    runs = [make_run(tmp_path / name) for name in ("$MODEL_$SEED", "_hidden")]
    plot_runs(runs, tmp_path / "plots")
    assert (tmp_path / "plots" / "overview.png").is_file()
    _, labels = drawn["reward"].axes[0].get_legend_handles_labels()
    assert [label.strip("\u200b") for label in labels] == [r"\$MODEL_\$SEED", "_hidden"]


def test_characters_that_the_font_lacks_are_told_in_one_line(tmp_path, caplog, recwarn):
    plot_runs([make_run(tmp_path / "\u6f22")], tmp_path / "plots")
    assert (tmp_path / "plots" / "overview.png").is_file() and not recwarn.list
    assert {record.message.split(": ")[1] for record in caplog.records} == {
        "matplotlib's font lacks characters of a run's name, which are boxes there"
    }


def test_a_folder_whose_name_is_no_text_has_a_picture(tmp_path, drawn):
    plot_runs([make_run(tmp_path / "r\udcff")], tmp_path / "out")
    assert drawn["overview"].get_suptitle() == "r?"
