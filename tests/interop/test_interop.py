"""Folders exchanged with transformers, PEFT and compressed-tensors, which run as programs of their own
(other_programs.py): they compute our logits from what this library writes, and it theirs from what they write.

    make test-interop

All logits are float32 and compared to 2e-5 of the largest one.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qerl_jax import (
    Batch,
    UpdateSettings,
    init_adapter,
    init_state,
    load_adapter,
    load_model,
    logits,
    save_adapter,
    save_model,
    update_step,
)
from qerl_jax.formats import NVFP4Weight, dequantize

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
PROGRAM = HERE / "other_programs.py"
IDS = np.arange(3, 33, dtype=np.int32).reshape(2, 15)
FAMILIES = {name: HERE.parent / "oracles" / name for name in ("qwen2_untied", "qwen3_sharded", "llama3")}
RELATIVE = 2e-5
ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True, "target_modules": ("q_proj", "v_proj")},
    "norms": {"train_norms": True},
}
KINDS = ("plain", "nvfp4", "trained", *ADAPTERS)


def other_programs(*words):
    """Runs them; what they cannot do is a failure of the test that asked, and so is their absence."""
    python = os.environ.get("INTEROP_PYTHON")
    assert python, "INTEROP_PYTHON is not set: run `make test-interop`"
    done = subprocess.run([python, PROGRAM, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_logits(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape and expected.dtype == np.float32
    span = np.abs(expected).max()
    assert span > 1  # logits of nothing would agree too
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * span)


def unpacked(folder):
    """A packed folder in float32, with its linear layers rounded to bfloat16, as compressed-tensors unpacks them."""

    def unpack(weight):
        return weight if isinstance(weight, jax.Array) else dequantize(weight, jnp.bfloat16).astype(jnp.float32)

    model = load_model(folder, dtype="float32")
    return jax.tree.map(unpack, model, is_leaf=lambda node: isinstance(node, NVFP4Weight))


def random_adapter(model, **options):
    adapter = init_adapter(jax.random.key(1), model, lora_r=4, lora_alpha=6, **options)
    keys = iter(jax.random.split(jax.random.key(2), 1000))
    return jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(next(keys), leaf.shape), adapter)


def trained_adapter(model):
    """An adapter after three updates towards a few tokens."""
    optimizer = optax.adam(0.05)
    state = init_state(init_adapter(jax.random.key(3), model, lora_r=4, lora_alpha=8, train_norms=True), optimizer)
    settings = UpdateSettings(num_generations=2, temperature=1.0, micro_batch_size=2)
    ids = jnp.asarray(IDS)
    batch = Batch(
        prompt=jnp.tile(ids[:1, :5], (2, 1)),
        prompt_lengths=jnp.full(2, 5),
        completion=ids[:, 5:],
        completion_lengths=jnp.full(2, 10),
        mask=jnp.ones((2, 10), bool),
        rewards=jnp.array([1.0, 0.0]),
        sampled_logps=jnp.zeros((2, 10)),
        rollout_step=jnp.int32(0),
    )
    step = jax.jit(
        lambda state, model, batch: update_step(state, model, batch, optimizer=optimizer, settings=settings)[0]
    )
    for _ in range(3):
        state = step(state, model, batch)
    return state.adapter


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """What this library writes for each family and kind, our logits, and the file of theirs."""
    folder = tmp_path_factory.mktemp("ours")
    expected, jobs = {}, []

    def job(name, model, our_logits, adapter=None):
        expected[name] = our_logits, folder / f"{name}.npy"
        jobs.append({"model": str(model), "adapter": adapter and str(adapter), "out": str(expected[name][1])})

    for family, source in FAMILIES.items():
        model = load_model(source, dtype="float32")
        plain, packed = folder / f"{family}-base", folder / f"{family}-nvfp4"
        save_model(model, plain)
        job(f"{family}-plain", plain, logits(model, IDS))
        for kind, options in ADAPTERS.items():
            adapter = random_adapter(model, **options)
            save_adapter(adapter, folder / f"{family}-{kind}", str(plain))
            job(f"{family}-{kind}", plain, logits(model, IDS, adapter=adapter), folder / f"{family}-{kind}")
        quantized = load_model(source, "nvfp4", "float32")
        save_model(quantized, packed, weight_format="nvfp4")
        job(f"{family}-nvfp4", packed, logits(unpacked(packed), IDS))
        adapter = trained_adapter(quantized)
        save_adapter(adapter, folder / f"{family}-trained", str(packed))
        job(f"{family}-trained", packed, logits(unpacked(packed), IDS, adapter=adapter), folder / f"{family}-trained")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    other_programs("read", folder / "jobs.json")
    return expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_our_logits(ours, family, kind):
    our_logits, file = ours[f"{family}-{kind}"]
    assert_logits(np.load(file), our_logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_formats_move_the_logits(ours, family):
    """So that agreement is not that of an adapter which nobody applied."""
    plain, packed = ours[f"{family}-plain"][0], ours[f"{family}-nvfp4"][0]
    for kind in KINDS:
        base = packed if kind == "trained" else plain
        if kind != "plain":
            assert np.abs(ours[f"{family}-{kind}"][0] - base).max() > 0.05, kind


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The folder of what they write."""
    folder = tmp_path_factory.mktemp("theirs")
    other_programs("write", folder, *(f"{name}={source}" for name, source in FAMILIES.items()))
    return folder


@pytest.mark.parametrize("kind", [None, *ADAPTERS])
@pytest.mark.parametrize("family", FAMILIES)
def test_we_compute_their_logits(theirs, family, kind):
    model = load_model(theirs / family, dtype="float32")
    adapter = None if kind is None else load_adapter(theirs / f"{family}_{kind}", model)
    expected = np.load(theirs / f"{family}_{kind}.npy" if kind else theirs / f"{family}.npy")
    assert_logits(logits(model, IDS, adapter=adapter), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_we_compute_their_logits_of_packed_weights(theirs, family):
    folder = theirs / f"{family}_nvfp4"
    layer = load_model(folder).base.layers[0]
    scales = {float(getattr(layer, name).global_scale) for name in ("q_proj", "k_proj", "v_proj")}
    assert len(scales) == 3  # each linear has its own, and it is kept
    assert_logits(logits(unpacked(folder), IDS), np.load(theirs / f"{family}_nvfp4.npy"))
