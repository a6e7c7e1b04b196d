"""What is given in the place of a model, a run or a folder, and models whose tokenizer does not fit."""

import os
import re
import subprocess
import sys

import jax
import pytest
from mistakes import CONFIG, MODEL, SHAPE, policy
from run_harness import ROOT

from qerl_jax.errors import UserError
from qerl_jax.policy import load_policy


def test_a_run_or_an_adapter_in_the_place_of_a_model_or_an_adapter(folder, refused):
    (folder / "mine").mkdir()
    (folder / "mine" / "config.yaml").write_text(CONFIG)
    (folder / "tuned").mkdir()
    (folder / "tuned" / "adapter_config.json").write_text("{}")
    for words in (["train", "my.yaml", "model.model_name_or_path=mine"], ["quantize", "mine", "out"]):
        said = refused(*words)
        assert "mine is a run, not a model; its base is model.model_name_or_path in " in said
        assert re.search("mine'? OUT --format bf16` merges base and adapter into a model", said)
    for words in (["train", "my.yaml", "model.model_name_or_path=tuned"], ["quantize", "tuned", "out"]):
        said = refused(*words)
        assert "tuned is a PEFT adapter, not a model; give its base, with lora.adapter=" in said
        assert "export BASE OUT --format bf16 --adapter " in said
    for words in (
        ["train", "my.yaml", "lora.adapter=mine"],
        ["generate", MODEL, "--prompt", "x", "--adapter", "mine"],
        ["export", MODEL, "out", "--format", "bf16", "--adapter", "mine"],
    ):
        said = refused(*words)
        assert "mine is a run, not an adapter; its adapter is " in said
        assert said.endswith("mine/adapter, once it has ended\n")


def one_token_more(tokenizer):
    token = {"content": "<more>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocabulary = max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])])
    tokenizer["added_tokens"].append(token | {"id": vocabulary + 1, "special": True})


def test_a_tokenizer_with_more_ids_than_the_embedding(folder, refused):
    policy(folder / "more", tokenizer=one_token_more)
    V = SHAPE["vocab_size"]
    expected = f"the tokenizer has {V + 1} tokens, the largest id {V} ('<more>'); the embedding has {V} rows"
    assert expected in refused("train", "my.yaml", "model.model_name_or_path=more")
    assert expected in refused("generate", "more", "--prompt", "x")


def test_a_tokenizer_is_read_before_the_weights(folder, monkeypatch):
    """Which takes minutes where a large model is quantized."""
    policy(folder / "more", tokenizer=one_token_more)
    monkeypatch.setattr("qerl_jax.policy.load_model", None)
    with pytest.raises(UserError, match=r"the embedding has \d+ rows"):
        load_policy(str(folder / "more"), "nvfp4", "auto")


def test_a_tokenizer_without_an_end(folder, refused):
    def without(values):
        values.pop("eos_token_id", None)
        values.pop("eos_token", None)

    policy(folder / "endless", config=without, generation_config=without, tokenizer_config=without)
    assert "endless: no EOS" in refused("train", "my.yaml", "model.model_name_or_path=endless")
    assert "endless: no EOS" in refused("generate", "endless", "--prompt", "x")


@pytest.mark.parametrize("command", ["evaluate", "plot"])
def test_a_folder_that_is_no_run(command, folder, refused):
    (folder / "runs" / "other").mkdir(parents=True)
    assert "runs/othr: no such run folder (did you mean 'other'?)" in refused(command, "runs/othr")
    assert "runs/other: holds no " in refused(command, "runs/other")
    assert "expected the folder that `qerl train` made" in refused(command, "my.yaml")


SOURCES = pytest.mark.parametrize(
    ("command", "words"), [("generate", ["--prompt", "x"]), ("export", ["out", "--format", "bf16"])]
)


@SOURCES
def test_a_folder_that_is_neither_run_nor_model(command, words, folder, refused):
    (folder / "runs" / "quickstart").mkdir(parents=True)
    (folder / "tuned").mkdir()
    (folder / "tuned" / "adapter_config.json").write_text("{}")
    said = refused(command, "runs", *words)
    assert "runs is neither a run folder, with config.yaml, nor a model's folder, with config.json" in said
    assert "tuned is a PEFT adapter; give the base model, and --adapter tuned" in refused(command, "tuned", *words)


@SOURCES
def test_a_folder_that_is_missing_has_its_neighbour_named(command, words, folder, refused, monkeypatch):
    def unreachable(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    (folder / "runs" / "quickstart").mkdir(parents=True)
    said = refused(command, "runs/quikstart", *words)
    assert "runs/quikstart: no such folder here (did you mean 'quickstart'?), and it could not be had" in said
    assert "./rusn: no such folder (did you mean 'runs'?); allowed: a folder" in refused(command, "./rusn", *words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plot", ["run", "--output", "my.yaml"]),
        ("plot", ["run", "--output", "my.yaml/inside"]),
        ("export", [MODEL, "my.yaml/inside", "--format", "bf16"]),
        ("quantize", [MODEL, "my.yaml/inside"]),
    ],
)
def test_a_folder_in_a_file(command, words, folder, refused):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert "my.yaml is a file; expected a folder" in refused(command, *words)


def test_a_run_that_has_saved_nothing_yet(folder, refused):
    """`run/adapter` has the form of a name on the Hub, which must not be asked for it."""
    refused("train", "my.yaml", "data.max_prompt_length=8")
    assert (folder / "run" / "config.yaml").is_file()
    for words in (("evaluate", "run"), ("generate", "run", "--prompt", "x")):
        assert "run: holds neither adapter/ nor a checkpoint: the run has saved nothing yet" in refused(*words)
    assert "run/metrics.jsonl: no step was recorded yet" in refused("plot", "run")
    (folder / "run" / "summary.json").write_text("{}")
    expected = "by its summary.json the run is finished, so they were taken away; put adapter/ back"
    assert f"run: holds neither adapter/ nor a checkpoint: {expected}" in refused("evaluate", "run")


@pytest.mark.parametrize("command", [["train", "my.yaml"], ["generate", MODEL, "--prompt", "a"]])
@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there_is_told(command, platform):
    if platform == "cuda" and jax.default_backend() != "cpu":
        pytest.skip("it is there")
    env = os.environ | {"JAX_PLATFORMS": platform, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "qerl_jax", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"JAX_PLATFORMS is '{platform}', and JAX finds no such device here" in done.stderr.splitlines()[-1]
    assert not os.path.exists("run")
