"""Models written to folders: what comes back, what is refused, and what a failure leaves."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import NVFP4, V4, V5, assert_equal, packed_arrays, random_arrays, write_folder, write_tokenizer
from tiny import tiny_model

from qerl_jax.errors import UserError
from qerl_jax.formats import dequantize
from qerl_jax.models.init import for_kernels, quantize
from qerl_jax.models.loading import load_model
from qerl_jax.models.safetensors import read_safetensors
from qerl_jax.models.saving import save_model
from qerl_jax.models.transformer import logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_again(tmp_path, tied, dtype):
    model = load_model(write_folder(tmp_path / "a", random_arrays(tied=tied), V4, tied), dtype=dtype)
    write_tokenizer(tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": 21}')
    save_model(model, tmp_path / "b", tokenizer_from=tmp_path / "a")
    assert_equal(load_model(tmp_path / "b"), model)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_packed_weights_are_saved_unpacked(tmp_path):
    model = load_model(write_folder(tmp_path / "a", random_arrays()), "nvfp4", "bfloat16")
    save_model(model, tmp_path / "b")
    saved = load_model(tmp_path / "b")
    assert np.array_equal(saved.base.layers[1].up_proj, dequantize(model.base.layers[1].up_proj, jnp.bfloat16))


def test_saving_replaces_a_model_but_nothing_else(tmp_path):
    model = load_model(write_folder(tmp_path / "a", random_arrays()))
    save_model(model, tmp_path / "b")
    other = load_model(write_folder(tmp_path / "a", random_arrays(seed=1)))
    save_model(other, tmp_path / "b")
    assert_equal(load_model(tmp_path / "b"), other)
    os.rename(tmp_path / "b", tmp_path / ".old-b")  # killed between the two renames
    save_model(model, tmp_path / "b")
    assert_equal(load_model(tmp_path / "b"), model)
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"b holds thesis.tex, which would be lost"):
        save_model(model, tmp_path / "b")
    with pytest.raises(UserError, match=r"thesis.tex is a file"):
        save_model(model, tmp_path / "b" / "thesis.tex")
    with pytest.raises(UserError, match=r"tokenizer.json is missing; tokenizer_from"):
        save_model(model, tmp_path / "c", tokenizer_from=tmp_path / "a")
    assert not (tmp_path / "c").exists()


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    model = load_model(write_folder(tmp_path / "a", random_arrays()))
    save_model(model, tmp_path / "b")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qerl_jax.models.shards.write_safetensors", full)
    with pytest.raises(OSError, match="No space"):
        save_model(model, tmp_path / "b")
    assert_equal(load_model(tmp_path / "b"), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
def test_packed_bytes_come_back(tmp_path, tied, kernels):
    arrays = packed_arrays(tied)
    model = load_model(write_folder(tmp_path / "a", arrays, V5 | {"quantization_config": NVFP4}, tied))
    save_model(for_kernels(model) if kernels else model, tmp_path / "b", weight_format="nvfp4")
    assert_equal(load_model(tmp_path / "b"), model)
    saved = read_safetensors(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (saved[name].dtype, saved[name].shape) == (array.dtype, array.shape), name
        assert saved[name].tobytes() == array.tobytes(), name


def test_norm_scales_that_bfloat16_would_round_stay_in_float32(tmp_path):
    arrays = packed_arrays()
    name, other = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    arrays[name] = arrays[name].astype(np.float32) + np.float32(1 / 3)
    model = load_model(write_folder(tmp_path / "a", arrays, V5 | {"quantization_config": NVFP4}))
    for weight_format in ("nvfp4", "bf16"):
        save_model(model, tmp_path / weight_format, weight_format=weight_format)
        saved = read_safetensors(tmp_path / weight_format / "model.safetensors")
        assert saved[name].dtype == np.float32 and saved[name].tobytes() == arrays[name].tobytes()
        assert saved[other].dtype == saved["model.embed_tokens.weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_arrays_on_the_host_are_saved_as_those_on_the_device(tmp_path, weight_format):
    """As `jax.device_get`, flax's from_bytes and a restore without a target give them."""
    model = tiny_model(dtype=jnp.bfloat16)  # whose norms bfloat16 would round
    for name, of in (("device", model), ("host", jax.device_get(model))):
        save_model(of, tmp_path / name, weight_format=weight_format)
    device, host = (read_safetensors(tmp_path / name / "model.safetensors") for name in ("device", "host"))
    assert device["model.layers.0.input_layernorm.weight"].dtype == np.float32
    assert {n: (a.dtype, a.tobytes()) for n, a in host.items()} == {
        n: (a.dtype, a.tobytes()) for n, a in device.items()
    }


@pytest.mark.parametrize("weight_format", ["nvfp4", "nf4_double_quant"])
def test_a_model_on_the_host_is_quantized_and_called(weight_format):
    plain = tiny_model(weight_format="bf16")
    made = quantize(plain, weight_format)
    assert_equal(quantize(jax.device_get(plain), weight_format).base, made.base)
    tokens = jnp.arange(6).reshape(2, 3)
    for model in (plain, made):
        host = jax.device_get(model)
        assert_equal(jax.jit(lambda tokens, host=host: logits(host, tokens))(tokens), jax.jit(logits)(model, tokens))


@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_numbers_that_are_not_finite_are_not_written(tmp_path, weight_format):
    model = tiny_model()
    model = model.replace(base=model.base.replace(embed=model.base.embed.at[3, 4].set(jnp.nan)))
    with pytest.raises(UserError, match=r"^tensor model\.embed_tokens\.weight has numbers that are not finite"):
        save_model(model, tmp_path / "a", weight_format=weight_format)
    assert not list(tmp_path.iterdir())


def test_plain_models_are_not_written_as_nvfp4(tmp_path):
    model = load_model(write_folder(tmp_path / "a", random_arrays()))
    with pytest.raises(UserError, match="weight_format is 'nvfp4', but the model's linear layers are plain; quantize"):
        save_model(model, tmp_path / "b", weight_format="nvfp4")
    with pytest.raises(UserError, match=r"weight_format is 'nvfp'; written are bf16, nvfp4 \(did you mean 'nvfp4'"):
        save_model(model, tmp_path / "b", weight_format="nvfp")
    with pytest.raises(UserError, match=r"weight_format is 'mxfp4'; written are bf16, nvfp4$"):
        save_model(model, tmp_path / "b", weight_format="mxfp4")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("stated", [{"eos_token_id": [1, 2], "pad_token_id": 0}, {}])
def test_ids_of_special_tokens_are_those_of_the_source(tmp_path, stated):
    """Null where there are none: transformers' Llama would have 1 and 2."""
    folder = write_folder(tmp_path / "a", random_arrays(), V5 | stated)
    write_tokenizer(folder)
    save_model(load_model(folder), tmp_path / "b", tokenizer_from=folder)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids | stated


def test_layers_that_a_packed_folder_left_plain_stay_so(tmp_path):
    packed = load_model(write_folder(tmp_path / "a", packed_arrays(), V5 | {"quantization_config": NVFP4}))
    plain = packed.base.layers[0].replace(down_proj=dequantize(packed.base.layers[0].down_proj, jnp.bfloat16) + 0.01)
    mixed = packed.replace(base=packed.base.replace(layers=(plain, *packed.base.layers[1:])))
    save_model(mixed, tmp_path / "b", weight_format="nvfp4")
    for weight_format in (None, "nvfp4"):
        again = load_model(tmp_path / "b", weight_format)
        assert_equal(again.base.layers[0].q_proj, packed.base.layers[0].q_proj)
        stored = load_model(tmp_path / "b").base.layers[0].down_proj
        np.testing.assert_array_equal(np.asarray(again.base.layers[0].down_proj), np.asarray(stored))


def test_quantizing_what_is_packed(tmp_path):
    model = load_model(write_folder(tmp_path, packed_arrays(), V5 | {"quantization_config": NVFP4}), dtype="float32")
    assert_equal(quantize(model, "nvfp4").base, model.base)
    assert_equal(quantize(model, "bf16").base, load_model(tmp_path, "bf16", "float32").base)
    with pytest.raises(
        UserError, match="q_proj is in nvfp4 already and would be rounded a second time; allowed: nvfp4"
    ):
        quantize(model, "nf4")
