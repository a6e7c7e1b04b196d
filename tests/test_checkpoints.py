"""Round trips, damage of any byte, and kills at any instant."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from full_disk import full_disk

from qerl_jax import checkpoints, orbax_arrays
from qerl_jax.checkpoints import (
    checkpoint_steps,
    newest_progress,
    remove_partial,
    restore_checkpoint,
    save_checkpoint,
)
from qerl_jax.errors import UserError
from qerl_jax.models.params import Adapter, LoRA

PROGRESS = {"cursor": 3, "names": ["a", "ü"], "sigma": 1e-05, "nested": {"x": None, "done": False}}


@flax.struct.dataclass
class Pair:
    a: jax.Array
    b: jax.Array | None
    scaling: float = flax.struct.field(pytree_node=False, default=2.0)


def make_tree(seed=0):
    """Like a TrainState: step, adapter of dataclasses in dictionaries in tuples, optimizer state."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    adapter = ({"q_proj": Pair(normal(4, 6), normal(8, 4))}, {"q_proj": Pair(normal(4, 6), None)})
    return {
        "step": jnp.int32(7 + seed),
        "adapter": adapter,
        "opt_state": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(adapter),
        "bits": jnp.asarray(rng.integers(0, 2**32, 5), jnp.uint32),
        "half": jnp.asarray(rng.normal(size=(3, 1)), jnp.bfloat16),
        "flag": jnp.array([True, False]),
        "nothing": None,
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "key": jax.random.split(jax.random.key(seed), 2),
    }


def raw(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


def assert_same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert type(leaf) is type(other) and leaf.dtype == other.dtype and raw(leaf) == raw(other)


def test_round_trip_keeps_every_bit(tmp_path):
    tree = make_tree()
    path = save_checkpoint(tmp_path / "checkpoints", 12, tree, PROGRESS)
    assert path == tmp_path / "checkpoints" / "step_00000012"
    restored, progress, step = restore_checkpoint(tmp_path / "checkpoints", make_tree(seed=1))
    assert_same(restored, tree)
    assert progress == PROGRESS and step == 12
    assert not restored["half"].committed  # as the target's: jit must not compile again after a resume
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["leaves"]["adapter.0.q_proj.a"]["shape"] == [4, 6]
    assert manifest["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("name", ["lr[1e-5]", "a*b", "a\\b", "gs:", "100% #1 \u00e9"])
def test_a_folder_may_have_any_name(tmp_path, name):
    (tmp_path / "axb").mkdir()  # which a*b matches as a pattern
    tree = {"a": jnp.arange(3.0)}
    save_checkpoint(tmp_path / name, 1, tree, {})
    save_checkpoint(tmp_path / name, 1, tree, {"again": 1})
    restored, progress, step = restore_checkpoint(tmp_path / name, tree)
    assert np.array_equal(restored["a"], tree["a"]) and (progress, step) == ({"again": 1}, 1)


def test_a_folder_that_orbax_cannot_be_told_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t[1]"))
    with pytest.raises(UserError, match=r"lr\[1e-5\]: orbax takes .*/t\[1\]; choose another folder, or set TMPDIR"):
        save_checkpoint(tmp_path / "lr[1e-5]", 1, {"a": jnp.arange(3.0)}, {})


def test_target_may_be_abstract_or_numpy(tmp_path):
    tree = make_tree()
    save_checkpoint(tmp_path, 0, tree, {})
    abstract = jax.eval_shape(lambda: tree)
    assert_same(restore_checkpoint(tmp_path, abstract)[0], tree)
    save_checkpoint(tmp_path, 1, {"x": np.arange(3, dtype=np.int64)}, {})
    restored = restore_checkpoint(tmp_path, {"x": np.zeros(3, np.int64)})[0]["x"]
    assert isinstance(restored, np.ndarray) and restored.tolist() == [0, 1, 2]


def test_restored_arrays_can_be_donated(tmp_path):
    tree = {"x": jnp.arange(4096.0)}
    save_checkpoint(tmp_path, 0, tree, {})
    restored, _, _ = restore_checkpoint(tmp_path, tree)
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: 2 * x, t), donate_argnums=0)(restored)
    assert np.array_equal(doubled["x"], 2 * np.arange(4096.0))


def test_no_checkpoint_is_none(tmp_path):
    assert restore_checkpoint(tmp_path / "absent", make_tree()) is None
    assert checkpoint_steps(tmp_path / "absent") == []
    remove_partial(tmp_path / "absent")


def test_rotation_and_choice_of_a_step(tmp_path):
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, step, {"x": jnp.float32(step)}, {"s": step}, save_total_limit=2)
    assert checkpoint_steps(tmp_path) == [30, 40]
    assert restore_checkpoint(tmp_path, {"x": jnp.float32(0)}, step=30) == ({"x": 30.0}, {"s": 30}, 30)
    with pytest.raises(UserError, match=r"no checkpoint of step 20; there are \[30, 40\]"):
        restore_checkpoint(tmp_path, {"x": jnp.float32(0)}, step=20)
    # Saving an earlier step again (a run continued from it) must delete neither it nor what lies ahead.
    save_checkpoint(tmp_path, 35, {"x": jnp.float32(0)}, {}, save_total_limit=1)
    assert checkpoint_steps(tmp_path) == [35, 40]
    assert sorted(os.listdir(tmp_path)) == ["step_00000035", "step_00000040"]


def test_a_step_may_be_a_scalar_array(tmp_path):
    folder = save_checkpoint(tmp_path, jnp.int32(7), make_tree(), {})
    assert folder.name == "step_00000007" and restore_checkpoint(tmp_path, make_tree())[2] == 7


def test_same_step_is_replaced(tmp_path):
    save_checkpoint(tmp_path, 1, {"x": jnp.float32(1)}, {})
    save_checkpoint(tmp_path, 1, {"x": jnp.float32(2)}, {}, save_total_limit=1)
    assert restore_checkpoint(tmp_path, {"x": jnp.float32(0)})[0] == {"x": 2.0}
    assert os.listdir(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t | {"half": jnp.zeros((4, 1), jnp.bfloat16)},
            r"leaf half: expected bfloat16\[4, 1\], found bf.*3, 1",
        ),
        (lambda t: t | {"half": jnp.zeros((3, 1))}, r"leaf half: expected float32\[3, 1\], found bfloat16\[3, 1\]"),
        (lambda t: t | {"more": jnp.zeros(2)}, r"leaf more: expected float32\[2\], found no such leaf"),
        (lambda t: t | {"bits": None}, r"leaf bits: expected no such leaf, found uint32\[5\]"),
        (lambda t: t | {"key": jax.random.key(0, impl="rbg")}, r"leaf key: expected key<rbg>\[\], found key<fry>\[2\]"),
    ],
)
def test_other_target_is_named(tmp_path, change, message):
    save_checkpoint(tmp_path, 5, make_tree(), {})
    with pytest.raises(UserError, match=message):
        restore_checkpoint(tmp_path, change(make_tree()))


def paired(scaling, rank_stabilised=False):
    pair = LoRA(jnp.ones((2, 6)), jnp.ones((8, 2)), scaling, rank_stabilised)
    return {"train": {"adapter": Adapter(({"k_proj": pair.replace(scaling=1.0), "q_proj": pair},)), "x": jnp.ones(1)}}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((200.0,), r"static train\.adapter\.lora\.0\.q_proj\.scaling: expected 200\.0, found 2\.0\. "),
        ((2.0, True), r"static train\.adapter\.lora\.0\.k_proj\.rank_stabilised: expected True, found False\. "),
    ],
)
def test_a_pair_that_scales_otherwise_is_named(tmp_path, other, message):
    save_checkpoint(tmp_path, 5, paired(2.0), {})
    with pytest.raises(UserError, match=f"{message}The checkpoint is of another set-up .*alpha, use_rslora.*continue"):
        restore_checkpoint(tmp_path, paired(*other))
    assert_same(restore_checkpoint(tmp_path, paired(2.0))[0], paired(2.0))
    assert_same(restore_checkpoint(tmp_path, jax.eval_shape(lambda: paired(2.0)))[0], paired(2.0))


def test_of_what_is_static_the_manifest_holds_plain_values(tmp_path):
    @flax.struct.dataclass
    class Outer:
        inner: tuple
        name: str = flax.struct.field(pytree_node=False)
        function: object = flax.struct.field(pytree_node=False)

    def tree(name="x", function=print):
        return {"a": Outer((Pair(jnp.ones(2), None, 3.0),), name, function)}

    path = save_checkpoint(tmp_path, 0, tree(), {})
    assert json.loads((path / "manifest.json").read_text())["static"] == {"a.inner.0.scaling": 3.0, "a.name": "x"}
    target = tree(function=len)
    assert_same(restore_checkpoint(tmp_path, target)[0], target)
    with pytest.raises(UserError, match=r"static a\.name: expected None, found x\. "):
        restore_checkpoint(tmp_path, tree(name=None))


def test_a_checkpoint_that_does_not_know_what_was_static_is_taken(tmp_path):
    path = save_checkpoint(tmp_path, 5, paired(2.0), {})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.pop("static")["train.adapter.lora.0.q_proj.scaling"] == 2.0
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")
    assert restore_checkpoint(tmp_path, paired(3.0))[0]["train"]["adapter"].lora[0]["q_proj"].scaling == 3.0


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match=r"leaf a\.0: expected an array, found int"):
        save_checkpoint(tmp_path, 0, {"a": [3]}, {})
    with pytest.raises(TypeError, match="JSON"):
        save_checkpoint(tmp_path, 0, {}, {"a": (1, 2)})
    with pytest.raises(ValueError, match="nan"):
        save_checkpoint(tmp_path, 0, {}, {"a": float("nan")})
    with pytest.raises(ValueError, match="save_total_limit"):
        save_checkpoint(tmp_path, 0, {}, {}, save_total_limit=0)


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        ({"cursor": np.int64(3)}, "progress['cursor'] is np.int64(3) (int64); make one of it by int(...), float"),
        ({"a": [1, {"b": np.zeros(2)}]}, "progress['a'][1]['b'] is array([0., 0.]) (ndarray); make"),
        ({"a": {"b": (1, 2)}}, "progress['a']['b'] is (1, 2) (tuple); make"),
        ({"a": [{1: 2}]}, "progress['a'][0] has the key 1; make"),
    ],
)
def test_progress_that_json_does_not_hold_is_named_before_anything_is_written(tmp_path, progress, said):
    expected = f"progress must hold JSON values only (no tuples, no keys but strings): {said}"
    with pytest.raises(TypeError, match=re.escape(expected)):
        save_checkpoint(tmp_path / "new", 1, {}, progress)
    assert not (tmp_path / "new").exists()


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
    with pytest.raises(UserError, match=f"{tmp_path}: the checkpoint of step 2 .*No space left on device"):
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


@pytest.fixture
def two(tmp_path):
    """Checkpoints 10 and 20 of different trees."""
    for step in (10, 20):
        save_checkpoint(tmp_path, step, make_tree(seed=step), {"step": step})
    return tmp_path


def assert_falls_back(directory, caplog, what):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="qerl_jax.checkpoints"):
        tree, progress, step = restore_checkpoint(directory, make_tree())
    assert (step, progress) == (10, {"step": 10}), what
    assert_same(tree, make_tree(seed=10))
    [record] = caplog.records
    assert "step 20 is damaged" in record.getMessage(), what


def test_any_flipped_bit_is_found(two, caplog):
    newest = two / "step_00000020"
    rng = random.Random(0)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 8
    # Every file at least four times; the manifest, whose text has bits that JSON would not miss, more often.
    places = [(path, rng.randrange(8 * path.stat().st_size)) for path in files * 3]
    manifest = newest / "manifest.json"
    places += [(manifest, rng.randrange(8 * manifest.stat().st_size)) for _ in range(20)]
    exponent = manifest.read_bytes().index(b"sha256")  # case of a letter: the same JSON after an upper/lower flip
    places += [(manifest, 8 * exponent + 5)]
    for path, bit in places:
        original = path.read_bytes()
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert_falls_back(two, caplog, f"{path.relative_to(newest)} bit {bit}")
        path.write_bytes(original)
    assert restore_checkpoint(two, make_tree())[2] == 20


def test_truncated_lengthened_or_deleted_files_are_found(two, caplog):
    newest = two / "step_00000020"
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        original = path.read_bytes()
        for damaged in (original[:-1], b"", original + b"\0", None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            assert_falls_back(
                two, caplog, f"{path.relative_to(newest)}: {damaged if damaged is None else len(damaged)}"
            )
        path.write_bytes(original)
    shutil.rmtree(newest / "arrays")
    assert_falls_back(two, caplog, "arrays deleted")


def test_a_file_too_many_changes_nothing(two):
    (two / "step_00000020" / "arrays" / ".DS_Store").write_bytes(b"x")
    (two / "notes.txt").write_text("step")
    (two / "step_final").mkdir()
    tree, _, step = restore_checkpoint(two, make_tree())
    assert step == 20
    assert_same(tree, make_tree(seed=20))


def test_exchanged_checkpoints_are_found(two, caplog):
    shutil.rmtree(two / "step_00000020")
    shutil.copytree(two / "step_00000010", two / "step_00000020")
    assert_falls_back(two, caplog, "folder of another step")


def test_damage_the_files_do_not_show_is_found_in_the_leaves(two, caplog, monkeypatch):
    read = checkpoints.read_manifest

    def with_other_leaf(folder, step):
        manifest = read(folder, step)
        if step == 20:
            manifest["leaves"]["half"]["sha256"] = "0" * 64
        return manifest

    monkeypatch.setattr(checkpoints, "read_manifest", with_other_leaf)
    assert_falls_back(two, caplog, "leaf digest")


def test_all_damaged_is_an_error(two):
    for step in (10, 20):
        (two / f"step_{step:08d}" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"every checkpoint \(10, 20\) is damaged"):
        restore_checkpoint(two, make_tree())
    with pytest.raises(UserError, match="checkpoint 10 is damaged"):
        restore_checkpoint(two, make_tree(), step=10)


@pytest.fixture(params=["before", "after"])
def at_the_manifest(request, monkeypatch):
    """Sets what happens while the checkpoint of a step is read, before its manifest is or after."""

    def happens(step, what):
        read = checkpoints.read_manifest

        def read_amid(folder, of):
            if of == step and request.param == "before":
                what()
            manifest = read(folder, of)
            if of == step and request.param == "after":
                what()
            return manifest

        monkeypatch.setattr(checkpoints, "read_manifest", read_amid)

    return happens


def test_one_that_a_run_deletes_meanwhile_gives_way_to_a_newer_one(two, at_the_manifest, caplog):
    def saves(step):
        return lambda: save_checkpoint(two, step, make_tree(seed=step), {"step": step}, save_total_limit=1)

    at_the_manifest(20, saves(30))
    at_the_manifest(30, saves(40))
    with caplog.at_level(logging.WARNING, logger="qerl_jax.checkpoints"):
        tree, progress, step = restore_checkpoint(two, make_tree())
    assert (step, progress, caplog.records) == (40, {"step": 40}, [])
    assert_same(tree, make_tree(seed=40))


def test_so_does_its_progress(two, at_the_manifest, request):
    at_the_manifest(20, lambda: save_checkpoint(two, 30, make_tree(), {"step": 30}, save_total_limit=1))
    read = 20 if "after" in request.node.callspec.id else 30
    assert newest_progress(two) == ({"step": read}, read)


def test_one_that_goes_without_a_newer_one_is_not_called_damaged(two, at_the_manifest):
    at_the_manifest(20, lambda: [shutil.rmtree(folder) for folder in two.iterdir()])
    with pytest.raises(UserError, match=r"checkpoint 20 was deleted while it was read, and no newer one is there$"):
        restore_checkpoint(two, make_tree())
    save_checkpoint(two, 20, make_tree(), {})
    with pytest.raises(UserError, match=r"checkpoint 20 was deleted while it was read$"):
        restore_checkpoint(two, make_tree(), step=20)


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
    for _ in range(4):
        command = [sys.executable, str(script), str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            first = child.stdout.readline()
            assert first == f"saving {last + 1}\n"
            time.sleep(rng.uniform(0.0, 0.4))
            child.send_signal(signal.SIGKILL)
            lines = [first, *child.stdout.read().splitlines()]
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


def test_checkpoints_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = save_checkpoint("~/kept", 3, {"a": jnp.ones(2)}, {})
    assert folder == tmp_path / "kept" / "step_00000003" and checkpoint_steps("~/kept") == [3]
    tree, _, step = restore_checkpoint("~/kept", {"a": jnp.zeros(2)})
    assert step == 3 and tree["a"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_a_folder_that_is_a_file_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    tree = {"a": jnp.ones(2)}
    for call in (
        lambda directory: save_checkpoint(directory, 0, tree, {}),
        lambda directory: restore_checkpoint(directory, tree),
        checkpoint_steps, newest_progress, remove_partial,
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"^{tmp_path}/file is a file; expected a folder$"):
            call(tmp_path / name)
