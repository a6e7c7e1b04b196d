"""`qerl generate`: completes prompts with a model or with the result of a run."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_jax.commands.command import add_command
from qerl_jax.errors import UserError

if TYPE_CHECKING:
    from qerl_jax.commands.command import Commands
    from qerl_jax.config import GenerationOptions

_DESCRIPTION = """\
Completes prompts with a model (a Hugging Face folder or hub name) or with the result of a run. Noise is never added.
One --prompt prints its completions as text; --prompts prints one JSON row per completion. Sampling options not given
are the ones the run was trained with, or the defaults.
"""
_EXAMPLES = """\
examples:
  qerl generate runs/quickstart --prompt "Tom has 3 apples and buys 4. How many now?" --greedy
  qerl generate Qwen/Qwen2.5-0.5B-Instruct --adapter my/adapter --prompts questions.jsonl --n 4 --temperature 0.6
"""


def add(commands: "Commands") -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "generate", "complete prompts", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model_or_run", metavar="MODEL_OR_RUN", help="a model's folder or hub name, or a run folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="one prompt")
    prompt.add_argument("--prompts", metavar="FILE.jsonl", help="many: rows with a `prompt` (text or messages)")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions of each prompt (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="X", help="divides the logits")
    parser.add_argument("--top-p", type=float, metavar="X", help="sample from the most likely tokens that sum to X")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens; 0: all")
    parser.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the most likely one")
    parser.add_argument(
        "--max-completion-length", type=int, metavar="N", help="most tokens of a completion (default of a model: 256)"
    )
    parser.add_argument("--adapter", metavar="DIR", help="a PEFT folder to apply to the model")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    parser.add_argument("--greedy", action="store_true", help="take the most likely token each time")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the completions."""
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
