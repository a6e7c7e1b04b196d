"""benchmarks.fp4_matmul: its rows, with a clock of the test's own, and how those of several runs become one table."""

import argparse

import numpy as np

from benchmarks import fp4_matmul
from benchmarks.compiling import Programs
from benchmarks.fp4_rows import merged, summarize


def row(m=8, us=2.0, k=3584, n=3584, op="forward", variant="StreamConfig(1)", **more):
    return {"format": "nvfp4", "op": op, "m": m, "k": k, "n": n, "device_us": us, "variant": variant} | more


def result(*rows, device="H200", jax="1"):
    return {"device": device, "jax": jax, "rows": list(rows)}


def test_new_rows_replace_those_that_measure_the_same():
    old = result(row(us=1.0), row(m=16), row(op="lora", rank=8), row(variant="triton"))
    new = result(row(us=3.0, variant="StreamConfig(2)"), row(op="lora", rank=32))
    assert merged(old, new) == [*old["rows"][1:], *new["rows"]]


def test_rows_of_another_device_or_version_do_not_stay():
    for other in (result(row(), device="H100"), result(row(), jax="2")):
        assert merged(other, result(row(m=16))) == [row(m=16)]


def test_a_summary_is_of_the_rows_that_the_table_chose():
    shapes = [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)]
    rows = [row(us=10.0, k=k, n=n, marlin_us=20.0) for k, n in shapes]
    rows += [row(us=1.0, k=k, n=n, marlin_us=20.0, variant="triton") for k, n in shapes]
    summary = summarize(rows)
    assert summary["speedup_over_marlin_m8"] == 2.0
    weights = 3584 * (4608 + 3584 + 37888 + 18944)
    assert abs(summary["layer_7B_m8_tb_per_s"] - weights * 0.5625e-6 / 40.0) < 1e-9


def test_every_row_is_of_its_own_program_beside_one_time_of_cublas(monkeypatch):
    args = argparse.Namespace(
        m=[2], ops=["forward", "dx", "lora"], dx_m=[3], lora_m=[2, 80], ranks=[8, 20], formats=["nvfp4", "mxfp4"],
        formats_m=[2], triton_m=[],
    )  # fmt: skip
    monkeypatch.setattr(fp4_matmul, "ROTATE_BYTES", 1e5)
    programs, clock = Programs(2), iter(range(100, 200))

    def device_us(program, xs, operands):
        assert len(xs) == len(operands) >= 2
        ys = program(xs, operands)
        assert len(ys) == len(xs) and not np.array_equal(*[np.asarray(y[0], np.float32) for y in ys[:2]])
        return float(next(clock)) * len(xs)

    monkeypatch.setattr(fp4_matmul, "device_us", device_us)
    shape = fp4_matmul.Shape(256, 256, args, programs)  # as wide as it is long: dx has cuBLAS times of its own
    shape.start()
    programs.wait()
    rows = shape.measure()
    assert [(r["format"], r["op"], r["m"], r.get("rank")) for r in rows] == [
        ("nvfp4", "forward", 2, None), ("nvfp4", "lora", 2, 8), ("nvfp4", "lora", 2, 20), ("mxfp4", "forward", 2, None),
        ("nvfp4", "dx", 3, None), ("nvfp4", "lora", 80, 8), ("nvfp4", "lora", 80, 20),
    ]  # fmt: skip
    times = [(r["device_us"], r["bf16_us"]) for r in rows]
    assert times == [(100, 101), (102, 101), (103, 101), (104, 101), (105, 106), (107, 108), (109, 108)]
    assert all({"k", "n", "tb_per_s", "variant"} <= row.keys() for row in rows)
    assert rows[0]["tb_per_s"] == 256 * 256 * 0.5625e-6 / 100
    assert rows[3]["tb_per_s"] == 256 * 256 * (0.5 + 1 / 32) * 1e-6 / 104
    assert [r["operands"] for r in rows] == [3, 3, 2, 3, 3, 3, 2]  # adapters count too
    assert [shape.count(m, "nvfp4") for m in (2, 1024)] == [3, 2] and shape.count(2, "plain") == 2
