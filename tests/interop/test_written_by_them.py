"""Folders that transformers, PEFT and compressed-tensors write (other_programs.py): this library computes their logits.

make test-interop
"""

import json

import numpy as np
import pytest
from comparing import FAMILIES, assert_logits, our_logits, unpacked

from qerl_jax import load_adapter, load_generation_config, load_model, load_tokenizer
from qerl_jax.formats import MXFP4Weight, NVFP4Weight

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers(theirs, family):
    model = load_model(theirs / family, dtype="float32")
    assert_logits(our_logits(model), np.load(theirs / f"{family}.npy"))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_tokenizer_and_generation_configuration(theirs, family):
    expected = json.loads((theirs / f"{family}.json").read_text())
    tokenizer = load_tokenizer(theirs / family, 360)
    for text, ids in expected["texts"].items():
        assert tokenizer(text)["input_ids"] == ids
    ends = load_generation_config(theirs / family)
    assert list(ends.eos_token_ids) == expected["eos"]
    assert expected["pad"] in (ends.pad_token_id, None)  # Llama 3's files name none


@pytest.mark.parametrize("kind", ["lora", "rslora", "norms", "pattern", "paths", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_peft(theirs, family, kind):
    model = load_model(theirs / family, dtype="float32")
    adapter = load_adapter(theirs / f"{family}-{kind}", model)
    expected = np.load(theirs / f"{family}-{kind}.npy")
    assert_logits(our_logits(model, adapter), expected)
    assert np.abs(expected - np.load(theirs / f"{family}.npy")).max() > 0.05


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_of_compressed_tensors(theirs, family, kind):
    expected = np.load(theirs / f"{family}-{kind}.npy")
    model = load_model(theirs / f"{family}-{kind}", dtype="float32")
    layer = model.base.layers[0]
    if kind == "nvfp4":
        scales = {float(getattr(layer, name).global_scale) for name in ("q_proj", "k_proj", "v_proj")}
        assert len(scales) == 3  # each linear has its own, and it is kept
        assert isinstance(layer.down_proj, NVFP4Weight)
        model = unpacked(theirs / f"{family}-{kind}")
    else:  # bfloat16 holds a 4-bit code times a power of two, so nothing is rounded
        assert isinstance(layer.down_proj, MXFP4Weight)
    assert_logits(our_logits(model), expected)
    assert np.abs(expected - np.load(theirs / f"{family}.npy")).max() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_peft_on_packed_weights(theirs, family):
    model = unpacked(theirs / f"{family}-nvfp4")
    adapter = load_adapter(theirs / f"{family}-lora", model)
    assert_logits(our_logits(model, adapter), np.load(theirs / f"{family}-nvfp4-lora.npy"))
