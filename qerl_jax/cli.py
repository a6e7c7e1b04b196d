"""The command line: a thin layer that reads arguments, calls one function, and prints what it returns.

    qerl train quickstart run.seed=1
    qerl generate runs/quickstart --prompt "Tom has 3 apples and buys 4. How many now?"
    qerl evaluate runs/quickstart --seed 7
    qerl plot runs/quickstart runs/quickstart-2

Exit codes: 0 done; 2 a mistake in the arguments, options or files, told in one line each; 130 interrupted by Ctrl-C.
JAX is imported by the commands that compute, so that `--help` answers at once.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_jax.errors import UserError, nearest

if TYPE_CHECKING:
    from qerl_jax.config import GenerationOptions

_DESCRIPTION = """\
Reinforcement learning of language models whose frozen weights are 4-bit floats.

  qerl train               trains the shipped 1M-parameter policy on this machine, in minutes
  qerl train my.yaml       trains as my.yaml says
  qerl COMMAND --help      explains a command, with examples
"""
_TRAIN = """\
Trains as a YAML file (or a shipped recipe, such as `quickstart`, the default) says. Any option can be set on the
command line as section.option=value; values are YAML. The run folder is named by the config (run.output_dir): an
unfinished run is continued from its last checkpoint, --fresh starts a new one beside it. Ctrl-C saves and stops.
"""
_TRAIN_EXAMPLES = """\
examples:
  qerl train
  qerl train quickstart run.seed=1 run.output_dir=runs/seed1
  qerl train my.yaml optimizer.learning_rate=3e-5 'lora.lora_target_modules=[q_proj, v_proj]'
  qerl train my.yaml --fresh --profile /tmp/trace
"""
_GENERATE = """\
Completes prompts with a model (a Hugging Face folder or hub name) or with the result of a run. Noise is never added.
One --prompt prints its completions as text; --prompts prints one JSON row per completion. Sampling options not given
are the ones the run was trained with, or the defaults.
"""
_GENERATE_EXAMPLES = """\
examples:
  qerl generate runs/quickstart --prompt "Tom has 3 apples and buys 4. How many now?" --greedy
  qerl generate Qwen/Qwen2.5-0.5B-Instruct --adapter my/adapter --prompts questions.jsonl --n 4 --temperature 0.6
"""
_EVALUATE = """\
Measures the accuracy of a run's policy on held-out problems, sampled and greedy, and prints it. The run itself is
not changed; its summary.json holds what was measured when it ended.
"""
_EVALUATE_EXAMPLES = """\
example:
  qerl evaluate runs/quickstart --seed 7
"""
_PLOT = """\
Draws reward, accuracy, entropy, sigma and completion lengths of one run, or of several in the same axes, as PNG files.
"""
_PLOT_EXAMPLES = """\
examples:
  qerl plot runs/quickstart
  qerl plot runs/with_noise runs/without_noise --output compared
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    if not words:
        parser.print_help()
        return 2
    if words[0] in commands:
        # Not by the parser of all commands: only an intermixed parse takes `train quickstart --fresh run.seed=1`.
        parsed = commands[words[0]].parse_intermixed_args(words[1:])
    else:
        if not words[0].startswith("-"):
            parser.error(f"unknown command {words[0]!r}{nearest(words[0], commands)}; commands: {', '.join(commands)}")
        parsed = parser.parse_args(words)
    try:
        parsed.command(parsed)
        sys.stdout.flush()
    except UserError as error:
        print(f"qerl {words[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\n{stop}" if str(stop) else "\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`qerl generate ... | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file or folder that cannot be made, read or written: no permission, a full disk
        if error.filename is None:
            raise
        print(f"qerl {words[0]}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _train(arguments: argparse.Namespace) -> None:
    from qerl_jax.config import load_config

    configs = [word for word in arguments.words if "=" not in word]
    if len(configs) > 1:
        raise UserError(f"found {' and '.join(configs)}; expected one config, then section.option=value overrides")
    overrides = [word for word in arguments.words if "=" in word]
    config = load_config(configs[0] if configs else "quickstart", overrides)
    if arguments.profile is not None and Path(arguments.profile).is_file():
        raise UserError(
            f"--profile {arguments.profile} is a file; expected a folder, which is made where there is none"
        )

    from qerl_jax.rl.trainer import train

    train(config, fresh=arguments.fresh, profile=arguments.profile)


def _generate(arguments: argparse.Namespace) -> None:
    options, length = _generation_options(arguments)
    if arguments.greedy and arguments.n > 1:
        raise UserError(f"--n is {arguments.n}; allowed with --greedy: 1, since all completions would be the same")
    if arguments.n < 1:
        raise UserError(f"--n is {arguments.n}; allowed: a whole number >= 1")
    prompts: list[Any] = [arguments.prompt]
    if arguments.prompts is not None:
        from qerl_jax.data.dataset import load_dataset

        rows = load_dataset(arguments.prompts, split="eval")
        prompts = [rows[index]["prompt"] for index in range(len(rows))]

    from qerl_jax.rollout.texts import generate_texts

    answers = generate_texts(
        arguments.model_or_run,
        prompts,
        n=arguments.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_completion_length=length,
        adapter=arguments.adapter,
        seed=arguments.seed,
        greedy=arguments.greedy,
    )
    if arguments.prompts is not None:
        for prompt, texts in zip(prompts, answers, strict=True):
            for text in texts:
                print(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False))
            sys.stdout.flush()  # answers come in batches; a pipe shall see each as it ends
    else:
        for number, text in enumerate(next(iter(answers)), start=1):
            if arguments.n > 1:
                print(f"--- {number} of {arguments.n}")
            print(text)


def _generation_options(arguments: argparse.Namespace) -> tuple["GenerationOptions", int | None]:
    """The sampling options given, over those of the run (where it is one), over the defaults; and the completion's
    length, None where neither the arguments nor a run say it."""
    import dataclasses

    import pydantic

    from qerl_jax.config import GenerationOptions, load_config
    from qerl_jax.config_errors import render_validation_error

    names = ("temperature", "top_p", "top_k", "min_p", "max_completion_length")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    sampling = [name for name in given if name != "max_completion_length"]
    if arguments.greedy and sampling:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sampling)
        raise UserError(f"{flags} has no effect with --greedy; leave one of them out")
    saved = Path(arguments.model_or_run) / "config.yaml"
    start = load_config(str(saved)).generation if saved.is_file() else GenerationOptions()
    try:
        options = dataclasses.replace(start, **given)
    except pydantic.ValidationError as error:
        raise UserError(render_validation_error(error, GenerationOptions, {})) from None
    known = saved.is_file() or "max_completion_length" in given
    return options, options.max_completion_length if known else None


def _evaluate(arguments: argparse.Namespace) -> None:
    folder = _run_folder(arguments.run, "config.yaml")

    from qerl_jax.evaluation import evaluate_run

    for name, value in evaluate_run(folder, arguments.seed).items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


def _plot(arguments: argparse.Namespace) -> None:
    folders = [_run_folder(run, "metrics.jsonl") for run in arguments.runs]
    default = folders[0] / "plots" if len(folders) == 1 else Path("plots")

    from qerl_jax.plots import plot_runs

    for path in plot_runs(folders, Path(arguments.output) if arguments.output else default):
        print(path)


def _run_folder(name: str, file: str) -> Path:
    """The folder of a run, which must hold `file`."""
    folder = Path(name)
    if not folder.is_dir():
        beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
        hint = nearest(folder.name, [path.name for path in beside if path.is_dir()])
        raise UserError(f"{name}: no such run folder{hint}; expected the folder that `qerl train` made")
    if not (folder / file).is_file():
        raise UserError(f"{name}: holds no {file}; expected the folder that `qerl train` made")
    return folder


def _version() -> str:
    try:
        return f"qerl-jax {importlib.metadata.version('qerl-jax')}"
    except importlib.metadata.PackageNotFoundError:
        return "qerl-jax (run from a checkout, not installed)"


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("qerl", description=_DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=_version())
    made = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = made.add_parser(
        "train", help="train a policy", description=_TRAIN, epilog=_TRAIN_EXAMPLES, formatter_class=raw
    )
    train.add_argument(
        "words", nargs="*", metavar="CONFIG | section.option=value", help="the config, then options to set otherwise"
    )
    train.add_argument("--fresh", action="store_true", help="start over in a new run folder beside the existing one")
    train.add_argument("--profile", metavar="DIR", help="write a JAX profiler trace of a few steps to DIR")
    train.set_defaults(command=_train)

    generate = made.add_parser(
        "generate", help="complete prompts", description=_GENERATE, epilog=_GENERATE_EXAMPLES, formatter_class=raw
    )
    generate.add_argument("model_or_run", metavar="MODEL_OR_RUN", help="a model's folder or hub name, or a run folder")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="one prompt")
    prompt.add_argument("--prompts", metavar="FILE.jsonl", help="many: rows with a `prompt` (text or messages)")
    generate.add_argument("--n", type=int, default=1, metavar="N", help="completions of each prompt (default: 1)")
    generate.add_argument("--temperature", type=float, metavar="X", help="divides the logits")
    generate.add_argument("--top-p", type=float, metavar="X", help="sample from the most likely tokens that sum to X")
    generate.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens; 0: all")
    generate.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the most likely one")
    generate.add_argument(
        "--max-completion-length", type=int, metavar="N", help="most tokens of a completion (default of a model: 256)"
    )
    generate.add_argument("--adapter", metavar="DIR", help="a PEFT folder to apply to the model")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    generate.add_argument("--greedy", action="store_true", help="take the most likely token each time")
    generate.set_defaults(command=_generate)

    evaluate = made.add_parser(
        "evaluate", help="measure a run", description=_EVALUATE, epilog=_EVALUATE_EXAMPLES, formatter_class=raw
    )
    evaluate.add_argument("run", metavar="RUN", help="the run folder")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N", help="chooses problems and samples (default: 0)")
    evaluate.set_defaults(command=_evaluate)

    plot = made.add_parser("plot", help="draw runs", description=_PLOT, epilog=_PLOT_EXAMPLES, formatter_class=raw)
    plot.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    plot.add_argument("--output", metavar="DIR", help="where the pictures go (default: RUN/plots; several runs: plots)")
    plot.set_defaults(command=_plot)
    return parser, made.choices


if __name__ == "__main__":
    sys.exit(main())
