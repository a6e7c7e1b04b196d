"""The report of a quantization: what is written beside the weights, and the table that is printed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.models.params import PROJECTIONS

REPORT = "quantization_report.json"
# Kind of error in the report -> its head in the table.
_KINDS = {"weight_error": "weight", "output_error_calibration": "output", "output_error_held_out": "held out"}


def mean_errors(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By kind of error, the mean over all layers and projections under each method."""
    rows = [layer["projections"][name] for layer in layers for name in PROJECTIONS]
    kinds = [kind for kind in _KINDS if kind in rows[0]]
    return {
        kind: {method: float(np.mean([row[kind][method] for row in rows])) for method in rows[0][kind]}
        for kind in kinds
    }


def progress(layer: Mapping[str, Any]) -> str:
    """A layer's errors on one line: the mean over its projections of the last kind there is."""
    [*_, (kind, methods)] = mean_errors([layer]).items()
    return f"{kind.replace('_', ' ')}: " + ", ".join(f"{method} {value:.4f}" for method, value in methods.items())


def table(report: Mapping[str, Any]) -> str:
    """The report as text: each projection's relative errors, the mean over layers, in its weights, its outputs on the
    calibration text and on held-out text; then perplexity and entropy."""
    layers = report["layers"]
    kinds = list(report["mean"])
    methods = list(report["mean"][kinds[0]])
    heads = [f"{_KINDS[kind] + ' ' + method:>12}" for kind in kinds for method in methods]
    lines = ["  ".join([f"{'projection':<10}", *heads])]

    def line(label: str, values: Sequence[float]) -> str:
        return "  ".join([f"{label:<10}", *(f"{value:>12.4f}" for value in values)])

    for name in PROJECTIONS:
        rows = [layer["projections"][name] for layer in layers]
        lines.append(line(name, [float(np.mean([row[kind][m] for row in rows])) for kind in kinds for m in methods]))
    lines.append(line("mean", [report["mean"][kind][method] for kind in kinds for method in methods]))
    if "text" in report:
        lines += ["", "held-out text   perplexity   entropy"]
        lines += [
            f"{name:<14}  {row['perplexity']:>10.4f}  {row['entropy']:>8.4f}" for name, row in report["text"].items()
        ]
    return "\n".join(lines)
