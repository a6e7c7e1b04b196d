"""`qerl plan`: what a run would take."""

import argparse
import sys

from qerl_jax.commands.command import Commands, add_command, add_words, config_of, take_device

_DESCRIPTION = """\
Prints the steps of the run that `qerl train` would begin with the same words, and the memory that rollouts, evaluations
and updates would take on this device; of a run that has begun also whether it would be continued, is finished, or would
be refused, and why (but for another process that is at work on it). All is loaded, checked and compiled as for the run,
and refused as there where it does not fit into what the device says it has. Nothing is sampled or written. The exit
code is 2 wherever `qerl train` would refuse the run, also below a plan that says so.
"""
_EXAMPLES = """\
examples:
  qerl plan my.yaml
  qerl plan my.yaml optimizer.per_device_train_batch_size=4 generation.max_completion_length=8192
"""


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "plan", "say what a run would take", _DESCRIPTION, _EXAMPLES)
    add_words(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; the exit code says whether the run would be refused."""
    config = config_of(arguments.words)

    print("loading and compiling what the run would call; nothing is kept", file=sys.stderr, flush=True)
    take_device()
    from qerl_jax.rl.plan import plan_run

    plan, refused = plan_run(config)
    print(plan)
    return 2 if refused else 0
