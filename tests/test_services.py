"""TensorBoard and W&B: what they show, and how their failures are told."""

import importlib.machinery
import struct
import sys
import types
from pathlib import Path

import pytest
from full_disk import full_disk

from qerl_jax import services
from qerl_jax.errors import UserError
from qerl_jax.metrics import MetricsWriter, read_rows


def test_a_missing_service_names_its_extra(tmp_path, monkeypatch):
    for extra, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        for module in [name for name in sys.modules if name.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, module)  # one that has been imported is found without its package
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"{package} is not installed; pip install 'qerl-jax\[{extra}\]'"):
            MetricsWriter(tmp_path, [extra])


@pytest.mark.parametrize(("service", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_what_an_installed_package_lacks_is_told(tmp_path, monkeypatch, service, package):
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import gone_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        UserError, match=rf"{service} failed, ModuleNotFoundError: No module named 'gone_missing'\. Mend"
    ):
        MetricsWriter(tmp_path / "run", [service])


def test_a_service_that_cannot_be_opened_leaves_none_open(tmp_path, monkeypatch):
    closed = []

    class Opened:
        package = "json"

        def __init__(self, run_dir, step, options):
            self.close = lambda: closed.append(run_dir)

    monkeypatch.setitem(services._SERVICES, "tensorboard", Opened)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed"):
        MetricsWriter(tmp_path, ["tensorboard", "wandb"])
    assert closed == [tmp_path]


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.log({"step": 1, "rollout": 0, "reward": 0.25, "skipped": float("nan")})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward" in events.read_bytes()
    assert b"skipped" not in events.read_bytes()


@pytest.mark.parametrize("done", [0, 3])
def test_tensorboard_hides_what_a_killed_process_wrote_beyond_the_checkpoint(tmp_path, monkeypatch, done):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    monkeypatch.setattr("time.time", iter(range(1_000_000_000, 2_000_000_000)).__next__)  # which names the file
    for step in (0, done):
        with MetricsWriter(tmp_path, ["tensorboard"], step=step) as writer:
            writer.log({"step": step + 1, "rollout": 0, "reward": 0.25})
    first, second = (events(path, event_pb2) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert [(event.step, event.session_log.status) for event in first] == [(0, 0), (1, 0)]
    start = event_pb2.SessionLog.START
    assert [(event.step, event.session_log.status) for event in second] == [(0, 0), (done + 1, start), (done + 1, 0)]
    assert [(value.tag, value.simple_value) for value in second[-1].summary.value][-1] == ("reward", 0.25)


def events(path, event_pb2):
    """The events of a file: 8 bytes of length, 4 of its checksum, then so many, and 4 of theirs."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def test_a_row_is_in_tensorboards_file_once_it_is_logged(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        for step in (1, 2):
            writer.log({"step": step, "rollout": 0, f"reward{step}": 0.25})
            (file,) = (tmp_path / "tensorboard").iterdir()
            assert b"reward%d" % step in file.read_bytes()


@pytest.mark.timeout(60)
def test_a_disk_that_is_full_for_tensorboard_is_told(tmp_path):
    pytest.importorskip("tensorboardX")
    row = {f"metric/{number}": number for number in range(30)}
    with (
        full_disk(room=16_000),  # which its file reaches before metrics.jsonl does
        pytest.raises(UserError, match=r"tensorboard failed, OSError: .* File too large.* leave tensorboard out"),
        MetricsWriter(tmp_path, ["tensorboard"]) as writer,
    ):
        for step in range(1, 40):
            writer.log(row | {"step": step, "rollout": 0})
    assert list(read_rows(tmp_path / "metrics.jsonl"))[-1]["step"] == step < 39


def in_place_of_wandb(monkeypatch, init):
    """W&B that has only this `init`."""
    stand_in = types.ModuleType("wandb")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="here")
    stand_in.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)


def failing_wandb(monkeypatch, place):
    """W&B that fails where it begins, at step 3, or where it ends: the program that it starts has died."""

    def log(numbers, step):
        if place == "log" and step == 3:
            raise BrokenPipeError(32, "Broken pipe")

    def finish():
        if place == "finish":
            raise RuntimeError("could not upload")

    def init(**options):
        if place == "init":
            raise RuntimeError("no API key")
        return types.SimpleNamespace(log=log, finish=finish)

    in_place_of_wandb(monkeypatch, init)


@pytest.mark.parametrize(
    "place, said",
    [
        ("init", "RuntimeError: no API key"),
        ("log", "BrokenPipeError: .*"),
        ("finish", "RuntimeError: could not upload"),
    ],
)
def test_what_wandb_raises_is_told_once_all_rows_are_written(tmp_path, monkeypatch, place, said):
    failing_wandb(monkeypatch, place)
    with (
        pytest.raises(UserError, match=rf"run.report_to: wandb failed, {said}.*\. Mend that, or leave wandb out"),
        MetricsWriter(tmp_path, ["wandb"]) as writer,
    ):
        writer.log(*({"step": step, "rollout": 0} for step in (2, 3, 4)))
    if place != "init":
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2, 3, 4]


def test_wandb_gets_no_step_before_the_last_one(tmp_path, monkeypatch):
    """It would drop the row, such as an evaluation behind an update that was refused."""
    logged = []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row["step"])), finish=lambda: None)
    in_place_of_wandb(monkeypatch, lambda **options: run)
    with MetricsWriter(tmp_path, ["wandb"], step=3) as writer:
        for step in (4, 5, 4, 5, 6):
            writer.log({"step": step, "rollout": 0})
    assert logged == [(4, 4), (5, 5), (5, 4), (5, 5), (6, 6)]


def test_what_stopped_a_run_is_told_where_its_service_cannot_be_closed(tmp_path, monkeypatch, caplog):
    failing_wandb(monkeypatch, "finish")
    with pytest.raises(KeyboardInterrupt, match="saved at step 4"), MetricsWriter(tmp_path, ["wandb"]):
        raise KeyboardInterrupt("saved at step 4")
    assert "wandb failed, RuntimeError: could not upload" in caplog.text


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: logged.append("end"))
    in_place_of_wandb(monkeypatch, lambda **options: (started.append(options), run)[1])
    options = {"run": {"seed": 3}}
    for step in (1, 2):
        with MetricsWriter(tmp_path, ["wandb"], step - 1, options) as writer:
            writer.log({"step": step, "rollout": 0, "reward": 0.5, "note": "text"})
    assert logged == [
        (1, {"step": 1, "rollout": 0, "reward": 0.5}),
        "end",
        (2, {"step": 2, "rollout": 0, "reward": 0.5}),
        "end",
    ]
    assert started[0] == started[1] and started[0]["config"] == options
    assert (started[0]["resume"], started[0]["project"], started[0]["name"]) == ("allow", "qerl-jax", tmp_path.name)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "")
    monkeypatch.chdir(tmp_path)
    with MetricsWriter(Path("."), ["wandb"], 0, options):
        assert started[2] == started[0] | {"project": "mine", "dir": "."}
