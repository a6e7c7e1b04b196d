"""Adapters that cannot be read or do not fit, told before a model is loaded."""

import shutil

import jax
import numpy as np
import pytest
from folders import edit_arrays, edit_options
from mistakes import CONFIG, MODEL, SHAPE

from qerl_jax.models.init import init_adapter
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import Adapter, LoRA
from qerl_jax.models.peft import save_adapter


def test_an_adapter_of_another_model(folder, refused):
    pair = LoRA(np.zeros((4, 32), np.float32), np.zeros((32, 4), np.float32), 2.0)
    save_adapter(Adapter(({"q_proj": pair}, {"q_proj": pair}), None), folder / "adapter", "another")
    train, generate = (
        ("train", "my.yaml", "lora.adapter=adapter"),
        ("generate", MODEL, "--prompt", "x", "--adapter", "adapter"),
    )
    for words in (train, generate):
        said = refused(*words)
        assert (
            "adapter/adapter_model.safetensors: tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A" in said
        )
        assert f"expected shape [4, {SHAPE['hidden_size']}] by the configuration, found [4, 32]" in said


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A folder with two adapters of the shipped policy, `plain`, and `norms` with trained norm scales."""
    root, model = tmp_path_factory.mktemp("adapters"), load_model(MODEL)
    for name, train_norms in (("plain", False), ("norms", True)):
        adapter = init_adapter(jax.random.key(0), model, 4, 8, train_norms=train_norms)
        save_adapter(adapter, root / name, MODEL, weight_format="nvfp4")
    return root


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    for name in ("generation.load_policy", "export.load_model", "policy.load_model"):
        monkeypatch.setattr(f"qerl_jax.{name}", lambda *args: pytest.fail("loaded"))


@pytest.mark.parametrize(
    "words",
    [
        ["generate", MODEL, "--prompt", "x", "--adapter", "adapter"],
        ["train", "my.yaml", "lora.adapter=adapter"],
        ["plan", "my.yaml", "lora.adapter=adapter"],
        ["export", MODEL, "out", "--format", "bf16", "--adapter", "adapter"],
        ["export", MODEL, "out", "--format", "peft", "--adapter", "adapter"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shutil.rmtree, "adapter: no such folder"),
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing; expected a PEFT folder"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json: not valid JSON"),
        (edit_options(use_dora=True), "adapter_config.json: option use_dora (True) is not supported"),
        (edit_options(lora_alpha=None), "adapter_config.json: lora_alpha is None; expected a number"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a valid safetensors file"),
        (lambda f: (f / "qerl_adapter.json").write_text("{"), "qerl_adapter.json: not valid JSON"),
        (lambda f: (f / "qerl_adapter.json").write_text('{"weight_format": "fp4"}'), "weight_format is 'fp4'; allowed"),
        (edit_options(r=8), "lora_A.weight: expected shape [8, "),
        (edit_arrays(lambda arrays: arrays.popitem()), " is missing; expected float32["),
        (edit_arrays(lambda arrays: next(iter(arrays.values())).fill(np.nan)), "has numbers that are not finite"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said_before_the_model_is_loaded(
    words, damage, expected, folder, refused, adapters, nothing_is_loaded
):
    damage(shutil.copytree(adapters / "plain", folder / "adapter"))
    assert expected in refused(*words)


@pytest.mark.parametrize(
    "words",
    [["evaluate", "run"], ["generate", "run", "--prompt", "x"], ["export", "run", "out", "--format", "bf16"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "adapter_config.json").write_text("{"), "run/adapter/adapter_config.json: not valid JSON"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a valid safetensors file"),
        (edit_options(r=8), "lora_A.weight: expected shape [8, "),
        (edit_arrays(lambda arrays: next(iter(arrays.values())).fill(np.nan)), "has numbers that are not finite"),
    ],
)
def test_what_is_wrong_with_a_runs_own_adapter_is_said_before_the_model_is_loaded(
    words, damage, expected, folder, refused, adapters, nothing_is_loaded
):
    damage(shutil.copytree(adapters / "plain", folder / "run" / "adapter"))
    (folder / "run" / "config.yaml").write_text(CONFIG)
    assert expected in refused(*words)


def test_trained_norms_that_are_not_asked_for_are_said_before_the_model_is_loaded(refused, adapters, nothing_is_loaded):
    said = refused("train", "my.yaml", f"lora.adapter={adapters}/norms")
    assert "has trained norm scales, but train_norms is false; set lora.train_norms=true" in said
