"""Several reward functions with weights."""

import numpy as np
import pytest

from qerl_jax.config import RewardFunction, RewardOptions
from qerl_jax.errors import UserError
from qerl_jax.rewards.combine import RewardFunctions, combine, joined

EXAMPLES = [{"prompt": "p", "answer": "4"}, {"prompt": "q", "answer": "5"}]


def options(*functions, timeout=10.0, **parameters):
    return RewardOptions(tuple(RewardFunction(name, weight) for name, weight in functions), timeout, **parameters)


def test_the_weighted_sum_leaves_none_out():
    scores = combine({"a": [1.0, None, 0.0], "b": [1.0, 2.0, None]}, [2.0, 0.5])
    np.testing.assert_array_equal(scores.total, np.asarray([2.5, 1.0, 0.0], np.float32))
    assert scores.total.dtype == np.float32
    np.testing.assert_array_equal(scores.each["a"], [1.0, np.nan, 0.0])
    assert scores.means == {"a": 0.5, "b": 1.5}
    assert scores.row(1) == {"reward": 1.0, "rewards/a": None, "rewards/b": 2.0}
    assert combine({"a": [2.0**24, 1.0, 1.0]}, [1.0]).means == {"a": (2**24 + 2) / 3}  # which float32 cannot add


def test_a_function_that_applies_nowhere_has_no_mean():
    assert combine({"a": [1.0], "b": [None]}, [1.0, 1.0]).means == {"a": 1.0}
    some = combine({"a": [1.0, 4.0, 7.0], "b": [None, 2.0, None], "c": [5.0, None, 7.0]}, [1.0, 1.0, 1.0])
    assert some.stds == {"a": 3.0, "c": np.sqrt(2.0)}


def test_a_row_without_any_reward_is_an_error():
    with pytest.raises(
        UserError, match=r"row 1 \(counted from 0\) has no reward: every function \(a, b\) returned None"
    ):
        combine({"a": [1.0, None], "b": [1.0, None]}, [1.0, 1.0])


def test_a_function_that_is_only_logged_gives_no_row_a_reward():
    scores = {"a": [1.0, None], "b": [1.0, None], "length": [3.0, 4.0]}
    expected = r"row 1 .* has no reward: every function whose weight is not 0 \(a, b\) returned None"
    with pytest.raises(UserError, match=expected):
        combine(scores, [1.0, 2.0, 0.0])
    assert combine(scores, [0.0, 0.0, 0.0]).total.tolist() == [0.0, 0.0]
    assert combine(scores, [1.0, 1.0, 0.5]).total.tolist() == [3.5, 2.0]


def test_a_completion_without_a_reward_is_told_by_its_prompt(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(completions, **columns):\n    return [len(c) or None for c in completions]\n"
    )
    for texts, message in (
        (["a", "b", "c", ""], "a completion of the prompt that begins 'q' has no reward: every function"),
        (["a", "b" * 20, "c", "d"], "a completion of the prompt that begins 'p' has the reward 2e"),
    ):
        with (
            RewardFunctions(options((f"{tmp_path}/mine.py:f", 1e14))) as rewards,
            pytest.raises(UserError, match=message),
        ):
            rewards(EXAMPLES, texts, [[1]] * 4, 2)


def test_no_completions_have_no_scores(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, **columns):\n    return [1.0 for _ in completions]\n")
    with RewardFunctions(options((f"{tmp_path}/mine.py:f", 1.0))) as rewards:
        assert rewards([], [], [], 2).total.shape == (0,)


def test_a_sum_out_of_range_is_an_error():
    with pytest.raises(
        UserError,
        match=r"row 1 \(counted from 0\) has the reward 3e\+20, from a 3, b 1 times the weights \[1e\+20, 1.0\]",
    ):
        combine({"a": [0.0, 3.0], "b": [1.0, 1.0]}, [1e20, 1.0])


def test_a_weight_may_be_beyond_float32_where_the_sum_is_not():
    assert combine({"a": [1e-30, 0.0], "b": [1.0, 1.0]}, [1e39, 1.0]).total.tolist() == [np.float32(1e9 + 1), 1.0]


def test_a_negative_sum_out_of_range_is_an_error_too():
    for weight, total in ((1e20, r"-3e\+20"), (1e39, r"-3e\+39")):  # the second is infinite in float32
        with pytest.raises(UserError, match=rf"row 0 \(counted from 0\) has the reward {total}"):
            combine({"a": [-3.0]}, [weight])


def test_weights_go_by_the_order_of_the_config(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    with RewardFunctions(options((f"{tmp_path}/mine.py:f", 10.0), ("format", 1.0))) as rewards:
        scores = rewards(EXAMPLES, ["#### 4", "5"], [[1]] * 2, 1)
    np.testing.assert_array_equal(scores.total, np.asarray([11, 10], np.float32))
    assert list(scores.each) == ["f", "format"]


def test_builtin_functions_score_groups_prompt_by_prompt():
    with RewardFunctions(options(("accuracy", 1.0), ("format", 0.2))) as rewards:
        scores = rewards(EXAMPLES, ["#### 4", "#### 5", "#### 5", "5"], [[1]] * 4, 2)
    np.testing.assert_allclose(scores.total, [1.2, 0.2, 1.2, 0.0], rtol=1e-6)
    assert scores.means == {"accuracy": 0.5, "format": 0.75}


def test_a_users_function_beside_them_sees_messages_and_repeated_columns(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(prompts, completions, completion_ids, answer, extra):\n"
        "    assert completions[0] == [{'role': 'assistant', 'content': '#### 4'}], completions\n"
        "    assert prompts[2] == [{'role': 'user', 'content': 'q'}], prompts\n"
        "    assert answer == ['4', '4', '5', '5'] and extra == [None, None, 1, 1], (answer, extra)\n"
        "    return [len(ids) for ids in completion_ids]\n"
    )
    examples = [
        {"prompt": [{"role": "user", "content": "p"}], "answer": "4"},
        {"prompt": [{"role": "user", "content": "q"}], "answer": "5", "extra": 1},
    ]
    with RewardFunctions(options(("accuracy", 1.0), (f"{tmp_path}/mine.py:f", 10.0))) as rewards:
        scores = rewards(examples, ["#### 4"] * 4, [[1], [1, 2], [1], []], 2)
    np.testing.assert_array_equal(scores.total, np.asarray([11, 21, 10, 0], np.float32))
    assert scores.means == {"accuracy": 0.5, "f": 1.0}


def test_what_a_function_changes_is_seen_by_no_other_completion_and_no_other_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def takes(prompts, completions, tests, **columns):\n"
        "    return [sum(row.pop() for _ in range(len(row))) + len(prompt.pop()['content'])\n"
        "            for prompt, row in zip(prompts, tests)]\n"
        "def again(prompts, completions, tests, **columns):\n    return takes(prompts, completions, tests)\n"
    )
    examples = [{"prompt": [{"role": "user", "content": "p"}], "tests": [0, 1]}]
    names = [(f"{tmp_path}/mine.py:{name}", 1.0) for name in ("takes", "again")]
    with RewardFunctions(options(*names)) as rewards:
        for _ in range(2):
            scores = rewards(examples, ["a"] * 4, [[1]] * 4, 4)
            for each in scores.each.values():
                np.testing.assert_array_equal(each, [2, 2, 2, 2])


def test_one_failing_function_leaves_the_others_usable(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def slow(completions, **columns):\n    time.sleep(0.2)\n    return [float(c) for c in completions]\n"
        "def picky(completions, **columns):\n    return [1 / (float(c) - 1) for c in completions]\n"
    )
    names = [(f"{tmp_path}/mine.py:picky", 1.0), (f"{tmp_path}/mine.py:slow", 1.0)]
    with RewardFunctions(options(*names)) as rewards:
        with pytest.raises(UserError, match="ZeroDivisionError"):
            rewards(EXAMPLES[:1], ["1"], [[1]], 1)
        assert rewards(EXAMPLES[:1], ["3"], [[1]], 1).row(0) == {
            "reward": 3.5,
            "rewards/picky": 0.5,
            "rewards/slow": 3.0,
        }


def test_the_timeout_is_that_of_the_options(tmp_path):
    (tmp_path / "mine.py").write_text("import time\n\ndef f(**columns):\n    time.sleep(60)\n")
    with (
        RewardFunctions(options((f"{tmp_path}/mine.py:f", 1.0), timeout=0.25)) as rewards,
        pytest.raises(UserError, match=r"took longer than 0\.25 s \(reward\.timeout\)"),
    ):
        rewards(EXAMPLES, ["a", "b"], [[1]] * 2, 1)


def test_accuracy_needs_its_column():
    with (
        RewardFunctions(options(("accuracy", 1.0))) as rewards,
        pytest.raises(
            UserError, match="'accuracy' needs a column 'answer'; the data set has no columns besides prompt"
        ),
    ):
        rewards([{"prompt": "p"}], ["#### 4"], [[1]], 1)


def test_functions_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "one.py").write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    (tmp_path / "two.py").write_text("def f(completions, **columns):\n    return [2.0] * len(completions)\n")
    one, two = f"{tmp_path}/one.py:f", f"{tmp_path}/two.py:f"
    with RewardFunctions(options((one, 1.0), (two, 1.0))) as rewards:
        assert rewards(EXAMPLES, ["a", "b"], [[1], [1]], 1).means == {"one.py:f": 1.0, "two.py:f": 2.0}


def test_a_function_may_be_called_mean_length(tmp_path):
    (tmp_path / "mine.py").write_text("def mean_length(completions, **columns):\n    return [7] * len(completions)\n")
    with RewardFunctions(options((f"{tmp_path}/mine.py:mean_length", 1.0))) as rewards:
        assert rewards(EXAMPLES, ["a", "b"], [[1], [1]], 1).means == {"mean_length": 7.0}


def test_scores_of_several_batches_are_joined_in_order():
    one, two = combine({"a": [1.0, None], "b": [1.0, 2.0]}, [1.0, 1.0]), combine({"a": [4.0], "b": [None]}, [1.0, 1.0])
    both = joined([one, two])
    np.testing.assert_array_equal(both.total, np.asarray([2, 2, 4], np.float32))
    np.testing.assert_array_equal(both.each["a"], [1.0, np.nan, 4.0])
    assert both.means == {"a": 2.5, "b": 1.5} and both.total.dtype == np.float32


def test_the_soft_overlong_punishment_counts_tokens_with_its_weight():
    functions = options(("accuracy", 1.0), ("soft_overlong_punishment", 0.5), soft_punish_cache=2)
    with RewardFunctions(functions, max_completion_length=4) as rewards:
        rewards.check(EXAMPLES, "rows")
        scores = rewards(EXAMPLES, ["#### 4", "a longer text than any"], [[1, 2, 3], [1, 2]], 1)
        np.testing.assert_array_equal(scores.each["soft_overlong_punishment"], [-0.5, 0.0])
        np.testing.assert_array_equal(scores.total, [0.75, 0.0])


def test_a_row_that_no_function_can_score_is_refused_before_a_run(tmp_path):
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "What is it?", "answer": None}]
    expected = (
        "rows.jsonl: row 1 (counted from 0) has no reward: every function (accuracy) returned None; at least one must "
        "apply"
    )
    with RewardFunctions(options(("accuracy", 1.0))) as rewards, pytest.raises(UserError) as caught:
        rewards.check(rows, "rows.jsonl")
    assert expected in str(caught.value)
    with RewardFunctions(options(("accuracy", 1.0), ("format", 1.0))) as rewards:
        rewards.check(rows, "rows.jsonl")
    (tmp_path / "mine.py").write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    with RewardFunctions(options(("accuracy", 1.0), (f"{tmp_path}/mine.py:f", 1.0))) as rewards:
        rewards.check(rows, "rows.jsonl")


def test_a_function_that_applies_to_no_row_is_warned_of(caplog):
    nulls = [{"prompt": "p", "answer": None}, {"prompt": "q", "answer": None}]
    with RewardFunctions(options(("accuracy", 1.0), ("format", 1.0))) as rewards:
        rewards.check(nulls, "rows.jsonl")
        (warning,) = caplog.messages
        assert warning.startswith("rows.jsonl: reward function 'accuracy' gave no reward to any of the 2 rows")
        caplog.clear()
        for rows in ([*nulls, *EXAMPLES], EXAMPLES):
            rewards.check(rows, "rows.jsonl")
    with RewardFunctions(options(("format", 1.0))) as rewards:
        rewards.check([], "rows.jsonl")
    assert not caplog.messages
