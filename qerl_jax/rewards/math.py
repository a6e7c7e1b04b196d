"""Answers that are mathematics and not only numbers, compared by math-verify: `qerl_jax.rewards.math:accuracy`.

    reward:
      functions: [{function: "qerl_jax.rewards.math:accuracy"}]

Needs the package math-verify (`pip install .[math]`). Like a user's function it runs in a program of its own, there in
the main thread: what sympy does not finish is ended by a signal, which no other thread gets, and `reward.timeout`
bounds the whole call.
"""

import contextlib
import functools
import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from qerl_jax.errors import UserError
from qerl_jax.rewards.functions import MARKER, completion_text, number_value

try:
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
except ModuleNotFoundError as error:
    if error.name != "math_verify":  # it is there, and lacks something itself
        raise
    raise UserError("qerl_jax.rewards.math needs the package math-verify: pip install math-verify") from error

# Of what took too long it would log the whole text, a completion's: lines without end, and what a terminal obeys. It
# also warns where its own limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOX = "\\boxed{"
# Boxes alone: without them the first number of any text would be an answer.
_BOXES = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)
_SECONDS = 2  # of a processor, for one text or one comparison
# 12\,345: LaTeX's spaces between thousands, which math-verify takes for a sum or a product.
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\s)+\d{3})+(?![\d/])")
_SPACES = re.compile(r"\\[,;:! ]|~|\s")


def accuracy(
    prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[Any]
) -> list[float | None]:
    """1 where the completion's last \\boxed{} holds what is mathematically equal to column `answer`, else 0.

    `answer` is LaTeX or a number: alone, between $ signs, in a text's last \\boxed{}, or behind the last `####` of one.
    Where it is None the function does not apply. Two plain numbers (`1,200`, `1\\,200`, `-3/4`, `1e-5`) are compared
    exactly, other ones by math-verify, decimals to 6 places; to it 50\\% is 0.5 and 50. A full stop at the end counts
    for nothing. What it cannot read, or not within 2 seconds of a processor, equals the same text only. A call with
    many different ones of these needs a longer reward.timeout.

    Raises:
      UserError: an entry of `answer` that is neither a text nor a finite number, or is empty; or another thread than
        the program's main one.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError("qerl_jax.rewards.math:accuracy runs in a program's main thread alone, where signals arrive")
    scores: list[float | None] = []
    for row, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        if expected is None:
            scores.append(None)
            continue
        wanted, found = _plain(_expected(expected, row)), _last_box(completion_text(completion))
        found = None if found is None else _plain(found)
        scores.append(float(found is not None and (found == wanted or _equal(wanted, found))))
    return scores


def _plain(latex: str) -> str:
    """Without spaces between thousands, and without the full stop of a sentence."""
    return _THOUSANDS.sub(lambda found: _SPACES.sub("", found.group()), latex).rstrip(".").rstrip()


def _expected(answer: Any, row: int) -> str:
    """The LaTeX of an entry of column `answer`."""
    found: str | None = None
    if isinstance(answer, str):
        found = _last_box(answer) if _BOX in answer else answer.rpartition(MARKER)[2].strip().strip("$").strip()
    elif isinstance(answer, int | float) and not isinstance(answer, bool) and abs(answer) < float("inf"):
        found = str(answer)
    if not found:
        raise UserError(
            f"reward accuracy: column answer of row {row} (counted from 0) is {answer!r}; expected LaTeX or a number, "
            f"or a text with it in {_BOX}}} or behind '{MARKER}'"
        )
    return found


def _last_box(text: str) -> str | None:
    """What stands in the last box, None where there is none, or where it is not closed."""
    _, box, rest = text.rpartition(_BOX)
    depth = 1
    for i, letter in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:i].strip()
    return None


@functools.lru_cache(maxsize=4096)  # completions of a group often agree, and a timeout is not to be waited for again
def _equal(wanted: str, found: str) -> bool:
    numbers = number_value(wanted), number_value(found)
    if None not in numbers:
        return numbers[0] == numbers[1]
    both, equal = (_parsed(wanted), _parsed(found)), False
    with _limited():
        equal = all(both) and verify(*both, timeout_seconds=None)
    return equal


@functools.lru_cache(maxsize=4096)
def _parsed(latex: str) -> Sequence[Any]:
    """What math-verify makes of it; nothing where it cannot read it."""
    if (
        number_value(latex) is not None and "e" in latex.lower() and "/" not in latex
    ):  # 1e-5, which LaTeX reads as e - 5
        latex = format(Decimal(latex.replace(",", "").replace("\u2212", "-")), "f")
    found: Sequence[Any] = ()
    with _limited():
        found = parse(f"{_BOX}{latex}}}", _BOXES, extraction_mode="first_match", parsing_timeout=None)
    return found


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes a processor longer than `_SECONDS`. math-verify's own limits are a clock's: by them an answer
    that is right was scored 0 where other programs had the processor."""

    def end(*_: Any) -> None:
        raise TimeoutException  # which math-verify catches, as its own

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    except TimeoutException:  # it came while that returned
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
