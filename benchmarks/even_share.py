"""A reward that random weights can earn: the share of even token ids. For `benchmarks.train_at_size`."""

from typing import Any


def even_share(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
