"""Damage of any byte of a checkpoint, and checkpoints that are deleted while they are read."""

import logging
import random
import shutil

import pytest
from checkpoint_trees import assert_same, make_tree

from qerl_jax import checkpoints
from qerl_jax.checkpoints import (
    checkpoint_steps,
    newest_progress,
    restore_checkpoint,
    save_checkpoint,
)
from qerl_jax.errors import UserError


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
    (two / "step_00000030").write_text("step")
    tree, _, step = restore_checkpoint(two, make_tree())
    assert step == 20 and checkpoint_steps(two) == [10, 20]
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


def test_a_damaged_one_is_told_once_where_an_older_one_goes_meanwhile(two, at_the_manifest):
    (two / "step_00000020" / "manifest.json").write_bytes(b"{}")
    at_the_manifest(10, lambda: shutil.rmtree(two / "step_00000010"))
    with pytest.raises(UserError, match=r"every checkpoint \(20\) is damaged"):
        restore_checkpoint(two, make_tree())


def test_one_that_goes_without_a_newer_one_is_not_called_damaged(two, at_the_manifest):
    at_the_manifest(20, lambda: [shutil.rmtree(folder) for folder in two.iterdir()])
    with pytest.raises(UserError, match=r"checkpoint 20 was deleted while it was read, and no newer one is there$"):
        restore_checkpoint(two, make_tree())
    save_checkpoint(two, 20, make_tree(), {})
    with pytest.raises(UserError, match=r"checkpoint 20 was deleted while it was read$"):
        restore_checkpoint(two, make_tree(), step=20)
