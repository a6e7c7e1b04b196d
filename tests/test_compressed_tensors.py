"""config.json's quantization_config: the spellings that are read, and what is refused."""

import copy
from pathlib import Path

import pytest
from folders import NVFP4

from qerl_jax.errors import UserError
from qerl_jax.models.packed_by import packing_of

FOLDER = Path("some/folder")
UNTIED = {"tie_word_embeddings": False}
O0, O1, UP1 = (
    f"model.layers.{place}.weight" for place in ("0.self_attn.o_proj", "1.self_attn.o_proj", "1.mlp.up_proj")
)


def changed(path, value):
    """`NVFP4` with one entry at "a.b.c" changed."""
    config = copy.deepcopy(NVFP4)
    *outer, last = path.split(".")
    entry = config
    for key in outer:
        entry = entry[key]
    entry[last] = value
    return config


def read(config):
    return packing_of(UNTIED | {"quantization_config": config}, FOLDER)


@pytest.mark.parametrize(
    ("ignore", "plain"),
    [
        (["lm_head"], set()),
        (["re:.*lm_head"], set()),
        (["re:^lm_head$", "model.layers.1.self_attn.o_proj"], {O1}),
        (["lm_head", "re:.*o_proj"], {O0, O1}),
        (["lm_head", "re:model\\.layers\\.1\\..*"], {O1, UP1}),
        (["lm_head", "re:o_proj"], set()),  # patterns are compared from the beginning
        (["lm_head", "o_proj"], set()),  # names as a whole
        (["lm_head", "model.embed_tokens", "re:.*router"], set()),
    ],
)
def test_ignored_modules_are_plain(ignore, plain):
    packing = read(changed("ignore", ignore))
    assert {name for name in (O0, O1, UP1) if packing.is_plain(name)} == plain


def test_patterns_that_may_take_years_are_refused():
    for pattern in ("re:" + ".?" * 40 + "Z", "re:" + ".*" * 40 + "Z", "re:(.|..)*Z", "re:" + "(?:|.)" * 28 + "Z"):
        with pytest.raises(UserError, match=r"groups, with at most 5 repetitions, and with \| at most 6 groups"):
            read(changed("ignore", [pattern]))
    assert read(changed("ignore", ["lm_head", "re:(?:model|a)\\.(?=layers).*o_proj"])).is_plain(O0)


def test_targets_by_name():
    packing = read(changed("config_groups.group_0.targets", ["re:.*mlp.*"]))
    assert [packing.is_plain(name) for name in (O0, O1, UP1)] == [True, True, False]


def test_several_groups_of_one_format():
    group = NVFP4["config_groups"]["group_0"]
    groups = {
        name: group | {"targets": [target], "format": "nvfp4-pack-quantized"}
        for name, target in (("a", "re:.*mlp.*"), ("b", "re:.*layers.1.*"))
    }
    packing = read(changed("config_groups", groups) | {"format": "mixed-precision"})
    assert [packing.is_plain(name) for name in (O0, O1, UP1)] == [True, False, False]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", None),
        ("sparsity_config", {}),
        ("sparsity_config", {"format": "dense"}),
        ("transform_config", None),
        ("version", "0.11.0"),
        ("global_compression_ratio", 1.5),
        ("config_groups.group_0.weights.scale_dtype", None),
        ("config_groups.group_0.weights.scale_dtype", "float8_e4m3fn"),
        ("config_groups.group_0.weights.observer", "minmax"),
        ("config_groups.group_0.format", "nvfp4-pack-quantized"),
        ("config_groups.group_0.output_activations", None),
    ],
)
def test_other_spellings(path, value):
    assert not read(changed(path, value)).is_plain(UP1)


def test_a_cache_in_fp8_says_nothing_about_the_weights(tmp_path, caplog):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    packing = packing_of(UNTIED | {"quantization_config": changed("kv_cache_scheme", scheme)}, tmp_path)
    assert set(packing.unread) >= {".k_scale", ".v_scale"}
    assert "config.json asks for keys and values in FP8; here they are kept" in caplog.text


def test_a_pattern_may_name_a_tied_head_or_not():
    hf = {"tie_word_embeddings": True, "quantization_config": changed("ignore", [])}
    assert not packing_of(hf, FOLDER).is_plain(UP1)


def test_plain_folders_have_none():
    assert packing_of({}, FOLDER) is None
    assert packing_of({"quantization_config": None}, FOLDER) is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quant_method", "gptq", "quant_method is 'gptq'; supported is .* 'modelopt' or .*; take the plain model"),
        (
            "quantization_status",
            "calibration",
            "quantization_status is 'calibration'; supported is 'compressed' or 'fr",
        ),
        ("ignore", "lm_head", "ignore is 'lm_head'; expected a list of module names"),
        ("ignore", ["lm_head", 3], "ignore is .'lm_head', 3.; expected a list of module names"),
        ("ignore", ["lm_head", "re:("], r"'\(' is not a regular expression"),
        ("format", "pack-quantized", "format is 'pack-quantized'; supported is nvfp4-pack-quantized"),
        ("format", ["nvfp4-pack-quantized"], "supported is nvfp4-pack-quantized"),
        ("config_groups", {}, "config_groups is {}; expected an object of at least one group"),
        ("config_groups", {"NVFP4A16": ["Linear"]}, "config_groups is .*; expected an object"),
        ("kv_cache_scheme", {"num_bits": 8, "type": "int"}, "kv_cache_scheme type is 'int'; supported is 'float'"),
        ("kv_cache_scheme", "fp8", "kv_cache_scheme num_bits is 'fp8'; supported is 8"),
        ("transform_config", {"config_groups": {"R1": {}}}, "transform_config .* is not supported"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config .* is not supported"),
        ("config_groups.group_0.weights", None, "group_0 weights num_bits is None; supported is 4"),
        ("config_groups.group_0.weights.num_bits", 8, "group_0 weights num_bits is 8; supported is 4"),
        ("config_groups.group_0.weights.group_size", 32, "group_0 weights group_size is 32; supported is 16"),
        ("config_groups.group_0.weights.symmetric", False, "weights symmetric is False; supported is True"),
        ("config_groups.group_0.weights.symmetric", 1, "weights symmetric is 1; supported is True"),
        ("config_groups.group_0.weights.type", "int", "weights type is 'int'; supported is 'float'"),
        (
            "config_groups.group_0.input_activations",
            {"num_bits": 8, "type": "float", "symmetric": True},
            "group_0 input_activations num_bits is 8; supported is 4",
        ),
        ("config_groups.group_0.output_activations", {"num_bits": 4}, "output_activations is .*; supported is None"),
        ("config_groups.group_0.targets", "Linear", "group_0 targets is 'Linear'; expected a list"),
    ],
)
def test_refused(path, value, message):
    with pytest.raises(UserError, match=f"^some/folder.*{message}"):
        read(changed(path, value))


def test_groups_of_several_formats_are_refused():
    group = NVFP4["config_groups"]["group_0"]
    groups = {"a": group | {"format": "nvfp4-pack-quantized"}, "b": group | {"format": "float-quantized"}}
    message = (
        r"format is 'nvfp4-pack-quantized' and 'float-quantized'; supported is nvfp4-pack-quantized.*; all groups must"
    )
    with pytest.raises(UserError, match=message):
        read(changed("config_groups", groups) | {"format": "mixed-precision"})
