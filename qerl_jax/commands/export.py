"""`qerl export`: a run or a model as a folder for other programs."""

import argparse

from qerl_jax.commands.command import Commands, add_command, take_device
from qerl_jax.option_names import EXPORT_FORMATS

_DESCRIPTION = """\
Writes what a run learned, or a model, as a folder that PEFT and transformers read:
  peft    the adapter alone (LoRA and trained norms; servers of LoRA may not take those, nor rsLoRA: then merge)
  bf16    base and adapter merged, a plain model in bfloat16, trained norms in float32
  nvfp4   the base alone, packed as compressed-tensors stores it; no adapter can be inside
The base's tokenizer, chat template and generation_config.json go with each. Of a run that is not finished, the newest
checkpoint is exported. The folder appears whole or not at all; one that holds such an export already is replaced.
"""
_EXAMPLES = """\
examples:
  qerl export runs/quickstart my-adapter --format peft
  qerl export runs/quickstart my-model --format bf16
  qerl export Qwen/Qwen2.5-0.5B-Instruct merged --format bf16 --adapter my-adapter
"""


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "export", "write a folder for other programs", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("source", metavar="RUN_OR_MODEL", help="a run folder, or a model's folder or hub name")
    parser.add_argument("destination", metavar="DST", help="the folder to write")
    parser.add_argument("--format", required=True, metavar="NAME", help=f"one of {', '.join(EXPORT_FORMATS)}")
    parser.add_argument("--adapter", metavar="DIR", help="a PEFT folder to export or merge; for a run, not its own")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the folder that was written."""
    take_device()
    from qerl_jax.export import export_model

    export_model(arguments.source, arguments.destination, arguments.format, arguments.adapter)
    print(arguments.destination)
