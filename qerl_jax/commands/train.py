"""`qerl train`: trains as a config says."""

import argparse
import os

from qerl_jax.commands.command import Commands, add_command, add_words, config_of, take_device

_DESCRIPTION = """\
Trains as a YAML file (or a shipped recipe, such as `quickstart`, the default) says. Any option can be set on the
command line as section.option=value; values are YAML. The run folder is named by the config (run.output_dir): an
unfinished run is continued from its last checkpoint, --fresh starts a new one beside it. The config.yaml in a run
folder continues that run, wherever the folder has been moved or copied. Ctrl-C, SIGTERM and a closed terminal (not
under nohup) save and stop; output that nobody reads any more stops nothing.
"""
_EXAMPLES = """\
examples:
  qerl train
  qerl train quickstart run.seed=1 run.output_dir=runs/seed1
  qerl train my.yaml optimizer.learning_rate=3e-5 'lora.lora_target_modules=[q_proj, v_proj]'
  qerl train my.yaml --fresh --profile /tmp/trace
  qerl train runs/my-2/config.yaml
"""


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "train", "train a policy", _DESCRIPTION, _EXAMPLES)
    add_words(parser)
    parser.add_argument("--fresh", action="store_true", help="start over in a new run folder beside the existing one")
    parser.add_argument(
        "--profile", type=os.path.expanduser, metavar="DIR", help="write a JAX profiler trace of one rollout to DIR"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Trains, or continues a run."""
    config = config_of(arguments.words)

    take_device()
    from qerl_jax.rl.trainer import train

    train(config, fresh=arguments.fresh, profile=arguments.profile)
