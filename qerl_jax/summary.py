"""What a run prints when it ends: before and after, side by side, and what to do next."""

from pathlib import Path
from typing import Any


def report(folder: Path, summary: dict[str, Any]) -> str:
    """The closing report of a run, from the contents of its summary.json."""
    before, after = summary["before"], summary["after"]
    lines = ["", f"{summary['steps']} optimizer steps, seed {summary['seed']}, on {summary['device']}", ""]
    names = list(before["sampled"])
    width = max(len(name) for name in names)
    lines.append(f"held-out problems {'':{max(0, width - 17)}}        sampled              greedy")
    for name in names:
        cells = []
        for mode in ("sampled", "greedy"):
            was, now = before[mode][name], after[mode][name]
            cells.append(f"{_number(name, was):>7} -> {_number(name, now):<7}")
        lines.append(f"  {name:{max(width, 15)}}   {'   '.join(cells)}")
    lines += ["", "greedy completions of the same prompts"]
    for was, now in zip(before["samples"], after["samples"], strict=True):
        lines += [
            f"  {_text(was['prompt'])}",
            f"    before  {_text(was['completion'])}",
            f"    after   {_text(now['completion'])}",
        ]
    lines += [
        "",
        f"everything is in {folder}: metrics.jsonl, completions.jsonl, summary.json, plots/, checkpoints/, adapter/",
        "next:",
        f"  qerl evaluate {folder} --seed 1",
        f'  qerl generate {folder} --n 3 --prompt "{_text(after["samples"][0]["prompt"])}"' if after["samples"] else "",
        f"  qerl plot {folder}",
        f"  qerl train {folder}/config.yaml run.seed=1 run.output_dir={folder}-seed1",
    ]
    return "\n".join(lines)


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if name == "mean_length" else f"{value:.1%}"


def _text(prompt: Any) -> str:
    """A prompt or completion on one line; of a conversation, its last message."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return " ".join(text.split())
