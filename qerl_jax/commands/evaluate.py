"""`qerl evaluate`: measures a run on held-out problems."""

import argparse

from qerl_jax.commands.command import Commands, add_command, check_n, check_seed, run_folder, take_device
from qerl_jax.run_files import CONFIG

_DESCRIPTION = """\
Measures the accuracy of a run's policy on held-out problems, sampled and greedy, and prints it. The run itself is
not changed; its summary.json holds what was measured when it ended. Of a run that is not finished, and may be going
on, the newest checkpoint is measured.
"""
_EXAMPLES = """\
example:
  qerl evaluate runs/quickstart --seed 7
  qerl evaluate runs/quickstart --n 16        # pass@2, 4, 8 and 16 too
"""
_SEED = "chooses samples, and problems where they are generated; of a file the first rows are taken (default: 0)"


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "evaluate", "measure a run", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=_SEED)
    parser.add_argument(
        "--n",
        type=int,
        metavar="N",
        help="completions sampled of each problem, more than one for pass@k (default: the run's num_generations_eval)",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints what it measured."""
    check_seed(arguments.seed)
    if arguments.n is not None:
        check_n(arguments.n)
    folder = run_folder(arguments.run, CONFIG)

    take_device()
    from qerl_jax.evaluation import evaluate_run

    for name, value in evaluate_run(folder, arguments.seed, arguments.n).items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
