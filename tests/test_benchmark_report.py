"""Where a benchmark can run, and what its file holds when writing it fails."""

import importlib
import json
import os
import sys

import jax
import pytest

from benchmarks import decode_program, quickstart, report, roundings

KERNELS = {
    "decode_attention": [], "fp4_block": ["OUT"], "fp4_block_clock": ["OUT"], "fp4_chain": [], "fp4_error": ["OUT"],
    "fp4_inputs": ["OUT"], "fp4_layer": ["OUT"], "fp4_matmul": [], "fp4_sweep": ["OUT"],
    "fp4_wide_sweep": ["OUT", "--case", "forward", "3584", "3584", "128"], "instruction_rates": ["OUT"],
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_without_a_gpu_a_benchmark_of_kernels_says_so_in_a_line(tmp_path, monkeypatch, name):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *KERNELS[name]])
    with pytest.raises(SystemExit, match=r"^this benchmark times kernels on .* GPU.*; JAX's device here is cpu$"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert not list(tmp_path.iterdir())


def test_a_decode_program_names_the_compiler_that_is_missing(monkeypatch):
    def no_compiler(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(decode_program.topologies, "get_topology_desc", no_compiler)
    with pytest.raises(SystemExit, match=r"^no compiler for NVIDIA GPUs here .*; `pip install \.\[cuda\]` brings it$"):
        decode_program.compiled(decode_program.MODELS["tiny"], 8, 16, 8, 8, False, 90)


@pytest.mark.parametrize("words", [["--jobs", "2", "--cores", "2"], ["--cores", "4"]])
def test_quickstarts_that_would_not_have_their_cores_are_refused(monkeypatch, capsys, words):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 7, 9})
    with pytest.raises(SystemExit):
        quickstart.main(words)
    assert "each; allowed: 3 cores in all" in capsys.readouterr().err


def test_what_takes_long_writes_each_row_as_it_comes(tmp_path, monkeypatch):
    done = []

    def measured(*_):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return {"row": len(done)}

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(quickstart, "run", measured)
    monkeypatch.setattr(roundings, "measure", measured)
    for benchmark in (quickstart, roundings):
        path = tmp_path / benchmark.__name__
        with pytest.raises(KeyboardInterrupt):
            benchmark.main(["--output", str(path)])
        assert json.loads(path.read_text())["rows"] == [{"row": 1}, {"row": 2}]
        done.clear()


def test_results_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "out.json"
    report.write(path, {"rows": [1]})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            report.write(path, {"rows": [1, 2]})
    assert json.loads(path.read_text()) == {"rows": [1]} and list(path.parent.iterdir()) == [path]


def test_what_is_no_file_of_its_own_is_written_to_where_it_is(tmp_path):
    link, file, pipe = tmp_path / "link", tmp_path / "file.json", tmp_path / "pipe"
    link.symlink_to(file)
    report.write(link, {"rows": []})
    assert link.is_symlink() and json.loads(file.read_text()) == {"rows": []}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    report.write(pipe, {"rows": []})
    assert pipe.is_fifo() and json.loads(os.read(reader, 100)) == {"rows": []}
    os.close(reader)
