"""Synthetic word problems: hard to answer in one pass, easy to answer step by step.

A number of boxes, their content changed box by box, then the total changed once: a sum, a product of that sum, and a
change of that product, each step needing the result of the one before. Boxes are 2..9, all other operands have two
digits, and every result lies in 1..999:

    prompt   Ann has 7 boxes of 90 pens. She puts 25 into each and then loses 41. How many pens are left?
    worked    90+25=115 7*115=805 805-41=764 #### 764
    direct    #### 764

Problems without such a chain serve less: on four operands added and subtracted, or a sum of two products, networks of
0.85M parameters that had learned the steps also answered directly 30% to 98% right (here, 20%).

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
# Boxes, content of a box, change of a box, change of the whole.
_SMALLEST = np.asarray([2, 10, 10, 10], np.int64)
_SPAN = np.asarray([8, 90, 90, 90], np.int64)
LARGEST_RESULT = 999

_WOMEN = ("Ann", "Eva", "Ida", "Kim", "Lea", "Mia", "Sue", "Zoe")
_MEN = ("Ben", "Dan", "Leo", "Max", "Ned", "Sam", "Tom", "Vic")
NAMES = _WOMEN + _MEN
_SUBJECTS = (" She",) * len(_WOMEN) + (" He",) * len(_MEN)
THINGS = (
    " balls", " bars", " beads", " beans", " books", " cans", " caps", " cards", " cars", " coins", " cups", " keys",
    " pens", " rings", " shells",
)  # fmt: skip
GAINS = (" buys", " finds", " gets", " wins", " makes")
LOSSES = (" gives away", " loses", " sells", " drops", " lends")
_OPENINGS = (" has", " owns", " starts with")
_BOXES = (" boxes of", " bags of")
_MOVES = (" takes", " puts")
_ENDS_OF_MOVES = (" out of each", " into each")
_JOINTS = (" and", " and then", ". Then she", ". Later she")
_JOINTS_MEN = (" and", " and then", ". Then he", ". Later he")
_QUESTIONS = (" are left?", " now?", " in the end?")
_NUMBERS = tuple(f" {value}" for value in range(LARGEST_RESULT + 1))
_BARE_NUMBERS = tuple(str(value) for value in range(LARGEST_RESULT + 1))
_SIGNS = ("-", "+")
MARKER = " ####"

Piece = tuple[tuple[str, ...], np.ndarray]


class Problems(NamedTuple):
    """N problems.

    Attributes:
      operands: [N, 4] int64: boxes, content of a box, change of a box, change of the whole.
      signs: [N, 2], +1 or -1, of the two changes.
      wording: [N, 7] draws in 0..65535 that choose the words.
    """

    operands: np.ndarray
    signs: np.ndarray
    wording: np.ndarray

    @property
    def results(self) -> np.ndarray:
        """What the three steps give [N, 3]: content of a box after its change, of all boxes, and the answer."""
        boxes, content, of_box, of_whole = self.operands.T
        changed = content + self.signs[:, 0] * of_box
        return np.stack([changed, boxes * changed, boxes * changed + self.signs[:, 1] * of_whole], axis=1)

    @property
    def answers(self) -> np.ndarray:
        """Results of the last step [N]."""
        return self.results[:, -1]


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

    Candidates are drawn until one belongs to the split and has all its results in 1..999.
    """
    wanted = SPLITS.index(split)
    keys = fold(seed, wanted, np.asarray(indices, np.int64).reshape(-1))
    wording = draw(fold(keys, -1), range(7), 1 << 16)
    problems = Problems(np.zeros((keys.size, 4), np.int64), np.zeros((keys.size, 2), np.int64), wording)
    unsettled = np.arange(keys.size)
    attempt = 0
    while unsettled.size:
        key = fold(keys[unsettled], attempt)
        offsets = draw(key, range(4), 1 << 16) * _SPAN // (1 << 16)
        candidates = Problems(_SMALLEST + offsets, 2 * draw(key, range(4, 6), 2) - 1, wording[unsettled])
        valid = ((candidates.results >= 1) & (candidates.results <= LARGEST_RESULT)).all(axis=1)
        valid &= split_of(candidates.operands) == wanted
        problems.operands[unsettled[valid]] = candidates.operands[valid]
        problems.signs[unsettled[valid]] = candidates.signs[valid]
        unsettled = unsettled[~valid]
        attempt += 1
    return problems


def prompt_pieces(problems: Problems) -> list[Piece]:
    """The story as (table, row of the table for each problem) in reading order."""
    operands, wording = problems.operands, problems.wording
    name, thing = wording[:, 0] % len(NAMES), wording[:, 1] % len(THINGS)
    into, gained = (problems.signs.T + 1) // 2
    verb = wording[:, 2] % len(GAINS) + len(LOSSES) * gained
    joint = wording[:, 3] % len(_JOINTS) + len(_JOINTS) * (name >= len(_WOMEN))
    zero = np.zeros_like(name)
    return [
        (NAMES, name),
        (_OPENINGS, wording[:, 4] % len(_OPENINGS)),
        (_NUMBERS, operands[:, 0]),
        (_BOXES, wording[:, 5] % len(_BOXES)),
        (_NUMBERS, operands[:, 1]),
        (THINGS, thing),
        ((".",), zero),
        (_SUBJECTS, name),
        (_MOVES, into),
        (_NUMBERS, operands[:, 2]),
        (_ENDS_OF_MOVES, into),
        (_JOINTS + _JOINTS_MEN, joint),
        (LOSSES + GAINS, verb),
        (_NUMBERS, operands[:, 3]),
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
    """` 90+25=115 7*115=805 805-41=764 #### 764`."""
    boxes, content, of_box, of_whole = problems.operands.T
    changed, product, answer = problems.results.T
    into, gained = (problems.signs.T + 1) // 2
    zero = np.zeros_like(answer)

    def step(left: np.ndarray, sign: Piece, right: np.ndarray, result: np.ndarray) -> list[Piece]:
        return [(_NUMBERS, left), sign, (_BARE_NUMBERS, right), (("=",), zero), (_BARE_NUMBERS, result)]

    return [
        *step(content, (_SIGNS, into), of_box, changed),
        *step(boxes, (("*",), zero), changed, product),
        *step(product, (_SIGNS, gained), of_whole, answer),
        *direct_pieces(problems),
    ]


def texts(pieces: list[Piece]) -> list[str]:
    """The strings that `pieces` spell, one for each problem."""
    columns = [np.asarray(table, object)[rows] for table, rows in pieces]
    return ["".join(parts) for parts in zip(*columns, strict=True)]


def vocabulary() -> list[str]:
    """Every string that the tables hold, numbers and signs included: what a tokenizer of these texts must cover."""
    tables = (
        NAMES, _OPENINGS, _BOXES, THINGS, _SUBJECTS, _MOVES, _ENDS_OF_MOVES, GAINS, LOSSES, _JOINTS, _JOINTS_MEN,
        (" How many",), _QUESTIONS, _NUMBERS, _BARE_NUMBERS, _SIGNS, ("*", "=", ".", MARKER),
    )  # fmt: skip
    return [text for table in tables for text in table]
