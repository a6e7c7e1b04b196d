"""`qerl quantize`: a model's folder with 4-bit weights."""

import argparse
import sys

from qerl_jax.commands.command import Commands, add_command, add_template_kwargs, take_device, template_kwargs

_DESCRIPTION = """\
Writes a model with NVFP4 linear layers, as a compressed-tensors folder that qerl and transformers read. --method
rtn rounds every weight to nearest, as `qerl train` does when it loads a plain model; awq first searches, on calibration
text, scales of the input channels and of the blocks that lower the error of what the layers compute. Errors of every
layer, perplexity and entropy of held-out text go to DST/quantization_report.json, and a table is printed. With rtn,
text is optional and only measured on.

Layers are read, quantized and written one at a time, to a work folder .quantize-DST-... beside DST. The same command
continues one that was interrupted; DST appears when it is complete, and the work folder goes.
"""
_EXAMPLES = """\
examples:
  qerl quantize Qwen/Qwen2.5-7B-Instruct qwen2.5-7b-nvfp4
  qerl quantize Qwen/Qwen2.5-7B-Instruct qwen2.5-7b-awq --method awq --calibration thoughts.jsonl --length 2048
  qerl quantize builtin:quickstart quickstart-awq --method awq
"""


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "quantize", "write a model with 4-bit weights", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("source", metavar="SRC", help="a model with plain weights: folder, hub name or builtin:NAME")
    parser.add_argument("destination", metavar="DST", help="the folder to write")
    parser.add_argument("--format", default="nvfp4", metavar="NAME", help="weight format: nvfp4 (the default)")
    parser.add_argument("--method", default="rtn", metavar="NAME", help="rtn (the default) or awq")
    parser.add_argument(
        "--calibration",
        metavar="FILE.jsonl",
        help="text: rows with `text`, `messages`, or `prompt` and perhaps `completion`; awq needs it "
        "(builtin:quickstart is given `arithmetic`, its own problems)",
    )
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="rows to take, evenly over the file, one in eight of them held out (default: 256, or all it has)",
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="most tokens of a row (default: 2048, or the positions the model has)"
    )
    add_template_kwargs(parser, ", which messages of the calibration text pass")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each layer to standard error, and the table."""
    kwargs = template_kwargs(arguments)
    take_device()
    from qerl_jax.quantization import quantize_folder
    from qerl_jax.quantization.report import table

    report = quantize_folder(
        arguments.source,
        arguments.destination,
        arguments.format,
        arguments.method,
        arguments.calibration,
        arguments.sequences,
        arguments.length,
        kwargs,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(table(report))
