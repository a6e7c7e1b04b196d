"""The quickstart's reward functions with scores permuted among completions: the control of `benchmarks.quickstart`.

The mean over a batch is unchanged, so accuracies logged and measured stay true; only what a completion is told about
itself is taken from another one. The permutation is a function of the batch, so runs can be repeated.
"""

import hashlib
import random
from typing import Any

from qerl_jax.rewards import functions


def _permuted(scores: list[float | None], ids: list[list[int]]) -> list[float | None]:
    seed = hashlib.sha256(repr(ids).encode()).hexdigest()
    order = list(range(len(scores)))
    random.Random(seed).shuffle(order)
    return [scores[i] for i in order]


def accuracy(prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[Any]) -> list[Any]:
    return _permuted(functions.accuracy(prompts, completions, completion_ids, answer), completion_ids)


def format(prompts: list[Any], completions: list[Any], completion_ids: list[Any]) -> list[Any]:
    return _permuted(functions.format(prompts, completions, completion_ids), completion_ids)
