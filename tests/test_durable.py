"""A folder that appears whole, or not at all."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from full_disk import full_disk

from qerl_jax.durable import locked, make_folder, named, staying, whole_folder, with_home, write_whole, writing
from qerl_jax.errors import UserError


def put(path, text, names=("a.txt",)):
    with whole_folder(path, names) as folder:
        (folder / "a.txt").write_text(text)


def test_it_appears_at_the_end_and_replaces_its_kind(tmp_path):
    with whole_folder(tmp_path / "deep" / "x", ["a.txt"]) as folder:
        (folder / "a.txt").write_text("1")
        assert not (tmp_path / "deep" / "x").exists()
    put(tmp_path / "deep" / "x", "2")
    assert (tmp_path / "deep" / "x" / "a.txt").read_text() == "2"
    assert os.listdir(tmp_path / "deep") == ["x"]


def test_a_body_that_raises_changes_nothing(tmp_path):
    put(tmp_path / "x", "1")
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "x", ["a.txt"]):
        raise KeyboardInterrupt
    assert (tmp_path / "x" / "a.txt").read_text() == "1"
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_cleared_or_brought_back(tmp_path):
    put(tmp_path / "x", "1")
    (tmp_path / ".tmp-x").mkdir()
    (tmp_path / ".tmp-x" / "half").write_text("")
    os.rename(tmp_path / "x", tmp_path / ".old-x")  # died between its two renames
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "x", ["a.txt"]):
        raise RuntimeError
    assert (tmp_path / "x" / "a.txt").read_text() == "1"
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_process_killed_behind_its_renames_left_is_cleared(tmp_path):
    put(tmp_path / "x", "1")
    shutil.copytree(tmp_path / "x", tmp_path / ".old-x")
    put(tmp_path / "x", "2")
    assert (tmp_path / "x" / "a.txt").read_text() == "2"
    assert os.listdir(tmp_path) == ["x"]


def test_what_comes_back_is_held_against_the_kind_of_what_is_written(tmp_path):
    put(tmp_path / "x", "1")
    os.rename(tmp_path / "x", tmp_path / ".old-x")
    with (
        pytest.raises(UserError, match=r"x holds a\.txt, which would be lost"),
        whole_folder(tmp_path / "x", ["b.txt"]),
    ):
        pass
    assert (tmp_path / "x" / "a.txt").read_text() == "1"
    assert os.listdir(tmp_path) == ["x"]


def test_an_interruption_between_the_renames_changes_nothing(tmp_path, monkeypatch):
    put(tmp_path / "x", "1")
    rename = os.rename

    def interrupted(source, target):
        if source.name == ".tmp-x":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "x", "2")
    assert (tmp_path / "x" / "a.txt").read_text() == "1"
    assert os.listdir(tmp_path) == ["x"]


def test_where_the_disk_is_full_what_was_to_be_written_is_named_and_stays_as_it_was(tmp_path):
    put(tmp_path / "x", "1")
    write_whole(tmp_path / "file", "1")
    for write, name in ((put, "x"), (write_whole, "file")):
        with pytest.raises(OSError, match=re.escape(f"File too large: '{tmp_path}/{name}'")), full_disk():
            write(tmp_path / name, "2")
    assert (tmp_path / "x" / "a.txt").read_text() == (tmp_path / "file").read_text() == "1"
    assert sorted(os.listdir(tmp_path)) == ["file", "x"]


def test_a_link_where_a_file_is_written_first_is_not_followed(tmp_path):
    """As another user may lay one in a shared folder, to have a file of one's own overwritten."""
    (tmp_path / "other").write_text("kept")
    (tmp_path / ".tmp-file").symlink_to("other")
    write_whole(tmp_path / "file", "1")
    assert not (tmp_path / "file").is_symlink()
    assert [(tmp_path / name).read_text() for name in ("other", "file")] == ["kept", "1"]
    assert not os.path.lexists(tmp_path / ".tmp-file")


def test_an_error_that_names_its_file_keeps_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'missing'"), writing(tmp_path):
        os.stat("missing")


def test_a_folder_is_named_by_a_path_that_ends_in_its_name(tmp_path, monkeypatch):
    (tmp_path / "x" / "y").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x" / "y")
    assert [named(Path(path)) for path in (".", "..", "a")] == [tmp_path / "x" / "y", tmp_path / "x", Path("a")]


def test_two_that_write_one_folder_are_kept_apart(tmp_path):
    put(tmp_path / "x", "1")
    with whole_folder(tmp_path / "x", ["a.txt"]) as folder:
        (folder / "a.txt").write_text("2")
        with pytest.raises(UserError, match="x: another process is writing it; wait for it or choose another name"):
            put(tmp_path / "x", "3")
        put(tmp_path / "y", "4")
    assert [(tmp_path / name / "a.txt").read_text() for name in ("x", "y")] == ["2", "4"]
    put(tmp_path / "x", "5")
    assert (tmp_path / "x" / "a.txt").read_text() == "5" and sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_one_that_has_opened_a_lock_just_removed_gets_its_own(tmp_path, monkeypatch):
    first = whole_folder(tmp_path / "x", ["a.txt"])
    (first.__enter__() / "a.txt").write_text("1")
    opened = os.open

    def late(path, *how):
        handle = opened(path, *how)
        monkeypatch.undo()
        first.__exit__(None, None, None)
        return handle

    monkeypatch.setattr(os, "open", late)
    with whole_folder(tmp_path / "x", ["a.txt"]) as folder:
        with pytest.raises(UserError, match="another process is writing it"):
            put(tmp_path / "x", "3")
        (folder / "a.txt").write_text("2")
    assert (tmp_path / "x" / "a.txt").read_text() == "2" and os.listdir(tmp_path) == ["x"]


def test_nobody_else_writes_it_before_the_replaced_one_is_gone(tmp_path, monkeypatch):
    """Another one's `.old-x` would be removed in its place."""
    put(tmp_path / "x", "1")
    removed, refused = shutil.rmtree, []

    def meanwhile(folder, **how):
        if folder.exists():
            with pytest.raises(UserError, match="another process is writing it"):
                put(tmp_path / "x", "3")
            refused.append(folder.name)
        removed(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    put(tmp_path / "x", "2")
    assert refused == [".old-x"]
    assert (tmp_path / "x" / "a.txt").read_text() == "2" and os.listdir(tmp_path) == ["x"]


def test_the_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    (tmp_path / ".lock-x").touch()
    put(tmp_path / "x", "1")
    assert os.listdir(tmp_path) == ["x"]


def test_the_lock_of_another_process_in_a_folder_that_took_the_place_of_ones_own_stays(tmp_path):
    (tmp_path / "x").mkdir()
    with locked(tmp_path / "x" / ".lock", "taken"):
        (tmp_path / "x").rename(tmp_path / "moved")
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / ".lock").touch()
    assert (tmp_path / "x" / ".lock").exists()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def unsupported(handle, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # names no file

    monkeypatch.setattr("fcntl.flock", unsupported)
    said = r"/x\.lock: cannot be locked \(Function not implemented\).*another file system"
    with pytest.raises(UserError, match=said), locked(tmp_path / "x.lock", "taken"):
        pass


def test_a_folder_that_no_longer_lies_at_its_path_is_told(tmp_path):
    (tmp_path / "deep" / "x").mkdir(parents=True)
    with staying(tmp_path / "deep" / "x", "it has gone") as check:
        check()
        (tmp_path / "deep" / "x").rmdir()
        with pytest.raises(UserError, match="it has gone"):
            check()
        (tmp_path / "deep" / "x").mkdir()  # whose number it might get
        with pytest.raises(UserError, match="it has gone"):
            check()
        (tmp_path / "deep").rename(tmp_path / "other")
        (tmp_path / "deep").touch()
        with pytest.raises(UserError, match="it has gone"):
            check()


def test_other_content_is_never_replaced(tmp_path):
    (tmp_path / "x").mkdir()
    put(tmp_path / "x", "1")  # an empty folder may go
    (tmp_path / "x" / "notes").write_text("")
    with pytest.raises(UserError, match="x holds notes, which would be lost"):
        put(tmp_path / "x", "2")
    with pytest.raises(UserError, match="notes is a file; expected a folder"):
        put(tmp_path / "x" / "notes", "2")
    assert (tmp_path / "x" / "a.txt").read_text() == "1"


def test_a_folder_without_what_each_of_its_kind_has_is_not_replaced(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "b.txt").write_text("mine")
    with pytest.raises(UserError, match=r"x holds b\.txt, which would be lost by replacing the folder; choose another"):
        put(tmp_path / "x", "2", ["a.txt", "b.txt"])
    (tmp_path / "x" / "a.txt").write_text("1")
    put(tmp_path / "x", "2", ["a.txt", "b.txt"])
    assert os.listdir(tmp_path / "x") == ["a.txt"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("file", "file is a file"),
        ("file/inside", "file is a file"),
        ("file/deep/inside", "file is a file"),
        ("link", "link is a symbolic link to disk/gone, which does not exist"),
        ("link/inside", "link is a symbolic link to disk/gone, which does not exist"),
    ],
)
def test_a_folder_cannot_be_made_of_what_is_none_or_in_it(name, found, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("disk/gone")
    for path in (tmp_path / name, tmp_path / name / "x"):
        with pytest.raises(UserError, match=re.escape(f"{tmp_path}/{found}; expected a folder")):
            make_folder(path)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/{found}; expected a folder")):
        put(tmp_path / name / "x", "1")


def test_a_folder_is_made_once(tmp_path):
    for _ in range(2):
        make_folder(tmp_path / "deep" / "x")
    assert (tmp_path / "deep" / "x").is_dir()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_names_is_replaced(tmp_path, there):
    (tmp_path / "disk").mkdir()
    if there:
        put(tmp_path / "disk" / "real", "0")
    (tmp_path / "link").symlink_to("disk/real")
    for text in "12":
        put(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "real" / "a.txt").read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"] and os.listdir(tmp_path / "disk") == ["real"]


def test_a_folder_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in "12":
        put(Path("~/x"), text)
        assert (tmp_path / "x" / "a.txt").read_text() == text
    assert [str(with_home(name)) for name in ("~", "a~/b", "~nobody-has-this-name/x")] == [
        str(tmp_path), "a~/b", "~nobody-has-this-name/x"
    ]  # fmt: skip
