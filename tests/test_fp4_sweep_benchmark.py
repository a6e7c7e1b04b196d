"""benchmarks.fp4_sweep with a kernel and a clock of the test's own, and what it makes of its measurements: the table's
entries, and rows of several runs in one result."""

import itertools
import json
import sys
import types

import jax.numpy as jnp
import pytest

from benchmarks import fp4_sweep
from pallas_kernels import KernelWeight, dequantize, variants

TABLE = [
    {"k": 512, "n": 64, "m": 8, "config": [1, 2, 1, 1, 2, 2, False, 1, 32], "us": 9.0},
    {"k": 512, "n": 64, "m": 16, "config": [1, 2, 1, 1, 2, 2, False, 1, 32], "us": 9.0},
    {"k": 512, "n": 64, "m": 16, "lora": True, "config": [1, 2, 2, 1, 2, 2, False, 1, 32], "us": 11.0},
]


def row(us, depth, m=8, rank=0, error=1e-8):
    config = [1, 2, 1, 1, depth, 2, False, 1, 32, False, False]  # all numbers, of which the table's entries have nine
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
    assert first == {"k": 512, "n": 64, "m": 8, "config": row(9.5, 3)["config"], "us": 9.5}
    assert rest == TABLE[1:]


@pytest.mark.parametrize("other", [row(9.95, 3), row(5.0, 3, error=1e-4), row(5.0, 3, error=float("nan"))])
def test_what_is_hardly_faster_or_wrong_does_not(merge, other):
    assert merge(row(10.0, 2), other) == TABLE


def test_calls_with_adapters_have_entries_of_their_own_where_these_are_faster(merge):
    found = merge(row(10.0, 2, rank=32, error=1e-3), row(9.0, 3, rank=32, error=1e-3))
    assert found[:3] == [*TABLE[:2], TABLE[0] | {"lora": True, "config": row(9.0, 3)["config"]}]
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


def plain_kernel(m, k, n, config, wide_out, ranks):
    """`stream_kernel.build` in plain JAX."""

    def run(x, *rest):
        x, parts = x.astype(jnp.float32), [rest[i : i + len(n)] for i in range(0, len(rest), len(n))]
        weights = zip(parts[0], parts[1], n, strict=True)
        ys = [x @ dequantize(KernelWeight(data, n_i, k), scale, jnp.float32).T for data, scale, n_i in weights]
        if ranks:
            adapters = zip(ys, *parts[2:5], strict=True)
            ys = [y + (s * x @ a.T.astype(jnp.float32)).astype(jnp.bfloat16) @ b.T for y, a, b, s in adapters]
        return ys

    return run


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_a_sweep_measures_writes_and_merges_what_is_right(tmp_path, monkeypatch, capsys, rank, factor):
    out, table = tmp_path / "out.json", tmp_path / "table.json"
    table.write_text("[]")

    def build(*shape, wide_out=False, ranks=()):
        kernel = plain_kernel(*shape, wide_out, ranks)
        return lambda *operands: [factor * y for y in kernel(*operands)]

    clock = (30.0 - i for i in itertools.count())  # the last is the fastest
    monkeypatch.setattr(fp4_sweep, "require_gpu", lambda: None)
    monkeypatch.setattr(fp4_sweep.stream_kernel, "build", build)
    monkeypatch.setattr(fp4_sweep, "device_us", lambda run, xs, operands: (run(xs, operands), 2 * next(clock))[1])
    monkeypatch.setattr(fp4_sweep, "ROTATE_BYTES", 1)
    monkeypatch.setitem(fp4_sweep.SPLITS, (512, 96), (64, 32))
    words = [str(out), "--m", "8", "--shapes", "512x96", "--limit", "3", "--rank", str(rank), "--table", str(table)]
    monkeypatch.setattr(sys, "argv", ["fp4_sweep", *words])
    assert fp4_sweep.main() == 0
    rows, entries = json.loads(out.read_text())["rows"], json.loads(table.read_text())
    assert [(*row[:4], row[5]) for row in rows] == [(512, 96, 8, rank, us) for us in (30.0, 29.0, 28.0)]
    said = capsys.readouterr().out
    if factor == 1.0:
        lora = {"lora": True} if rank else {}
        assert "WRONG" not in said and all(row[6] <= 2.0**-8 for row in rows)
        assert entries == [{"k": 512, "n": 96, "m": 8} | lora | {"config": rows[-1][4], "us": 28.0}]
    else:
        assert said.count("WRONG") == 3 and entries == []


@pytest.mark.parametrize("words, said", [
    (["--rank", "8"], "--rank is 8; allowed: multiples of 16"),  # no configuration takes it
    (["--m", "1", "8", "--table", "table.json"], "--table takes M of (8, 16, 32, 64), found [1, 8]"),  # never read
])  # fmt: skip
def test_what_would_measure_nothing_or_for_nothing_is_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["fp4_sweep", "out.json", *words])
    with pytest.raises(SystemExit):
        fp4_sweep.main()
    assert said in capsys.readouterr().err
