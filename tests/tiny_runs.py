"""Folders of runs in which nothing is trained."""

from qerl_jax import run_folder
from qerl_jax.config_files import load_config


def config(tmp_path, *overrides):
    return load_config("quickstart", [f"run.output_dir={tmp_path / 'run'}", *overrides])


def open_once(config, fresh=False):
    with run_folder.open_run(config, fresh) as (folder, _):
        return folder


def edit(folder, *changes):
    """Changes the file of the run in `folder`, and returns the config that it has become."""
    text = (folder / "config.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "config.yaml").write_text(text)
    return load_config(str(folder / "config.yaml"))
