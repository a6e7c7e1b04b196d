"""All reward functions of a run as one object: scores of every function and their weighted sum."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from qerl_jax.config import RewardOptions
from qerl_jax.errors import UserError, beginning
from qerl_jax.rewards.calling import LARGEST, call
from qerl_jax.rewards.functions import RewardFunction, with_parameters
from qerl_jax.rewards.loading import parse_name, titles
from qerl_jax.rewards.pool import Worker

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of a batch of B completions.

    Attributes:
      total: float32 [B], the weighted sum over the functions that apply.
      each: by function name, float32 [B], NaN where the function returned None.
    """

    total: np.ndarray
    each: dict[str, np.ndarray]

    @property
    def means(self) -> dict[str, float]:
        """Mean of every function over the rows where it applies; a function that applies nowhere is left out."""
        return {
            name: float(np.nanmean(values, dtype=np.float64))
            for name, values in self.each.items()
            if not np.isnan(values).all()
        }

    @property
    def stds(self) -> dict[str, float]:
        """Standard deviation, by n - 1, of every function that applies to two rows or more."""
        applied = {name: values[~np.isnan(values)] for name, values in self.each.items()}
        return {n: float(np.std(scores, dtype=np.float64, ddof=1)) for n, scores in applied.items() if len(scores) > 1}

    def row(self, index: int) -> dict[str, float | None]:
        """`reward` and `rewards/{name}` of one completion."""
        scores = {name: float(values[index]) for name, values in self.each.items()}
        return {"reward": float(self.total[index])} | {
            f"rewards/{name}": None if np.isnan(score) else score for name, score in scores.items()
        }


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of several batches, by the same functions, as those of one."""
    each = {name: np.concatenate([part.each[name] for part in parts]) for name in parts[0].each}
    return Scores(np.concatenate([part.total for part in parts]), each)


def combine(
    scores: dict[str, list[float | None]],
    weights: Sequence[float],
    named: Callable[[int], str] = "row {} (counted from 0)".format,
) -> Scores:
    """The weighted sum over functions, a function that returned None left out of that row's sum. `named` says in a
    message which row it is about.

    Raises:
      UserError: no function applies to a row, of those whose weight is not 0 if there are any, or a row's sum is out of
        range.
    """
    each = {
        name: np.asarray([np.nan if value is None else value for value in values], np.float32)
        for name, values in scores.items()
    }
    stacked = np.stack(list(each.values()))
    counted = [i for i, weight in enumerate(weights) if weight] or range(len(weights))
    nowhere = np.flatnonzero(np.isnan(stacked[counted]).all(axis=0))
    if nowhere.size:
        names = ", ".join(list(each)[i] for i in counted)
        which = "every function" if len(counted) == len(each) else "every function whose weight is not 0"
        raise UserError(f"{named(nowhere[0])} has no reward: {which} ({names}) returned None; at least one must apply")
    exact = np.nansum(stacked * np.asarray(weights, np.float64)[:, None], axis=0)  # in float32 a weight may be infinite
    beyond = np.flatnonzero(~(np.abs(exact) <= LARGEST))
    if beyond.size:
        row = beyond[0]
        parts = ", ".join(f"{name} {values[row]:g}" for name, values in each.items())
        raise UserError(
            f"{named(row)} has the reward {exact[row]:g}, from {parts} times the weights {list(weights)}; allowed: "
            f"-{LARGEST:g} to {LARGEST:g}"
        )
    return Scores(exact.astype(np.float32), each)


class RewardFunctions:
    """The configured functions; a context manager, since user functions hold processes.

    with RewardFunctions(config.reward) as rewards:
        scores = rewards(examples, texts, ids, num_generations)
    """

    def __init__(self, options: RewardOptions, max_completion_length: int | None = None) -> None:
        """Starts the workers and waits until the user's modules are imported.

        Args:
          options: of a `Config`: the functions, and what built-in ones take from it.
          max_completion_length: generation.max_completion_length, which some of them take too.

        Raises:
          UserError: an unknown function, or one that cannot be imported.
        """
        names = [parse_name(entry.function) for entry in options.functions]
        self._weights = [entry.weight for entry in options.functions]
        self._names = dict(zip(titles([name.spec for name in names]), names, strict=True))
        parameters = {
            "max_completion_length": max_completion_length,
            "soft_punish_cache": options.soft_punish_cache,
        }
        self._builtin: dict[str, RewardFunction] = {
            title: with_parameters(name.spec, parameters) for title, name in self._names.items() if name.builtin
        }
        self._workers: dict[str, Worker] = {}
        try:
            for title, name in self._names.items():
                if not name.builtin:
                    self._workers[title] = Worker(name, options.timeout)
            for worker in self._workers.values():
                worker.ready()
        except BaseException:
            self.close()
            raise

    @property
    def sources(self) -> dict[str, str]:
        """Digest of the file of every function of the user's, by the name that metrics show."""
        return {title: worker.source for title, worker in self._workers.items() if worker.source is not None}

    def __call__(
        self, examples: Sequence[dict[str, Any]], texts: list[str], ids: list[list[int]], num_generations: int
    ) -> Scores:
        """Scores completions, prompt-major: rows n * G .. n * G + G - 1 belong to example n.

        Args:
          examples: rows of the data set, with `prompt` and further columns [N].
          texts: decoded completions [N * G], without special tokens.
          ids: their token ids, the EOS included.
          num_generations: G.

        Raises:
          UserError: a function failed (see `qerl_jax.rewards.calling` and `qerl_jax.rewards.pool`), or none applies.
        """
        batch = _batch([example for example in examples for _ in range(num_generations)], texts, ids)
        scores: dict[str, list[float | None]] = {}
        try:
            for worker in self._workers.values():
                worker.submit(*batch)
            for title, function in self._builtin.items():
                scores[title] = call(self._names[title].spec, function, *batch)
            for title, worker in self._workers.items():
                scores[title] = worker.result()
        except BaseException:
            for worker in self._workers.values():
                worker.cancel()  # its answer would be taken for that of the next call
            raise

        def named(row: int) -> str:
            return f"a completion of the prompt that begins {beginning(examples[row // num_generations]['prompt'])}"

        return combine({title: scores[title] for title in self._names}, self._weights, named)

    def check(self, examples: Sequence[dict[str, Any]], name: str) -> None:
        """Refuses a data set that the functions cannot score, before anything is sampled: the columns by the
        functions' signatures, and every row by the functions that come with this package. Warns of one of those that
        applies to no row.

        Raises:
          UserError: naming the data set `name`, and the row (from 0) where it is one.
        """
        columns = _columns(examples)
        # Not the prompts, which these functions do not read: one call, with one deadline, is for the whole data set.
        texts: list[Any] = [""] * len(examples)
        ids: list[list[int]] = [[] for _ in examples]
        scores: dict[str, list[float | None]] = {}
        try:
            for title, function in self._builtin.items():
                scores[title] = call(self._names[title].spec, function, texts, texts, ids, columns)
            for title, worker in self._workers.items():
                taken = worker.check(list(columns))
                if self._names[title].shipped:
                    worker.submit(texts, texts, ids, {name: columns[name] for name in taken})
                    scores[title] = worker.result()
            if len(scores) == len(self._names):
                combine(scores, self._weights)  # whether a function applies to each row depends on the row alone
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        for title, given in scores.items():
            if given and all(score is None for score in given):
                _log.warning(
                    "%s: reward function %r gave no reward to any of the %d rows, and changes nothing there; see what "
                    "it reads of a row (its columns may be null), or take it out of reward.functions",
                    name,
                    title,
                    len(given),
                )

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers.values():
            worker.close()

    def __enter__(self) -> "RewardFunctions":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _batch(
    examples: Sequence[dict[str, Any]], texts: list[str], ids: list[list[int]]
) -> tuple[list[Any], list[Any], list[list[int]], dict[str, list[Any]]]:
    """Prompts, completions, their ids and columns, as reward functions take them, of one example for each text."""
    prompts = [example["prompt"] for example in examples]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return prompts, completions, ids, _columns(examples)


def _columns(examples: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns besides the prompt by name, None where an example has no such."""
    names = dict.fromkeys(name for example in examples for name in example if name != "prompt")
    return {name: [example.get(name) for example in examples] for name in names}
