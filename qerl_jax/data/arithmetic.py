"""Synthetic word problems: hard to answer in one pass, easy to answer step by step.

A story changes a count three times; every operand has two digits and every running total lies in 0..299:

    prompt   Ann has 37 pens. She buys 58, gives away 24 and finds 19. How many pens are left?
    worked    37+58=95 95-24=71 71+19=90 #### 90
    direct    #### 90

The three splits are disjoint in their operands whatever the order and the signs: the split is a hash of the *sorted*
operands. A problem is a pure function of (seed, split, index), by counter-based hashing (splitmix64) and no generator
state, so neither the batch layout nor the numpy version moves it.

Texts are sequences of pieces looked up in tables of strings, so that a tokenizer can turn the same tables into ids and
write millions of problems as arrays (`qerl_jax.policies.train_quickstart`).

Dimension letters: N problems.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qerl_jax.data.hashing import draw, fold

SPLITS = ("pretrain", "train", "eval")
OPERANDS = 4
SMALLEST, LARGEST = 10, 99
LARGEST_TOTAL = 299

_WOMEN = ("Ann", "Eva", "Ida", "Kim", "Lea", "Mia", "Sue", "Zoe")
_MEN = ("Ben", "Dan", "Leo", "Max", "Ned", "Sam", "Tom", "Vic")
NAMES = _WOMEN + _MEN
_SUBJECTS = (" She",) * len(_WOMEN) + (" He",) * len(_MEN)
_PRONOUNS = (" she",) * len(_WOMEN) + (" he",) * len(_MEN)
THINGS = (
    " balls", " bars", " beads", " books", " cans", " caps", " cards", " coins", " cups", " keys", " pens", " pins",
    " rings", " shells",
)  # fmt: skip
GAINS = (" buys", " finds", " gets", " wins", " makes")
LOSSES = (" gives away", " loses", " sells", " drops", " lends")
_VERBS = GAINS + LOSSES
_OPENINGS = (" has", " starts with", " owns")
_JOINTS = (",", ". Then she", ". Later she")
_JOINTS_MEN = (",", ". Then he", ". Later he")
_SECOND_JOINTS = (" and", " and then")
_QUESTIONS = (" are left?", " now?", " in the end?", " in total?")
_NUMBERS = tuple(f" {value}" for value in range(LARGEST_TOTAL + 1))
_BARE_NUMBERS = tuple(str(value) for value in range(LARGEST_TOTAL + 1))
_SIGNS = ("-", "+")
MARKER = " ####"

Piece = tuple[tuple[str, ...], np.ndarray]


class Problems(NamedTuple):
    """Operands [N, 4] in 10..99, signs [N, 3] of +1 or -1, running totals [N, 4] and draws for the wording [N, 9]."""

    operands: np.ndarray
    signs: np.ndarray
    totals: np.ndarray
    wording: np.ndarray

    @property
    def answers(self) -> np.ndarray:
        """The final totals [N]."""
        return self.totals[:, -1]


def split_of(operands: np.ndarray | Sequence[int]) -> np.ndarray:
    """Index into `SPLITS` [N] of operand rows [N, 4]: 3/4 pretrain, 1/8 train, 1/8 eval, blind to order and signs."""
    rows = np.sort(np.atleast_2d(np.asarray(operands)), axis=1)
    eighth = fold(0x5EED, *rows.T) >> np.uint64(61)
    return np.where(eighth == 0, 2, np.where(eighth == 1, 1, 0))


def check_split(operands: np.ndarray | Sequence[int], split: str) -> None:
    """Raises AssertionError unless every operand row belongs to `split`, and so to no other one."""
    found = split_of(operands)
    wrong = np.flatnonzero(found != SPLITS.index(split))
    if wrong.size:
        row = np.atleast_2d(np.asarray(operands))[wrong[0]].tolist()
        actual = SPLITS[found[wrong[0]]]
        raise AssertionError(f"problem {wrong[0]} with operands {row} is of split {actual}, not {split}")


def generate(seed: int, split: str, indices: np.ndarray) -> Problems:
    """The problems number `indices` [N] of a split; entry i depends on (seed, split, indices[i]) alone.

    Candidates are drawn until one belongs to the split and keeps its running totals in 0..299.

    Raises:
      ValueError: for a split outside `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed are {list(SPLITS)}")
    wanted = SPLITS.index(split)
    keys = fold(seed, wanted, np.asarray(indices, np.int64).reshape(-1))
    operands = np.zeros((keys.size, OPERANDS), np.int64)
    signs = np.zeros((keys.size, OPERANDS - 1), np.int64)
    open_rows = np.arange(keys.size)
    attempt = 0
    while open_rows.size:
        key = fold(keys[open_rows], attempt)
        operands[open_rows] = SMALLEST + draw(key, range(OPERANDS), LARGEST - SMALLEST + 1)
        signs[open_rows] = 2 * draw(key, range(OPERANDS, 2 * OPERANDS - 1), 2) - 1
        totals = _totals(operands[open_rows], signs[open_rows])
        valid = ((totals >= 0) & (totals <= LARGEST_TOTAL)).all(axis=1)
        valid &= split_of(operands[open_rows]) == wanted
        open_rows = open_rows[~valid]
        attempt += 1
    wording = draw(fold(keys, -1), range(9), 1 << 16)
    return Problems(operands, signs, _totals(operands, signs), wording)


def _totals(operands: np.ndarray, signs: np.ndarray) -> np.ndarray:
    return np.cumsum(np.concatenate([operands[:, :1], operands[:, 1:] * signs], axis=1), axis=1)


def prompt_pieces(problems: Problems) -> list[Piece]:
    """The story as (table, row of the table for each problem) in reading order."""
    operands, signs, wording = problems.operands, problems.signs, problems.wording
    name, thing = wording[:, 0] % len(NAMES), wording[:, 1] % len(THINGS)
    gain, loss = wording[:, 2] % len(GAINS), wording[:, 3] % len(LOSSES)
    # Consecutive verbs of one sign differ, because the k-th change takes the k-th verb after a drawn first one.
    verbs = [
        np.where(signs[:, k] > 0, (gain + k) % len(GAINS), len(GAINS) + (loss + k) % len(LOSSES))
        for k in range(OPERANDS - 1)
    ]
    joint = wording[:, 4] % len(_JOINTS) + len(_JOINTS) * (name >= len(_WOMEN))
    zero = np.zeros_like(name)
    return [
        (NAMES, name),
        (_OPENINGS, wording[:, 5] % len(_OPENINGS)),
        (_NUMBERS, operands[:, 0]),
        (THINGS, thing),
        ((".",), zero),
        (_SUBJECTS, name),
        (_VERBS, verbs[0]),
        (_NUMBERS, operands[:, 1]),
        (_JOINTS + _JOINTS_MEN, joint),
        (_VERBS, verbs[1]),
        (_NUMBERS, operands[:, 2]),
        (_SECOND_JOINTS, wording[:, 6] % len(_SECOND_JOINTS)),
        (_VERBS, verbs[2]),
        (_NUMBERS, operands[:, 3]),
        ((".",), zero),
        ((" How many",), zero),
        (THINGS, thing),
        (_QUESTIONS, wording[:, 7] % len(_QUESTIONS)),
    ]


def direct_pieces(problems: Problems) -> list[Piece]:
    """` #### 90`."""
    return [((MARKER,), np.zeros_like(problems.answers)), (_NUMBERS, problems.answers)]


def worked_pieces(problems: Problems) -> list[Piece]:
    """` 37+58=95 95-24=71 71+19=90 #### 90`."""
    pieces: list[Piece] = []
    for k in range(OPERANDS - 1):
        pieces += [
            (_NUMBERS, problems.totals[:, k]),
            (_SIGNS, (problems.signs[:, k] + 1) // 2),
            (_BARE_NUMBERS, problems.operands[:, k + 1]),
            (("=",), np.zeros_like(problems.answers)),
            (_BARE_NUMBERS, problems.totals[:, k + 1]),
        ]
    return pieces + direct_pieces(problems)


def texts(pieces: list[Piece]) -> list[str]:
    """The strings that `pieces` spell, one for each problem."""
    columns = [np.asarray(table, object)[rows] for table, rows in pieces]
    return ["".join(parts) for parts in zip(*columns, strict=True)]


def vocabulary() -> list[str]:
    """Every string that the tables hold, numbers and signs included: what a tokenizer of these texts must cover."""
    tables = (
        NAMES, _OPENINGS, THINGS, _SUBJECTS, _VERBS, _JOINTS, _JOINTS_MEN, _SECOND_JOINTS, (" How many",), _QUESTIONS,
        _NUMBERS, _BARE_NUMBERS, _SIGNS, ("=", ".", MARKER),
    )  # fmt: skip
    return [text for table in tables for text in table]
