"""Adapters on weights of another format, and those of another base on a folder that AWQ has made."""

import json

import pytest
from folders import NVFP4, V4, V5, packed_arrays, random_arrays, write_folder, write_tokenizer
from tiny import tiny_adapter

from qerl_jax.config_files import config_from_dict
from qerl_jax.errors import UserError
from qerl_jax.export import export_model
from qerl_jax.generation import generate_texts
from qerl_jax.models.loading import load_model
from qerl_jax.models.peft import save_adapter
from qerl_jax.quantization.adapters import warn_of_other_format, warn_of_scaled_base
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.assembly import assemble


@pytest.fixture
def scaled(tmp_path):
    """A folder with the report of AWQ."""
    folder = write_tokenizer(write_folder(tmp_path / "scaled", random_arrays(), V4))
    (folder / "quantization_report.json").write_text('{"method": "awq"}')
    return folder


def adapter_of(base, folder, name):
    save_adapter(tiny_adapter(load_model(base)), folder / "adapter", name)
    return folder / "adapter"


@pytest.mark.parametrize(
    ("method", "trained_on", "told"),
    [("awq", "org/plain", True), ("awq", "elsewhere/scaled", False), ("rtn", "org/plain", False)],
)
def test_it_is_told_of_another_base_alone_and_of_scaled_channels_alone(
    scaled, tmp_path, caplog, method, trained_on, told
):
    (scaled / "quantization_report.json").write_text(json.dumps({"method": method}))
    warn_of_scaled_base(adapter_of(scaled, tmp_path, trained_on), scaled)
    words = f"the adapter was trained on {trained_on}, and AWQ has scaled the channels of {scaled}"
    assert (words in caplog.text) == told and len(caplog.records) == told


def begun(base, adapter, folder):
    """What a run on unpacked weights does before its first step."""
    data = str(folder / "data.jsonl")
    (folder / "data.jsonl").write_text('{"prompt": "w1 w2", "answer": 3}\n')
    sections = {
        "model": {"model_name_or_path": str(base), "weight_format": "bf16"},
        "lora": {"adapter": adapter},
        "data": {"train_dataset": data, "max_prompt_length": 4},
        "generation": {"max_completion_length": 4},
        "evaluation": {"eval_dataset": data},
        "optimizer": {"max_steps": 10},
    }
    config = config_from_dict(sections)
    with RewardFunctions(config.reward) as rewards:
        assemble(config, rewards)


def test_every_use_of_an_adapter_tells_it(scaled, tmp_path, caplog):
    adapter = str(adapter_of(scaled, tmp_path, "plain"))
    export_model(scaled, tmp_path / "out", "peft", adapter)
    assert list(generate_texts(str(scaled), [], adapter=adapter)) == []
    begun(scaled, adapter, tmp_path)
    assert caplog.text.count("AWQ has scaled the channels") == 3


@pytest.fixture
def bases(tmp_path):
    """Networks of one shape whose linear weights are stored in bfloat16, float32 and NVFP4."""
    packed = V5 | {"quantization_config": NVFP4}
    return {
        "bfloat16": write_folder(tmp_path / "bfloat16", random_arrays(), V4),
        "float32": write_folder(tmp_path / "float32", random_arrays("float32"), V4 | {"torch_dtype": "float32"}),
        "nvfp4": write_folder(tmp_path / "nvfp4", packed_arrays(), packed),
    }


@pytest.mark.parametrize(
    ("trained", "base", "weight_format", "remedy"),
    [
        ("nvfp4", "bfloat16", None, "{} with weight_format (--weight-format) nvfp4"),
        ("nvfp4", "bfloat16", "mxfp4", "{} with weight_format (--weight-format) nvfp4"),
        ("bf16", "float32", "nvfp4", "{} with weight_format (--weight-format) bf16"),
        ("nvfp4", "bfloat16", "nvfp4", None),
        ("nvfp4", "nvfp4", None, None),
        ("nvfp4", "nvfp4", "bf16", None),  # unpacked, the weights have the same values
        ("bf16", "bfloat16", None, None),
        ("bf16", "float32", "bf16", None),
        ("bf16", "nvfp4", None, "the run or the base that it was trained on"),
        ("mxfp4", "nvfp4", "bf16", "the run or the base that it was trained on"),
        (None, "nvfp4", None, None),  # another program's
    ],
)
def test_it_is_told_of_weights_in_another_format(bases, tmp_path, caplog, trained, base, weight_format, remedy):
    folder = bases[base]
    save_adapter(tiny_adapter(load_model(folder)), tmp_path / "adapter", "base", weight_format=trained)
    warn_of_other_format(tmp_path / "adapter", folder, weight_format)
    assert len(caplog.records) == (remedy is not None)
    if remedy is not None:
        found = "nvfp4" if base == "nvfp4" else weight_format or "bf16"
        assert caplog.records[0].message == (
            f"{tmp_path}/adapter/qerl_adapter.json: the adapter was trained on {trained} weights, and those of "
            f"{folder} are {found} here: it answers otherwise; take {remedy.format(folder)}"
        )


def test_every_use_of_weights_in_another_format_tells_it_with_its_own_remedy(bases, tmp_path, caplog):
    base, adapter = write_tokenizer(bases["bfloat16"]), str(tmp_path / "adapter")
    save_adapter(tiny_adapter(load_model(base)), adapter, "base", weight_format="nvfp4")
    export_model(base, tmp_path / "copied", "peft", adapter)  # meets no weights
    assert not caplog.records
    assert list(generate_texts(str(base), [], adapter=adapter)) == []
    begun(base, adapter, tmp_path)
    export_model(base, tmp_path / "merged", "bf16", adapter)
    told = f"was trained on nvfp4 weights, and those of {base} are bf16 here: it answers otherwise; take "
    assert [message.partition(told)[2] for message in caplog.messages if told in message] == [
        f"{base} with weight_format (--weight-format) nvfp4",
        f"{base} with model.weight_format nvfp4",
        "the run or the base that it was trained on",
    ]


def test_it_is_told_before_weights_are_read(bases, tmp_path, caplog, monkeypatch):
    base, adapter = write_tokenizer(bases["bfloat16"]), str(tmp_path / "adapter")
    save_adapter(tiny_adapter(load_model(base)), adapter, "base", weight_format="nvfp4")

    def load(*args):
        raise InterruptedError

    for name in ("generation.load_policy", "policy.load_model", "export.load_model"):
        monkeypatch.setattr(f"qerl_jax.{name}", load)
    for use in (
        lambda: list(generate_texts(str(base), [], adapter=adapter)),
        lambda: begun(base, adapter, tmp_path),
        lambda: export_model(base, tmp_path / "merged", "bf16", adapter),
    ):
        caplog.clear()
        with pytest.raises(InterruptedError):
            use()
        assert caplog.text.count("was trained on nvfp4 weights") == 1


def test_of_a_format_that_is_unknown_nothing_is_told(bases, tmp_path, caplog):
    base, adapter = bases["bfloat16"], tmp_path / "adapter"
    save_adapter(tiny_adapter(load_model(base)), adapter, "base", weight_format="nvfp4")
    with pytest.raises(UserError, match=r"weight_format is 'nvfp5'; allowed: nvfp4, .* \(did you mean 'nvfp4'\?\)"):
        list(generate_texts(str(base), [], adapter=str(adapter), weight_format="nvfp5"))
    assert not caplog.records


@pytest.mark.parametrize("text", ['{"weight_format": "fp4"}', "{}", '{"weight_format": ["nvfp4"]}'])
def test_a_folder_that_names_no_format_is_refused(bases, tmp_path, text):
    adapter = adapter_of(bases["float32"], tmp_path, "base")
    (adapter / "qerl_adapter.json").write_text(text)
    with pytest.raises(UserError, match=r"adapter/qerl_adapter.json: weight_format is .*; allowed: nvfp4, mxfp4"):
        warn_of_other_format(adapter, bases["float32"], None)
