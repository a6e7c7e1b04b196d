"""Pictures of runs, from their metrics.jsonl: one PNG per quantity and an overview, one run or several overlaid.

Curves of many steps are drawn twice: each step in a pale colour, and the mean over a window of steps in full. The eight
colours are Okabe and Ito's, which people with any colour vision tell apart.
"""

import dataclasses
import itertools
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from qerl_jax.durable import make_folder, whole_file
from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import read_json
from qerl_jax.json_fields import Fields
from qerl_jax.metrics import are_shares, read_rows
from qerl_jax.run_files import METRICS, SUMMARY

_log = logging.getLogger(__name__)

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_INK, _GRID = "#333333", "#E3E3E3"
_MEANS = 1000  # a picture is 960 dots wide; at every one of a million steps the means took 8 minutes at a run's end


@dataclasses.dataclass(frozen=True)
class _Run:
    name: str
    rows: list[dict[str, Any]]
    measured: dict[tuple[str, str], float]  # accuracy on held-out problems by moment, before or after, and mode

    @property
    def label(self) -> str:
        """The name for matplotlib, which reads what is between two $ as mathematics and hides what begins with _."""
        name = self.name.encode(errors="replace").decode()  # a folder's may have bytes that are no text
        return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the rows that have the key; null is NaN, a gap in the curve."""
        found = [(row["step"], row[key]) for row in self.rows if key in row]
        values = [math.nan if value is None else float(value) for _, value in found]
        return np.array([step for step, _ in found], float), np.array(values, float)


def plot_runs(runs: list[Path], output: Path, summary: dict[str, Any] | None = None) -> list[Path]:
    """Draws the runs into `output` and returns the files: reward, accuracy, entropy, sigma, lengths, and overview.png.

    A quantity that no run recorded has no picture.

    Args:
      runs: run folders; metrics.jsonl and, where there is one, summary.json are read.
      output: folder of the pictures; made if missing.
      summary: what the last run's summary.json will hold, while it is not written yet.

    Raises:
      UserError: a run's metrics.jsonl is missing, damaged, without rows or another program's, or its summary.json is
        damaged; `output` is a file or lies in one.
    """
    loaded = [_load(folder, name) for folder, name in zip(runs, _names(runs), strict=True)]
    if summary is not None:
        loaded[-1] = dataclasses.replace(loaded[-1], measured=_measured(summary, "summary"))
    make_folder(output)
    written = []
    for panel in _PANELS[:5]:
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        if panel.draw(axes, loaded):
            _finish(axes, panel, loaded, legend=True)
            written.append(_save(figure, output / f"{panel.file}.png"))
    figure = Figure(figsize=(13.0, 7.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    for index, (axes, panel) in enumerate(zip(figure.subplots(2, 3).flat, _PANELS, strict=True)):
        if panel.draw(axes, loaded):
            _finish(axes, panel, loaded, legend=index == 0 or panel.file == "accuracy" or len(loaded) == 1)
        else:
            axes.set_title(panel.title, loc="left", color=_INK)
            axes.text(0.5, 0.5, "not recorded", ha="center", va="center", color="#888888", transform=axes.transAxes)
            axes.set_axis_off()
    figure.suptitle(", ".join(run.label for run in loaded), fontsize=13, color=_INK)
    written.append(_save(figure, output / "overview.png"))
    return written


def _load(folder: Path, name: str) -> _Run:
    file = folder / METRICS
    rows = list(read_rows(file))
    if not rows:
        raise UserError(f"{file}: no step was recorded yet; nothing to draw")
    for number, row in enumerate(rows, 1):
        _check(row, f"{file}, line {number}")
    summary = folder / SUMMARY
    return _Run(name, rows, _measured(read_json(summary), str(summary)) if summary.exists() else {})


def _check(row: dict[str, Any], where: str) -> None:
    for key, value in row.items():
        if value is not None and not _is_number(value):
            found = f"`{shown(key)}` is {shown(json.dumps(value))}"
            raise UserError(f"{where}: {found}; expected a number or null; correct or remove the line")
    if type(row.get("step")) is not int:
        raise UserError(f"{where}: no `step`, a whole number, in {shown(json.dumps(row))}; expected a run's metrics")


def _measured(summary: dict[str, Any], where: str) -> dict[tuple[str, str], float]:
    measured = {}
    for moment in ("before", "after"):
        modes = Fields(Fields(summary, where).object(moment), f"{where}: {moment}")
        for mode in ("sampled", "greedy"):
            value = modes.object(mode).get("accuracy")
            if value is None:
                continue
            if not _is_number(value):
                found = f"{moment}: {mode}: accuracy is {shown(json.dumps(value))}"
                raise UserError(f"{where}: {found}; expected a number or null")
            measured[moment, mode] = float(value)
    return measured


def _is_number(value: Any) -> bool:
    # json reads NaN and Infinity, which no run writes, and numbers that no float holds, or no axis.
    return type(value) in (int, float) and abs(value) <= 1e300


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as it takes to tell the runs apart."""
    whole = [path.resolve().parts for path in runs]
    by_depth = (["/".join(parts[-depth:]) for parts in whole] for depth in itertools.count(1))
    return next(names for names in by_depth if len(set(names)) == len(set(whole)))


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, index: int, label: str | None) -> None:
    """Draws run number `index`; the ninth and later runs repeat the colours with broken lines."""
    colour, style = _colour(index), ("-", "--", ":")[index // len(_COLOURS) % 3]
    window = len(values) // 20
    if window < 3:
        axes.plot(steps, values, color=colour, ls=style, lw=1.8, label=label, marker="o" if len(values) == 1 else None)
        return
    axes.plot(steps, values, color=colour, lw=0.8, alpha=0.3)
    half = window // 2
    places = slice(0, None, max(1, len(values) // _MEANS))
    means = [
        np.nan if np.isnan(near := values[max(0, i - half) : i + half + 1]).all() else np.nanmean(near)
        for i in range(len(values))[places]
    ]
    axes.plot(steps[places], means, color=colour, ls=style, lw=1.8, label=label)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _one_key(key: str, alone: str | None = None) -> Callable[[Axes, list[_Run]], bool]:
    """Draws one metric of each run; a single run's curve gets the label `alone`."""

    def draw(axes: Axes, runs: list[_Run]) -> bool:
        drawn = False
        for index, run in enumerate(runs):
            steps, values = run.series(key)
            if len(steps):
                _curve(axes, steps, values, index, run.label if len(runs) > 1 else alone)
                drawn = True
        return drawn

    return draw


def _accuracy(axes: Axes, runs: list[_Run]) -> bool:
    drawn = _one_key("rewards/accuracy/mean", "training batches")(axes, runs)
    markers = {"sampled": "o", "greedy": "s"}
    modes: dict[str, str] = {}
    for index, run in enumerate(runs):
        for mode, points in _evaluations(run).items():
            modes[mode] = marker = markers[mode]
            steps, values = zip(*sorted(points.items()), strict=True)
            # Two points, before and after, are not joined: a straight line would claim a course nobody measured.
            joined = "--" if len(steps) > 2 else "none"
            axes.plot(steps, values, color=_colour(index), ls=joined, lw=1, marker=marker, mfc="white", clip_on=False)
    for mode, marker in modes.items():
        colour = _colour(0) if len(runs) == 1 else _INK
        axes.plot([], [], color=colour, ls="none", marker=marker, mfc="white", label=f"held-out problems, {mode}")
    drawn_values = [value for line in axes.lines for value in np.asarray(line.get_ydata(), float)]
    if are_shares(drawn_values):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(0, 1)
    return drawn or bool(modes)


def _evaluations(run: _Run) -> dict[str, dict[float, float]]:
    """{mode: {step: accuracy}} for the modes "sampled" and "greedy": metrics `eval/.../accuracy` of the rows, and the
    summary's accuracy before (step 0) and after the run."""
    found: dict[str, dict[float, float]] = {}
    for row in run.rows:
        for key, value in row.items():
            if key.startswith("eval/") and key.endswith("/accuracy") and value is not None:
                found.setdefault("greedy" if "greedy" in key else "sampled", {})[row["step"]] = float(value)
    steps = {"before": 0, "after": run.rows[-1]["step"]}
    for (moment, mode), value in run.measured.items():
        found.setdefault(mode, {})[steps[moment]] = value
    return found


def _sigma(axes: Axes, runs: list[_Run]) -> bool:
    drawn = any_noise = False
    for index, run in enumerate(runs):
        steps, values = run.series("aqn/sigma")
        if not len(steps):
            continue
        drawn, any_noise = True, any_noise or bool((values > 0).any())
        name, quiet = run.label if len(runs) > 1 else None, steps[values == 0]
        axes.step(steps, np.where(values > 0, values, np.nan), where="mid", color=_colour(index), lw=1.8, label=name)
        if len(quiet) and len(runs) == 1:
            axes.axvspan(quiet[0] - 0.5, quiet[-1] + 0.5, color="#EBEBEB", lw=0, label="no noise")
        elif len(quiet):  # a logarithmic axis has no zero: it is drawn on the bottom line
            floor = np.where(values == 0, 0.0, np.nan)
            axes.plot(steps, floor, color=_colour(index), lw=4, transform=axes.get_xaxis_transform(), clip_on=False)
            axes.text(0.02, 0.03, "on the axis: sigma 0", ha="left", va="bottom", fontsize=8, transform=axes.transAxes)
    if any_noise:
        axes.set_yscale("log")
    return drawn


def _lengths(axes: Axes, runs: list[_Run]) -> bool:
    drawn = False
    for index, run in enumerate(runs):
        steps, values = run.series("completions/mean_length")
        if not len(steps):
            continue
        drawn = True
        low_steps, low = run.series("completions/min_length")
        _, high = run.series("completions/max_length")
        if len(runs) == 1 and len(low) == len(high) == len(values):
            axes.fill_between(low_steps, low, high, color=_colour(index), alpha=0.12, lw=0, label="shortest to longest")
        _curve(axes, steps, values, index, run.label if len(runs) > 1 else "mean")
    if drawn:
        axes.set_ylim(bottom=0)
    return drawn


def _silent_groups(axes: Axes, runs: list[_Run]) -> bool:
    drawn = _one_key("frac_reward_zero_std")(axes, runs)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if drawn:
        axes.set_ylim(0, 1)
    return drawn


@dataclasses.dataclass(frozen=True)
class _Panel:
    file: str
    title: str
    unit: str
    draw: Callable[[Axes, list[_Run]], bool]


_PANELS = (
    _Panel("reward", "Reward", "mean of a rollout", _one_key("reward")),
    _Panel("accuracy", "Accuracy", "right answers", _accuracy),
    _Panel("entropy", "Entropy of the policy", "nats per token", _one_key("entropy")),
    _Panel("sigma", "Exploration noise (AQN)", "sigma", _sigma),
    _Panel("lengths", "Completion length", "tokens", _lengths),
    _Panel("silent_groups", "Groups without a signal", "all rewards equal", _silent_groups),
)


def _finish(axes: Axes, panel: _Panel, runs: list[_Run], legend: bool) -> None:
    axes.set_title(panel.title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylabel(panel.unit, color=_INK)
    # Before its first step a run may have been evaluated alone, at step 0.
    axes.set_xlim(left=0, right=max(1, *(run.rows[-1]["step"] for run in runs)) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    axes.grid(color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, _ = axes.get_legend_handles_labels()
    if legend and handles:
        axes.legend(frameon=False, fontsize=9)


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    # A run that ends draws itself, perhaps while `qerl plot` does.
    with whole_file(path, shared=True) as temporary, warnings.catch_warnings(record=True) as caught:
        figure.savefig(temporary, dpi=150)
    of_fonts = [warning for warning in caught if "missing from font" in str(warning.message)]
    for warning in caught:
        if warning not in of_fonts:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if of_fonts:
        _log.warning("%s: matplotlib's font lacks characters of a run's name, which are boxes there", path)
    return path
