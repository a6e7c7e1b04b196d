"""One live line on a terminal, plain lines elsewhere."""

import io

import pytest

from qerl_jax.live_line import LiveLine, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROW = {
    "reward": 0.5312,
    "rewards/accuracy/mean": 0.4375,
    "entropy": 1.2345,
    "aqn/sigma": 0.0069,
    "perf/throughput": 12345.6,
}


def test_live_line_on_a_terminal_is_rewritten_in_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    seconds = iter([0.0, 2.0, 4.0])
    stream = Terminal()
    line = LiveLine(60, stream=stream, clock=lambda: next(seconds))
    line.update({"step": 11, **ROW})
    line.update({"step": 12, **ROW})
    line.close()
    assert stream.getvalue().endswith(
        "\r\033[Kstep 12/60  reward 0.531  accuracy 43.8%  entropy 1.234  sigma 6.9e-03  12,346 tokens/s  1m36s left\n"
    )
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("updates", [1, 4, 16])
def test_the_time_left_is_that_of_rollouts_whose_rows_come_together(monkeypatch, updates):
    monkeypatch.setenv("COLUMNS", "200")
    now, stream = [0.0], Terminal()
    line = LiveLine(160, stream=stream, clock=lambda: now[0])
    for step in range(1, 97):
        rollout = (step - 1) // updates
        now[0] = 100.0 * updates * (rollout + 1)
        line.update({"step": step, "rollout": rollout, **ROW})
    line.close()
    assert stream.getvalue().endswith(f"  {duration(100 * 64)} left\n")


def test_the_time_left_goes_by_the_last_ten_rollouts():
    """Five of 100 seconds, then ten of 1 and 3 in turn: 2 seconds for each of the 20 that are left."""
    now, stream = [0.0], Terminal()
    line = LiveLine(36, stream=stream, clock=lambda: now[0])
    for step, seconds in enumerate([0, *[100] * 5, *[1, 3] * 5], start=1):
        now[0] += seconds
        line.update({"step": step, "rollout": step - 1})
    line.close()
    assert stream.getvalue().endswith("step 16/36  40s left\n")


def test_live_line_fits_the_terminal_and_notes_stand_above_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    line = LiveLine(60, stream=stream)
    line.update({"step": 1, **ROW})
    line.note("saved")
    drawn = stream.getvalue().split("\r\033[K")
    assert drawn == ["", "step  1/60  reward 0.531  acc", "saved\n", "step  1/60  reward 0.531  acc"]


def test_live_line_elsewhere_prints_every_ten_steps():
    stream = io.StringIO()
    line = LiveLine(25, stream=stream)
    for step in range(4, 26):
        line.update({"step": step, "reward": None})
    line.close()
    assert [text.split("/")[0] for text in stream.getvalue().splitlines()] == [
        "step  4",
        "step 10",
        "step 20",
        "step 25",
    ]


@pytest.mark.parametrize(("accuracy", "shown"), [(0.25, "25.0%"), (1.0, "100.0%"), (-2.0, "-2.000"), (2.5, "2.500")])
def test_an_accuracy_that_is_no_share_is_no_percentage(accuracy, shown):
    stream = io.StringIO()
    LiveLine(1, stream=stream).update({"step": 1, "rewards/accuracy/mean": accuracy})
    assert f"accuracy {shown}" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (3599.4, "59m59s"), (3600, "1h00m"), (7620, "2h07m")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
