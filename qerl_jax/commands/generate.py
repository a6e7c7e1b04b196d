"""`qerl generate`: completes prompts with a model or with the result of a run."""

import argparse
import contextlib
import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from qerl_jax.commands.command import (
    Commands,
    add_command,
    add_template_kwargs,
    check_n,
    check_seed,
    take_device,
    template_kwargs,
)
from qerl_jax.data import ROW_FILES
from qerl_jax.durable import locked, not_writable, with_home, writing
from qerl_jax.errors import UserError, on_terminal
from qerl_jax.metrics import json_line
from qerl_jax.option_names import FORMATS
from qerl_jax.run_files import CONFIG, means_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qerl_jax.config import GenerationOptions
    from qerl_jax.generation import Answer

_DESCRIPTION = """\
Completes prompts with a model (a Hugging Face folder or hub name) or with the result of a run, before its end with its
newest checkpoint. Noise is never added. One text is answered as text, as it grows; a file by one JSON row per
completion, as they end: `row` and `sample` say which it is, and a prompt that cannot be answered, or a line that cannot
be read, gets a row with `error`. Sampling options not given are the ones the run was trained with, or the defaults.
"""
_EXAMPLES = """\
examples:
  qerl generate runs/quickstart --greedy --prompt \\
    "Vic has 5 bags of 13 bars. He puts 15 into each and drops 77. How many bars are left?"
  qerl generate Qwen/Qwen2.5-0.5B-Instruct --adapter runs/my/adapter --weight-format nvfp4 --prompts questions.jsonl
  qerl generate my/model --prompts questions.jsonl --output answers.jsonl --stop $'\\n\\n' --logprobs

exit codes: 0 done; 2 a mistake in the arguments or files, or too little memory; 3 some prompts of a file could not be
answered
"""
_SOME_FAILED = 3
_FILE_NAME = re.compile(r"\S*/\S*|\S*\.[A-Za-z]\w*")  # one word, with a folder or a suffix


def add(commands: Commands) -> None:
    """Adds the command's parser."""
    parser = add_command(commands, "generate", "complete prompts", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("model_or_run", metavar="MODEL_OR_RUN", help="a model's folder or hub name, or a run folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="one prompt, as it stands: no chat template")
    prompt.add_argument(
        "--prompts",
        metavar="FILE.jsonl|TEXT",
        help="many: rows with a `prompt` (text, or messages, which pass the chat template); or one text that does not "
        "look like the name of a file",
    )
    add_template_kwargs(parser, " (default of a run: its own)")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions of each prompt (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="X", help="divides the logits")
    parser.add_argument("--top-p", type=float, metavar="X", help="sample from the most likely tokens that sum to X")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens; 0: all")
    parser.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the most likely one")
    parser.add_argument(
        "--max-completion-length",
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens of a completion (default of a model: 256)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text, or at this special token, as at an EOS; may be repeated",
    )
    parser.add_argument(
        "--output",
        type=os.path.expanduser,
        metavar="FILE",
        help="write JSON rows to this file, not the terminal; an existing one is replaced when the first row is there",
    )
    parser.add_argument("--logprobs", action="store_true", help="add token ids and log-probabilities to the JSON rows")
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="a PEFT folder to apply to the model; where a run has trained it on weights of another format than the "
        "model's, a warning names --weight-format's value",
    )
    parser.add_argument(
        "--weight-format",
        metavar="NAME",
        help=f"of a model's linear weights: {', '.join(FORMATS)} (default: as they are stored); a run has its own",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the sampling (default: 0)")
    parser.add_argument("--greedy", action="store_true", help="take the most likely token each time")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the completions, and how fast they came; returns the exit code."""
    seed = 0 if arguments.seed is None else arguments.seed
    check_seed(seed)
    options, length = _generation_options(arguments)
    if arguments.greedy and arguments.n > 1:
        raise UserError(f"--n is {arguments.n}; allowed with --greedy: 1, since all completions would be the same")
    check_n(arguments.n)
    if "" in arguments.stop:
        raise UserError("--stop is empty; expected a text")
    if arguments.output is not None:
        _check_output(arguments.output, arguments.prompts)
    kwargs = template_kwargs(arguments)
    prompts, from_file = _prompts(arguments)
    as_rows = from_file or arguments.output is not None
    if arguments.logprobs and not as_rows:
        raise UserError("--logprobs has no effect on text; add --output FILE, which gets JSON rows")

    take_device()
    from qerl_jax.generation import generate_texts

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
        weight_format=arguments.weight_format,
        seed=seed,
        greedy=arguments.greedy,
        stop=arguments.stop,
        stream=not as_rows and arguments.n == 1,
        chat_template_kwargs=kwargs,
    )
    began, counts = time.perf_counter(), {"tokens": 0, "answers": 0}
    refused: set[int] = set()

    def counted() -> "Iterator[Answer]":
        for answer in answers:
            if answer.error is not None and not from_file:
                raise UserError(answer.error)
            if answer.finish_reason is not None:
                counts["tokens"] += len(answer.ids)
                counts["answers"] += not answer.error
            if answer.error is not None:
                refused.add(answer.prompt)
            yield answer

    if not as_rows:
        _print_texts(counted(), arguments.n)
    elif arguments.output is None:
        _write_rows(counted(), prompts, arguments.logprobs, sys.stdout)
    else:
        _write_file(counted(), prompts, arguments.logprobs, arguments.output)
    seconds = time.perf_counter() - began
    failed = f"; {len(refused)} of {len(prompts)} prompts not answered" if refused else ""
    print(
        f"{counts['answers']} completions, {counts['tokens']} tokens in {seconds:.1f} s with loading and compilation: "
        f"{counts['tokens'] / seconds:.0f} tokens/s{failed}",
        file=sys.stderr,
    )
    return _SOME_FAILED if refused else 0


def _prompts(arguments: argparse.Namespace) -> tuple[list[Any], bool]:
    """The prompts, and whether they come from a file."""
    if arguments.prompts is None:
        return [arguments.prompt], False
    if arguments.prompts == "-":
        raise UserError(
            f"--prompts -: standard input is not read; expected a {' or '.join(ROW_FILES)} file with a `prompt` in "
            "each row, or a text (--prompt takes any text)"
        )
    if Path(arguments.prompts).suffix not in ROW_FILES:
        if os.path.exists(arguments.prompts) or _FILE_NAME.fullmatch(arguments.prompts):
            raise UserError(
                f"--prompts {arguments.prompts}: looks like the name of a file; expected a {' or '.join(ROW_FILES)} "
                "file with a `prompt` in each row, or a text (--prompt takes any text)"
            )
        return [arguments.prompts], False
    from qerl_jax.data.dataset import load_prompts

    return load_prompts(arguments.prompts), True


def _check_output(name: str, prompts: str | None) -> None:
    """Refuses a name that no file can have or that may not be written, and the file of the prompts, without touching
    one that is there."""
    if name == "-":
        raise UserError("--output -: expected the name of a file; /dev/stdout is standard output, ./- a file called so")
    file = Path(os.path.realpath(name))  # a link's target, which need not exist
    of_prompts = os.path.expanduser(prompts or "")
    if file.exists() and os.path.exists(of_prompts) and file.samefile(of_prompts):
        raise UserError(f"--output {name} is the file of the prompts, which would be lost; choose another name")
    if file.is_dir():
        raise UserError(f"--output {name} is a folder; expected the name of a file")
    for folder in (file.parent, Path(name).parent):  # the second fails for `gone/../rows.jsonl`
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--output {name}: {folder} is a file; choose another name")
        if not folder.is_dir():
            raise UserError(f"--output {name}: there is no folder {folder}; make it, or choose another name")
    # /dev/stdout may lead to a pipe, which has no path of its own.
    here = Path(name) if Path(name).exists() and not file.exists() else file
    if (written := not_writable(here)) is not None:
        raise UserError(
            f"--output {name}: {written} may not be written; change its permissions, or choose another name"
        )


def _write_file(answers: "Iterator[Answer]", prompts: list[Any], logprobs: bool, name: str) -> None:
    """Writes the rows as they come. A file of that name is replaced when the first one is there, not before: until then
    the model or an argument may prove wrong."""
    with _alone_with(name):
        first = list(itertools.islice(answers, 1))
        with writing(name), open(name, "w", encoding="utf-8") as file:
            _write_rows(itertools.chain(first, answers), prompts, logprobs, file)


def _alone_with(name: str) -> contextlib.AbstractContextManager[None]:
    """Refuses a file that another process is writing, where a lock can lie beside it; a pipe has none."""
    file = Path(os.path.realpath(name))
    if (os.path.exists(name) and not file.is_file()) or not os.access(file.parent, os.W_OK):
        return contextlib.nullcontext()
    refusal = f"--output {name}: another process is writing it; wait for it or choose another name"
    return locked(file.with_name(f".lock-{file.name}"), refusal)


def _write_rows(answers: "Iterator[Answer]", prompts: list[Any], logprobs: bool, file: TextIO) -> None:
    for answer in answers:
        prompt = prompts[answer.prompt]  # or why its line cannot be read
        row: dict[str, Any] = {"row": answer.prompt, "prompt": None if isinstance(prompt, UserError) else prompt}
        if answer.error is not None:
            row["error"] = answer.error
        else:
            row |= {"sample": answer.sample, "completion": answer.text, "finish_reason": answer.finish_reason}
            if logprobs:
                row |= {"ids": answer.ids, "logprobs": [float(f"{logp:.6g}") for logp in answer.logps]}
        print(json_line(row), end="", file=file, flush=True)  # a pipe shall see each as it ends


def _print_texts(answers: "Iterator[Answer]", n: int) -> None:
    """One text as it grows; several in their order, each as soon as those before it are there. On a terminal control
    characters are shown as escapes, elsewhere they are written as they are."""
    written = on_terminal if sys.stdout.isatty() else str
    shown, ended, number = "", {}, 0
    for answer in answers:
        if n == 1:
            print(written(answer.text[len(shown) :]), end="" if answer.finish_reason is None else "\n", flush=True)
            shown = answer.text
            continue
        ended[answer.sample] = answer.text
        while number in ended:
            print(f"--- {number + 1} of {n}\n{written(ended[number])}", flush=True)
            number += 1


def _generation_options(arguments: argparse.Namespace) -> tuple["GenerationOptions", int | None]:
    """The sampling options given, over those of the run (where it is one), over the defaults; and the completion's
    length, None where neither the arguments nor a run say it."""
    import dataclasses
    from typing import get_type_hints

    import pydantic

    from qerl_jax.config import GenerationOptions
    from qerl_jax.config_errors import allowed
    from qerl_jax.config_files import load_config

    sampling = ("temperature", "top_p", "top_k", "min_p")
    unused = [name for name in (*sampling, "seed") if getattr(arguments, name) is not None]
    if arguments.greedy and unused:
        flags = ", ".join(map(_flag, unused))
        raise UserError(f"{flags} has no effect with --greedy; leave one of them out")
    names = (*sampling, "max_completion_length")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    folder = with_home(arguments.model_or_run)
    is_run = means_run(folder)
    start = load_config(str(folder / CONFIG)).generation if is_run else GenerationOptions()
    try:
        options = dataclasses.replace(start, **given)
    except pydantic.ValidationError as error:
        hints = get_type_hints(GenerationOptions, include_extras=True)
        wrong = dict.fromkeys(str(finding["loc"][0]) for finding in error.errors())
        lines = {name: f"{_flag(name)} is {given[name]}; allowed: {allowed(hints[name])}" for name in wrong}
        if given.get("temperature") == 0:
            lines["temperature"] += "; use --greedy for the most likely token each time"
        raise UserError("\n".join(lines.values())) from None
    known = is_run or "max_completion_length" in given
    return options, options.max_completion_length if known else None


def _flag(name: str) -> str:
    """What the command line calls an option, by each of its names."""
    also = " (or --max-new-tokens)" if name == "max_completion_length" else ""
    return f"--{name.replace('_', '-')}{also}"
