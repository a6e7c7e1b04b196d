"""Answers compared as mathematics."""

import gc
import importlib
import signal
import sys
import threading
import time

import pytest
from math_verify import grader

from qerl_jax.config import RewardFunction, RewardOptions
from qerl_jax.errors import UserError
from qerl_jax.rewards import math
from qerl_jax.rewards.combine import RewardFunctions


def score(completion, answer):
    (found,) = math.accuracy(["p"], [completion], [[1]], [answer])
    return found


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("\\frac{1}{2}", "so it is \\boxed{0.5}."),
        ("$\\frac12$", "\\boxed{\\dfrac{2}{4}}"),
        ("Half, $\\boxed{\\frac{1}{2}}$.", "\\boxed{1/2}"),
        ("\\boxed{2} is wrong, \\boxed{3} is right", "\\boxed{3}"),
        ("x^2+1", "\\boxed{1 + x^2}"),
        ("3\\sqrt{2}", "\\boxed{\\sqrt{18}}"),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
        ("(1, 2)", "\\boxed{(1,2)}"),
        ("\\text{A}", "\\boxed{A}"),
        ("50\\%", "\\boxed{0.5}"),
        ("Two boxes hold 1,200 nails.\n#### 1,200", "\\boxed{1200}"),
        (7, "\\boxed{7.0}"),
        (0.5, "\\boxed{\\frac{1}{2}}"),
        ("7", "\\boxed{8}, no: \\boxed{7}"),
        ("7", [{"role": "assistant", "content": "\\boxed{7}"}]),
        ("1200", "\\boxed{1\\,200}"),
        ("1\\,000", "\\boxed{1000}"),
        ("12345678.5", "\\boxed{12\\ 345~678.5}"),
        ("3.5", "\\boxed{3 \\frac{1}{2}}"),
        ("42", "\\boxed{42.}"),
        ("\\frac12.", "\\boxed{0.5}"),
        ("9^{9^{9^9}}", "\\boxed{9^{9^{9^9}}}"),  # which sympy does not finish
    ],
)
def test_equal_answers(answer, completion):
    assert score(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("\\frac{1}{2}", "\\boxed{0.51}"),
        ("7", "7"),  # no box
        ("7", "\\boxed{7"),
        ("7", "\\boxed{}"),
        ("7", ""),
        ("7", "\\boxed{7}, no: \\boxed{8}"),
        ("7", "\\boxed{7, 8}"),
        ("A", "\\boxed{B}"),
        ("12", "\\boxed{1}"),
        ("x^2+1", "\\boxed{x^2-1}"),
        ("201", "\\boxed{1\\,200}"),
        ("357", "\\boxed{12 345}"),
        ("1\\,000\\,000", "\\boxed{0}"),
    ],
)
def test_other_answers(answer, completion):
    assert score(completion, answer) == 0.0


def test_a_power_of_ten_in_a_fraction_is_no_plain_number():
    assert score("\\boxed{1e-5/2}", "\\frac{1}{3}") == 0.0


def test_a_row_without_an_answer_has_no_score():
    assert score("\\boxed{7}", None) is None


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (5e-05, "0.00005", "0.00004"),
        (1e-05, "10^{-5}", "e-5"),
        (2.5e-07, "2.5e-7", "2.4e-7"),
        (1e22, "10^{22}", "10^{21}"),
        ("1e-5", "0.00001", "0.00002"),
        ("0.0000003", "3e-7", "0.0000001"),
        ("0.000001", "1/1000000", "0.0000012"),
    ],
)
def test_plain_numbers_are_the_numbers_that_are_written(answer, right, wrong):
    assert score(f"\\boxed{{{right}}}", answer) == 1.0
    assert score(f"\\boxed{{{wrong}}}", answer) == 0.0


def test_what_a_group_agrees_on_is_compared_once(monkeypatch):
    compared = []
    monkeypatch.setattr(math, "verify", lambda *both, **_: compared.append(both) is not None)
    assert math.accuracy(["p"] * 8, ["\\boxed{x+3}"] * 7 + ["\\boxed{x+4}"], [[1]] * 8, ["y+2"] * 8) == [0.0] * 8
    assert len(compared) == 2


@pytest.mark.parametrize(
    "answer", [float("nan"), float("inf"), "", " ", "$$", "####", "\\boxed{7", True, [7], {"a": 1}]
)
def test_an_entry_that_is_no_answer_is_named(answer):
    with pytest.raises(UserError, match=r"column answer of row 1 \(counted from 0\) is .*; expected LaTeX or a number"):
        math.accuracy(["p"] * 2, ["\\boxed{7}"] * 2, [[1]] * 2, ["7", answer])


@pytest.fixture
def no_collection():
    """JAX, which a reward's process does not import, is called at collections, where an alarm would be lost."""
    gc.disable()
    yield
    gc.enable()


def test_what_sympy_does_not_finish_is_another_answer_and_stays_out_of_the_log(monkeypatch, caplog, no_collection):
    monkeypatch.setattr(math, "_SECONDS", 1)
    assert score("\\boxed{9^{9^{9^9}}}", "9^{9^9}") == 0.0
    assert score(f"\\boxed{{{'(' * 20_000}\x1b[2J}}", "7") == 0.0
    assert score("\\boxed{7}", "7") == 1.0
    assert not caplog.records


def test_what_takes_long_while_others_have_the_processor_is_no_other_answer(monkeypatch):
    def slow(*of):
        time.sleep(1.5)
        return compare(*of)

    compare = grader.sympy_expr_eq
    monkeypatch.setattr(grader, "sympy_expr_eq", slow)
    monkeypatch.setattr(math, "_SECONDS", 1)
    assert score("\\boxed{\\sqrt{72}}", "6\\sqrt{2}") == 1.0


@pytest.mark.parametrize("name", ["parse", "verify"])
def test_a_limit_that_math_verify_does_not_catch_ends_it_too_and_is_taken_back(name, monkeypatch, no_collection):
    def endless(*_, **__):
        while time.process_time() < end:
            pass
        raise AssertionError

    end = time.process_time() + 5
    monkeypatch.setattr(math, "_SECONDS", 0.1)
    monkeypatch.setattr(math, name, endless)
    before = signal.getsignal(signal.SIGPROF)
    assert score(f"\\boxed{{\\sqrt{{50}}, {name}}}", "5\\sqrt{2}") == 0.0
    assert signal.getsignal(signal.SIGPROF) is before and signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_another_thread_is_refused_and_not_scored_0():
    found = []

    def run():
        try:
            found.append(score("\\boxed{7}", "7"))
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["qerl_jax.rewards.math:accuracy runs in a program's main thread alone, where signals arrive"]


def test_a_run_names_it_by_its_module():
    options = RewardOptions((RewardFunction("qerl_jax.rewards.math:accuracy", 2.0),))
    with RewardFunctions(options) as rewards:
        rewards.check([{"prompt": "p", "answer": "1/2"}], "rows")
        scores = rewards([{"prompt": "p", "answer": "1/2"}], ["\\boxed{0.5}", "0.5"], [[1], [1]], 2)
    assert scores.means == {"accuracy": 0.5} and scores.total.tolist() == [2.0, 0.0]


def test_every_row_is_checked_before_a_run_and_a_users_function_is_not_called(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, **columns):\n    raise AssertionError('called')\n")
    rows = [{"prompt": "p", "answer": answer} for answer in ("1/2", None, "$$")]
    functions = RewardFunction("qerl_jax.rewards.math:accuracy"), RewardFunction(f"{tmp_path}/mine.py:f")
    with RewardFunctions(RewardOptions(functions)) as rewards:
        rewards.check(rows[:2], "rows.jsonl")
        with pytest.raises(
            UserError, match=r"rows\.jsonl: reward accuracy: column answer of row 2 \(counted from 0\) is '\$\$'"
        ):
            rewards.check(rows, "rows.jsonl")


def test_the_check_of_a_data_set_hands_over_only_what_the_functions_read():
    class Unread:
        def __reduce_ex__(self, protocol):
            raise AssertionError("copied, or sent to another process")

    functions = RewardFunction("qerl_jax.rewards.math:accuracy"), RewardFunction("format")
    with RewardFunctions(RewardOptions(functions)) as rewards:
        rewards.check([{"prompt": Unread(), "solution": Unread(), "answer": "1/2"}], "rows.jsonl")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "qerl_jax.rewards.math")
    with pytest.raises(UserError, match="needs the package math-verify: pip install"):
        importlib.import_module("qerl_jax.rewards.math")


def test_what_an_installed_package_lacks_is_told(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("import gone_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("math_verify", "qerl_jax.rewards.math"):
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ModuleNotFoundError, match="No module named 'gone_missing'"):
        importlib.import_module("qerl_jax.rewards.math")
