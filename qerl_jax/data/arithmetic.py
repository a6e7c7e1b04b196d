"""Synthetic word problems: hard to answer in one pass, easy to answer step by step.

A count changes twice, once by a number of packs. Packs are 2..9, all other operands have two digits, and every
intermediate result lies in 0..299:

    prompt   Ann has 37 pens. She buys 3 packs of 24 and loses 19. How many pens are left?
    worked    3*24=72 37+72=109 109-19=90 #### 90
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
# Start, packs, items in a pack, the other change.
_SMALLEST = np.asarray([10, 2, 10, 10])
_SPAN = np.asarray([90, 8, 90, 90], np.int64)
LARGEST_RESULT = 299

_WOMEN = ("Ann", "Eva", "Ida", "Kim", "Lea", "Mia", "Sue", "Zoe")
_MEN = ("Ben", "Dan", "Leo", "Max", "Ned", "Sam", "Tom", "Vic")
NAMES = _WOMEN + _MEN
_SUBJECTS = (" She",) * len(_WOMEN) + (" He",) * len(_MEN)
THINGS = (
    " balls", " bars", " beads", " beans", " books", " cans", " caps", " cards", " coins", " cups", " keys", " pens",
    " rings", " shells",
)  # fmt: skip
GAINS = (" buys", " finds", " gets", " wins", " makes")
LOSSES = (" gives away", " loses", " sells", " drops", " lends")
_OPENINGS = (" has", " starts with", " owns")
_JOINTS = (" and", " and then", ". Then she", ". Later she")
_JOINTS_MEN = (" and", " and then", ". Then he", ". Later he")
_QUESTIONS = (" are left?", " now?", " in the end?")
_NUMBERS = tuple(f" {value}" for value in range(LARGEST_RESULT + 1))
_BARE_NUMBERS = tuple(str(value) for value in range(LARGEST_RESULT + 1))
_NUMBERS_OR_NONE = (*_NUMBERS, "")
_PACKS_OF = ("", " packs of")
_SIGNS = ("-", "+")
MARKER = " ####"

Piece = tuple[tuple[str, ...], np.ndarray]


class Problems(NamedTuple):
    """N problems.

    Attributes:
      operands: [N, 4] int64: start, packs, items in a pack, the other change.
      signs: [N, 2], +1 or -1, of the first and the second change.
      packs_first: [N] bool, whether the first change is the one in packs.
      wording: [N, 8] draws in 0..65535 that choose the words.
    """

    operands: np.ndarray
    signs: np.ndarray
    packs_first: np.ndarray
    wording: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        """Size of the first and the second change [N, 2]."""
        product, other = self.operands[:, 1] * self.operands[:, 2], self.operands[:, 3]
        first = self.packs_first
        return np.stack([np.where(first, product, other), np.where(first, other, product)], axis=1)

    @property
    def totals(self) -> np.ndarray:
        """The count at the start and after each change [N, 3]."""
        return np.cumsum(np.concatenate([self.operands[:, :1], self.signs * self.changes], axis=1), axis=1)

    @property
    def answers(self) -> np.ndarray:
        """The final counts [N]."""
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

    Candidates are drawn until one belongs to the split and keeps its results in 0..299.

    Raises:
      ValueError: for a split outside `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed are {list(SPLITS)}")
    wanted = SPLITS.index(split)
    keys = fold(seed, wanted, np.asarray(indices, np.int64).reshape(-1))
    wording = draw(fold(keys, -1), range(8), 1 << 16)
    count = keys.size
    problems = Problems(np.zeros((count, 4), np.int64), np.zeros((count, 2), np.int64), np.zeros(count, bool), wording)
    unsettled = np.arange(count)
    attempt = 0
    while unsettled.size:
        key = fold(keys[unsettled], attempt)
        offsets = draw(key, range(4), 1 << 16) * _SPAN // (1 << 16)
        coins = draw(key, range(4, 7), 2)
        candidates = Problems(_SMALLEST + offsets, 2 * coins[:, :2] - 1, coins[:, 2] == 1, wording[unsettled])
        results = np.concatenate([candidates.changes, candidates.totals], axis=1)
        valid = ((results >= 0) & (results <= LARGEST_RESULT)).all(axis=1)
        valid &= split_of(candidates.operands) == wanted
        for target, source in zip(problems[:3], candidates[:3], strict=True):
            target[unsettled[valid]] = source[valid]
        unsettled = unsettled[~valid]
        attempt += 1
    return problems


def prompt_pieces(problems: Problems) -> list[Piece]:
    """The story as (table, row of the table for each problem) in reading order."""
    operands, wording = problems.operands, problems.wording
    name, thing = wording[:, 0] % len(NAMES), wording[:, 1] % len(THINGS)
    gain, loss = wording[:, 2] % len(GAINS), wording[:, 3] % len(LOSSES)
    joint = wording[:, 4] % len(_JOINTS) + len(_JOINTS) * (name >= len(_WOMEN))
    zero = np.zeros_like(name)

    def change(place: int) -> list[Piece]:
        # Two changes of one sign take two different verbs: the next one after the drawn first.
        verb = np.where(
            problems.signs[:, place] > 0, (gain + place) % len(GAINS), len(GAINS) + (loss + place) % len(LOSSES)
        )
        in_packs = problems.packs_first == (place == 0)
        amount = np.where(in_packs, operands[:, 1], operands[:, 3])
        size = np.where(in_packs, operands[:, 2], len(_NUMBERS))
        return [
            (GAINS + LOSSES, verb),
            (_NUMBERS, amount),
            (_PACKS_OF, in_packs.astype(np.int64)),
            (_NUMBERS_OR_NONE, size),
        ]

    return [
        (NAMES, name),
        (_OPENINGS, wording[:, 5] % len(_OPENINGS)),
        (_NUMBERS, operands[:, 0]),
        (THINGS, thing),
        ((".",), zero),
        (_SUBJECTS, name),
        *change(0),
        (_JOINTS + _JOINTS_MEN, joint),
        *change(1),
        ((".",), zero),
        ((" How many",), zero),
        (THINGS, thing),
        (_QUESTIONS, wording[:, 6] % len(_QUESTIONS)),
    ]


def direct_pieces(problems: Problems) -> list[Piece]:
    """` #### 90`."""
    answers = problems.answers
    return [((MARKER,), np.zeros_like(answers)), (_NUMBERS, answers)]


def worked_pieces(problems: Problems) -> list[Piece]:
    """` 3*24=72 37+72=109 109-19=90 #### 90`."""
    operands, totals, changes = problems.operands, problems.totals, problems.changes
    zero = np.zeros_like(problems.answers)
    pieces: list[Piece] = [
        (_NUMBERS, operands[:, 1]),
        (("*",), zero),
        (_BARE_NUMBERS, operands[:, 2]),
        (("=",), zero),
        (_BARE_NUMBERS, operands[:, 1] * operands[:, 2]),
    ]
    for place in range(2):
        pieces += [
            (_NUMBERS, totals[:, place]),
            (_SIGNS, (problems.signs[:, place] + 1) // 2),
            (_BARE_NUMBERS, changes[:, place]),
            (("=",), zero),
            (_BARE_NUMBERS, totals[:, place + 1]),
        ]
    return pieces + direct_pieces(problems)


def texts(pieces: list[Piece]) -> list[str]:
    """The strings that `pieces` spell, one for each problem."""
    columns = [np.asarray(table, object)[rows] for table, rows in pieces]
    return ["".join(parts) for parts in zip(*columns, strict=True)]


def vocabulary() -> list[str]:
    """Every string that the tables hold, numbers and signs included: what a tokenizer of these texts must cover."""
    tables = (
        NAMES, _OPENINGS, THINGS, _SUBJECTS, GAINS, LOSSES, _JOINTS, _JOINTS_MEN, (" How many",), _QUESTIONS, _PACKS_OF,
        _NUMBERS, _BARE_NUMBERS, _SIGNS, ("*", "=", ".", MARKER),
    )  # fmt: skip
    return [text for table in tables for text in table]
