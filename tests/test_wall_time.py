"""What the benchmarks of a layer make of a busy host's times."""

import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import fp4_block, fp4_layer
from benchmarks.wall_time import ROUNDS, STEPS, possible, slope_us, turn_us

CALL, TURN = 3e-4, 50e-6  # seconds of a call itself, and of a turn
FEW, MANY = (CALL + turns * TURN for turns in (STEPS, 3 * STEPS))
QUIET = 0.0, 0.0, 0.0, 0.0


@pytest.mark.parametrize("few, many", [
    (QUIET, QUIET),
    ((3.6e-3, 3.9e-3, 0.0, 3.6e-3), QUIET),  # a difference of medians would be 5 us a turn
    (QUIET, (9e-3, 0.0, 7e-3, 8e-3)),
    ((4e-3, 0.0, 0.0, 0.0), (0.0, 5e-3, 6e-3, 7e-3)),
])  # fmt: skip
def test_a_turns_time_is_that_of_the_calls_that_nothing_held_up(few, many):
    few, many = ([least + more for more in held] for least, held in ((FEW, few), (MANY, many)))
    assert slope_us(few, many, 2 * STEPS) == pytest.approx(50.0)


def test_a_time_far_below_the_kernels_own_is_none_and_told(capsys):
    held = slope_us([FEW + 3.6e-3] * 4, [MANY] * 4, 2 * STEPS)
    assert held == pytest.approx(5.0) and possible(held, 27.6) is None
    assert capsys.readouterr().err == (
        "no wall time: 5.0 us is too little for kernels of 27.6, the host is too busy to tell\n"
    )
    assert possible(50.0, 48.5) == 50.0 and possible(48.0, 48.5) == 48.0 and capsys.readouterr().err == ""


def test_both_numbers_of_turns_are_timed_in_turn(monkeypatch):
    now, asked = [0.0], []

    def loop(turns):
        asked.append(turns)
        now[0] += CALL + turns * TURN + (4e-3 if len(asked) % 4 else 0.0) * (turns == 3 * STEPS)

    monkeypatch.setattr("benchmarks.wall_time.time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    assert turn_us(loop) == pytest.approx(50.0)
    assert asked == [STEPS, 3 * STEPS] * ROUNDS


@pytest.mark.parametrize("wall, us", [(150.0, 50.0), (60.0, None)])
def test_a_row_has_no_time_and_no_rate_that_cannot_be(monkeypatch, wall, us):
    """The block's and the layer's benchmark, of three layers whose kernels take 27 us each."""
    x = jnp.ones((1, 256), jnp.bfloat16)
    monkeypatch.setattr(fp4_block, "turn_us", lambda loop: wall)
    monkeypatch.setitem(fp4_block.SHAPES, "this", (256, 256, 256, 128))
    monkeypatch.setattr(fp4_block, "kernels_of", lambda *_: [("nvfp4_block", 20.0), ("attention", 7.0)] * 6)
    model = [fp4_block.random_layer(jax.random.key(i), fp4_block.SHAPES["this"], 0) for i in range(3)]
    plain = fp4_block.reference
    row = fp4_block.measure("this", 1, 0, model, (plain, plain, lambda *_: x))
    assert (row["us"], row["tb_per_s"]) == (us, us and pytest.approx(0.5625 * 256 * (5 * 256 + 2 * 128) / 50e6))
    assert (row["kernels_us"], row["attention_us"]) == (20.0, 7.0)

    monkeypatch.setattr(fp4_layer, "turn_us", lambda loop: wall)
    monkeypatch.setitem(fp4_layer.LAYERS, "7B", 3)
    monkeypatch.setattr(fp4_layer, "make_kernels", lambda *_: [])
    monkeypatch.setattr(fp4_layer, "make_loop", lambda _: lambda x, model, steps: x)
    monkeypatch.setattr(fp4_layer, "worst_error", lambda *_: 0.0)
    ran = types.SimpleNamespace(measure=lambda loop, aggregate: lambda *_: (None, [("nvfp4", 0.027)] * 6))
    monkeypatch.setattr(fp4_layer, "profiler", ran)
    row = fp4_layer.measure("7B", 1, 0, [[]])
    assert row["us"] == us and bool(row["tb_per_s"]) == bool(us) and row["kernels_us"] == pytest.approx(27.0)
