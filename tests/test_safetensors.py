"""Against the safetensors library, and against files that lie."""

import json
import os
import pickle

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from qerl_jax.errors import UserError
from qerl_jax.models.safetensors import DTYPES, read_safetensors, write_safetensors


def examples():
    """One array of every dtype, random bytes, odd lengths so that alignment matters."""
    rng = np.random.default_rng(0)
    arrays = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        count = 3 * (i % 4 + 1)
        raw = rng.integers(0, 2 if name == "BOOL" else 256, count * dtype.itemsize, np.uint8)
        arrays[f"tensor.{name}"] = raw.view(dtype).reshape(3, -1)
    return arrays | {"empty": np.zeros((0, 4), np.float32), "scalar": np.array(2.5, np.float32)}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_reads_what_the_library_writes(tmp_path):
    arrays = examples()
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(found[name], array), name
    with pytest.raises(ValueError, match="read-only"):
        found["tensor.F32"][0] = 0


@pytest.mark.parametrize("more", range(8))  # headers of any length
def test_the_library_reads_what_is_written(tmp_path, more):
    arrays = examples()
    specs = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    write_safetensors(tmp_path / "y.safetensors", specs, arrays.__getitem__, {"format": "pt" + more * "x"})
    read = dict(safetensors.deserialize((tmp_path / "y.safetensors").read_bytes()))
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tuple(read[name]["shape"]) == array.shape and bytes(read[name]["data"]) == array.tobytes()
        assert DTYPES[read[name]["dtype"]] == array.dtype
    found = read_safetensors(tmp_path / "y.safetensors")
    assert all(same(found[name], array) for name, array in arrays.items())
    assert all(a.flags.aligned for a in found.values())


def test_writer_refuses_another_array_than_announced(tmp_path):
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(
            tmp_path / "x", {"a": jax.ShapeDtypeStruct((2,), np.float32)}, lambda _: np.zeros(3, np.float32)
        )


GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
}


def with_a(**changes):
    return GOOD | {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (with_a(dtype="F33"), "tensor a: dtype is 'F33'; known are F64, F32"),
        (with_a(dtype=7), "tensor a: dtype is '7'"),
        (with_a(shape=[3]), r"tensor a: F32\[3\] needs 12 bytes; data_offsets give 8"),
        (with_a(shape=[-2]), r"tensor a: shape is \[-2\]"),
        (with_a(shape=[2.0]), r"tensor a: shape is \[2.0\]"),
        (with_a(shape=[True, 2]), r"tensor a: shape is \[True, 2\]"),
        (with_a(shape=[2**62, 2**62]), "tensor a: F32.* needs .* bytes; data_offsets give 8"),
        (with_a(shape=[0, 2**62], data_offsets=[0, 0]), "tensor a: shape is .* whose product has 63 bits"),
        (with_a(shape=[0, 2**61], data_offsets=[0, 0]), "tensor a: shape is .* whose product has 63 bits"),
        (with_a(shape=[2] + [1] * 32), r"tensor a: shape is \[2, 1"),
        (with_a(shape="2"), "tensor a: shape is 2"),
        (with_a(data_offsets=[0, 2**60]), "tensor a: data_offsets are .* expected two within the 12 bytes"),
        (with_a(data_offsets=[8, 0]), "tensor a: data_offsets are"),
        (with_a(data_offsets=[0]), "tensor a: data_offsets are"),
        (with_a(data_offsets=[-8, 0]), "tensor a: data_offsets are"),
        (with_a(data_offsets=[4, 12]), "tensor a begins at byte 4; expected 0"),
        ({"a": GOOD["a"], "b": GOOD["a"]}, "tensor b begins at byte 0; expected 8"),
        ({"a": GOOD["a"]}, "its tensors have 8 bytes by the header; the file has 12"),
        ({"a": {"dtype": "F32"}}, "tensor a: expected dtype, shape and data_offsets"),
        ({"a": 3}, "tensor a: expected dtype, shape and data_offsets; found 3"),
        ([1, 2], "its header is not a JSON object"),
    ],
)
def test_header_that_lies(tmp_path, header, message):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(UserError, match=f"x.safetensors: not a valid safetensors file: .*{message}"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes; expected at least 8"),
        (b"1234567", "it has 7 bytes"),
        ((2**63).to_bytes(8, "little"), "its header claims 9223372036854775808 bytes; the file has 8"),
        ((200_000_000).to_bytes(8, "little") + bytes(100), "its header claims 200000000 bytes"),
        ((4).to_bytes(8, "little") + b"{,,}", "its header is not JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc", "its header is not JSON"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "its header is not JSON"),
        ((20).to_bytes(8, "little") + b'{"a": {}, "a": {} } ', "the name 'a' occurs twice"),
        (pickle.dumps({"a": np.zeros(3)}), "looks like a PyTorch pickle, which can run code and is never loaded"),
        (b"PK\x03\x04" + bytes(range(64)), "looks like a PyTorch pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (b"<!doctype html><html></html>", "looks like a web page"),
    ],
)
def test_file_that_is_something_else(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"x.safetensors: not a valid safetensors file: .*{message}"):
        read_safetensors(path)


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 100_000_009)
    with pytest.raises(UserError, match=r"its header claims 100000001 bytes; .* a header at most 100000000"):
        read_safetensors(path)


def test_a_header_whose_length_looks_like_a_pickle_is_none(tmp_path):
    text = b"{}".ljust(0x280)
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1")
    with pytest.raises(UserError, match=r"the file has 1 for them$"):
        read_safetensors(tmp_path / "x.safetensors")


def test_every_truncation_is_refused(tmp_path):
    whole = safetensors.numpy.save({"a": np.zeros(3, np.float32)})
    path = tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="not a valid safetensors file"):
            read_safetensors(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="the file has 13"):
        read_safetensors(path)


def test_any_flipped_bit_of_the_header_is_refused_or_harmless(tmp_path):
    """No flip may crash, or yield a view beyond the file."""
    whole = safetensors.numpy.save({"weight": np.zeros((2, 3), ml_dtypes.bfloat16)})
    path = tmp_path / "x.safetensors"
    for bit in range(8 * (len(whole) - 12)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = read_safetensors(path)
        except UserError:
            continue
        assert sum(array.nbytes for array in found.values()) == 12


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none.safetensors is missing"):
        read_safetensors(tmp_path / "none.safetensors")


def test_eight_bit_floats_have_their_values(tmp_path):
    values = np.array([0.5, 448.0, -1.75], ml_dtypes.float8_e4m3fn)
    specs = {"s": jax.ShapeDtypeStruct((3,), values.dtype)}
    write_safetensors(tmp_path / "x.safetensors", specs, lambda _: values)
    assert read_safetensors(tmp_path / "x.safetensors")["s"].astype(np.float32).tolist() == [0.5, 448.0, -1.75]
