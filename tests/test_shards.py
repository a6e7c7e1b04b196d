"""Weights in several files: where the cuts fall, and what the index says."""

import json

import jax
import numpy as np

from qerl_jax.models.shards import Stored, weight_files, write_shards
from qerl_jax.models.source import open_tensors


def tensors(sizes):
    def stored(name, size):
        return Stored(jax.ShapeDtypeStruct((size,), np.uint8), lambda: np.full(size, ord(name), np.uint8))

    return {name: stored(name, size) for name, size in sizes.items()}


def test_cut_where_the_next_tensor_would_not_fit(tmp_path):
    write_shards(tmp_path, tensors({"a": 6, "b": 4, "c": 1, "d": 30, "e": 2}), shard_bytes=10)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    places = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}
    assert index == {
        "metadata": {"total_size": 43},
        "weight_map": {name: f"model-0000{number}-of-00004.safetensors" for name, number in places.items()},
    }
    assert sorted(weight_files(tmp_path)) == sorted({*index["weight_map"].values(), "model.safetensors.index.json"})
    assert {n: bytes(array) for n, (_, array) in open_tensors(tmp_path).items()}["d"] == b"d" * 30


def test_one_file_needs_no_index(tmp_path):
    write_shards(tmp_path, tensors({"a": 6, "b": 4}), shard_bytes=10)
    assert weight_files(tmp_path) == ["model.safetensors"]
