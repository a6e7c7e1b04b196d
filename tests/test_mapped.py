"""Tensors on their way from a file to the device: right bytes, right dtype, and no page kept."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from qerl_jax.models import mapped
from qerl_jax.models.mapped import largest_magnitude, release, same_bytes, to_device
from qerl_jax.models.safetensors import read_safetensors


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(mapped, "_PIECE", 100)


def stored(folder, array):
    safetensors.numpy.save_file({"a": np.zeros(3, np.uint8), "x": array}, folder / "x.safetensors")
    return read_safetensors(folder / "x.safetensors")["x"]


VALUES = np.random.default_rng(0).normal(size=(7, 33))


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float32, np.float16])
@pytest.mark.parametrize("target", [None, ml_dtypes.bfloat16, np.float32, np.float16])
def test_values_arrive_in_the_dtype_asked_for(tmp_path, source, target):
    array = VALUES.astype(source)
    found = to_device(stored(tmp_path, array), target)
    expected = array.astype(source if target is None else target)
    assert found.dtype == expected.dtype and found.shape == (7, 33)
    assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (50,)])
def test_any_shape(tmp_path, shape):
    array = np.full(shape, 2.5, np.float32)
    found = to_device(stored(tmp_path, array))
    assert found.shape == shape and np.array_equal(found, array)


def test_the_device_array_is_not_the_file(tmp_path):
    found = to_device(stored(tmp_path, np.zeros(500, np.float32)))
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.seek(-2000, 2)
        file.write(b"\xff" * 2000)
    assert not np.asarray(found).any()


def resident_kb(path):
    """Kilobytes of the mapping of `path` that this process holds."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return int(next(line.split()[1] for line in lines[start:] if line.startswith("Rss:")))


def test_pages_are_let_go_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "_PIECE", 1 << 20)
    array = np.random.default_rng(1).integers(0, 255, 8 << 20, np.uint8)
    view = stored(tmp_path, array)
    view.sum()
    assert resident_kb(tmp_path / "x.safetensors") >= 8 << 10
    release(view)
    assert resident_kb(tmp_path / "x.safetensors") <= 128
    assert np.array_equal(to_device(view), array)
    assert resident_kb(tmp_path / "x.safetensors") <= 128


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16])
def test_largest_magnitude(tmp_path, dtype):
    array = VALUES.astype(dtype)
    assert largest_magnitude(stored(tmp_path, array)) == np.abs(array).max()
    array[5, 30] = -9
    found = largest_magnitude(stored(tmp_path, array))
    assert found == 9 and found.dtype == dtype
    assert largest_magnitude(np.zeros((0, 4), dtype)) == 0
    array[0, 1] = -np.inf
    assert np.isposinf(largest_magnitude(array))
    array[6, 2] = np.nan
    assert np.isnan(largest_magnitude(array))


def test_same_bytes():
    one = np.arange(300, dtype=np.int16)
    other = one.copy()
    assert same_bytes(one, other) and same_bytes(one, other.reshape(3, 100)) and not same_bytes(one, other[:-1])
    other[299] = 0
    assert not same_bytes(one, other)
