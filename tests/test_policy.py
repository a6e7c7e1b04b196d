"""The shipped policy and the script that trained it."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from qerl_jax.data import arithmetic
from qerl_jax.data.dataset import load_dataset
from qerl_jax.formats import dequantize
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_model
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS, parameter_count, projection_shape
from qerl_jax.models.source import resolve
from qerl_jax.models.tokenizer import load_generation_config, load_tokenizer
from qerl_jax.models.transformer import logits
from qerl_jax.policies import train_quickstart
from qerl_jax.policies.tokenizer import EOS, PAD, PieceEncoder, build_tokenizer
from qerl_jax.policies.train_quickstart import Recipe

TINY = Recipe(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    steps=50,
    rows=10,
    quantized_share=0.0,
)


@pytest.fixture(scope="module")
def folder():
    return resolve("builtin:quickstart")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer("builtin:quickstart", json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def problems():
    return arithmetic.generate(1, "train", np.arange(300))


def test_the_folder_is_small_and_ordinary(folder):
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert sum(files.values()) < 2_000_000
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert config.model_type == "qwen2" and config.tie_word_embeddings
    assert all(projection_shape(config, name)[1] % 16 == 0 for name in PROJECTIONS)


def test_the_folder_is_what_the_script_writes(folder):
    told = json.loads((folder / "training.json").read_text())
    assert Recipe(**told["recipe"]) == Recipe()
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert config == train_quickstart.network(Recipe(), build_tokenizer().get_vocab_size())
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(build_tokenizer().to_str())
    assert told["parameters"] == parameter_count(load_model("builtin:quickstart"))


def test_ids(folder, tokenizer):
    ids = load_generation_config("builtin:quickstart")
    assert ids.eos_token_ids == (tokenizer.eos_token_id,) and ids.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS, PAD)
    assert len(tokenizer) == json.loads((folder / "config.json").read_text())["vocab_size"]


def test_every_way_of_loading_the_tokenizer_gives_the_same_ids(folder, tokenizer, problems):
    """AutoTokenizer rebuilds Qwen2Tokenizer whatever tokenizer_config.json says."""
    automatic = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(automatic) == len(tokenizer)
    assert (automatic.eos_token_id, automatic.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    for pieces in (arithmetic.prompt_pieces(problems), arithmetic.worked_pieces(problems)):
        texts = arithmetic.texts(pieces)
        assert automatic(texts)["input_ids"] == tokenizer(texts)["input_ids"]


def test_texts_survive_encoding_and_pieces_encode_alike(tokenizer, problems):
    encode = PieceEncoder(build_tokenizer())
    for pieces in (
        arithmetic.prompt_pieces(problems),
        arithmetic.worked_pieces(problems),
        arithmetic.direct_pieces(problems),
    ):
        texts = arithmetic.texts(pieces)
        ids = tokenizer(texts)["input_ids"]
        assert tokenizer.batch_decode(ids) == texts
        tokens, lengths = encode(pieces)
        assert [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)] == ids
        assert (tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] == tokenizer.pad_token_id).all()


def test_any_text_can_be_encoded(tokenizer):
    text = "Zoë asked: 3 < 12?\n\tJa! 数"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_prompts_and_answers_are_short(tokenizer):
    data = load_dataset("arithmetic", split="eval")
    assert max(map(len, tokenizer([data[i]["prompt"] for i in range(len(data))])["input_ids"])) <= 48
    problems = arithmetic.generate(0, "eval", np.arange(4096))
    assert max(map(len, tokenizer(arithmetic.texts(arithmetic.worked_pieces(problems)))["input_ids"])) < 48


def test_the_scripts_network_is_the_librarys(problems):
    model = load_model("builtin:quickstart", "bf16", jnp.float32)
    tokens, _ = PieceEncoder(build_tokenizer())(arithmetic.prompt_pieces(problems))
    batch = jnp.asarray(tokens[:4])
    np.testing.assert_allclose(train_quickstart.logits(model, batch), logits(model, batch), rtol=1e-4, atol=1e-4)


def test_batches_are_a_function_of_seed_and_call_and_mix_the_two_ways(tokenizer):
    encode = PieceEncoder(build_tokenizer())
    direct, worked = train_quickstart.batches(encode, TINY, 3)
    assert direct.tokens.shape[:2] == (50, 8) and worked.tokens.shape[:2] == (50, 2)
    again = train_quickstart.batches(encode, TINY, 3)
    np.testing.assert_array_equal(direct.tokens, again[0].tokens)
    assert (direct.tokens != train_quickstart.batches(encode, TINY, 4)[0].tokens).any()
    for rows, way in ((direct, "#### "), (worked, "=")):
        tokens, start, end = rows.tokens[7, 1], rows.starts[7, 1], rows.ends[7, 1]
        assert tokenizer.decode(tokens[:start]).endswith("?")
        assert way in tokenizer.decode(tokens[start:end])
        assert tokens[end - 1] == tokenizer.eos_token_id
        operands = [int(part) for part in tokenizer.decode(tokens[:start]).replace(".", "").split() if part.isdigit()]
        arithmetic.check_split(operands, "pretrain")


def test_training_learns_and_the_folder_loads_back_bit_for_bit(tmp_path):
    lines = []
    model = train_quickstart.train(TINY, lines.append)
    assert len(lines) == 1 and float(lines[0].split()[3]) < 4.0, lines  # from log(464) = 6.1
    train_quickstart.save(model, tmp_path / "policy", {})
    packed = load_model(tmp_path / "policy", "nvfp4", jnp.float32)
    for path, expected in jax.tree_util.tree_leaves_with_path(train_quickstart.loaded(model)):
        found = dict(jax.tree_util.tree_leaves_with_path(packed))[path]
        assert found.dtype == expected.dtype and np.array_equal(found, expected), path


def test_quantization_in_training_is_that_of_loading_and_passes_gradients_through():
    model = init_model(jax.random.key(0), train_quickstart.network(TINY, 32))
    seen, packed = train_quickstart.fake_quantized(model), train_quickstart.loaded(model)
    for name in PROJECTIONS:
        unpacked = dequantize(getattr(packed.base.layers[0], name), jnp.float32)
        np.testing.assert_allclose(getattr(seen.base.layers[0], name), unpacked, atol=1e-6)
    weights = jax.random.normal(jax.random.key(1), model.base.layers[0].q_proj.shape)
    gradient = jax.grad(lambda m: jnp.sum(weights * train_quickstart.fake_quantized(m).base.layers[0].q_proj))(model)
    np.testing.assert_array_equal(gradient.base.layers[0].q_proj, weights)


def test_steps_come_in_whole_calls():
    with pytest.raises(ValueError, match="multiple of 50"):
        train_quickstart.train(Recipe(steps=70))


def test_an_output_that_cannot_be_written_is_refused_before_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_quickstart, "train", None)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "training.json").write_text("{}")
    closed, real = tmp_path / "closed", os.access  # who is root may write everything
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and real(path, mode))
    for name, said in (
        ("old", "old is not empty; expected an empty folder, or a name that is free"),
        ("old/training.json/new", "training.json is a file; expected a folder"),
        ("closed/a/b", "closed may not be written; change its permissions, or choose another name"),
    ):
        with pytest.raises(SystemExit):
            train_quickstart.main(["--output", str(tmp_path / name)])
        assert f"error: --output: {tmp_path}" in (text := capsys.readouterr().err) and said in text
    train_quickstart.check_output(tmp_path / "a" / "b")


def test_the_quantized_policy_has_a_better_way_to_find():
    figures = train_quickstart.evaluate(load_model("builtin:quickstart", "nvfp4", jnp.float32), "eval", count=256)
    assert figures["t1/well_formed"] >= 0.97 and figures["greedy/well_formed"] >= 0.97
    assert 0.12 <= figures["t1/share_worked"] <= 0.32
    assert 0.2 <= figures["t1/accuracy"] <= 0.5
    assert figures["greedy/accuracy"] <= 0.35 and figures["greedy/share_worked"] < 0.05
    assert figures["worked_t1/accuracy"] >= 0.93
