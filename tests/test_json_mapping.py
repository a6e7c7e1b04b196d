"""Mappings of JSON values in options."""

import copy
import pickle

import pytest

from qerl_jax.json_mapping import JsonMapping

VALUES = {"z": [1, {"b": None, "a": "é"}], "a": 1.5, "on": False}


def test_it_has_the_values_in_one_order():
    found = JsonMapping(VALUES)
    assert found == VALUES and list(found) == ["a", "on", "z"] and len(found) == 3 and found["on"] is False
    assert list(found["z"][1]) == ["b", "a"]  # which a template may write out
    assert repr(found) == "{'a': 1.5, 'on': False, 'z': [1, {'b': None, 'a': 'é'}]}"
    same = JsonMapping(dict(reversed(VALUES.items())))
    assert same == found and hash(same) == hash(found) and JsonMapping(found) == found
    for made in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert made == found and type(made) is JsonMapping


def test_nothing_changes_it():
    values = copy.deepcopy(VALUES)
    found = JsonMapping(values)
    values["z"].append(2)
    found["z"].append(3)
    assert found == VALUES
    with pytest.raises(TypeError, match="item assignment"):
        found["z"] = 1


def test_equal_numbers_of_other_kinds_are_other_values():
    one, *others = (JsonMapping({"on": value}) for value in (1, 1.0, True, "1", [1], {"1": 1}, None))
    assert all(one != other for other in others) and one != JsonMapping({}) and one != "on"


@pytest.mark.parametrize(
    "value", [{"x": {1: 2}}, {1: 2}, {1: 2, "x": 3}, {"x": (1,)}, {"x": b"y"}, {"x": float("nan")}]
)
def test_what_json_cannot_give_back_is_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        JsonMapping(value)
