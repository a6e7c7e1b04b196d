"""The benchmark of an optimizer step on a tiny network."""

import json

import jax
import pytest

from benchmarks import update
from benchmarks.shapes import MODELS


def test_kernels_of_both_halves_are_counted_and_added_up(monkeypatch):
    ran = [("small", 0.5), ("large", 2.0), ("small", 0.25), ("not chosen", 0.0)]

    def measure(program, aggregate):
        assert isinstance(program, jax.stages.Compiled) and not aggregate  # another one would be compiled again
        return lambda *operands: (program(*operands), ran if len(operands) == 3 and operands[1] == 2.0 else ran[:1])

    monkeypatch.setattr(update.profiler, "measure", measure)
    gather = jax.jit(lambda state, model, batch: state + model + batch).lower(1.0, 2.0, 3.0).compile()
    apply = jax.jit(lambda state, batch, gathered: state + batch + gathered).lower(1.0, 3.0, 6.0).compile()
    found = [tuple(row.values()) for row in update.kernel_times(update.Update(gather, apply), (1.0, 2.0, 3.0))]
    assert found == [("large", 1, 2.0), ("small", 3, 1.25), ("not chosen", 1, 0.0)]


def test_a_profile_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        update.main(["--model", "tiny", "--profile"])
    assert "there is no GPU here" in capsys.readouterr().err


def test_products_by_hand():
    """2 layers of q, k, v, o (64 x 64, 32 x 64 twice, 64 x 64) and three of 128 x 64; a vocabulary of 512."""
    layers, head = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64), 512 * 64
    assert update.products_flops(MODELS["tiny"], 10, 7, False) == 2 * (2 * 10 * layers + 2 * 7 * head)
    assert update.products_flops(MODELS["tiny"], 10, 7, True) == 2 * (3 * 10 * layers + 2 * 7 * head)


def test_every_cut_is_the_same_step(tmp_path):
    output = tmp_path / "update.json"
    words = (
        "--model tiny --lora-rank 4 --rows 4 --prompt 4 --completion 64 --micro-batch 1 4 --checkpointed 2 --repeats 1"
    )
    assert update.main([*words.split(), "--long-tail", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    rows, cut = result["rows"], ("micro_batch", "gradient_checkpointing")
    assert [[row[key] for key in cut] for row in rows] == [[1, False], [4, False], [2, True]]
    assert 1 < result["mean_length"] < 64
    assert [row["numbers_that_differ"] for row in rows] == [0] * 3
    assert rows[0]["grad_norm"] > 0 and all(row["seconds"] > 0 and row["temporary_gb"] > 0 for row in rows)
    assert all(row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-4) for row in rows)
