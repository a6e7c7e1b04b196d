"""Built-in reward functions: exact answers, never first characters."""

from fractions import Fraction

import pytest

from qerl_jax.errors import UserError
from qerl_jax.rewards import math
from qerl_jax.rewards.calling import accepted, call
from qerl_jax.rewards.functions import (
    BUILTIN,
    accuracy,
    final_number,
    format,
    soft_overlong_punishment,
    with_parameters,
)


def score(completion, answer):
    return accuracy(["p"], [completion], [[1]], answer=[answer])[0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("#### 12", "12", 1.0),
        ("#### 12", "1", 0.0),
        ("#### 1", "12", 0.0),
        ("#### 12", "2", 0.0),
        ("#### 120", "12", 0.0),
        ("#### -12", "12", 0.0),
        ("#### 12.0", "12", 1.0),
        ("#### 12", "+12", 1.0),
        ("#### 12.50", 12.5, 1.0),
        ("#### 0.1", 0.1, 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### 1,23", "123", 0.0),
        ("#### 3/4", "0.75", 1.0),
        ("#### .75", "3/4", 1.0),
        ("#### 1/0", "1", 0.0),
        ("#### $ 18.", "$18", 1.0),
        ("#### 18 dollars", 18, 1.0),
        ("#### -$18", "-18", 1.0),
        ("#### -$18", "18", 0.0),
        ("#### $-18", "-$18", 1.0),
        ("#### \u22121,800", "-1800", 1.0),
        ("#### \u221218", "18", 0.0),
        ("#### -18", "\u221218", 1.0),
        ("3+4=7 #### 7", "7", 1.0),
        ("7", "7", 0.0),
        ("7 ####", "7", 0.0),
        ("#### 5 #### 7", "7", 1.0),
        ("#### 7 #### 5", "7", 0.0),
        ("#### 7 ####", "7", 0.0),
        ("#### 5, or 7", "7", 1.0),
        ("#### 7, or 5", "7", 0.0),
        ("", "7", 0.0),
        ("#### 72", "Natalia sold 48/2 = 24.\n#### 72", 1.0),
        ("#### " + "9" * 5000, "9", 0.0),
        ("#### ٣", "3", 0.0),
        ("#### 1e5", "100000", 1.0),
        ("#### 1e5", "5", 0.0),
        ("#### 1E-3", "0.001", 1.0),
        ("#### 1.5e+3 km", "1,500", 1.0),
        ("#### 1500", "1.5e+3", 1.0),
        ("#### .5e1", "5", 1.0),
        ("#### 1e5/2", "50000", 1.0),
        ("#### 1/2e1", ".05", 1.0),
        ("#### 1/2.5", ".4", 1.0),
        ("#### 1/0e5", "0", 0.0),
        ("#### 2e", "2", 1.0),
        ("#### e5", "5", 1.0),
        ("#### 1e999", 10**999, 1.0),
        ("#### 1e999999999999", "9", 0.0),
        ("#### 7", None, None),
    ],
)
def test_accuracy(completion, answer, expected):
    assert score(completion, answer) == expected


# Answers in the words of models; None where there is no number, or no telling which.
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("12 m2", 12),
        ("12 m^2", 12),
        ("12 m s-1", 12),
        ("12 m s^-2", 12),
        ("5 mol CO2", 5),
        ("12km", 12),
        ("12.5%", Fraction(25, 2)),
        ("x=5", 5),
        ("x=-5", -5),
        ("x2 = 5", 5),
        ("e5 = 7", 7),
        ("Rs50", 50),
        ("Rs.50", 50),
        ("USD-50", -50),
        ("$1,234.50", Fraction(2469, 2)),
        ("1,234,567", 1234567),
        ("-$1,234", -1234),
        ("**72**.", 72),
        ("\\boxed{72}", 72),
        ("5, 7", 7),
        ("5-7", 7),
        ("5+7", 7),
        ("5 - 7 = -2", -2),
        ("3/4 cups", Fraction(3, 4)),
        ("1,2345", None),
        ("1234,567", None),
        ("1,23", None),
        ("3,4", None),
        ("1.2.3", None),
        ("1.234,56", None),
        ("2^10", None),
        ("10^-3", None),
        ("1/2^3", None),
        ("1e5^2", None),
        ("1e-1001", None),
    ],
)
def test_what_a_final_number_stands_beside(answer, expected):
    assert final_number(f"It is 99. #### {answer}") == expected


def test_accuracy_reads_the_assistants_message():
    assert score([{"role": "assistant", "content": "#### 4"}], 4) == 1.0
    several = [{"role": "assistant", "content": "#### 4"}, {"role": "assistant", "content": "No. #### 5"}]
    assert (score(several, 4), score(several, 5)) == (0.0, 1.0)


@pytest.mark.parametrize("answer", ["four", "", True, [4], float("nan"), "1 2", "2e", "e5", "1e9999"])
def test_an_answer_that_is_no_number_names_its_row(answer):
    with pytest.raises(UserError, match=r"column answer of row 1 \(counted from 0\) is"):
        accuracy(["p", "p"], ["#### 4", "#### 4"], [[1], [1]], answer=["4", answer])


def test_final_number_is_exact():
    assert final_number("#### 0.1") == Fraction(1, 10)
    assert final_number("#### 123456789012345678901234567890") == 123456789012345678901234567890


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" 1+1=2 #### 2", 1.0),
        ("#### -2.5 ", 1.0),
        ("#### +2", 1.0),
        ("#### \u22122", 1.0),
        ("#### -$2", 0.0),
        ("#### 1.5e-3", 1.0),
        ("#### 2e", 0.0),
        ("#### 2 #### 2", 0.0),
        ("#### 2 pens", 0.0),
        ("####", 0.0),
        ("#### 1 2", 0.0),
        ("2", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion, expected):
    assert format(["p"], [completion], [[1]]) == [expected]


# What `get_soft_overlong_punishment(max_completion_len, soft_punish_cache)` of TRL 1.16.0 returns.
@pytest.mark.parametrize(
    ("longest", "cache", "expected"),
    [
        (20, 8, {0: 0.0, 1: 0.0, 12: 0.0, 13: -0.125, 14: -0.25, 16: -0.5, 19: -0.875, 20: -1.0, 21: -1.0}),
        (64, 1, {62: 0.0, 63: 0.0, 64: -1.0, 65: -1.0}),
        (10, 9, {0: 0.0, 1: 0.0, 2: -0.1111111111111111, 9: -0.8888888888888888, 10: -1.0}),
        (48, 16, {31: 0.0, 32: 0.0, 33: -0.0625, 40: -0.5, 47: -0.9375, 48: -1.0}),
    ],
)
def test_the_soft_overlong_punishment_is_trls(longest, cache, expected):
    ids = [[7] * length for length in expected]
    found = soft_overlong_punishment(longest, cache, ["p"] * len(ids), ["c"] * len(ids), ids)
    assert found == list(expected.values())


def test_parameters_come_by_name_and_leave_columns_of_these_names_alone():
    bound = with_parameters("soft_overlong_punishment", {"soft_punish_cache": 8, "max_completion_length": 20})
    columns = {"max_completion_length": [3], "soft_punish_cache": [4]}
    assert call("soft_overlong_punishment", bound, ["p"], ["c"], [[7] * 14], columns) == [-0.25]
    assert with_parameters("accuracy", {"soft_punish_cache": None}) is accuracy


@pytest.mark.parametrize("name", [*BUILTIN, "math"])
def test_no_column_is_given_that_a_function_does_not_read(name):
    """It would be copied for each completion."""
    parameters = {"soft_punish_cache": 8, "max_completion_length": 20}
    function = math.accuracy if name == "math" else with_parameters(name, parameters)
    assert "tests" not in accepted(name, function, ["answer", "tests"])
