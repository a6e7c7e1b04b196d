"""What is refused before a byte is believed, and how it is told."""

import os

import pytest

from qerl_jax.errors import UserError, shown
from qerl_jax.input_files import file_size, parse_json, read_json
from qerl_jax.models.safetensors import read_safetensors


def test_only_ordinary_files_are_opened(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert file_size(tmp_path / "f") == 5
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name, found in (("pipe", "pipe, socket or device"), ("zeros", "pipe, socket or device"), ("", "folder")):
        for read in (file_size, read_json, read_safetensors):
            with pytest.raises(UserError, match=rf"{name}: cannot be read \(expected a file, found a {found}"):
                read(tmp_path / name)
    with pytest.raises(UserError, match="none is missing"):
        file_size(tmp_path / "none")
    (tmp_path / "f.json").symlink_to("../blobs/5")
    with pytest.raises(UserError, match=r"f.json is a link to ../blobs/5, where nothing is; copy what links lead to"):
        file_size(tmp_path / "f.json")


def test_a_json_file_of_ten_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10_000_000_000)
    with pytest.raises(UserError, match=r"config.json: expected a JSON file of at most 200000000 bytes, found 100000"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "the name 'c' occurs twice"),
        (b'{"a": 1} x', "Extra data"),
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" * 200_000, "lists or objects in one another, deeper than can be read"),
        (b"1" * 5000, r"1{20}\.\.\. is a whole number of 5000 digits; allowed: at most 4300"),
    ],
)
def test_what_is_no_json(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_text_of_a_message_stays_on_its_line():
    assert shown("wört") == "wört"
    assert shown("a\nb\0\x1b[2J\ud800") == r"a\nb\x00\x1b[2J\ud800"
    assert shown("x" * 300) == "x" * 200 + "..." and shown([1, "a\n"], 5) == r"[1, '..."
