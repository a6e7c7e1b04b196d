"""Adapters of another base on a folder that AWQ has made."""

import json

import pytest
from folders import V4, random_arrays, write_folder, write_tokenizer
from tiny import tiny_adapter

from qerl_jax.config_files import config_from_dict
from qerl_jax.export import export_model
from qerl_jax.models.loading import load_model
from qerl_jax.models.peft import save_adapter
from qerl_jax.quantization.adapters import warn_of_scaled_base
from qerl_jax.rewards.combine import RewardFunctions
from qerl_jax.rl.assembly import assemble
from qerl_jax.rollout.texts import generate_texts


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


def test_every_use_of_an_adapter_tells_it(scaled, tmp_path, caplog):
    adapter = str(adapter_of(scaled, tmp_path, "plain"))
    export_model(scaled, tmp_path / "out", "peft", adapter)
    assert list(generate_texts(str(scaled), [], adapter=adapter)) == []
    (tmp_path / "data.jsonl").write_text('{"prompt": "w1 w2", "answer": 3}\n')
    data = str(tmp_path / "data.jsonl")
    sections = {
        "model": {"model_name_or_path": str(scaled), "weight_format": "bf16"},
        "lora": {"adapter": adapter},
        "data": {"train_dataset": data, "max_prompt_length": 4},
        "generation": {"max_completion_length": 4},
        "evaluation": {"eval_dataset": data},
        "optimizer": {"max_steps": 10},
    }
    config = config_from_dict(sections)
    with RewardFunctions(config.reward) as rewards:
        assemble(config, rewards)
    assert caplog.text.count("AWQ has scaled the channels") == 3
