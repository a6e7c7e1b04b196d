"""The rows of benchmarks.fp4_matmul: the shapes, the peer's times, and how rows of several runs become one table."""

from typing import Any

import numpy as np

Row = dict[str, Any]
MODELS = {
    "7B": [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)],
    "14B": [(5120, 7168), (5120, 5120), (5120, 27648), (13824, 5120)],
    "32B": [(5120, 7168), (5120, 5120), (5120, 55296), (27648, 5120)],
}
# The matrices of a call that multiplies by several.
SPLITS = {
    (3584, 4608): (3584, 512, 512), (3584, 37888): (18944, 18944), (5120, 7168): (5120, 1024, 1024),
    (5120, 27648): (13824, 13824), (5120, 55296): (27648, 27648),
}  # fmt: skip
# Marlin NVFP4 (vLLM 0.22.1) on an H200, microseconds by M.
MARLIN = {
    (3584, 4608): {1: 10.9, 8: 11.2, 16: 12.0, 32: 13.3, 64: 18.9, 128: 27.1, 256: 35.6, 1024: 112, 4096: 470},
    (3584, 3584): {1: 10.0, 8: 9.8, 16: 10.4, 32: 11.9, 64: 16.6, 128: 23.0, 256: 31.3, 1024: 89, 4096: 354},
    (3584, 37888): {1: 37.0, 8: 35.8, 16: 39.0, 32: 43.8, 64: 61.9, 128: 113, 256: 236, 1024: 1034, 4096: 3587},
    (18944, 3584): {1: 26.7, 8: 25.1, 16: 26.5, 32: 29.9, 64: 46.1, 128: 79.6, 256: 115, 1024: 475, 4096: 1699},
    (5120, 7168): {1: 14.4, 8: 14.9, 16: 15.7, 32: 19.4, 64: 28.8, 128: 39.8, 256: 64.2, 1024: 260, 4096: 963},
    (5120, 5120): {1: 13.0, 8: 13.1, 16: 14.2, 32: 16.3, 64: 23.9, 128: 34.4, 256: 49.8, 1024: 178, 4096: 690},
    (5120, 27648): {1: 38.4, 8: 37.2, 16: 40.3, 32: 45.2, 64: 63.7, 128: 116, 256: 224, 1024: 1055, 4096: 3634},
    (13824, 5120): {1: 25.6, 8: 25.7, 16: 24.8, 32: 30.8, 64: 46.2, 128: 68.2, 256: 128, 1024: 562, 4096: 1716},
    (5120, 55296): {1: 71.6, 8: 68.7, 16: 74.5, 32: 83.0, 64: 116, 128: 224, 256: 500, 1024: 2059, 4096: 7219},
    (27648, 5120): {1: 47.4, 8: 38.1, 16: 40.1, 32: 53.5, 64: 82.2, 128: 118, 256: 225, 1024: 955, 4096: 3394},
}


def key_of(row):
    """What a row measures; a forced backend's rows stand beside the table's own."""
    family = row["variant"].split("(")[0].split(" ")[0]
    chosen = family if family in ("triton", "dequantize") else ""
    return (row["format"], row["op"], row["m"], row["k"], row["n"], row.get("rank", 0), chosen)


def merged(old, new):
    """The rows of a result `old` that `new` has not, before those of `new`; none of another device or JAX."""
    if (old["device"], old["jax"]) != (new["device"], new["jax"]):
        return new["rows"]
    measured = {key_of(row) for row in new["rows"]}
    return [row for row in old["rows"] if key_of(row) not in measured] + new["rows"]


def print_row(r):
    peer = f"{r['marlin_us'] / r['device_us']:5.2f}x" if r.get("marlin_us") else "     -"
    op = f"{r['op']}{r.get('rank', '')}"
    print(
        f"{r['format']:6} {op:8} {r['k']:6}x{r['n']:<6} M={r['m']:<5} {r['device_us']:9.2f} us "
        f"{r['tb_per_s']:5.2f} TB/s  BF16 {r['bf16_us']:9.2f} us ({r['bf16_us'] / r['device_us']:5.2f}x)  "
        f"Marlin {peer}",
        flush=True,
    )


def _by_table(row):
    return row["format"] == "nvfp4" and key_of(row)[-1] == ""


def summarize(rows):
    """Geometric means over Marlin, and the four matmuls of a layer in sequence."""
    out = {}
    for m in sorted({r["m"] for r in rows}):
        ratios = [r["marlin_us"] / r["device_us"] for r in rows if r["m"] == m and r.get("marlin_us") and _by_table(r)]
        if ratios:
            out[f"speedup_over_marlin_m{m}"] = float(np.exp(np.mean(np.log(ratios))))
    for model, shapes in MODELS.items():
        for m in sorted({r["m"] for r in rows if r["m"] <= 64}):
            mine = [r for r in rows if r["m"] == m and _by_table(r)]
            found = [r for s in shapes for r in mine if (r["k"], r["n"], r["op"]) == (*s, "forward")]
            if len(found) == 4:
                out[f"layer_{model}_m{m}_tb_per_s"] = (
                    sum(k * n * 0.5625 for k, n in shapes) * 1e-6 / sum(r["device_us"] for r in found)
                )
    return out
