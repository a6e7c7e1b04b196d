"""The word problems: right arithmetic, disjoint splits, a function of (seed, split, index)."""

import re

import numpy as np
import pytest

from qerl_jax.data import arithmetic


@pytest.fixture(scope="module")
def problems():
    return arithmetic.generate(0, "train", np.arange(2000))


def test_a_known_problem_is_spelled_and_solved():
    fixed = arithmetic.Problems(
        operands=np.asarray([[7, 90, 25, 41]]), signs=np.asarray([[1, -1]]), wording=np.zeros((1, 8), np.int64)
    )
    (prompt,) = arithmetic.texts(arithmetic.prompt_pieces(fixed))
    assert prompt == ("Ann has 7 boxes of 90 balls. She puts 25 into each and gives away 41. How many balls are left?")
    assert arithmetic.texts(arithmetic.worked_pieces(fixed)) == [" 90+25=115 7*115=805 805-41=764 #### 764"]
    assert arithmetic.texts(arithmetic.direct_pieces(fixed)) == [" #### 764"]


def test_every_step_of_every_worked_solution_is_true(problems):
    for text, answer in zip(arithmetic.texts(arithmetic.worked_pieces(problems)), problems.answers, strict=True):
        steps, final = text.split(" #### ")
        found = re.findall(r"(\d+)([-+*])(\d+)=(\d+)", steps)
        assert len(found) == 3
        for left, sign, right, result in found:
            assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign] == int(
                result
            )
        assert int(final) == answer and steps.endswith(f"={answer}")


def test_operands_and_results_are_in_range(problems):
    assert problems.operands.min(0).tolist() == [2, 10, 10, 10]
    assert problems.operands.max(0).tolist() == [9, 99, 99, 99]
    assert problems.results.min() >= 1 and problems.results.max() <= 999
    assert set(np.unique(problems.signs)) == {-1, 1}


def test_the_prompt_holds_the_operands_in_order(problems):
    for prompt, operands in zip(
        arithmetic.texts(arithmetic.prompt_pieces(problems)), problems.operands.tolist(), strict=True
    ):
        assert [int(number) for number in re.findall(r"\d+", prompt)] == operands


def test_a_problem_depends_on_seed_split_and_index_alone():
    block = arithmetic.generate(3, "eval", np.arange(50))
    alone = arithmetic.generate(3, "eval", np.asarray([41, 7]))
    for whole, part in zip(block, alone, strict=True):
        np.testing.assert_array_equal(whole[[41, 7]], part)
    assert (arithmetic.generate(4, "eval", np.arange(50)).operands != block.operands).any(1).all()


def test_the_stream_never_moves():
    """The shipped policy was trained on this stream; a change of the hash would make its splits leak."""
    first = arithmetic.generate(0, "pretrain", np.arange(2))
    assert first.operands.tolist() == [[3, 61, 19, 95], [9, 25, 72, 41]]
    assert first.signs.tolist() == [[1, -1], [1, 1]]


def test_splits_are_disjoint_in_their_operands_whatever_the_order():
    seen = {
        split: {tuple(sorted(row)) for row in arithmetic.generate(0, split, np.arange(20000)).operands.tolist()}
        for split in arithmetic.SPLITS
    }
    assert not seen["pretrain"] & seen["train"]
    assert not seen["pretrain"] & seen["eval"]
    assert not seen["train"] & seen["eval"]


def test_the_split_is_blind_to_order_and_has_the_stated_shares():
    rows = np.random.default_rng(0).integers(10, 99, (4000, 4))
    split = arithmetic.split_of(rows)
    np.testing.assert_array_equal(split, arithmetic.split_of(rows[:, ::-1]))
    np.testing.assert_allclose(np.bincount(split) / 4000, [0.75, 0.125, 0.125], atol=0.02)


def test_check_split_names_the_intruder():
    rows = arithmetic.generate(0, "train", np.arange(3)).operands
    arithmetic.check_split(rows, "train")
    with pytest.raises(AssertionError, match="is of split train, not eval"):
        arithmetic.check_split(rows, "eval")
