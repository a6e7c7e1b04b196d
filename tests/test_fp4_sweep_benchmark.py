"""What benchmarks.fp4_sweep makes of its measurements: the table's entries, and rows of several runs in one result."""

import json
import types

import pytest

from benchmarks import fp4_sweep
from pallas_kernels import variants

TABLE = [
    {"k": 512, "n": 64, "m": 8, "config": [1, 2, 1, 1, 2, 2, False, 1, 32], "us": 9.0},
    {"k": 512, "n": 64, "m": 16, "config": [1, 2, 1, 1, 2, 2, False, 1, 32], "us": 9.0},
    {"k": 512, "n": 64, "m": 16, "lora": True, "config": [1, 2, 2, 1, 2, 2, False, 1, 32], "us": 11.0},
]


def row(us, depth, m=8, rank=0, error=1e-8):
    config = [1, 2, 1, 1, depth, 2, False, 1, 32]
    return {"k": 512, "n": 64, "m": m, "rank": rank, "config": config, "us": us, "error": error}


@pytest.fixture
def merge(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))

    def run(*rows):
        fp4_sweep.merge(list(rows), path)
        return json.loads(path.read_text())

    return run


def test_what_is_faster_in_the_same_run_takes_the_place_of_an_entry(merge):
    # the entry itself took 10 us in this run, so that 9.5 is faster, though not than its time of another day
    first, *rest = merge(row(10.0, 2), row(9.5, 3), row(9.7, 4))
    assert first == {"k": 512, "n": 64, "m": 8, "config": [1, 2, 1, 1, 3, 2, False, 1, 32], "us": 9.5}
    assert rest == TABLE[1:]


@pytest.mark.parametrize("other", [row(9.95, 3), row(5.0, 3, error=1e-4), row(5.0, 3, error=float("nan"))])
def test_what_is_hardly_faster_or_wrong_does_not(merge, other):
    assert merge(row(10.0, 2), other) == TABLE


def test_calls_with_adapters_have_entries_of_their_own_where_these_are_faster(merge):
    found = merge(row(10.0, 2, rank=32, error=1e-3), row(9.0, 3, rank=32, error=1e-3))
    assert found[:3] == [*TABLE[:2], TABLE[0] | {"lora": True, "config": [1, 2, 1, 1, 3, 2, False, 1, 32]}]
    # against the entry for calls with adapters, where there is one
    assert merge(row(10.99, 3, m=16, rank=32)) == merge() == found
    assert merge(row(10.0, 3, m=16, rank=32))[3]["us"] == 10.0


def test_rows_that_are_not_measured_again_stay(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    gpu = types.SimpleNamespace(device_kind="a GPU")
    monkeypatch.setattr(fp4_sweep.jax, "devices", lambda: [gpu])
    fp4_sweep.write([row(9.0, 2), row(8.0, 3), row(7.0, 2, m=16)], path)
    fp4_sweep.write([row(8.5, 2), row(12.0, 2, rank=32)], path)
    lines = json.loads(path.read_text())["rows"]
    assert [(*line[2:4], line[5]) for line in lines] == [(16, 0, 7.0), (8, 0, 8.5), (8, 32, 12.0)]
    gpu.device_kind = "another"
    fp4_sweep.write([row(6.0, 2)], path)
    assert [line[5] for line in json.loads(path.read_text())["rows"]] == [6.0]


@pytest.mark.parametrize("rank, shape", [(0, (3584, (37888,))), (32, (3584, (18944, 18944)))])
def test_candidates_begin_with_the_tables_entries_and_take_the_shape(rank, shape):
    k, n = shape
    ranks = (rank,) * len(n) if rank else ()
    found = fp4_sweep.candidates(16, k, n, ranks, wgmma=False)
    assert found[0] == variants.config_for(16, k, n, ranks) and len(found) == len(set(found)) > 20
    assert all(variants.takes_lora(16, k, n, config, ranks) for config in found)
    assert not rank or all(config.waves == 1 for config in found)  # a wave cannot wait for the next one's x A^T
