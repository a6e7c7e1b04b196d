"""The file of a run's result (`--result`): of all its tests, whoever ran them."""

import json
import types
from pathlib import Path

import pytest


@pytest.fixture
def summarize(pytestconfig):
    """The end of a run in which three tests have passed."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))

    def ends(path, **config):
        invoked = types.SimpleNamespace(args=["-m", "gpu", f"--result={path}"])
        config = types.SimpleNamespace(getoption=lambda name: path, invocation_params=invoked, **config)
        reporter = types.SimpleNamespace(stats={"passed": [object()] * 3})
        conftest.pytest_terminal_summary(reporter, pytest.ExitCode.OK, config)

    return ends


def test_the_whole_run_is_written(summarize, tmp_path):
    summarize(tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["passed"], result["failed"], result["not passed"]) == (3, 0, [])
    assert result["command"] == "python -m pytest -m gpu --result=result.json"


def test_a_worker_writes_nothing(summarize, tmp_path):
    """Where the run is killed, its part would be taken for the whole."""
    summarize(tmp_path / "result.json", workerinput={"workerid": "gw0"})
    assert not (tmp_path / "result.json").exists()
