"""Folders in and out: every spelling, every precision, and every way in which a folder can be wrong."""

import json
from pathlib import Path

import huggingface_hub.constants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import HF, NVFP4, V4, V5, assert_equal, packed_arrays, random_arrays, write_file, write_folder

from qerl_jax.errors import UserError
from qerl_jax.formats import NVFP4Weight, dequantize
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import quantize
from qerl_jax.models.loading import load_model, tensor_table
from qerl_jax.models.params import PROJECTIONS

ORACLES = Path(__file__).parent / "oracles"
PLACES = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}


@pytest.mark.parametrize(("tied", "shards"), [(True, 1), (False, 3)])
@pytest.mark.parametrize(("hf", "source"), [(V4, ml_dtypes.bfloat16), (V5, np.float32), (V5, np.float16)])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_every_tensor_comes_to_its_place(tmp_path, tied, shards, hf, source, dtype):
    arrays = random_arrays(source, tied)
    model = load_model(write_folder(tmp_path, arrays, hf, tied, shards), dtype=dtype)
    assert model.config == ModelConfig("qwen2", 24, 32, 48, 2, 4, 2, 8, 1e-6, 1000.0, tied, True, 64)
    expected = jnp.dtype(dtype or ("bfloat16" if source == ml_dtypes.bfloat16 else "float32"))

    def check(leaf, name, leaf_dtype):
        assert leaf.dtype == leaf_dtype, name
        assert np.array_equal(leaf, jnp.asarray(arrays[name]).astype(leaf_dtype)), name

    check(model.base.embed, "model.embed_tokens.weight", expected)
    check(model.base.final_norm, "model.norm.weight", jnp.float32)
    if tied:
        assert model.base.lm_head is None
    else:
        check(model.base.lm_head, "lm_head.weight", expected)
    for i, layer in enumerate(model.base.layers):
        for field, name in PLACES.items():
            check(getattr(layer, field), f"model.layers.{i}.{name}", jnp.float32 if "norm" in field else expected)


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float32, np.float16])
def test_quantizing_while_loading_equals_quantizing_what_is_stored(tmp_path, source):
    folder = write_folder(tmp_path, random_arrays(source))
    stored = load_model(folder)
    expected = jax.jit(quantize)(stored).base.layers
    for dtype in ("float32", "bfloat16", "float16"):
        model = load_model(folder, "nvfp4", dtype)
        for layer, other in zip(model.base.layers, expected, strict=True):
            assert_equal([getattr(layer, name) for name in PROJECTIONS], [getattr(other, name) for name in PROJECTIONS])
        assert model.base.embed.dtype == model.base.layers[0].q_bias.dtype == dtype
    layer = model.base.layers[0]
    assert layer.q_proj.global_scale == layer.k_proj.global_scale == layer.v_proj.global_scale
    assert layer.gate_proj.global_scale == layer.up_proj.global_scale
    largest = max(float(jnp.abs(getattr(stored.base.layers[0], n)).max()) for n in ("q_proj", "k_proj", "v_proj"))
    assert float(layer.q_proj.global_scale) == pytest.approx(448 * 6 / largest, rel=0.01)  # bf16 rounds it twice


@pytest.mark.parametrize("weight_format", [None, "nvfp4"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_folders_keep_their_bytes(tmp_path, weight_format, tied):
    arrays = packed_arrays(tied)
    model = load_model(write_folder(tmp_path, arrays, V5 | {"quantization_config": NVFP4}, tied), weight_format)
    for i, layer in enumerate(model.base.layers):
        for field in PROJECTIONS:
            weight, name = getattr(layer, field), f"model.layers.{i}.{PLACES[field]}"
            assert isinstance(weight, NVFP4Weight)
            assert np.asarray(weight.packed).tobytes() == arrays[f"{name}_packed"].tobytes()
            assert np.asarray(weight.scale).tobytes() == arrays[f"{name}_scale"].tobytes()
            assert weight.global_scale.shape == () and weight.global_scale == arrays[f"{name}_global_scale"][0]


def test_a_global_scale_may_have_no_dimension(tmp_path):
    arrays, hf = packed_arrays(), V5 | {"quantization_config": NVFP4}
    expected = load_model(write_folder(tmp_path / "one", arrays, hf))
    flat = {name: a.reshape(()) if name.endswith("global_scale") else a for name, a in arrays.items()}
    assert_equal(load_model(write_folder(tmp_path / "none", flat, hf)), expected)


def test_a_packed_output_matrix_is_unpacked(tmp_path):
    arrays = packed_arrays(tied=False)
    stored = {f"lm_head.weight{suffix}": arrays[f"{Q}{suffix}"][:24] for suffix in ("_packed", "_scale")}
    stored["lm_head.weight_global_scale"] = arrays[f"{Q}_global_scale"]
    plain = {name: array for name, array in arrays.items() if name != "lm_head.weight"}
    hf = V5 | {"quantization_config": NVFP4 | {"ignore": []}}
    folder = write_folder(tmp_path / "m", plain | stored, hf, tied=False)
    for weight_format, dtype in ((None, jnp.bfloat16), ("nvfp4", jnp.float32), ("bf16", jnp.float32)):
        model = load_model(folder, weight_format, dtype)
        head = dequantize(load_model(folder).base.layers[1].q_proj, dtype)[:24]
        assert model.base.lm_head.dtype == dtype and np.array_equal(model.base.lm_head, head)
    with pytest.raises(UserError, match=r"tensor lm_head.weight_packed is missing .*; expected uint8.24, 16."):
        load_model(write_folder(tmp_path / "n", arrays, hf, tied=False))


def test_packed_folder_unpacked(tmp_path):
    folder = write_folder(tmp_path, packed_arrays(), V5 | {"quantization_config": NVFP4})
    packed, plain = load_model(folder).base.layers[1], load_model(folder, "bf16", "float32").base.layers[1]
    for name in PROJECTIONS:
        assert np.array_equal(getattr(plain, name), dequantize(getattr(packed, name), jnp.float32))


def test_loaded_arrays_do_not_depend_on_the_file(tmp_path):
    folder = write_folder(tmp_path, random_arrays(np.float32))
    model = load_model(folder)
    before = np.array(model.base.embed)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-8192, 2)
        file.write(b"\xff" * 8192)
    assert np.array_equal(model.base.embed, before)


def test_derived_and_repeated_tensors_are_accepted(tmp_path):
    arrays = random_arrays()
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load_model(write_folder(tmp_path, arrays)).base.lm_head is None
    arrays["lm_head.weight"] = 2 * arrays["lm_head.weight"]
    with pytest.raises(UserError, match=r"tensor lm_head.weight differs from model.embed_tokens.weight"):
        load_model(write_folder(tmp_path, arrays))


def test_an_adapter_beside_a_model_is_told(tmp_path, caplog):
    folder = write_folder(tmp_path, random_arrays(np.float32, True), V5, True, 1)
    load_model(folder)
    assert not caplog.messages
    (folder / "adapter_config.json").write_text("{}")
    load_model(folder)
    assert "holds a model and a PEFT adapter beside it; the model alone is loaded" in caplog.text


def test_table_names_every_tensor_once():
    config = ModelConfig.from_hf(HF | V5)
    assert tensor_table(config).keys() == random_arrays(tied=False).keys()
    assert tensor_table(config)["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)


def test_hub_names(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="someone/model: no such folder here, and it could not be had from the Hugging"):
        load_model("someone/model")
    # The cache's layout, as a download leaves it.
    revision = "a" * 40
    cached = tmp_path / "models--someone--model"
    write_folder(cached / "snapshots" / revision, random_arrays())
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    assert_equal(load_model("someone/model"), load_model(cached / "snapshots" / revision))
    # A revision that comes meanwhile: what a process has begun to read of one it goes on to read of that one.
    (cached / "refs" / "main").write_text("b" * 40)
    assert_equal(load_model("someone/model"), load_model(cached / "snapshots" / revision))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./none", "./none: no such folder"),
        ("none", "none: no such folder; allowed: a folder, owner/name"),
        ("a/b/c", "a/b/c: no such folder"),
        (__file__, "test_loading.py is a file; expected the folder"),
        ("builtin:none", "builtin:none is unknown; allowed: "),
    ],
)
def test_names_of_nothing(path, message):
    with pytest.raises(UserError, match=message):
        load_model(path)


def test_options(tmp_path):
    folder = write_folder(tmp_path, random_arrays())
    with pytest.raises(
        UserError, match=r"weight_format is 'nvpf4'; allowed: nvfp4, mxfp4, .*, bf16 \(did you mean 'nvfp4'"
    ):
        load_model(folder, "nvpf4")
    with pytest.raises(UserError, match=r"weight_format is <class '.*bfloat16'>; allowed: nvfp4, .*, bf16$"):
        load_model(folder, jnp.bfloat16)
    with pytest.raises(UserError, match="dtype is int8; allowed: float32, bfloat16, float16"):
        load_model(folder, dtype="int8")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.bias"])
@pytest.mark.parametrize("value", [7e4, np.nan])
def test_what_float16_cannot_hold_is_refused_by_name(tmp_path, name, value):
    arrays = random_arrays()
    arrays[name].reshape(-1)[3] = value
    folder = write_folder(tmp_path, arrays)
    with pytest.raises(UserError, match=rf"model.safetensors: tensor {name} is not finite in float16.*; allowed: "):
        load_model(folder, dtype="float16")
    load_model(folder, dtype="bfloat16")


def test_unpacked_weights_that_float16_cannot_hold_are_refused_by_name(tmp_path):
    arrays = packed_arrays()
    name = "model.layers.1.mlp.up_proj.weight"
    arrays[f"{name}_global_scale"] = np.full_like(arrays[f"{name}_global_scale"], 1e-4)
    folder = write_folder(tmp_path, arrays, V5 | {"quantization_config": NVFP4})
    with pytest.raises(UserError, match=rf"tensor {name} is not finite in float16"):
        load_model(folder, "bf16", "float16")
    load_model(folder, "nvfp4", "float16")


def edit_config(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def edit_arrays(change):
    def edit(folder):
        arrays = random_arrays()
        change(arrays)
        write_file(folder / "model.safetensors", arrays)

    return edit


def only(name, content=b"\x80\x04"):
    def edit(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)

    return edit


def as_link(name):
    """As `cp -r` makes it of a snapshot in the Hub's cache."""

    def edit(folder):
        (folder / name).unlink()
        (folder / name).symlink_to("../../blobs/5")

    return edit


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (as_link("config.json"), r"config.json is a link to ../../blobs/5, where nothing is; copy what links lead to"),
        (as_link("model.safetensors"), "model.safetensors is a link to ../../blobs/5, where nothing is"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: expected a JSON object, found list"),
        (edit_config(model_type="mamba"), r"config.json: model_type is 'mamba'; supported are \["),
        (edit_config(hidden_size=40), "model.embed_tokens.weight: expected shape .24, 40. by the conf.*found .24, 32."),
        (
            edit_config(num_hidden_layers=3),
            r"tensor model.layers.2.input_layernorm.weight is missing \(and 11 more\); expected float32.32.$",
        ),
        (edit_config(num_hidden_layers=1), "tensor model.layers.1.* belongs to no part of"),
        (edit_config(tie_word_embeddings=False), "tensor lm_head.weight is missing; expected float32.24, 32."),
        (
            edit_config(quantization_config={"quant_method": "gptq"}),
            "quant_method is 'gptq'; supported is 'compressed-",
        ),
        (edit_config(quantization_config=7), "quantization_config quant_method is 7; supported is 'compressed-"),
        (edit_config(quantization_config=NVFP4), "q_proj.weight_packed is missing"),
        (edit_arrays(lambda a: a.pop(Q)), f"tensor {Q} is missing; expected float32.32, 32.$"),
        (edit_arrays(lambda a: a.update({Q + "s": a.pop(Q)})), rf"{Q} is missing; .* \(did you mean '{Q}s'\?\)$"),
        (
            edit_arrays(lambda a: a.update({Q.replace("1", "2"): a.pop(Q)})),
            f"{Q} is missing; expected float32.32, 32.$",
        ),
        (
            edit_arrays(lambda a: a.update({Q: a[Q].T[:16].copy()})),
            f"tensor {Q}: expected shape .32, 32.*found .16, 32.",
        ),
        (
            edit_arrays(lambda a: a.update({Q: a[Q].astype(np.int8)})),
            f"tensor {Q} is int8, so the weights are quantized, but neither quantization_config in .*plain",
        ),
        (
            edit_arrays(lambda a: a.update({Q: a[Q].astype(np.float64)})),
            f"tensor {Q}: expected dtype float32 or .*, found float64",
        ),
        (
            edit_arrays(lambda a: a.update({Q.replace("weight", "qweight"): a.pop(Q).astype(np.int32)})),
            f"tensor {Q.replace('weight', 'qweight')} is int32, so the weights are quantized",
        ),
        (
            edit_arrays(lambda a: a.update({Q + "x": a[Q]})),
            f"{Q}x bfloat16.32, 32. belongs to no part of what the folder's configuration describes$",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 4), "model.safetensors: not a valid safetensors file"),
        (only("adapter_config.json"), "m is a PEFT adapter, not a model; give its base, with lora.adapter="),
        (
            only("pytorch_model.bin"),
            "expected model.safetensors or .*, found neither; pytorch_model.bin is a pickle, which",
        ),
        (only("q4.gguf"), "found neither; q4.gguf is a GGUF file, which is not read: take the model's safetensors$"),
        (only("notes.txt"), "expected model.safetensors or model.safetensors.index.json, found neither$"),
        (
            only("model-00001-of-00002.safetensors"),
            "found neither; model-00001-of-00002.safetensors alone is not read: model.safetensors.index.json must",
        ),
    ],
)
def test_folder_that_is_wrong(tmp_path, damage, message):
    folder = write_folder(tmp_path / "m", random_arrays())
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_model(folder)


def test_every_truncation_of_a_model_file_is_refused(tmp_path):
    folder = write_folder(tmp_path, random_arrays())
    whole = (folder / "model.safetensors").read_bytes()
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model.safetensors: not a valid safetensors file"):
            load_model(folder)


def edit_index(**changes):
    def edit(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        named = index["weight_map"] | changes
        path.write_text(json.dumps({"weight_map": {name: shard for name, shard in named.items() if shard is not None}}))

    return edit


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing; model.safetensors.index.json names it"),
        (as_link(SHARD), f"{SHARD} is a link to ../../blobs/5, where nothing is"),
        (lambda f: (f / SHARD).write_bytes(b"\0" * 20), f"{SHARD}: not a valid safetensors file"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json: weight_map is missing"),
        (edit_index(**{Q: 3}), "index.json: 3 is not allowed; expected the name of a .safetensors file"),
        (edit_index(**{Q: "../x.safetensors"}), "index.json: '../x.safetensors' is not allowed"),
        (edit_index(**{Q: "/etc/passwd"}), "index.json: '/etc/passwd' is not allowed"),
        (edit_index(**{Q: "pytorch_model.bin"}), "index.json: 'pytorch_model.bin' is not allowed"),
        (
            edit_index(**{"model.layers.9.x": SHARD}),
            f"{SHARD}: tensor model.layers.9.x is missing; .* says it is there",
        ),
        (
            edit_index(**{"model.embed_tokens.weight": SHARD}),
            "holds tensor model.embed_tokens.weight; .* in model-00002",
        ),
        (edit_index(**{Q: None}), "holds tensor .*q_proj.weight; model.safetensors.index.json lacks it"),
    ],
)
def test_shards_that_are_wrong(tmp_path, damage, message):
    folder = write_folder(tmp_path / "m", random_arrays(), shards=2)
    assert load_model(folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map["model.embed_tokens.weight"] != SHARD
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_model(folder)


def byte(value, where=(3, 1)):
    def change(arrays):
        scales = arrays[f"{Q}_scale"].view(np.uint8).copy()
        scales[where] = value
        arrays[f"{Q}_scale"] = scales.view(ml_dtypes.float8_e4m3fn)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (byte(0x7F), f"tensor {Q}_scale: expected scales that are neither negative nor NaN; found 1 .* nan at .3, 1."),
        (byte(0xFF), f"tensor {Q}_scale: .*found 1 others, the first nan at .3, 1."),
        (byte(0xB8), f"tensor {Q}_scale: .*the first -1.0 at .3, 1."),
        (byte(0x80), f"tensor {Q}_scale: .*the first -0.0 at .3, 1."),
        (
            lambda a: a.update({f"{Q}_global_scale": np.zeros(1, np.float32)}),
            "_global_scale: expected a pos.*found 0.0",
        ),
        (
            lambda a: a.update({f"{Q}_global_scale": np.full(1, np.nan, np.float32)}),
            "_global_scale: expected.*found nan",
        ),
        (
            lambda a: a.update({f"{Q}_global_scale": np.full(1, 1e-40, np.float32)}),
            "_global_scale: expected a positive number, from 1e-30 to 1e",
        ),
        (
            lambda a: a.update({f"{Q}_global_scale": np.ones(2, np.float32)}),
            "_global_scale: expected shape .1.*found .2.",
        ),
        (
            lambda a: a.update({f"{Q}_packed": a[f"{Q}_packed"].view(np.int8)}),
            "_packed: expected dtype uint8, found int8",
        ),
        (
            lambda a: a.update({f"{Q}_scale": a[f"{Q}_scale"][:, :1].copy()}),
            "_scale: expected shape .32, 2. by .*found .32, 1.",
        ),
        (lambda a: a.pop(f"{Q}_scale"), f"tensor {Q}_scale is missing; expected float8_e4m3fn.32, 2."),
    ],
)
def test_packed_weights_that_are_wrong(tmp_path, change, message):
    arrays = packed_arrays()
    change(arrays)
    folder = write_folder(tmp_path, arrays, V5 | {"quantization_config": NVFP4})
    with pytest.raises(UserError, match=message):
        load_model(folder)


def test_shapes_that_the_packing_does_not_hold(tmp_path):
    for packing, inputs, needs in ((NVFP4, 56, "NVFP4 needs inputs in multiples of 16"), (NVFP4, 40, "of 16")):
        hf = V5 | {"quantization_config": packing, "intermediate_size": inputs}
        folder = write_folder(tmp_path / str(inputs), packed_arrays(), hf)
        with pytest.raises(UserError, match=rf"config.json: down_proj is \[\d+, {inputs}\] and packed .*{needs}"):
            load_model(folder)


def test_weights_that_cannot_be_quantized(tmp_path):
    arrays = random_arrays()
    arrays[Q][3, 4] = np.nan
    folder = write_folder(tmp_path / "nan", arrays)
    with pytest.raises(UserError, match=f"tensor {Q}: expected finite weights, found NaN or infinity"):
        load_model(folder, "nvfp4")
    arrays = {n: np.pad(a, [(0, 0), (0, 4)]) if "down_proj" in n else a for n, a in random_arrays().items()}
    arrays = {n: np.pad(a, [(0, 4), (0, 0)]) if "gate" in n or "up_proj" in n else a for n, a in arrays.items()}
    folder = write_folder(tmp_path / "odd", arrays, V5 | {"intermediate_size": 52})
    with pytest.raises(UserError, match=r"down_proj.weight: NVFP4 needs inputs in multiples of 16, found .32, 52."):
        load_model(folder, "nvfp4")


def test_an_absurd_number_of_layers_is_refused_before_anything_is_made_of_it(tmp_path):
    folder = write_folder(tmp_path, random_arrays(), V5 | {"num_hidden_layers": 10**9})
    with pytest.raises(UserError, match=r"config.json: num_hidden_layers is 1000000000; the folder has 26 tensors"):
        load_model(folder)
