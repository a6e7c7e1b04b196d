"""Round trips of checkpoints, what they are compared with, and what cannot be saved."""

import hashlib
import json
import os
import re
import tempfile

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_trees import PROGRESS, Pair, assert_same, make_tree

from qerl_jax import checkpoints
from qerl_jax.checkpoints import (
    checkpoint_steps,
    newest_progress,
    remove_partial,
    restore_checkpoint,
    save_checkpoint,
)
from qerl_jax.errors import UserError
from qerl_jax.models.params import Adapter, LoRA


def test_round_trip_keeps_every_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl_jax.manifest.__version__", "9.9")
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
    assert manifest["versions"]["qerl-jax"] == "9.9"


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


def test_restored_arrays_share_no_memory_with_what_was_read(tmp_path, monkeypatch):
    """XLA takes the memory of an array that lies as it wants, at a multiple of 64 bytes, where it may."""
    read, found = checkpoints.read_arrays, {}

    def aligned(*arguments):
        for name, array in read(*arguments).items():
            place = np.zeros(array.size + 16, array.dtype)
            first = -(place.ctypes.data // array.itemsize) % (64 // array.itemsize)
            found[name] = place[first : first + array.size]
            found[name][:] = array
        return found

    save_checkpoint(tmp_path, 0, {"x": jnp.arange(4096.0)}, {})
    monkeypatch.setattr(checkpoints, "read_arrays", aligned)
    restored, _, _ = restore_checkpoint(tmp_path, {"x": jnp.zeros(4096)})
    found["x"][:] = -1
    assert np.array_equal(restored["x"], np.arange(4096.0))


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


def test_a_target_that_is_a_part_of_what_was_saved_is_told_so(tmp_path):
    save_checkpoint(tmp_path, 5, {"train": make_tree(), "key": jax.random.key(0)}, {})
    message = r"leaf bits: found no such leaf, but train\.bits: expected the whole tree that was saved"
    with pytest.raises(UserError, match=message):
        restore_checkpoint(tmp_path, {"bits": make_tree()["bits"]})


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
        pair = Pair(jnp.ones(2), None, 3.0)
        return {"a": Outer((pair, Outer((pair,), "y", print)), name, function)}

    path = save_checkpoint(tmp_path, 0, tree(), {})
    assert json.loads((path / "manifest.json").read_text())["static"] == {
        "a.inner.0.scaling": 3.0, "a.inner.1.inner.0.scaling": 3.0, "a.inner.1.name": "y", "a.name": "x"
    }  # fmt: skip
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
    with pytest.raises(TypeError, match=r"two leaves of the tree are both named a\.b"):
        save_checkpoint(tmp_path, 0, {"a": {"b": np.zeros(1)}, "a.b": np.ones(1)}, {})
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
        with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path))}/file is a file; expected a folder$"):
            call(tmp_path / name)
