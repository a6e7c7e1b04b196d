"""Whole folders: the bytes of round-to-nearest, what AWQ writes, interruptions, and what is refused."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import contents, random_arrays, write_folder, write_tokenizer
from full_disk import full_disk

from qerl_jax.cli import main
from qerl_jax.errors import UserError
from qerl_jax.formats import NVFP4Weight
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS
from qerl_jax.models.safetensors import read_safetensors
from qerl_jax.models.transformer import logits
from qerl_jax.quantization import quantize as quantize_module
from qerl_jax.quantization import quantize_folder
from qerl_jax.quantization.methods import METHODS, Made, Method, round_to_nearest
from qerl_jax.quantization.observation import GROUPS
from qerl_jax.quantization.work import WorkFolder, work_folders

ROWS = 16


def source(folder, dtype=ml_dtypes.bfloat16, tied=True, shards=1):
    """A tiny model with a tokenizer, and calibration text beside it."""
    write_folder(folder / "model", random_arrays(dtype, tied), tied=tied, shards=shards)
    write_tokenizer(folder / "model")
    rng = np.random.default_rng(0)
    rows = [{"text": " ".join(f"w{i}" for i in rng.integers(0, 20, rng.integers(3, 12)))} for _ in range(ROWS)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / "model", str(folder / "text.jsonl")


@pytest.mark.parametrize(("dtype", "tied", "shards"), [(ml_dtypes.bfloat16, True, 3), (np.float16, False, 1)])
def test_rounding_to_nearest_writes_what_loading_makes(tmp_path, dtype, tied, shards):
    model, _ = source(tmp_path, dtype, tied, shards)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    report = quantize_folder(model, tmp_path / "out")
    expected, found = load_model(model, "nvfp4"), load_model(tmp_path / "out")
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert isinstance(found.base.layers[0].q_proj, NVFP4Weight)
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert report == json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert report["mean"].keys() == {"weight_error"} and "text" not in report
    assert 0.05 < report["mean"]["weight_error"]["rtn"] < 0.15
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "text.jsonl"]


def test_projections_of_two_dtypes_that_share_a_scale_get_one_scale(tmp_path):
    """It is rounded in the wider dtype, whichever comes first; float16 is quantized as float32."""
    arrays = random_arrays(ml_dtypes.bfloat16)
    wide = {
        n: a.astype(np.float16 if "up_proj" in n else np.float32)
        for n, a in arrays.items()
        if "up_proj" in n or "q_proj.w" in n
    }
    model = write_folder(tmp_path / "model", arrays | wide)
    write_tokenizer(model)
    quantize_folder(model, tmp_path / "out")
    for layer, other in zip(
        load_model(model, "nvfp4").base.layers, load_model(tmp_path / "out").base.layers, strict=True
    ):
        for name in PROJECTIONS:
            for a, b in zip(*map(jax.tree.leaves, (getattr(layer, name), getattr(other, name))), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
        assert layer.gate_proj.global_scale == layer.up_proj.global_scale


def test_awq_writes_an_ordinary_folder_that_errs_less(tmp_path):
    model, text = source(tmp_path)
    report = quantize_folder(model, tmp_path / "awq", method="awq", calibration=text, length=8)
    loaded = load_model(tmp_path / "awq")
    assert loaded.base.embed.dtype == jnp.bfloat16 and loaded.base.layers[0].input_norm.dtype == jnp.float32
    stored = read_safetensors(tmp_path / "awq" / "model.safetensors")
    assert stored["model.layers.0.input_layernorm.weight"].dtype == ml_dtypes.bfloat16
    for kind in ("output_error_calibration", "output_error_held_out"):
        assert report["mean"][kind]["awq"] < report["mean"][kind]["rtn"]
    assert report["calibration"]["sequences"] == 14 and report["calibration"]["held_out_sequences"] == 2
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    assert report["layers"][1].keys() == {"layer", "projections", "scales", "aqn_gain", "stream_error_held_out"}


def test_a_text_that_is_all_but_impossible_has_an_infinite_perplexity(tmp_path):
    model, text = source(tmp_path)
    arrays = random_arrays()
    arrays["model.norm.weight"] *= 10000
    write_folder(model, arrays)
    report = quantize_folder(model, tmp_path / "out", calibration=text)
    assert report["text"]["plain"]["perplexity"] == math.inf and (tmp_path / "out").is_dir()


def test_perplexity_and_entropy_are_those_of_the_folders(tmp_path):
    model, text = source(tmp_path)
    report = quantize_folder(model, tmp_path / "awq", method="awq", calibration=text, length=8)
    quantize_folder(model, tmp_path / "rtn", calibration=text, length=8)
    rows = [json.loads(line)["text"] for line in Path(text).read_text().splitlines()]
    for name, folder in (("plain", model), ("rtn", tmp_path / "rtn"), ("awq", tmp_path / "awq")):
        loaded, losses, entropies = load_model(folder, dtype="float32"), [], []
        for row in (7, 15):
            ids = [int(word[1:]) for word in rows[row].split()][:8]
            logs = np.asarray(jax.nn.log_softmax(logits(loaded, jnp.asarray([ids]))[0, :-1]), np.float64)
            losses += [-logs[i, token] for i, token in enumerate(ids[1:])]
            entropies += list(-(np.exp(logs) * logs).sum(-1))
        assert report["text"][name]["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
        assert report["text"][name]["entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)


def test_activations_in_bfloat16_as_on_a_gpu_give_nearly_the_same(tmp_path, monkeypatch):
    model, text = source(tmp_path)
    options = {"method": "awq", "calibration": text, "length": 8}
    expected = quantize_folder(model, tmp_path / "float32", **options)
    monkeypatch.setattr("qerl_jax.quantization.quantize._compute_dtype", lambda opened: jnp.dtype(jnp.bfloat16))
    found = quantize_folder(model, tmp_path / "bfloat16", **options)
    assert found["computed_in"] == "bfloat16"
    for kind, methods in expected["mean"].items():
        for method, value in methods.items():
            assert found["mean"][kind][method] == pytest.approx(value, rel=0.05), (kind, method)
    for name in ("plain", "rtn"):  # of awq's scales some are others, which a random network's logits show
        assert found["text"][name]["perplexity"] == pytest.approx(expected["text"][name]["perplexity"], rel=0.05), name


def interrupted(model, folder, **options):
    """The work folder of a command that was to make `folder / "out"`, interrupted behind the first layer."""

    def stop(line):
        if line.startswith("layer 1/2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(model, folder / "out", say=stop, **options)
    [work] = folder.glob(".quantize-out-*")
    return work


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_an_interrupted_command_goes_on_and_ends_the_same(tmp_path, method):
    model, text = source(tmp_path)
    options = {"method": method, "calibration": text, "length": 8}
    quantize_folder(model, tmp_path / "whole", **options)
    work = interrupted(model, tmp_path, **options)
    assert not (tmp_path / "out").exists()
    first = work / "layer-00000.safetensors"
    made = first.stat().st_mtime_ns
    assert not (work / "layer-00001.json").exists()

    # Other settings are another work; the first one is not touched, and named.
    lines = []
    quantize_folder(model, tmp_path / "out", say=lines.append, **options | {"length": 7})
    assert lines[0].startswith(str(work)) and first.stat().st_mtime_ns == made
    for file in (tmp_path / "out").iterdir():
        file.unlink()

    finished = []
    quantize_folder(model, tmp_path / "out", say=lambda _: finished.append(first.stat().st_mtime_ns), **options)
    assert finished == [made, made], "the finished layer was made again"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not work.exists()


def test_what_a_finished_folder_was_made_from_is_named_where_it_was_left(tmp_path):
    model, _ = source(tmp_path)
    work = interrupted(model, tmp_path)
    shutil.copytree(model, tmp_path / "out")  # as if the command had been killed after the folder's last file
    with pytest.raises(
        UserError, match=f"out is there already; .*; {re.escape(str(work))} is what an interrupted command left"
    ):
        quantize_folder(model, tmp_path / "out")
    assert work_folders(tmp_path / "out") == [work] and work_folders(tmp_path / "ou") == []


def test_a_third_method_is_a_row_of_the_table(tmp_path, monkeypatch):
    def halves(config, layer, seen):
        assert seen.keys() == GROUPS.keys()
        half = layer.replace(**{name: getattr(layer, name) / 2 for name in PROJECTIONS})
        return Made(round_to_nearest(half), {"said": 1})

    monkeypatch.setitem(METHODS, "half", Method(True, halves))
    model, text = source(tmp_path)
    with pytest.raises(UserError, match="--method half needs --calibration"):
        quantize_folder(model, tmp_path / "out", method="half")
    report = quantize_folder(model, tmp_path / "out", method="half", calibration=text, length=8)
    assert [layer["said"] for layer in report["layers"]] == [1, 1]
    assert report["mean"]["weight_error"]["half"] == pytest.approx(0.5, rel=0.05)
    assert report["mean"]["output_error_held_out"].keys() == {"rtn", "half"} == report["text"].keys() - {"plain"}


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_layer_is_made_again(tmp_path, damage):
    model, _ = source(tmp_path)
    quantize_folder(model, tmp_path / "whole")
    file = interrupted(model, tmp_path) / "layer-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    match damage:
        case "flipped":
            file.write_bytes(data)
        case "cut":
            file.write_bytes(data[:-100])
        case "gone":
            file.unlink()
    quantize_folder(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk_is_told_with_the_layers_file(tmp_path):
    work = WorkFolder(tmp_path / "out", {})
    with pytest.raises(OSError, match=re.escape(f"File too large: '{work.path}/layer-00000.safetensors'")), full_disk():
        work.write(0, {"a": np.zeros(4, np.float32)}, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "nvfp"}, r"--format is 'nvfp'; allowed: nvfp4 \(did you mean 'nvfp4'\?\)"),
        ({"weight_format": None}, "--format is None; allowed: nvfp4. Other 4-bit formats"),
        ({"weight_format": "mxfp4"}, "--format is 'mxfp4'; allowed: nvfp4. Other 4-bit formats"),
        ({"weight_format": "nf4"}, "--format is 'nf4'; allowed: nvfp4. Other 4-bit formats"),
        ({"method": "gptq"}, "--method is 'gptq'; allowed: rtn, awq"),
        ({"method": "awq"}, "--method awq needs --calibration"),
        ({"sequences": 4}, "--sequences, --length and --chat-template-kwargs have no effect without --calibration"),
        ({"chat_template_kwargs": {"loud": True}}, "--chat-template-kwargs have no effect without --calibration"),
        ({"calibration": "TEXT", "chat_template_kwargs": {}}, r"\(--chat-template-kwargs\) has no effect: no row"),
        ({"calibration": "TEXT", "sequences": 1}, "--sequences is 1; allowed: 2 or more"),
        ({"calibration": "TEXT", "sequences": 99}, "text.jsonl: has 16 rows; expected 99 or more"),
        ({"calibration": "TEXT", "length": 65}, "--length is 65; allowed: 2 to 64"),
        ({"calibration": "TEXT", "length": 1}, "--length is 1; allowed: 2 to 64"),
        ({"calibration": "text.txt"}, "--calibration is text.txt; allowed: a .jsonl or .ndjson file, or arithmetic"),
        ({"calibration": "no.jsonl"}, r"no\.jsonl is missing"),
    ],
)
def test_options_that_cannot_be_used_are_named_and_nothing_is_left(tmp_path, options, message):
    model, text = source(tmp_path)
    if options.get("calibration") == "TEXT":
        options = options | {"calibration": text}
    with pytest.raises(UserError, match=message):
        quantize_folder(model, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.jsonl"]


def test_sources_and_destinations_that_cannot_be_used_are_named(tmp_path):
    model, _ = source(tmp_path)
    quantize_folder(model, tmp_path / "out")
    with pytest.raises(UserError, match="out is there already"):
        quantize_folder(model, tmp_path / "out")
    with pytest.raises(UserError, match="its weights are quantized already"):
        quantize_folder(tmp_path / "out", tmp_path / "twice")
    arrays = random_arrays()
    arrays["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    bad = write_folder(tmp_path / "bad", arrays)
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight: expected finite weights"):
        quantize_folder(bad, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_command_prints_a_line_a_layer_and_the_table(tmp_path, capsys):
    model, text = source(tmp_path)
    words = ["quantize", str(model), str(tmp_path / "out"), "--method", "awq", "--calibration", text, "--length", "8"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [line.split("  ")[0] for line in err.splitlines()] == ["layer 1/2", "layer 2/2"]
    lines = out.splitlines()
    heads = ("projection", *(f"{kind} {method}" for kind in ("weight", "output", "held out") for method in METHODS))
    assert lines[0].split() == " ".join(heads).split()
    assert [line.split()[0] for line in lines[1:9]] == [*PROJECTIONS, "mean"]
    assert [line.split()[0] for line in lines[-3:]] == ["plain", "rtn", "awq"]
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err
    words[2] = str(tmp_path / "other")
    assert main([*words, "--chat-template-kwargs", '{"enable_thinking": false}']) == 2
    assert "(--chat-template-kwargs) is {'enable_thinking': False}, and the" in capsys.readouterr().err


def test_a_second_command_for_the_same_folder_is_refused(tmp_path, monkeypatch):
    layers = quantize_module._layers

    def meanwhile(*arguments):
        for more in ({}, {"calibration": "arithmetic", "sequences": 4}):
            with pytest.raises(UserError, match=r"packed: another process is making it; wait for it"):
                quantize_folder("builtin:quickstart", tmp_path / "packed", **more)
        return layers(*arguments)

    monkeypatch.setattr(quantize_module, "_layers", meanwhile)
    quantize_folder("builtin:quickstart", tmp_path / "packed")
    assert (tmp_path / "packed" / "config.json").is_file()


def test_a_second_command_that_comes_when_the_first_has_ended_leaves_nothing(tmp_path, monkeypatch):
    opened = quantize_module.open_model

    def late(source):
        (tmp_path / "packed").mkdir()
        (tmp_path / "packed" / "config.json").write_text("{}")
        return opened(source)

    monkeypatch.setattr(quantize_module, "open_model", late)
    with pytest.raises(UserError, match=r"packed is there already; remove it or choose another name$"):
        quantize_folder("builtin:quickstart", tmp_path / "packed")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize(("old", "new"), [('"q_proj"', '"p_proj"'), ('": 0.0', '": 0.8')])
def test_a_record_that_is_damaged_is_made_again(tmp_path, old, new):
    model, _ = source(tmp_path)
    quantize_folder(model, tmp_path / "whole")
    record = interrupted(model, tmp_path) / "layer-00000.json"
    assert old in record.read_text()
    record.write_text(record.read_text().replace(old, new, 1))
    quantize_folder(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_changes_meanwhile_is_told(tmp_path):
    model, _ = source(tmp_path)
    lines = []

    def say(line):
        lines.append(line)
        if len(lines) == 1:
            os.utime(model / "config.json")

    with pytest.raises(UserError, match="its files have changed meanwhile; run the command again"):
        quantize_folder(model, tmp_path / "out", say=say)
    assert lines and not (tmp_path / "out").exists()
    quantize_folder(model, tmp_path / "out")


@pytest.mark.parametrize("record", ["", "[]", "{}", "[" * 100_000, '{"sha256": "x", "report": 3}'])
def test_a_record_that_is_none_counts_as_not_finished(tmp_path, record):
    work = WorkFolder(tmp_path / "out", {})
    work.write(0, {"w": np.ones(2, np.float32)}, {"error": 0.5})
    assert work.report(0) == {"error": 0.5}
    next(work.path.glob("layer-*.json")).write_text(record)
    assert work.report(0) is None
