"""`qerl plot`: draws runs."""

import argparse
import os
from pathlib import Path

from qerl_jax.commands.command import Commands, add_command, run_folder
from qerl_jax.durable import not_writable
from qerl_jax.errors import UserError
from qerl_jax.run_files import METRICS, PLOTS

_DESCRIPTION = """\
Draws reward, accuracy, entropy, sigma and completion lengths of one run, or of several in the same axes, as PNG files.
"""
_EXAMPLES = """\
examples:
  qerl plot runs/quickstart
  qerl plot runs/with_noise runs/without_noise --output compared
"""


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "plot", "draw runs", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--output",
        type=os.path.expanduser,
        metavar="DIR",
        help="where the pictures go (default: RUN/plots; several runs: plots)",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the paths of the pictures."""
    folders = [run_folder(run, METRICS) for run in arguments.runs]
    default = folders[0] / PLOTS if len(folders) == 1 else Path(PLOTS)
    output = Path(arguments.output) if arguments.output else default
    if (place := not_writable(output)) is not None:
        raise UserError(f"{place} may not be written; --output DIR puts the pictures elsewhere")

    from qerl_jax.plots import plot_runs

    for path in plot_runs(folders, output):
        print(path)
