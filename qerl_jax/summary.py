"""What a run prints when it ends: before and after, side by side, and what to do next."""

import shlex
from pathlib import Path
from typing import Any

from qerl_jax.durable import named
from qerl_jax.metrics import are_shares
from qerl_jax.program import program
from qerl_jax.recipes import text_override
from qerl_jax.run_files import ADAPTER, CHECKPOINTS, COMPLETIONS, CONFIG, METRICS, PLOTS, SUMMARY


def report(folder: Path, summary: dict[str, Any], eval_dataset: str, configured: bool = True) -> str:
    """The closing report of a run, from the contents of its summary.json and the name of its evaluation's data set;
    `configured` is whether its config says all that it was trained by."""
    before, after = summary["before"], summary["after"]
    lines = ["", f"{summary['steps']} optimizer steps, seed {summary['seed']}, on {summary['device']}", ""]
    # A reward function that applies to no row of a measurement is not in it.
    names = list(dict.fromkeys(name for when in (before, after) for name in when["sampled"] | when["greedy"]))
    width = max(len(name) for name in names)
    lines += [f"held-out problems of {eval_dataset}", f"{'':{max(18, width + 1)}}        sampled              greedy"]
    for name in names:
        cells = []
        for mode in ("sampled", "greedy"):
            was, now = before[mode].get(name), after[mode].get(name)
            cells.append(f"{_number(name, was):>7} -> {_number(name, now):<7}")
        lines.append(f"  {name:{max(width, 15)}}   {'   '.join(cells)}")
    lines += ["", "greedy completions of the same prompts"]
    for was, now in zip(before["samples"], after["samples"], strict=True):
        lines += [
            f"  {_text(was['prompt'])}",
            f"    before  {_text(was['completion'])}",
            f"    after   {_text(now['completion'])}",
        ]
    other = 0 if summary["seed"] == 1 else 1
    qerl, run, prompt = program(), shlex.quote(str(folder)), after["samples"][0]["prompt"]
    beside = shlex.quote(text_override("run.output_dir", f"{named(folder)}-seed{other}"))
    # A message's text alone would not pass the chat template.
    is_text = isinstance(prompt, str)
    generate = [f"  {qerl} generate {run} --n 3 --prompt {shlex.quote(prompt)}"] if is_text else []
    lines += [
        "",
        f"everything is in {folder}: {METRICS}, {COMPLETIONS}, {SUMMARY}, {PLOTS}/, {CHECKPOINTS}/, {ADAPTER}/",
        "next:",
        f"  {qerl} evaluate {run} --seed {other}",
        *generate,
        f"  {qerl} plot {run}",
    ]
    if configured:  # or it would be trained by another loss
        lines.append(f"  {qerl} train {run}/{CONFIG} run.seed={other} {beside}")
    return "\n".join(lines)


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if (name in ("accuracy", "format") and are_shares([value])) or name.startswith("pass@"):
        return f"{value:.1%}"
    return f"{value:.1f}" if name == "completions/mean_length" else f"{value:.3g}"


def _text(prompt: Any) -> str:
    """A prompt or completion on one line; of a conversation, its last message."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return " ".join(text.split())
