"""The benchmark of decoding on a tiny network: what it writes, and its arithmetic by hand."""

import json

import pytest

from benchmarks import rollout
from benchmarks.shapes import MODELS

# The benchmark has a cache of its own.
pytestmark = pytest.mark.usefixtures("cache_restored")

WORDS = ["--model", "tiny", "--lora-rank", "4", "--prompt", "12", "--new", "6", "--repeats", "1"]


def test_rows_of_two_calls_are_in_one_file(tmp_path):
    output, shown = tmp_path / "deep" / "rollout.json", []
    assert rollout.main([*WORDS, "--batch", "16", "--output", str(output)], shown.append) == 0
    first = json.loads(output.read_text())
    assert rollout.main([*WORDS, "--batch", "4", "--format", "nf4", "--output", str(output)], shown.append) == 0
    result = json.loads(output.read_text())
    assert {"device", "versions", "settings", "read_tb_per_s"} <= result.keys()
    assert result["rows"][:1] == first["rows"]
    names = [(row["format"], row["batch"], row["num_generations"]) for row in result["rows"]]
    assert names == [("nvfp4", 16, 8), ("nf4", 4, 4)]
    for row in result["rows"]:
        assert (row["model"], row["lora_rank"], row["prompt"], row["new"]) == ("tiny", 4, 12, 6)
        assert row["floor_ms"] > 0 and row["prefill_tokens_per_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert row["logp_difference"] < 1e-5 < 1e-4 < row["logp_difference_to_clean"]  # float32, and noise of 0.01
    assert sum("tiny" in text for text in shown) == 2


def test_rows_of_another_dtype_stand_beside(tmp_path):
    output = tmp_path / "rollout.json"
    for words in ([], ["--dtype", "float16"], ["--dtype", "float32"]):
        assert rollout.main([*WORDS, "--batch", "16", *words, "--output", str(output)], lambda _: None) == 0
    result = json.loads(output.read_text())
    assert [row.get("dtype") for row in result["rows"]] == [None, "float16"]
    assert all(row["logp_difference"] < 1e-3 for row in result["rows"])


@pytest.mark.parametrize("other", [{"device": "another"}, {"versions": {"jax": "another"}}])
def test_a_file_of_another_device_or_other_versions_is_left_alone(tmp_path, other):
    about = {"device": "cpu", "versions": {"jax": "1"}}
    old = about | other | {"rows": []}
    output = tmp_path / "rollout.json"
    output.write_text(json.dumps(old))
    with pytest.raises(SystemExit, match=r"holds results of .*another.*: name another file"):
        rollout.Results(output, about)
    assert json.loads(output.read_text()) == old


def test_a_batch_that_does_not_fit_is_said_and_the_others_run(monkeypatch):
    monkeypatch.setattr(rollout, "measure", lambda case, *_: (_ for _ in ()).throw(MemoryError("too large")))
    shown = []
    assert rollout.main([*WORDS, "--batch", "16", "4"], shown.append) == 1
    assert sum("too large" in text for text in shown) == 2


def test_bytes_of_a_step_by_hand():
    model = rollout.random_model(MODELS["tiny"], "float32", "bf16")
    case = rollout.make_case(model, 4, 16, 8, 12, 6)
    # Two layers: q, k, v, o; gate, up, down; their norms and q, k and v's biases. Then the embedding, which is the
    # output matrix too, LoRA's rank times inputs and outputs, and keys and values of 2 heads of 16 numbers: 2 prompts
    # of 12, 16 completions of 3 on average.
    layer = (64 + 32 + 32) * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + (64 + 32 + 32)
    lora = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    cache = 2 * 2 * 16 * (2 * 12 + 16 * 3)
    assert rollout.step_bytes(case) == 4 * (2 * layer + 512 * 64 + 2 * lora + 2 * cache)


def test_kernels_of_a_step_are_what_more_steps_add():
    one = [("gemm_1", 0.5), ("fusion_3", 0.1)]
    five = [("gemm_1", 0.5), ("fusion_3", 0.1), *[("fusion_4", 0.02), ("fusion_7", 0.01), ("attention", 0.2)] * 4]
    found = rollout.per_step(one, five, 4)
    assert [(row["kernel"], row["count"]) for row in found] == [("attention", 1), ("fusion", 2)]
    assert [row["us"] for row in found] == pytest.approx([200, 30])


@pytest.mark.parametrize(
    ("batch", "device", "peer", "ratio"),
    [
        (8, "NVIDIA H200", 1717, "2.00"),
        (64, "NVIDIA H200", 9197, "0.37"),
        (3, "NVIDIA H200", None, "-"),
        (8, "NVIDIA H100 80GB HBM3", None, "-"),
    ],
)
def test_the_peers_rate_is_the_one_to_beat_on_its_device(batch, device, peer, ratio):
    row = dict.fromkeys(("step_ms", "floor_ms", "prefill_tokens_per_s", "logp_difference"), 1.0)
    row |= {"model": "qwen2.5-7b", "format": "nvfp4", "lora_rank": 32, "batch": batch, "tokens_per_s": 3434}
    text = rollout.line(row, device)
    assert text.split()[-3] == ratio and text.split()[-4] == ("-" if peer is None else str(peer))


@pytest.mark.parametrize(("words", "said"), [
    (["--new", "1"], "--new is less than 2"),
    (["--profile", "8"], "no GPU"),
    (["--batch", "1", "64", "--profile", "8"], "--profile is [8]; allowed: batches of --batch, [1, 64]"),
])  # fmt: skip
def test_words_that_make_no_sense(words, said, capsys):
    with pytest.raises(SystemExit):
        rollout.main(words)
    assert said in capsys.readouterr().err
