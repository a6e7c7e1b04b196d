"""Names of reward functions."""

import hashlib

import pytest

from qerl_jax.errors import UserError
from qerl_jax.rewards.functions import accuracy
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
    assert load_function(parse_name("accuracy")) is accuracy


def test_a_module_and_a_file(module):
    for location in ("my_rewards", str(module / "my_rewards.py")):
        name = parse_name(f"{location}:length")
        assert (name.location, name.function, name.builtin) == (location, "length", False)
        assert load_function(name)(completions=["ab", ""]) == [2, 0]
        assert source_digest(name) == hashlib.sha256((module / "my_rewards.py").read_bytes()).hexdigest()


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


def test_what_is_missing_is_named(module):
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.py"):
        parse_name("nowhere.py:f")
    with pytest.raises(UserError, match="there is no module 'nowhere'"):
        load_function(parse_name("nowhere:f"))
    with pytest.raises(UserError, match=r"there is no module 'nowhere'"):
        load_function(parse_name("nowhere.inside:f"))
    with pytest.raises(UserError, match=r"has no 'lenght' \(did you mean 'length'\?\)"):
        load_function(parse_name("my_rewards:lenght"))
    with pytest.raises(UserError, match="constant is a int, not a function"):
        load_function(parse_name("my_rewards:constant"))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        load_function(parse_name("needs_more:f"))


def test_titles_are_as_long_as_they_must_be():
    specs = ["accuracy", "/a/own.py:f", "/a/own.py:g", "/a/other.py:f", "pkg.own:g", "/b/own.py:f"]
    assert titles(specs) == ["accuracy", "/a/own.py:f", "own.py:g", "other.py:f", "pkg.own:g", "/b/own.py:f"]
    assert titles(["accuracy", "mine.py:accuracy"]) == ["accuracy", "mine.py:accuracy"]
