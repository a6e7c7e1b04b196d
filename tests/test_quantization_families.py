"""Every family through `quantize_folder`: norms of queries and keys, biases everywhere, heads of their own size."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import assert_equal, write_tokenizer

from qerl_jax.models.loading import load_model, open_model
from qerl_jax.models.safetensors import read_safetensors
from qerl_jax.models.transformer import logits, run_layer
from qerl_jax.quantization import quantize_folder
from qerl_jax.quantization.awq import smooth
from qerl_jax.quantization.layers import computed, read_layer
from qerl_jax.quantization.observation import GROUPS, nothing_seen, observe

ORACLES = Path(__file__).parent / "oracles"
NAMES = ("qwen2_untied", "qwen3_sharded", "llama_biased")
ROWS, LENGTH = 16, 9


def perplexity(folder, rows_BT):
    logs = np.asarray(jax.nn.log_softmax(logits(load_model(folder, dtype="float32"), rows_BT)), np.float64)
    return np.exp(-np.take_along_axis(logs[:, :-1], np.asarray(rows_BT)[:, 1:, None], axis=-1).mean())


# Each takes 10 s to compile; whole folders of Qwen2 are what test_quantization.py has.
@pytest.mark.parametrize("name", ["qwen3_sharded", pytest.param("llama_biased", marks=pytest.mark.slow)])
def test_folders_compute_what_the_report_says_and_awq_errs_less(tmp_path, name):
    model = shutil.copytree(ORACLES / name, tmp_path / "model")
    write_tokenizer(model)
    rows = np.random.default_rng(0).integers(0, 20, (ROWS, LENGTH))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows))
    report = quantize_folder(model, tmp_path / "awq", method="awq", calibration=str(text))
    assert report["mean"]["output_error_calibration"]["awq"] < report["mean"]["output_error_calibration"]["rtn"]
    quantize_folder(model, tmp_path / "rtn")
    assert_equal(load_model(model, "nvfp4"), load_model(tmp_path / "rtn"))
    held_out = jnp.asarray(rows[7::8], jnp.int32)
    for method, folder in (("plain", model), ("rtn", tmp_path / "rtn"), ("awq", tmp_path / "awq")):
        assert perplexity(folder, held_out) == pytest.approx(report["text"][method]["perplexity"], rel=1e-4), method


def test_rounding_to_nearest_writes_the_bytes_that_llm_compressor_writes(tmp_path):
    quantize_folder(ORACLES / "qwen2_untied", tmp_path / "rtn")
    ours = read_safetensors(tmp_path / "rtn" / "model.safetensors")
    theirs = read_safetensors(ORACLES / "quantized" / "llmcompressor_nvfp4" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_scales_leave_the_function_of_the_unquantized_layer_as_it_was(name):
    opened = open_model(ORACLES / name)
    layer = read_layer(opened, 1)
    clean = computed(layer, jnp.dtype(jnp.float32))
    channels = np.geomspace(0.1, 10, 32)
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(4, LENGTH, 32)) * channels, jnp.float32)
    seen = observe(opened.config, clean, x_BTD, jnp.full(4, LENGTH, jnp.int32), nothing_seen(opened.config))
    done = smooth(opened.config, layer, seen)
    assert all(np.ptp(columns) > 0.1 for columns in done.columns.values()), "no scale was at work"
    weights = {
        field: getattr(clean, field) * done.columns[group] / done.rows[field][:, None]
        for group, names in GROUPS.items()
        for field in names
    }
    changed = computed(done.layer.replace(**weights), jnp.dtype(jnp.float32))
    np.testing.assert_allclose(
        run_layer(opened.config, changed, x_BTD), run_layer(opened.config, clean, x_BTD), rtol=1e-5, atol=1e-5
    )
    for field in ("q_norm", "k_norm", "q_bias", "k_bias", "o_bias", "gate_bias", "down_bias"):
        before, after = getattr(layer, field), getattr(done.layer, field)
        assert before is after is None or np.array_equal(before, after), field
