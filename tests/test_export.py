"""Runs and models as folders for other programs: what is written, what is refused, what a kill leaves."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from folders import NVFP4, V4, V5, assert_equal, packed_arrays, random_arrays, write_folder, write_tokenizer

from qerl_jax.checkpoints import newest_progress, save_checkpoint
from qerl_jax.cli import main
from qerl_jax.config_files import load_config, save_yaml
from qerl_jax.errors import UserError
from qerl_jax.export import export_model
from qerl_jax.models.fingerprint import fingerprint
from qerl_jax.models.loading import load_model
from qerl_jax.models.peft import load_adapter, save_adapter
from qerl_jax.models.saving import merge_adapter
from qerl_jax.policy import model_identity
from qerl_jax.quantization.adapters import trained_format
from qerl_jax.rl.assembly import initial_adapter, optimizer_spec
from qerl_jax.rl.optimizer import make_optimizer
from qerl_jax.rl.saved import Saved
from qerl_jax.rl.state import init_state

COMPANIONS = {
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates",
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
    """A plain model's folder with everything that belongs to it."""
    folder = write_folder(tmp_path / "base", random_arrays(), V4)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 21}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture
def run(tmp_path, base):
    """An unfinished run on it, as its files are after 3 and 5 steps, and the adapter of the fifth."""
    words = [f"model.model_name_or_path={base}", "model.dtype=float32", "lora.lora_r=4", f"run.output_dir={tmp_path}/r"]
    config = load_config("quickstart", words)
    folder = tmp_path / "r"
    folder.mkdir()
    save_yaml(config, folder / "config.yaml")
    model = load_model(base, "nvfp4", "float32")
    optimizer = make_optimizer(optimizer_spec(config, 100))
    identity = model_identity(str(base), fingerprint(model)) | {"training data": "x", "total optimizer steps": 100}
    key = jax.random.key(0)
    for step in (3, 5):
        adapter = jax.tree.map(lambda x, step=step: x + 0.01 * step, initial_adapter(config, model, key))
        saved = Saved(init_state(adapter, optimizer), key)
        save_checkpoint(folder / "checkpoints", step, saved, {"identity": identity, "rollout": step})
    return folder, model, adapter


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_adapter_of_an_unfinished_run(tmp_path, run):
    folder, model, adapter = run
    export_model(folder, tmp_path / "out", "peft")
    files = {"adapter_config.json", "adapter_model.safetensors", "qerl_adapter.json"}
    assert names(tmp_path / "out") == COMPANIONS | files
    assert_equal(load_adapter(tmp_path / "out", model), adapter)
    assert trained_format(tmp_path / "out") == "nvfp4"
    export_model(tmp_path / "base", tmp_path / "again", "peft", tmp_path / "out")
    assert trained_format(tmp_path / "again") == "nvfp4"
    options = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == str(tmp_path / "base") and options["r"] == 4


def test_an_unfinished_runs_adapter_is_not_taken_with_another_scaling(tmp_path, run):
    file = run[0] / "config.yaml"
    file.write_text(file.read_text().replace("lora_alpha: 32.0", "lora_alpha: 3200.0"))
    with pytest.raises(UserError, match=r"adapter\.lora\.0\.down_proj\.scaling: expected 800\.0, found 8\.0\. .*alpha"):
        export_model(run[0], tmp_path / "out", "peft")


def test_a_run_and_its_export_may_lie_at_home(tmp_path, run, monkeypatch):
    _, model, adapter = run
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    export_model("~/r", "~/out", "peft")
    assert_equal(load_adapter("~/out", model), adapter)
    for _ in range(2):  # the second takes the first one's place
        export_model("~/r", "~/merged", "bf16")
    assert_equal(load_model(tmp_path / "merged"), load_model("~/merged"))
    for source in ("~/base", "~/r"):
        with pytest.raises(UserError, match="the export would replace what it is made from"):
            export_model(source, source, "peft")
    assert not (tmp_path / "~").exists()


def test_a_finished_run_has_its_adapter_in_a_folder(tmp_path, run):
    folder, model, adapter = run
    last = jax.tree.map(lambda x: 2 * x, adapter)
    save_adapter(last, folder / "adapter", "base")
    export_model(folder, tmp_path / "out", "peft")
    assert_equal(load_adapter(tmp_path / "out", model), adapter)  # it has not ended: whoever has left that there
    (folder / "summary.json").write_text("{}")
    export_model(folder, tmp_path / "out", "peft")
    assert_equal(load_adapter(tmp_path / "out", model), last)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    export_model(folder, tmp_path / "out", "peft")
    assert_equal(load_adapter(tmp_path / "out", model), last)


def test_a_finished_run_whose_first_adapter_is_gone(tmp_path, base, run):
    folder, model, adapter = run
    words = [f"model.model_name_or_path={base}", "model.dtype=float32", f"lora.adapter={tmp_path}/gone"]
    save_yaml(
        load_config("configs/quickstart.yaml", ["lora={}", *words, f"run.output_dir={folder}"]), folder / "config.yaml"
    )
    with pytest.raises(
        UserError, match=r"lora.adapter: .*gone is no longer there; .* write its place into .*/r/config.yaml"
    ):
        export_model(folder, tmp_path / "out", "peft")
    save_adapter(adapter, folder / "adapter", "base")
    (folder / "summary.json").write_text(json.dumps(newest_progress(folder / "checkpoints")[0]))
    export_model(folder, tmp_path / "out", "peft")
    assert_equal(load_adapter(tmp_path / "out", model), adapter)
    write_folder(base, random_arrays(seed=1), V4)
    with pytest.raises(UserError, match="base weights was"):
        export_model(folder, tmp_path / "merged", "bf16")


def test_base_and_adapter_merged_in_bfloat16(tmp_path, run):
    folder, model, adapter = run
    export_model(folder, tmp_path / "out", "bf16")
    assert names(tmp_path / "out") == COMPANIONS | {"config.json", "model.safetensors"}
    expected = merge_adapter(model, adapter)
    found = load_model(tmp_path / "out")
    assert found.base.embed.dtype == "bfloat16"
    for one, other in zip(found.base.layers, expected.base.layers, strict=True):
        assert np.array_equal(one.v_proj, other.v_proj.astype("bfloat16"))
        assert np.array_equal(one.input_norm, other.input_norm)
    for name in COMPANIONS - {"additional_chat_templates"} | {"additional_chat_templates/tool_use.jinja"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


@pytest.mark.parametrize("format", ["peft", "bf16"])
def test_what_lies_among_chat_templates_and_is_none_is_not_lost(tmp_path, run, format):
    folder, *_ = run
    export_model(folder, tmp_path / "out", format)
    export_model(folder, tmp_path / "out", format)  # which replaces it
    notes = tmp_path / "out" / "additional_chat_templates" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(UserError, match="out holds additional_chat_templates, which would be lost"):
        export_model(folder, tmp_path / "out", format)
    assert notes.read_text() == "mine"


def test_the_base_alone_in_nvfp4(tmp_path, run):
    folder, model, _ = run
    export_model(folder, tmp_path / "out", "nvfp4")
    assert names(tmp_path / "out") == COMPANIONS | {"config.json", "model.safetensors"}
    assert_equal(load_model(tmp_path / "out", dtype="float32"), model)


def test_a_model_and_an_adapter(tmp_path, base):
    model = load_model(base)
    adapter = jax.tree.map(lambda x: x + 0.1, initial_adapter(load_config("quickstart", []), model, jax.random.key(1)))
    save_adapter(adapter, tmp_path / "adapter", "base")
    export_model(base, tmp_path / "merged", "bf16", tmp_path / "adapter")
    assert_equal(load_model(tmp_path / "merged"), merge_adapter(model, adapter))
    export_model(base, tmp_path / "plain", "bf16")
    assert_equal(load_model(tmp_path / "plain"), model)
    export_model(base, tmp_path / "again", "peft", tmp_path / "adapter")
    assert_equal(load_adapter(tmp_path / "again", model), adapter)
    with pytest.raises(UserError, match=r"--adapter .*adapter has no effect with nvfp4: 4-bit weights cannot hold"):
        export_model(base, tmp_path / "x", "nvfp4", tmp_path / "adapter")


@pytest.mark.parametrize("name", ["base", "~/base", "base/../base", "."])
def test_an_adapter_names_its_base_so_that_it_is_found_from_any_folder(tmp_path, base, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(base if name == "." else tmp_path)
    save_adapter(initial_adapter(load_config("quickstart", []), load_model(base), jax.random.key(1)), "mine", "b")
    export_model(name, tmp_path / "out", "peft", "mine")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_a_config_yaml_of_another_program_makes_no_run(tmp_path, base, run):
    """Beside a model, and beside an adapter that is written."""
    (base / "config.yaml").write_text("base_model: x\n")
    export_model(base, tmp_path / "merged", "bf16")
    assert_equal(load_model(tmp_path / "merged"), load_model(base))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("base_model: x\n")
    for _ in range(2):
        export_model(run[0], tmp_path / "project" / "adapter", "peft")
    assert names(tmp_path / "project") == {"adapter", "config.yaml"}


def test_a_packed_model_unpacked(tmp_path):
    folder = write_tokenizer(write_folder(tmp_path / "p", packed_arrays(), V5 | {"quantization_config": NVFP4}))
    export_model(folder, tmp_path / "plain", "bf16")
    assert_equal(load_model(tmp_path / "plain"), load_model(folder, "bf16"))
    export_model(folder, tmp_path / "packed", "nvfp4")
    assert_equal(load_model(tmp_path / "packed"), load_model(folder))


@pytest.mark.parametrize("held", ["nf4", "nf4_double_quant", "mxfp4"])
def test_a_run_on_a_base_in_another_4_bit_format_is_refused_before_it_is_loaded(tmp_path, run, monkeypatch, held):
    monkeypatch.setattr("qerl_jax.export.load_model", lambda *args: pytest.fail("loaded"))
    file = run[0] / "config.yaml"
    file.write_text(file.read_text().replace("weight_format: nvfp4", f"weight_format: {held}"))
    message = (
        rf"/r: its base is held in {held}; allowed with --format nvfp4: nvfp4\. Use --format peft \(.*\) or bf16 \(.*"
        r"\); or `.* quantize .*/base .*/out`, which packs"
    )
    with pytest.raises(UserError, match=message):
        export_model(run[0], tmp_path / "out", "nvfp4")


def test_a_model_packed_in_another_format_is_refused_by_it(tmp_path, base, monkeypatch):
    monkeypatch.setattr("qerl_jax.export.rounded_to", lambda *args: "mxfp4")
    with pytest.raises(UserError, match=r"base: its base is held in mxfp4; .* Use --format bf16$"):
        export_model(base, tmp_path / "out", "nvfp4")


def test_what_cannot_be_exported(tmp_path, base, run, capsys):
    folder, _, _ = run
    with pytest.raises(UserError, match=r"format is 'bf61'; allowed: peft, bf16, nvfp4 \(did you mean 'bf16'"):
        export_model(base, tmp_path / "x", "bf61")
    with pytest.raises(UserError, match=r"format is 'mxfp4'; allowed: peft, bf16, nvfp4$"):
        export_model(base, tmp_path / "x", "mxfp4")
    with pytest.raises(UserError, match="base: a model alone has no adapter; expected a run folder, or --adapter"):
        export_model(base, tmp_path / "x", "peft")
    with pytest.raises(UserError, match=r"linear layers are plain, not nvfp4; `.* quantize .* packs them"):
        export_model(base, tmp_path / "x", "nvfp4")
    for source in (base, folder):
        with pytest.raises(UserError, match="base: the export would replace what it is made from"):
            export_model(source, base, "bf16")
    with pytest.raises(UserError, match="would replace what it is made from"):
        export_model(folder, folder, "peft")
    save_adapter(run[2], tmp_path / "mine", "b")
    with pytest.raises(UserError, match="would replace what it is made from"):
        export_model(base, tmp_path / "mine", "peft", tmp_path / "mine")
    with pytest.raises(UserError, match=r"there the run in .*/r leaves what it has learned; choose another name"):
        export_model(folder, folder / "adapter", "peft")
    assert not (folder / "adapter").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis.tex, which would be lost"):
        export_model(folder, tmp_path / "thesis", "peft")
    assert main(["export", str(base), str(tmp_path / "x"), "--format", "peft"]) == 2
    assert capsys.readouterr().err.startswith("qerl export: ")
    assert not (tmp_path / "x").exists()


def test_a_run_whose_base_has_changed_is_refused(tmp_path, base, run):
    folder, _, _ = run
    write_folder(base, random_arrays(seed=1), V4)
    for format in ("bf16", "nvfp4"):
        with pytest.raises(UserError, match="base weights was") as error:
            export_model(folder, tmp_path / "out", format)
        assert "--fresh" not in str(error.value) and f"of {folder / 'config.yaml'}" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["peft", "bf16", "nvfp4"])
def test_a_run_whose_tokenizer_has_changed_is_refused(tmp_path, base, run, format):
    folder, _, _ = run
    (base / "chat_template.jinja").write_text("{{ messages | length }}")
    (base / "generation_config.json").write_text('{"eos_token_id": 20}')
    with pytest.raises(UserError, match=r"tokenizer and chat template was '\w+', is now '(.|\n)*EOS and pad ids was"):
        export_model(folder, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_is_refused_before_its_model_is_loaded(tmp_path, run, monkeypatch):
    folder, _, _ = run
    monkeypatch.setattr("qerl_jax.export.load_model", lambda *args: pytest.fail("loaded"))
    os.rename(folder / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"r: holds neither adapter/ nor a checkpoint: the run has saved nothing yet"):
        export_model(folder, tmp_path / "out", "bf16")


FOREVER = """\
import sys
from qerl_jax.export import export_model
number = 0
while True:
    export_model(sys.argv[1 + number % 2], sys.argv[3], "bf16")
    number += 1
    print(number, flush=True)
"""


def kills(folder, times, seed):
    """Exports two models in turn to one place, killed at random instants; the name is free, or holds one of them."""
    root = Path(__file__).parent.parent
    sources = [folder / "one", folder / "two"]
    for number, source in enumerate(sources):
        write_tokenizer(write_folder(source, random_arrays(seed=number), V4))
    whole = [load_model(source) for source in sources]
    out, rng = folder / "out", random.Random(seed)
    states = {"absent": 0, "whole": 0, "remains": 0}
    for _ in range(times):
        command = [sys.executable, "-c", FOREVER, *map(str, [*sources, out])]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout.readline() == b"1\n"
            time.sleep(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
        for place in folder.iterdir():
            if place in sources:
                continue
            try:
                found = load_model(place)
            except UserError:
                assert place != out
                states["remains"] += 1
                continue
            assert any(np.array_equal(found.base.embed, model.base.embed) for model in whole)
            source = whole[0] if np.array_equal(found.base.embed, whole[0].base.embed) else whole[1]
            assert_equal(found, source)
            states["whole" if place == out else "remains"] += 1
        states["absent"] += not out.exists()
    export_model(sources[0], out, "bf16")
    assert names(folder) == {"one", "two", "out"}
    return states


def test_an_export_killed_at_random_instants(tmp_path):
    states = kills(tmp_path, 2, seed=0)
    assert states["whole"] + states["absent"] == 2


@pytest.mark.slow
def test_many_exports_killed(tmp_path):
    states = kills(tmp_path, 25, seed=int.from_bytes(os.urandom(4)))
    assert states["whole"] + states["absent"] == 25 and states["remains"] > 0
