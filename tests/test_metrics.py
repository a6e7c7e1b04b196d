"""Rows on disk, and cutting them back on resume."""

import json
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from full_disk import full_disk

from qerl_jax.errors import UserError
from qerl_jax.metrics import MetricsWriter, json_line, read_rows, truncate_after, warn_of_missing_rows


def test_rows_of_any_number_type_become_json(tmp_path):
    with MetricsWriter(tmp_path / "deep" / "run") as writer:
        writer.log({"step": 1, "rollout": 0, "a": np.float32(0.5), "b": jnp.float32(2), "c": jnp.arange(3), "d": "é"})
        writer.log({"step": np.int64(2), "rollout": jnp.int32(1), "a": float("nan"), "b": -np.inf, "c": [np.nan, True]})
    first, second = read_rows(tmp_path / "deep" / "run" / "metrics.jsonl")
    assert first == {"step": 1, "rollout": 0, "a": 0.5, "b": 2.0, "c": [0, 1, 2], "d": "é"}
    assert second == {"step": 2, "rollout": 1, "a": None, "b": None, "c": [None, True]}


def test_equal_values_give_equal_bytes():
    value = np.float32(0.1)
    assert json_line({"x": value}) == json_line({"x": jnp.asarray(value)}) == '{"x": 0.10000000149011612}\n'
    assert json_line({"x": "é €"}) == '{"x": "é €"}\n'


def test_no_control_character_stands_in_a_line_as_it_is():
    text = "\x1b[2J\x7f\x9b3J\x85"
    line = json_line({"completion": text})
    assert json.loads(line) == {"completion": text}
    assert line.rstrip("\n").isprintable()


def test_a_new_writer_appends(tmp_path):
    for step in (1, 2):
        with MetricsWriter(tmp_path) as writer:
            writer.log({"step": step, "rollout": step - 1})
            writer.log_completions({"rollout": step - 1, "completion": text} for text in "ab")
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [row["completion"] for row in read_rows(tmp_path / "completions.jsonl")] == ["a", "b", "a", "b"]


def test_truncate_cuts_both_files_back_and_drops_a_torn_line(tmp_path, caplog):
    metrics, completions = tmp_path / "metrics.jsonl", tmp_path / "completions.jsonl"
    kept = "".join(json.dumps({"step": s, "rollout": r, "loss": None}) + "\n" for s, r in ((1, 0), (2, 0), (3, 1)))
    kept += '{"step": 4, "rollout": 1, "eval/accuracy": 0.5}\n'  # the update's own row was lost
    metrics.write_text(kept + '{"step": 4, "rollout": 2}\n{"step": 5, "rol')
    completions.write_text('{"rollout": 0, "completion": "é"}\ndamaged\n{"rollout": 3, "completion": ""}\n')
    assert truncate_after(tmp_path, 2) == {"metrics.jsonl": {1, 2, 3}, "completions.jsonl": {0}}
    assert metrics.read_text() == kept
    assert completions.read_text() == '{"rollout": 0, "completion": "é"}\n'
    damaged = tmp_path / "completions.jsonl.damaged"
    assert f"completions.jsonl, line 2: not a JSON object with `rollout`; moved to {damaged}" in caplog.text
    metrics.write_text(kept + '{"step": 4, "rollout": 1}')  # what is appended next must begin a line
    completions.write_text('{"completion": "a"}\n{"rollout": null}\n{"rollout": 1}\n')
    truncate_after(tmp_path, 2)
    assert metrics.read_text() == kept and completions.read_text() == '{"rollout": 1}\n'
    assert "completions.jsonl, line 1: not a JSON object with `rollout`; moved to" in caplog.text
    assert damaged.read_text() == 'damaged\n{"completion": "a"}\n{"rollout": null}\n'  # nothing is lost
    damaged.unlink()
    completions.write_bytes(b'{"rollout": 1}\n' + '{"rollout": 0} '.encode("utf-16") + b"\n")
    assert truncate_after(tmp_path, 2)["completions.jsonl"] == {1}  # of UTF-8 alone, as what is appended
    damaged.unlink()
    truncate_after(tmp_path, 0)
    assert metrics.read_text() == completions.read_text() == ""
    assert truncate_after(tmp_path / "nothing_here", 5) == {"metrics.jsonl": set(), "completions.jsonl": set()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["completions.jsonl", "metrics.jsonl"]


def test_rows_that_are_missing_are_named_in_spans(tmp_path, caplog):
    left = {"metrics.jsonl": {3, 5, 9}, "completions.jsonl": {0, 1}}
    warn_of_missing_rows(tmp_path, left, steps=9, rollouts=2)
    (record,) = caplog.records
    assert record.message.startswith(f"{tmp_path}/metrics.jsonl: the rows of steps 1 to 2, 4, 6 to 8 are missing: they")
    assert "log_completions" not in record.message
    caplog.clear()
    warn_of_missing_rows(tmp_path, left, steps=0, rollouts=0)
    assert not caplog.records
    warn_of_missing_rows(tmp_path, left | {"completions.jsonl": {1}}, steps=0, rollouts=2)
    (record,) = caplog.records
    assert "completions.jsonl: the rows of rollout 0 are missing" in record.message
    assert "since, or run.log_completions was false;" in record.message


def test_reading_leaves_out_a_torn_line_and_names_a_damaged_one(tmp_path):
    path = tmp_path / "m.jsonl"
    for torn in ('{"a": 2', '{"a": 2}'):  # the second lacks its line's end alone
        path.write_text('{"a": 1}\n' + torn)
        assert list(read_rows(path)) == [{"a": 1}]
    for damaged in (b'{"a"', b'{"a": 2}\r{"a": 3}', b'{"a": "\xff"}', b'{"a": ' + 10**6 * b"["):
        path.write_bytes(b'{"a": 1}\n' + damaged + b'\n{"a": 3}\n')
        with pytest.raises(UserError, match=r'm.jsonl, line 2: found \{"a".*; expected a JSON object'):
            list(read_rows(path))
    with pytest.raises(UserError, match=r"missing.jsonl: cannot be read: No such file"):
        list(read_rows(tmp_path / "missing.jsonl"))


def test_the_rows_of_a_long_run_are_not_all_held_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json_line({"step": step, "rollout": step, "x": "y" * 1000}) for step in range(2000)))
    tracemalloc.start()
    assert sum(row["step"] == 1999 for row in read_rows(path)) == 1
    assert tracemalloc.get_traced_memory()[1] < 10**6 < path.stat().st_size
    tracemalloc.stop()


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    """The rows are in the file as soon as log() returns: nothing waits in a buffer of the process."""
    code = (
        "import sys; from pathlib import Path; from qerl_jax.metrics import MetricsWriter\n"
        "w = MetricsWriter(Path(sys.argv[1])); n = 0\n"
        "while True:\n  n += 1; w.log({'step': n, 'rollout': n, 'x': 'y' * 5000}); print(n, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    assert process.stdout is not None
    for _ in range(50):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = list(read_rows(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= last


def test_a_full_disk_is_told_with_the_file(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log({"step": 1, "rollout": 0})
        with pytest.raises(OSError, match=re.escape(f"File too large: '{tmp_path}/metrics.jsonl'")), full_disk():
            writer.log({"step": 2, "rollout": 1})
        with pytest.raises(OSError, match=re.escape(f"File too large: '{tmp_path}/completions.jsonl'")), full_disk():
            writer.log_completions([{"rollout": 0}])


def test_on_a_full_disk_rows_can_be_cut_off_and_not_be_taken_out_from_amid_others(tmp_path):
    metrics, completions = tmp_path / "metrics.jsonl", tmp_path / "completions.jsonl"
    metrics.write_text('{"step": 1, "rollout": 0}\n{"step": 2, "rollout": 1}\n{"step"')
    completions.write_text('{"rollout": 1}\n{"rollout": 0}\n')
    with pytest.raises(OSError, match=re.escape(f"File too large: '{completions}'")), full_disk():
        truncate_after(tmp_path, 1)
    assert metrics.read_text() == '{"step": 1, "rollout": 0}\n'
    assert completions.read_text() == '{"rollout": 1}\n{"rollout": 0}\n'
    truncate_after(tmp_path, 1)
    assert completions.read_text() == '{"rollout": 0}\n'


def test_a_run_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file; expected a folder"):
        MetricsWriter(tmp_path / "file")
