"""modelopt's configuration: where it stands, which modules it leaves alone, and what is refused."""

import json

import pytest

from qerl_jax.errors import UserError
from qerl_jax.models.packed_by import packing_of

STATED = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
NAMES = [
    f"model.layers.{i}.{name}.weight" for i in (1, 10) for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
]


def read(tmp_path, **changes):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": STATED | changes}))
    return packing_of({}, tmp_path)


@pytest.mark.parametrize(
    ("excluded", "plain"),
    [
        ([], []),
        (["model.layers.1.mlp.gate_proj"], [1]),
        (["model.layers.1"], [0, 1, 2]),
        (["model.layers.1.*"], [0, 1, 2]),
        (["model.layers.1*"], [0, 1, 2, 3, 4, 5]),
        (["*.mlp.*"], [1, 2, 4, 5]),
        (["*o_proj"], [0, 3]),
        (["model.layers.1.mlp.gate"], []),
        (["*"], [0, 1, 2, 3, 4, 5]),
        (["**.mlp**gate*"], [1, 4]),
        (["*" * 40 + "Z", "*e" * 20 + "Z"], []),  # at once, where each star that tries all places would take years
    ],
)
def test_excluded_modules_are_plain(tmp_path, excluded, plain):
    packing = read(tmp_path, exclude_modules=["lm_head", *excluded])
    assert [i for i, name in enumerate(NAMES) if packing.is_plain(name)] == plain


def test_a_flat_file_is_read_as_config_json(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(in_config_json(kv_cache_scheme="FP8")))
    assert packing_of({}, tmp_path).is_plain("lm_head.weight")


@pytest.mark.parametrize("name", [{"quant_library": "modelopt"}, {"quant_method": "modelopt_fp4"}])
def test_names_of_the_program(tmp_path, name):
    stated = {key: value for key, value in in_config_json().items() if key != "quant_method"}
    assert packing_of({"quantization_config": stated | name}, tmp_path).weight_format == "nvfp4"


@pytest.mark.parametrize("inner", [True, False])
def test_in_config_json(tmp_path, inner):
    stated = {"quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    hf = {"quantization_config": {"quant_method": "modelopt"} | ({"quantization": STATED} if inner else stated)}
    packing = packing_of(hf, tmp_path)
    assert packing.is_plain("lm_head.weight") and not packing.is_plain(NAMES[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8'; supported is 'W4A16_NVFP4' or 'NVFP4'; take the plain model"),
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'; supported is"),
        ({"quant_algo": "W4A8_NVFP4_FP8"}, "quant_algo is 'W4A8_NVFP4_FP8'; supported is"),
        ({"quant_algo": None}, "quant_algo is None; supported is"),
        ({"group_size": 32}, "group_size is 32; supported is 16"),
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo is 'INT8'; supported is None or 'FP8' or"),
        ({"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; expected a list of module names"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo is 'MIXED_PRECISION'; supported is .*; take the plain model"),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, **changes)


def test_a_file_that_states_nothing(tmp_path):
    for text, message in (
        ("{}", "quant_algo is None; supported is"),
        ('{"quantization": null}', "quantization is None; expected an object"),
    ):
        (tmp_path / "hf_quant_config.json").write_text(text)
        with pytest.raises(UserError, match=f"hf_quant_config.json: {message}"):
            packing_of({}, tmp_path)


def in_config_json(**changes):
    return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]} | changes


def test_a_cache_in_fp8_says_nothing_about_the_weights(tmp_path, caplog):
    assert set(read(tmp_path, kv_cache_quant_algo="FP8").unread) >= {".k_scale", ".v_scale"}
    stated = in_config_json(kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"})
    assert set(packing_of({"quantization_config": stated}, tmp_path).unread) >= {".k_scale", ".v_scale"}
    for message, file in zip(caplog.messages, ("hf_quant_config.json", "config.json"), strict=True):
        assert message.startswith(f"{tmp_path / file} asks for keys and values in FP8; here they are kept")


def test_a_cache_by_its_word(tmp_path, caplog):
    for key, word in (("kv_cache_scheme", "FP8"), ("kv_cache_scheme", "NVFP4"), ("kv_cache_quant_algo", "NVFP4")):
        where = tmp_path / key / word
        packing = packing_of({"quantization_config": in_config_json(**{key: word})}, where)
        assert set(packing.unread) >= {".k_scale", ".v_scale"}
        assert f"{where / 'config.json'} asks for keys and values in {word}; here they are kept" in caplog.text
    with pytest.raises(UserError, match=r"config.json: kv_cache_scheme is 'INT8'; supported is None or 'FP8' or"):
        packing_of({"quantization_config": in_config_json(kv_cache_scheme="INT8")}, tmp_path)


def test_another_kv_cache_scheme_in_config_json_is_refused(tmp_path):
    stated = in_config_json(kv_cache_scheme={"num_bits": 4, "type": "float"})
    with pytest.raises(UserError, match=r"config.json: kv_cache_scheme num_bits is 4; supported is 8"):
        packing_of({"quantization_config": stated}, tmp_path)
