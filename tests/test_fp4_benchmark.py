"""How results of several runs of benchmarks.fp4_matmul become one table."""

from benchmarks.fp4_matmul import merged, summarize


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
