"""One call of a reward function: the columns it gets and what it may return."""

import asyncio
import copy
import functools
import gc
import re

import numpy as np
import pytest

from qerl_jax.errors import UserError
from qerl_jax.rewards.calling import accepted, call, checked

BATCH = (["p", "p"], ["a", "b"], [[1], [2]], {"answer": ["1", "2"], "level": [3, 4]})


def test_a_function_with_keywords_gets_every_column():
    def f(prompts, completions, completion_ids, **columns):
        assert columns == BATCH[3]
        return [1, None]

    assert call("f", f, *BATCH) == [1.0, None]


def test_a_function_without_keywords_gets_the_columns_it_names():
    def f(prompts, completions, completion_ids, level):
        return level

    assert call("f", f, *BATCH) == [3.0, 4.0]


def test_a_missing_column_is_named_with_the_ones_there_are():
    def f(prompts, completions, completion_ids, anser, **columns):
        return [0, 0]

    with pytest.raises(UserError, match=r"'m:f' needs a column 'anser' \(did you mean 'answer'\?\); .* answer, level"):
        call("m:f", f, *BATCH)


def test_what_is_taken_by_position_only_is_refused_before_a_call():
    def f(prompts, /, completions, completion_ids, **columns):
        return [0, 0]

    with pytest.raises(UserError, match=r"'m:f' takes 'prompts' by position only; .* take the / out"):
        accepted("m:f", f, ["answer"])

    def harmless(scale=1.0, /, **columns):
        return [scale, scale]

    assert call("m:f", harmless, *BATCH) == [1.0, 1.0]


def test_what_an_asynchronous_function_keeps_is_good_in_the_next_call():
    two_at_once, running = asyncio.Semaphore(2), {}

    async def one(completion):
        async with two_at_once:
            await asyncio.sleep(0)
            return float(len(completion))

    async def forever():
        await asyncio.Event().wait()

    async def f(prompts, completions, completion_ids, **columns):
        task = running.setdefault("task", asyncio.create_task(forever()) if not running else None)
        await asyncio.gather(*(one(completion * 2) for completion in completions))  # some of them wait for others
        return [0.0 if task.done() else await one(completion) for completion in completions]

    expected = [float(len(completion)) for completion in BATCH[1]]
    assert call("m:f", f, *BATCH) == call("m:f", f, *BATCH) == expected


def test_a_decorated_function_has_the_parameters_of_what_is_called():
    def of_one(completion, target):
        return float(len(completion) + len(target))

    @functools.wraps(of_one)
    def outer(prompts, completions, completion_ids, **columns):
        return [of_one(*pair) for pair in zip(completions, columns["answer"], strict=True)]

    def inner(prompts, completions, completion_ids, answer):
        return [0.5] * len(completions)

    @functools.wraps(inner)
    def hands_on(*args, **kwargs):
        return inner(*args, **kwargs)

    assert accepted("m:f", outer, ["answer", "level"]) == ["answer", "level"]
    assert accepted("m:f", hands_on, ["answer", "level"]) == ["answer"]
    assert len(call("m:f", outer, *BATCH)) == len(call("m:f", hands_on, *BATCH)) == len(BATCH[1])


def test_what_is_asynchronous_is_awaited():
    async def one(completion):
        await asyncio.sleep(0)
        return float(len(completion))

    async def f(prompts, completions, completion_ids, **columns):
        return await asyncio.gather(*map(one, completions))

    class F:
        async def __call__(self, prompts, completions, completion_ids, **columns):
            return await f(prompts, completions, completion_ids)

    def future(completions, **columns):
        return f(None, completions, None)

    for function in (f, F(), future):
        assert call("m:f", function, *BATCH) == [float(len(completion)) for completion in BATCH[1]]

    async def wrong(**columns):
        return "text"

    with pytest.raises(UserError, match=r"'m:f' returned 'text' .*; expected a list of 2 numbers or None"):
        call("m:f", wrong, *BATCH)


def test_a_function_that_empties_its_arguments_is_held_against_the_completions_that_there_were():
    def f(prompts, completions, completion_ids, answer, level):
        scores = [float(number) for number in answer]
        for values in (prompts, completions, completion_ids, answer, level):
            values.clear()
        return scores

    batch = copy.deepcopy(BATCH)
    assert call("f", f, *batch) == [1.0, 2.0]
    assert batch == BATCH
    with pytest.raises(UserError, match="'f' returned 1 scores; expected 2, one per completion"):
        call("f", lambda prompts, **columns: prompts.clear() or [1.0], *batch)


def test_completions_of_one_row_have_objects_of_their_own():
    def f(prompts, completions, completion_ids, tests):
        rows = zip(prompts, completion_ids, tests, strict=True)
        return [len(prompt.pop()["content"]) + ids.pop() + row.pop("n") for prompt, ids, row in rows]

    prompt, ids, row = [{"role": "user", "content": "p"}], [1], {"n": 2}
    assert call("f", f, [prompt] * 4, ["a"] * 4, [ids] * 4, {"tests": [row] * 4}) == [4.0] * 4
    assert (prompt, ids, row) == ([{"role": "user", "content": "p"}], [1], {"n": 2})


def test_a_completions_ids_are_copied_at_once():
    """There may be a million in a rollout, and the GPU waits."""

    class Id(int):
        def __deepcopy__(self, memo):
            raise AssertionError("copied alone")

    ids = [Id(1), Id(2)]
    assert call("f", lambda completion_ids, **columns: [ids.pop() for ids in completion_ids], "pp", "ab", [ids] * 2, {})
    assert ids == [1, 2]


def test_coroutines_in_a_list_are_closed_without_a_warning(recwarn):
    async def score():
        return 1.0

    def f(**columns):
        return [score() for _ in range(2)]

    with pytest.raises(UserError, match=r"'m:f' returned <coroutine object .* \(coroutine\).*; expected a"):
        call("m:f", f, *BATCH)
    gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize("values", [(1, 0.5), np.asarray([1.0, 0.5]), [True, np.float32(0.5)], [np.asarray(1), 0.5]])
def test_numbers_of_any_kind(values):
    assert checked("f", values, ["p", "q"]) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "returned None"),
        (1.0, "returned 1.0 (float); expected a list of 2 numbers"),
        ("11", "returned '11' (str)"),
        ([1], "returned 1 scores; expected 2"),
        ([1, 2, 3], "returned 3 scores; expected 2"),
        (
            [1, float("nan")],
            "returned nan (float) for a completion of the prompt that begins 'q'; expected a number from -1e+15",
        ),
        (
            [1, 1e300],
            "returned 1e+300 (float) for a completion of the prompt that begins 'q'; expected a number from -1e+15",
        ),
        ([float("inf"), 1], "returned inf (float) for a completion of the prompt that begins 'p'"),
        ([1, "1"], "returned '1' (str) for a completion of the prompt that begins 'q'"),
        ([[1], [2]], "returned [1] (list) for a completion of the prompt that begins 'p'"),
        ([1, 10**400], "that begins 'q'"),
        (np.array([1 + 5j, 2], np.complex64), "(complex64) for a completion of the prompt that begins 'p'"),
        ([1, np.complex128(2)], "(complex128) for a completion of the prompt that begins 'q'"),
        ([1j, 1], "returned 1j (complex)"),
        (
            np.zeros((2, 1)),
            "returned an array of shape (2, 1); expected a list of 2 numbers or None, or an array of shape (2,); "
            ".reshape(-1) makes it one",
        ),
        (np.zeros((1, 2), np.float32), "returned an array of shape (1, 2); expected a list of 2 numbers or None"),
        (np.zeros((2, 3)), "returned an array of shape (2, 3); expected a list of 2 numbers or None, or an array of"),
    ],
)
def test_anything_else_names_function_and_prompt(values, message):
    with pytest.raises(UserError, match=re.escape("reward function 'm:f' ") + ".*" + re.escape(message)):
        checked("m:f", values, ["p", [{"role": "user", "content": "q"}]])


def test_one_number_of_numpy_is_no_list():
    with pytest.raises(UserError, match=r"reward function 'f' returned .*; expected a list of 2 numbers or None"):
        checked("f", np.mean([0.0, 1.0]), ["a", "b"])
