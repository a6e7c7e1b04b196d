"""Names of reward functions."""

import hashlib
import inspect
import os
import pickle
import py_compile
import sys

import pytest

from qerl_jax.errors import UserError
from qerl_jax.rewards.loading import RewardName, load_function, parse_name, source_digest, titles


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def length(completions, **columns):\n    return [len(c) for c in completions]\n\nconstant = 3\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_builtin_names():
    assert parse_name("accuracy") == RewardName("accuracy", "", "accuracy")


def test_a_module_and_a_file(module):
    for location in ("my_rewards", str(module / "my_rewards.py")):
        name = parse_name(f"{location}:length")
        assert (name.location, name.function, name.builtin) == (location, "length", False)
        function = load_function(name)
        assert function(completions=["ab", ""]) == [2, 0]
        assert inspect.getsource(function).startswith("def length")
        assert source_digest(name) == hashlib.sha256((module / "my_rewards.py").read_bytes()).hexdigest()


def test_what_a_file_with_a_dot_in_its_name_defines_can_be_pickled(tmp_path):
    file = tmp_path / "rewards.v2.py"
    file.write_text("class Found:\n    pass\n\ndef score(**columns):\n    return Found()\n")
    found = load_function(parse_name(f"{file}:score"))()
    assert type(pickle.loads(pickle.dumps(found))) is type(found)


@pytest.mark.parametrize("file", ["mine.py", "rewritten.py", "rewritten_package/inner.py"])
def test_a_source_rewritten_within_a_second_to_the_same_length(tmp_path, monkeypatch, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if path.parent != tmp_path:
        (path.parent / "__init__.py").write_text("from rewritten_package import inner\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(score):
        path.write_text(f"def score(**columns):\n    return [{score}]\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))

    write(1)
    py_compile.compile(str(path))  # as whatever imports it does
    write(2)
    name = parse_name(f"{path if file == 'mine.py' else file.removesuffix('.py').replace('/', '.')}:score")
    assert load_function(name)() == [2]
    of_what_runs = hashlib.sha256(path.read_bytes()).hexdigest()
    assert source_digest(name) == of_what_runs
    write(3)
    assert source_digest(name) == of_what_runs


def test_a_module_beside_a_finder_that_finds_nothing(module, monkeypatch):
    (module / "never_imported.py").write_text("def one(**columns):\n    return [1]\n")
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])  # which Python passes over
    assert load_function(parse_name("never_imported:one"))() == [1]


@pytest.mark.parametrize("spec", ["acuracy", "length", "my_rewards:", ":length", "my_rewards:two words"])
def test_names_of_no_known_form(spec):
    with pytest.raises(
        UserError,
        match=r"allowed: accuracy, format, soft_overlong_punishment, package.module:function or path/to/file.py:func",
    ):
        parse_name(spec)


def test_the_nearest_builtin_is_named():
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        parse_name("acuracy")


def test_main_is_another_program_to_a_worker():
    with pytest.raises(UserError, match=r"reward function '__main__:mine': it would run in a program of its own"):
        parse_name("__main__:mine")


def test_what_is_missing_is_named(module):
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.py"):
        parse_name("nowhere.py:f")
    with pytest.raises(UserError, match="there is no module 'nowhere'"):
        load_function(parse_name("nowhere:f"))
    with pytest.raises(UserError, match=r"there is no module 'nowhere'"):
        load_function(parse_name("nowhere.inside:f"))
    with pytest.raises(UserError, match=r"has no 'lenght' \(did you mean 'length'\?\)"):
        load_function(parse_name("my_rewards:lenght"))
    with pytest.raises(UserError, match="constant is of type int, not a function"):
        load_function(parse_name("my_rewards:constant"))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        load_function(parse_name("needs_more:f"))


def test_titles_are_as_long_as_they_must_be():
    specs = ["accuracy", "/a/own.py:f", "/a/own.py:g", "/a/other.py:f", "pkg.own:g", "/b/own.py:f"]
    assert titles(specs) == ["accuracy", "a/own.py:f", "own.py:g", "other.py:f", "pkg.own:g", "b/own.py:f"]
    assert titles(["/x/a/own.py:f", "/y/a/own.py:f", "a/own.py:f"]) == ["x/a/own.py:f", "y/a/own.py:f", "a/own.py:f"]
    assert titles(["accuracy", "mine.py:accuracy"]) == ["accuracy", "mine.py:accuracy"]
