"""Folders that llm-compressor, compressed-tensors and modelopt wrote (oracles/quantized_folders.py): stored bytes stay,
and weights and logits are those that these programs compute."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import assert_equal, write_file

from qerl_jax.errors import UserError
from qerl_jax.formats import MXFP4Weight, dequantize, quantize_mxfp4
from qerl_jax.input_files import read_json
from qerl_jax.models.init import for_kernels
from qerl_jax.models.loading import load_model, named_weights
from qerl_jax.models.safetensors import read_safetensors
from qerl_jax.models.saving import save_model
from qerl_jax.models.transformer import logits

FOLDERS = Path(__file__).parent / "oracles" / "quantized"
NVFP4 = (
    "compressed_tensors_0.11",
    "llmcompressor_nvfp4",
    "llmcompressor_nvfp4_w4a4",
    "modelopt_nvfp4",
    "modelopt_w4a16",
)
MXFP4 = "llmcompressor_mxfp4"
WITH_ACTIVATIONS = ("llmcompressor_nvfp4_w4a4", "modelopt_nvfp4")


def load(name, *arguments, **options):
    return load_model(FOLDERS / name, *arguments, **options)


@pytest.mark.parametrize("name", WITH_ACTIVATIONS)
def test_activations_asked_for_in_4_bits_are_told_once(tmp_path, caplog, recwarn, name):
    shutil.copytree(FOLDERS / name, tmp_path / "m")
    for _ in range(2):
        load_model(tmp_path / "m")
    [line] = caplog.messages
    assert "m/config.json asks for activations in FP4; they stay in 16 bits here" in line
    assert not recwarn.list  # which would name a line of this library's


@pytest.mark.parametrize("name", [*NVFP4, MXFP4])
def test_weights_and_logits_are_those_of_the_program(name):
    oracle = np.load(FOLDERS / f"{name}.npz")
    model = load(name, dtype="float32")
    packed = {n.removesuffix(".weight"): w for n, w in named_weights(model).items() if not isinstance(w, jax.Array)}
    assert packed.keys() == set(oracle.files) - {"ids", "logits"}
    for linear, weight in packed.items():
        # modelopt unpacks the code of -0.0 as 0.0: values are compared, and adding zero leaves no sign of it.
        assert (np.asarray(dequantize(weight, jnp.float32)) + 0).tobytes() == (oracle[linear] + 0).tobytes(), linear
    np.testing.assert_allclose(logits(model, oracle["ids"]), oracle["logits"], rtol=0, atol=2e-5 * span(oracle))


def span(oracle):
    return np.abs(oracle["logits"]).max()


@pytest.mark.parametrize("name", NVFP4)
def test_stored_bytes_are_kept(name):
    stored = read_safetensors(FOLDERS / name / "model.safetensors")
    weights = named_weights(load(name))
    for linear, weight in weights.items():
        if isinstance(weight, jax.Array):
            assert np.array_equal(weight, stored[linear].astype(weight.dtype)), linear
            continue
        parts = ("", "_scale", "_scale_2") if weight.scale_multiplies else ("_packed", "_scale", "_global_scale")
        for part, array in zip(parts, (weight.packed, weight.scale, weight.global_scale), strict=True):
            assert np.asarray(array).tobytes() == stored[linear + part].tobytes(), linear + part


def test_stored_bytes_of_mxfp4_are_kept():
    stored = read_safetensors(FOLDERS / MXFP4 / "model.safetensors")
    for linear, weight in named_weights(load(MXFP4)).items():
        if not isinstance(weight, jax.Array):
            assert isinstance(weight, MXFP4Weight)
            assert np.asarray(weight.packed).tobytes() == stored[f"{linear}_packed"].tobytes()
            assert np.asarray(weight.scale).tobytes() == stored[f"{linear}_scale"].tobytes()
    assert isinstance(load(MXFP4).base.layers[1].down_proj, jax.Array)  # left alone


def test_global_scales_are_those_of_each_linear():
    separate, shared = (load(name).base.layers[0] for name in ("compressed_tensors_0.11", "llmcompressor_nvfp4"))
    assert len({float(getattr(separate, name).global_scale) for name in ("q_proj", "k_proj", "v_proj")}) == 3
    assert len({float(getattr(shared, name).global_scale) for name in ("q_proj", "k_proj", "v_proj")}) == 1


def test_the_quantizer_writes_what_llm_compressor_writes():
    ours = load_model(FOLDERS.parent / "qwen2_untied", "nvfp4")
    assert_equal(ours, load("llmcompressor_nvfp4"))


@pytest.mark.parametrize("name", NVFP4)
def test_saved_again(tmp_path, name):
    model = load(name)
    save_model(model, tmp_path / "m", weight_format="nvfp4")
    again = load_model(tmp_path / "m")
    if name.startswith("modelopt"):
        # The reciprocal of the second scale, rounded: a unit in the last place of a block's step, and as much again in
        # the product.
        for old, new in zip(named_weights(model).values(), named_weights(again).values(), strict=True):
            np.testing.assert_allclose(dequantize(new, jnp.float32), dequantize(old, jnp.float32), rtol=2.0**-22)
        return
    assert_equal(again, model)
    stored, saved = (read_safetensors(path / "model.safetensors") for path in (FOLDERS / name, tmp_path / "m"))
    assert saved.keys() == {key for key in stored if not key.endswith("input_global_scale")}
    for key, array in saved.items():
        assert (array.dtype, array.shape) == (stored[key].dtype, stored[key].shape)
        assert array.tobytes() == stored[key].tobytes()


def test_the_configuration_is_spelled_as_llm_compressor_does(tmp_path):
    save_model(load("llmcompressor_nvfp4"), tmp_path / "m", weight_format="nvfp4")
    ours, theirs = (
        read_json(path / "config.json")["quantization_config"]
        for path in (tmp_path / "m", FOLDERS / "llmcompressor_nvfp4")
    )
    assert ours | {"version": "0.19.0"} == theirs


def test_mxfp4_is_not_written_as_a_folder(tmp_path):
    with pytest.raises(UserError, match=r"q_proj.weight: a compressed-tensors folder is .* NVFP4 weights; found MXFP4"):
        save_model(load(MXFP4), tmp_path / "m", weight_format="nvfp4")
    assert not list(tmp_path.iterdir())


def test_the_bytes_of_mxfp4_are_those_that_the_quantizer_writes():
    """All linears but down_proj, whose 48 inputs are no multiple of 32."""
    source, stored = (load(name) for name in (FOLDERS.parent / "qwen2_untied", MXFP4))
    for layer, expected in zip(source.base.layers, stored.base.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"):
            assert_equal(quantize_mxfp4(getattr(layer, name)), getattr(expected, name))


def test_an_exponent_that_is_nan_is_refused(tmp_path):
    shutil.copytree(FOLDERS / MXFP4, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    arrays = {name: np.array(array) for name, array in read_safetensors(file).items()}
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    arrays[name][3, 0] = 255
    write_file(file, arrays)
    with pytest.raises(UserError, match=rf"{name}: expected exponents below 255, which is NaN; found 1 .* at .3, 0."):
        load_model(tmp_path / "m")


def test_kernels_get_the_reciprocal_of_a_scale_that_multiplies():
    model = load("modelopt_w4a16")
    weight, kernel = model.base.layers[1].up_proj, for_kernels(model).base.layers[1].up_proj
    assert weight.scale_multiplies and float(kernel.divisor) == pytest.approx(
        1 / float(weight.global_scale), rel=2**-23
    )
    assert_equal(dequantize(kernel, jnp.float32), dequantize(weight, jnp.float32))


def test_modelopt_without_words_in_config_json(tmp_path):
    """Before 0.29 only hf_quant_config.json said how the folder was made."""
    shutil.copytree(FOLDERS / "modelopt_w4a16", tmp_path / "m")
    hf = json.loads((tmp_path / "m" / "config.json").read_text())
    del hf["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(hf))
    assert_equal(load_model(tmp_path / "m"), load("modelopt_w4a16"))


@pytest.mark.parametrize(
    ("name", "key", "scales"),
    [
        ("modelopt_w4a16", "self_attn.{}_proj.{}_scale", ()),
        ("llmcompressor_nvfp4", "self_attn.{1}_scale", (1,)),
    ],
)
def test_scales_of_a_cache_in_fp8_change_no_weight(tmp_path, caplog, name, key, scales):
    """As most of NVIDIA's own folders have them, and llm-compressor's with a kv_cache_scheme."""
    folder = shutil.copytree(FOLDERS / name, tmp_path / "m")
    hf = json.loads((folder / "config.json").read_text())
    hf["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(hf))
    arrays = {name: np.array(array) for name, array in read_safetensors(folder / "model.safetensors").items()}
    scale = np.full(scales, 0.5, np.float32)
    layers = range(hf["num_hidden_layers"])
    arrays |= {f"model.layers.{i}.{key.format(half, half)}": scale for i in layers for half in "kv"}
    write_file(folder / "model.safetensors", arrays)
    assert_equal(load_model(folder), load(name))
    assert "m/config.json asks for keys and values in FP8; here they are kept in the model's dtype" in caplog.text
