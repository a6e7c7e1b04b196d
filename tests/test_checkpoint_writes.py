"""Saves that fail or are killed at any instant leave the checkpoint before them."""

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_trees import PROGRESS, make_tree
from full_disk import full_disk

from qerl_jax import checkpoints, orbax_arrays
from qerl_jax.checkpoints import (
    checkpoint_steps,
    remove_partial,
    restore_checkpoint,
    save_checkpoint,
)
from qerl_jax.errors import UserError


def test_all_is_on_the_disk_before_it_is_visible_and_its_name_before_the_call_returns(tmp_path, monkeypatch):
    """After a power failure a checkpoint is whole or not there, and one whose save has returned is there."""
    done, renamed, synced = [], os.rename, os.fsync

    def fsync(handle):
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        synced(handle)

    def rename(old, new):
        if Path(new).parent == tmp_path:  # others are within the checkpoint
            assert {Path(old), *Path(old).rglob("*")} <= set(done)
            done.append("renamed")
        renamed(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save_checkpoint(tmp_path, 1, make_tree(1), PROGRESS)
    assert done.count("renamed") == 1 and tmp_path in done[done.index("renamed") :]


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(tmp_path, monkeypatch, caplog):
    save_checkpoint(tmp_path, 1, make_tree(1), PROGRESS)
    big = {"a": np.random.default_rng(0).random(100_000)}
    refused = r"checkpoint of step 2 could not be written \(File too large\); older .* Make room"
    with pytest.raises(UserError, match=refused), full_disk(room=1 << 16):
        save_checkpoint(tmp_path, 2, big, {})
    assert not caplog.records

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "flush_tree", full)
    with pytest.raises(
        UserError, match=f"{re.escape(str(tmp_path))}: the checkpoint of step 2 .*No space left on device"
    ):
        save_checkpoint(tmp_path, 2, big, {})
    assert os.listdir(tmp_path) == ["step_00000001"]
    assert restore_checkpoint(tmp_path, make_tree(0))[2] == 1


def test_a_full_disk_at_the_first_checkpoint_speaks_of_no_older_one(tmp_path):
    refused = r"step 1 could not be written \(File too large\)\. Make room .* start again: there is no older one to"
    with pytest.raises(UserError, match=refused) as error, full_disk(room=1 << 16):
        save_checkpoint(tmp_path, 1, {"a": np.random.default_rng(0).random(100_000)}, {})
    assert "as they were" not in str(error.value) and "newest" not in str(error.value)


def test_what_a_failed_save_still_writes_is_removed(tmp_path, monkeypatch):
    """Orbax's other threads write on after the first has failed, and make the folders that they miss."""

    def write_on(temp):
        for number in range(8):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                (temp / "arrays").mkdir(parents=True, exist_ok=True)
                (temp / "arrays" / str(number)).write_text("late")
            time.sleep(0.05)

    def full(temp, *args):
        writer.append(threading.Thread(target=write_on, args=(temp,)))
        writer[0].start()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = []
    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(UserError, match="No space left on device"):
        save_checkpoint(tmp_path, 1, make_tree(1), PROGRESS)
    writer[0].join()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_writes_any_more_is_told_at_once(tmp_path, monkeypatch, number):
    """As where a disk fails, and is mounted again for reading alone; or where the folder may not be entered."""

    def refuse(*args, **options):
        raise OSError(number, os.strerror(number))

    def write(temp, *args):
        temp.mkdir()
        for name in ("rmdir", "stat") if number == errno.EACCES else ("rmdir",):
            monkeypatch.setattr(os, name, refuse)
        raise OSError(number, os.strerror(number))

    save_checkpoint(tmp_path, 1, make_tree(1), PROGRESS)
    monkeypatch.setattr(checkpoints, "_write", write)
    monkeypatch.setattr(orbax_arrays, "_PATIENCE", 4.0)
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"{os.strerror(number)}\); older ones are as they were"):
        save_checkpoint(tmp_path, 2, make_tree(2), PROGRESS)
    assert time.monotonic() - began < 2
    monkeypatch.undo()
    assert restore_checkpoint(tmp_path, make_tree(0))[2] == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_an_older_checkpoint_that_is_read_meanwhile_fails_no_save(tmp_path, monkeypatch, caplog, replaced):
    """NFS keeps a file that another program has open, under another name, and so its folder is not empty."""

    def not_empty(path, **options):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    save_checkpoint(tmp_path, 1, make_tree(1), PROGRESS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", not_empty)
        for step in (1 if replaced else 2, 3):
            save_checkpoint(tmp_path, step, make_tree(step), PROGRESS, save_total_limit=1)
            assert checkpoint_steps(tmp_path) == [step]
    assert len(os.listdir(tmp_path)) == 3 and "is left for the next save to remove" in caplog.text
    save_checkpoint(tmp_path, 4, make_tree(4), PROGRESS, save_total_limit=1)
    assert os.listdir(tmp_path) == ["step_00000004"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("instant", range(9))
def test_death_between_any_two_changes_of_the_disk(tmp_path, monkeypatch, instant):
    """Replaces step 1 while only one checkpoint is kept: the hardest case, with none before it to fall back to."""
    save_checkpoint(tmp_path, 1, {"x": jnp.float32(1)}, {})
    left = instant

    def mortal(function):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "rename", mortal(os.rename))
        patch.setattr(checkpoints.shutil, "rmtree", mortal(shutil.rmtree))
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, 1, {"x": jnp.float32(2)}, {}, save_total_limit=1)
            save_checkpoint(tmp_path, 2, {"x": jnp.float32(3)}, {}, save_total_limit=1)
    target = {"x": jnp.float32(0)}
    before, _, step = restore_checkpoint(tmp_path, target)
    assert before["x"] in ((1.0, 2.0) if step == 1 else (3.0,))
    remove_partial(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert restore_checkpoint(tmp_path, target)[0] == before


SAVER = """
import sys
import jax.numpy as jnp
from qerl_jax.checkpoints import remove_partial, restore_checkpoint, save_checkpoint

def tree(step):
    return {"step": jnp.int32(step), "x": jnp.arange(20000, dtype=jnp.float32) * step}

directory = sys.argv[1]
remove_partial(directory)
found = restore_checkpoint(directory, tree(0))
step = 0 if found is None else found[2]
while True:
    step += 1
    print("saving", step, flush=True)
    save_checkpoint(directory, step, tree(step), {"step": step}, save_total_limit=2)
    print("saved", step, flush=True)
"""


def test_sigkill_during_saves_leaves_a_verified_checkpoint(tmp_path):
    rng = random.Random(1)
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    directory = tmp_path / "checkpoints"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    partial, last = 0, 0
    for attempt in range(12):
        if attempt >= 4 and partial:
            break
        command = [sys.executable, str(script), str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            # Lines tell where it is, whatever else the machine does; the instant after them is drawn.
            lines = [child.stdout.readline() for _ in range(1 + 2 * attempt)]
            assert lines[0] == f"saving {last + 1}\n"
            time.sleep(rng.uniform(0.0, 0.05))
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.read().splitlines()
        confirmed = [int(line.split()[1]) for line in lines if line.startswith("saved")]
        partial += any(name.startswith(".tmp-") for name in os.listdir(directory))
        target = {"step": jnp.int32(0), "x": jnp.zeros(20000, jnp.float32)}
        found = restore_checkpoint(directory, target)
        if found is None:
            assert last == 0 and not confirmed
            continue
        tree, progress, step = found
        assert step >= max([last, *confirmed])
        assert tree["step"] == step and progress == {"step": step}
        assert np.array_equal(tree["x"], np.arange(20000, dtype=np.float32) * step)
        last = step
    assert partial  # at least one kill fell into a save
    assert last >= 1
    remove_partial(directory)
    assert all(name.startswith("step_") for name in os.listdir(directory))
