"""What the commands share: how a parser is made, and what their arguments may be."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_jax.durable import with_home
from qerl_jax.errors import UserError, nearest_beside, shown
from qerl_jax.input_files import parse_json

if TYPE_CHECKING:
    from qerl_jax.config import Config

type Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(
    commands: Commands, name: str, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """A command's parser, whose help keeps the line ends of both texts.

    Args:
      commands: what `add_subparsers` returned.
      name: the word that calls it.
      summary: the line beside it in the list of commands.
      description: what it does, for its own help.
      examples: shown below its arguments.
    """
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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


def add_template_kwargs(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Adds the argument that sets variables of the chat template; `default` says what they are without it."""
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help=f"""variables of the chat template, as '{{"enable_thinking": false}}'{default}""",
    )


def template_kwargs(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The variables that this argument sets, a JSON object; None without it."""
    text = arguments.chat_template_kwargs
    if text is None:
        return None
    try:
        values = parse_json(os.fsencode(text))
    except ValueError as error:
        found = f"not JSON ({error})"
    else:
        if isinstance(values, dict):
            return values
        found = "no JSON object"
    raise UserError(
        f"--chat-template-kwargs {shown(text, 80)}: {found}; expected variables of the chat template with their "
        """values, as '{"enable_thinking": false}'"""
    )


def _is_override(word: str) -> bool:
    """Whether it sets an option. The path of a config may have a = too, in a folder named after its options."""
    return "=" in word and "/" not in word.partition("=")[0] and not os.path.isfile(word)


def check_seed(seed: int) -> None:
    """Refuses a seed that `run.seed` could not be."""
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed is {seed}; allowed: a whole number from 0 to 2^32 - 1")


def check_n(n: int) -> None:
    """Refuses a number of completions that cannot be."""
    if not 1 <= n <= 10**6:
        raise UserError(f"--n is {n}; allowed: a whole number from 1 to 1000000")


def run_folder(name: str, file: str) -> Path:
    """The folder of a run, which must hold `file`."""
    folder = with_home(name)
    if not folder.is_dir():
        raise UserError(
            f"{name}: no such run folder{nearest_beside(folder)}; expected the folder that `qerl train` made"
        )
    if not (folder / file).is_file():
        raise UserError(f"{name}: holds no {file}; expected the folder that `qerl train` made")
    return folder


def take_device() -> None:
    """Takes the first GPU alone: JAX would reserve memory on all that it sees. Refuses a JAX_PLATFORMS that names no
    device of this machine, of which JAX tells by a traceback."""
    # Before JAX, whose C++ would import it, and make an ImportError of a Ctrl-C meanwhile.
    import numpy  # noqa: F401, I001
    import jax

    if jax.config.read("jax_cuda_visible_devices") == "all":
        jax.config.update("jax_cuda_visible_devices", "0")
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where no plugin for that platform is installed
        said = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise UserError(
            f"JAX_PLATFORMS is {jax.config.jax_platforms!r}, and JAX finds no such device here{said}; unset it to take "
            "what there is, or set it to cpu; an NVIDIA GPU needs its driver, and `pip install 'qerl-jax[cuda]'`"
        ) from None
