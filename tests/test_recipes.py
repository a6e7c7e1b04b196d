"""Reading YAML files: every way in which one can be unreadable, and where options come from."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_jax.errors import UserError
from qerl_jax.recipes import read_recipe, shipped_recipes, write_yaml


def failure(name: object) -> str:
    with pytest.raises(UserError) as caught:
        read_recipe(str(name), [])
    return str(caught.value)


def test_yaml_1_2_reads_numbers_and_off_as_people_mean_them(tmp_path):
    path = tmp_path / "run1.yaml"
    path.write_text("a: 1e-5\nb: off\nc: yes\nd: [1, 2.5, null]\n")
    recipe = read_recipe(str(path), ["e.f={g: 2}"])
    assert recipe.name == "run1"
    assert recipe.values == {"a": 1e-5, "b": "off", "c": "yes", "d": [1, 2.5, None], "e": {"f": {"g": 2}}}
    assert str(recipe.sources["c"]) == f"{path}, line 3: "
    assert str(recipe.sources["e.f"]) == "command line: "


def test_a_section_may_be_empty(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optimizer:\n  # max_steps: 10\nnoise:\n")
    assert read_recipe(str(path), ["optimizer.max_steps=3"]).values == {"optimizer": {"max_steps": 3}, "noise": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "line 1, column 6: not readable as YAML: expected ',' or ']'"),
        ("a:\n  b: 1\n c: 2\n", "line 3, column 2: not readable as YAML"),
        (
            "\n".join(
                [
                    "a: &a [x,x,x,x,x,x,x,x,x]",
                    *(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise("abcdefgh")),
                ]
            ),
            "line 6, column 1: not readable as YAML: it is 597871 values with all aliases written out; allowed: 100000",
        ),
        ("a: 1\na: 2", 'line 2, column 1: not readable as YAML: found duplicate key "a", also in line 1; keep'),
        (
            "b:\n  x: {c: 1}\n\n  x: {d: 2}\n",
            'line 4, column 3: not readable as YAML: found duplicate key "x", also in line 2; keep one, for all of it',
        ),
        ("x: &a [*a]", "line 1, column 4: not readable as YAML: *a is in what &a in line 1 names, which would never"),
        ("b: 1\nx: &a\n  y:\n    z: *a\n", "line 4, column 5: not readable as YAML: *a is in what &a in line 2 names"),
        ("x: &a\n  b: 1\n  <<: *a\n", "line 3, column 3: not readable as YAML: *a is in what &a in line 1 names"),
        (
            "a: !!python/object:os.system {}",
            "line 1, column 4: not readable as YAML: could not determine a constructor",
        ),
        ("a: 1\n---\nb: 2", "not readable as YAML"),
        ("a: \x00", "not readable as YAML"),
        ("- 1", "found a list; expected sections with options"),
        ("", "found nothing; expected sections with options"),
    ],
)
def test_unreadable_files_name_the_place(tmp_path, text, expected):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert expected in failure(path)
    assert str(path) in failure(path)


def test_missing_files_binary_files_and_folders(tmp_path):
    assert "nope.yaml: no such file, and no shipped recipe" in failure("nope.yaml")
    assert "did you mean 'quickstart'?" in failure("quikstart")
    assert "xx: cannot be read: File name too long" in failure("x" * 300)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text (byte 0)" in failure(tmp_path / "binary.yaml")
    assert "is a folder" in failure(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    assert f"name its config: {tmp_path / 'config.yaml'}" in failure(tmp_path)


def test_a_file_beside_the_user_wins_over_a_shipped_recipe_only_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart.yaml").write_text("mine: 1")
    assert read_recipe("quickstart.yaml", []).values == {"mine": 1}
    assert "model" in read_recipe("quickstart", []).values
    assert "quickstart" in shipped_recipes()


def test_written_yaml_reads_back_in_order(tmp_path):
    values = {"b": {"y": 1e-8, "x": "off", "n": None}, "a": [1, {"f": "1e-5"}], "e": []}
    write_yaml(values, tmp_path / "o.yaml")
    back = read_recipe(str(tmp_path / "o.yaml"), []).values
    assert back == values
    assert list(back) == list(values)


_LETTERS = st.sampled_from("\\ \n\t\r\"'#:-{}[],&*!|>%@~?a1é😀\x85\u2028\ufeff\xa0\x00\x1b") | st.characters(
    codec="utf-8"
)
_WORDS = st.sampled_from(["word", "\\frac{a}{b}", "\\boxed{}", " ", "  ", "\n", "\t", "é", "😀", "\x85"])


@settings(max_examples=300, deadline=None)
@given(st.text(_LETTERS, max_size=200) | st.lists(_WORDS, max_size=80).map("".join))
def test_any_text_reads_back(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    write_yaml({"a": {"b": text, "c": [text]}}, path)
    assert read_recipe(str(path), []).values == {"a": {"b": text, "c": [text]}}


def test_texts_are_neither_folded_nor_escaped_without_need(tmp_path):
    prompt = (
        "Show your work.\nWrite fractions as \\frac{a}{b}\nput your final answer in \\boxed{} at the end, and no more\n"
    )
    path = tmp_path / "o.yaml"
    write_yaml({"a": {"system": prompt, "folder": "/home/müller/läufe"}}, path)
    assert "folder: /home/müller/läufe" in path.read_text("utf-8")
    assert read_recipe(str(path), []).values["a"]["system"] == prompt
    write_yaml({"a": {"folder": "müller\x85"}}, path)
    assert path.read_text("utf-8").isascii()


def test_options_taken_over_from_another_mapping_have_a_place(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a\n  x: 1\n  y: {z: 2}\nb:\n  <<: *a\n  x: 3\nc:\n  <<: [*a, {y: 4, w: 5}]\n")
    recipe = read_recipe(str(path), [])
    assert recipe.values["b"] == {"x": 3, "y": {"z": 2}} and recipe.values["c"] == {"x": 1, "y": {"z": 2}, "w": 5}
    places = {"b.x": 6, "b.y": 3, "b.y.z": 3, "c.x": 2, "c.y": 3, "c.w": 8}
    assert {name: str(recipe.sources[name]) for name in places} == {
        name: f"{path}, line {line}: " for name, line in places.items()
    }
    assert "b.<<" not in recipe.sources


@pytest.mark.parametrize("value", ["2024-13-45", "9" * 5000, "[" * 3000, "&m {inside: *m}"])
def test_values_that_yaml_cannot_make(tmp_path, value):
    with pytest.raises(UserError, match=r"command line: a\.b: .* is not readable as a YAML value"):
        read_recipe("quickstart", [f"a.b={value}"])
    (tmp_path / "x.yaml").write_text(f"a:\n  b: {value}\n")
    with pytest.raises(UserError, match=r"x\.yaml.*: not readable as YAML"):
        read_recipe(str(tmp_path / "x.yaml"), [])


@pytest.mark.parametrize("value", ["my #1", "#1", "'my' #1", "{a: b} # c"])
def test_an_override_has_no_comment(value):
    with pytest.raises(
        UserError, match=r"command line: run\.output_dir: in .* YAML takes what follows # for a comment"
    ):
        read_recipe("quickstart", [f"run.output_dir={value}"])


@pytest.mark.parametrize(
    ("value", "expected"), [("my#1", "my#1"), ('"my #1"', "my #1"), ('["#1", a#b]', ["#1", "a#b"])]
)
def test_a_number_sign_in_a_text_is_no_comment(value, expected):
    assert read_recipe("quickstart", [f"run.output_dir={value}"]).values["run"]["output_dir"] == expected


def test_a_section_set_as_a_whole_forgets_where_its_options_were():
    recipe = read_recipe("quickstart", ["noise={num_stages: 1}"])
    assert {name for name in recipe.sources if name.startswith("noise")} == {"noise", "noise.num_stages"}
    assert recipe.sources["noise.num_stages"].override
