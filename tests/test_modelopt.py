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


@pytest.mark.parametrize("inner", [True, False])
def test_in_config_json(tmp_path, inner):
    stated = {"quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    hf = {"quantization_config": {"quant_method": "modelopt"} | ({"quantization": STATED} if inner else stated)}
    packing = packing_of(hf, tmp_path)
    assert packing.is_plain("lm_head.weight") and not packing.is_plain(NAMES[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8'; supported is 'W4A16_NVFP4' or 'NVFP4'"),
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'; supported is"),
        ({"quant_algo": "W4A8_NVFP4_FP8"}, "quant_algo is 'W4A8_NVFP4_FP8'; supported is"),
        ({"quant_algo": None}, "quant_algo is None; supported is"),
        ({"group_size": 32}, "group_size is 32; supported is 16"),
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo is 'INT8'; supported is None or 'FP8'"),
        ({"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; expected a list of module names"),
        ({"exclude_modules": None}, "by its configuration lm_head is quantized"),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, **changes)


def test_a_file_that_states_nothing(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"hf_quant_config.json: quantization is None; expected an object"):
        packing_of({}, tmp_path)


def in_config_json(**changes):
    return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]} | changes


def test_a_cache_in_fp8_says_nothing_about_the_weights(tmp_path, caplog):
    assert set(read(tmp_path, kv_cache_quant_algo="FP8").unread) >= {".k_scale", ".v_scale"}
    stated = in_config_json(kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"})
    assert set(packing_of({"quantization_config": stated}, tmp_path).unread) >= {".k_scale", ".v_scale"}
    for message, file in zip(caplog.messages, ("hf_quant_config.json", "config.json"), strict=True):
        assert message.startswith(f"{tmp_path / file} asks for keys and values in FP8; here they are kept")


def test_another_kv_cache_scheme_in_config_json_is_refused(tmp_path):
    stated = in_config_json(kv_cache_scheme={"num_bits": 4, "type": "float"})
    with pytest.raises(UserError, match=r"config.json: kv_cache_scheme num_bits is 4; supported is 8"):
        packing_of({"quantization_config": stated}, tmp_path)
