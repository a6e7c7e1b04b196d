"""Mistakes at the command line: exit code 2, and one message that says what to mend, without a traceback."""

import re

import pytest
from mistakes import CONFIG

from qerl_jax.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a config that is in order."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def refused(capfd):
    """Runs a command that must fail; gives its message."""

    def run(*words):
        capfd.readouterr()
        assert main([str(word) for word in words]) == 2
        captured = capfd.readouterr()
        # On a slow machine lines come first that say how far loading is; a plan's first line says what it does.
        message = re.sub(r"^(loading .*\n)+", "", captured.err)
        assert message.startswith(f"qerl {words[0]}: ") and "Traceback" not in message
        assert message.count("\n") == 1, captured.err
        assert words[0] == "train" or captured.out == ""
        return message

    return run
