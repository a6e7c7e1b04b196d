"""`qerl train`: trains as a config says."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from qerl_jax.commands.command import add_command
from qerl_jax.errors import UserError

if TYPE_CHECKING:
    from qerl_jax.commands.command import Commands
    from qerl_jax.config import Config

_DESCRIPTION = """\
Trains as a YAML file (or a shipped recipe, such as `quickstart`, the default) says. Any option can be set on the
command line as section.option=value; values are YAML. The run folder is named by the config (run.output_dir): an
unfinished run is continued from its last checkpoint, --fresh starts a new one beside it. The config.yaml in a run
folder continues that run, wherever the folder has been moved or copied. Ctrl-C saves and stops.
"""
_EXAMPLES = """\
examples:
  qerl train
  qerl train quickstart run.seed=1 run.output_dir=runs/seed1
  qerl train my.yaml optimizer.learning_rate=3e-5 'lora.lora_target_modules=[q_proj, v_proj]'
  qerl train my.yaml --fresh --profile /tmp/trace
  qerl train runs/my-2/config.yaml
"""


def add(commands: "Commands") -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "train", "train a policy", _DESCRIPTION, _EXAMPLES)
    add_words(parser)
    parser.add_argument("--fresh", action="store_true", help="start over in a new run folder beside the existing one")
    parser.add_argument(
        "--profile", type=os.path.expanduser, metavar="DIR", help="write a JAX profiler trace of a few steps to DIR"
    )
    parser.set_defaults(command=run)


def add_words(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a config and set its options."""
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG | section.option=value", help="the config, then options to set otherwise"
    )


def config_of(words: list[str]) -> "Config":
    """The config that these arguments mean."""
    from qerl_jax.config_files import load_config

    configs = [word for word in words if not _is_override(word)]
    if len(configs) > 1:
        raise UserError(f"found {' and '.join(configs)}; expected one config, then section.option=value overrides")
    return load_config(configs[0] if configs else "quickstart", [word for word in words if _is_override(word)])


def run(arguments: argparse.Namespace) -> None:
    """Trains, or continues a run."""
    config = config_of(arguments.words)
    if arguments.profile is not None and Path(arguments.profile).is_file():
        raise UserError(
            f"--profile {arguments.profile} is a file; expected a folder, which is made where there is none"
        )

    from qerl_jax.rl.trainer import train

    train(config, fresh=arguments.fresh, profile=arguments.profile)


def _is_override(word: str) -> bool:
    """Whether it sets an option. The path of a config may have a = too, in a folder named after its options."""
    return "=" in word and "/" not in word.partition("=")[0] and not os.path.isfile(word)
