"""Folders that this library writes, its commands too: transformers, PEFT and compressed-tensors (other_programs.py)
compute our logits from them, and find in them the tokenizer and the generation configuration of the source.

    make test-interop

The source is what transformers wrote, in bfloat16.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import FAMILIES, IDS, assert_logits, in_bfloat16, our_logits, rounded, unpacked

from qerl_jax import (
    Batch,
    UpdateSettings,
    init_adapter,
    init_state,
    load_adapter,
    load_model,
    merge_adapter,
    save_adapter,
    save_merged,
    save_model,
    update_step,
)
from qerl_jax.cli import main

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True, "target_modules": ("q_proj", "v_proj")},
    "norms": {"train_norms": True},
}
# Each kind of folder, and the one without what it adds: agreement about that would say nothing of it.
KINDS = {
    "plain": None,
    "nvfp4": "plain",
    **{kind: "plain" for kind in ADAPTERS},
    **{f"nvfp4-{kind}": "nvfp4" for kind in ADAPTERS},
    "merged": "nvfp4",
    "export-peft": "plain",
    "export-bf16": "plain",
    "export-nvfp4": "plain",
    "quantize-rtn": "plain",
    "quantize-awq": "quantize-rtn",
}


def random_adapter(model, **options):
    adapter = init_adapter(jax.random.key(1), model, lora_r=4, lora_alpha=6, **options)
    keys = iter(jax.random.split(jax.random.key(2), 1000))
    return jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(next(keys), leaf.shape), adapter)


def trained_adapter(model):
    """An adapter after three updates towards a few tokens."""
    optimizer = optax.adam(0.05)
    state = init_state(init_adapter(jax.random.key(3), model, lora_r=4, lora_alpha=8, train_norms=True), optimizer)
    settings = UpdateSettings(num_generations=2, temperature=1.0, micro_batch_size=2)
    ids = jnp.asarray(IDS)
    batch = Batch(
        prompt=jnp.tile(ids[:1, :5], (2, 1)),
        prompt_lengths=jnp.full(2, 5),
        completion=ids[:, 5:],
        completion_lengths=jnp.full(2, 10),
        mask=jnp.ones((2, 10), bool),
        rewards=jnp.array([1.0, 0.0]),
        sampled_logps=jnp.zeros((2, 10)),
        rollout_step=jnp.int32(0),
    )
    step = jax.jit(
        lambda state, model, batch: update_step(state, model, batch, optimizer=optimizer, settings=settings)[0]
    )
    for _ in range(3):
        state = step(state, model, batch)
    return state.adapter


class Written:
    """What this library writes of one network, the logits that it computes, and the jobs for the other programs."""

    def __init__(self, folder, source):
        self.folder, self.source, self.expected, self.jobs = folder, source, {}, []
        self.model, self.quantized = load_model(source, dtype="float32"), load_model(source, "nvfp4", "float32")

    def add(self, kind, expected, model, adapter=None, dtype="float32"):
        self.expected[kind] = expected
        job = {"model": model and str(model), "adapter": adapter and str(adapter), "dtype": dtype}
        self.jobs.append(job | {"out": str(self.folder / kind)})

    def models_and_adapters(self):
        plain, packed = self.folder / "plain", self.folder / "nvfp4"
        save_model(self.model, plain, tokenizer_from=self.source)
        self.add("plain", our_logits(self.model), plain)
        save_model(self.quantized, packed, tokenizer_from=self.source, weight_format="nvfp4")
        in_16_bits = in_bfloat16(self.quantized)
        self.add("nvfp4", our_logits(in_16_bits), packed)
        for kind, options in ADAPTERS.items():
            adapter, folder = random_adapter(self.model, **options), self.folder / kind
            save_adapter(adapter, folder, str(plain), tokenizer_from=self.source)
            self.add(kind, our_logits(self.model, adapter), plain, folder)
            self.add(f"nvfp4-{kind}", our_logits(in_16_bits, adapter), packed, folder)

    def merged(self):
        adapter, folder = random_adapter(self.model, train_norms=True), self.folder / "merged"
        save_merged(self.quantized, adapter, folder, tokenizer_from=self.source)
        # In float32 nothing is rounded: the very network with 4-bit weights and its adapter.
        self.add("merged", our_logits(self.quantized, adapter), folder)

    def exported(self):
        adapter = self.folder / "norms"
        self.command("export", self.source, "export-bf16", "--format", "bf16", "--adapter", adapter)
        in_16_bits = rounded(merge_adapter(self.model, load_adapter(adapter, self.model)))
        self.add("export-bf16", our_logits(in_16_bits), self.folder / "export-bf16")
        self.command("export", self.source, "export-peft", "--format", "peft", "--adapter", self.folder / "rslora")
        # No model is named: PEFT finds it by the name in the folder.
        self.add("export-peft", self.expected["rslora"], None, self.folder / "export-peft")

    def quantized_by_command(self):
        text = self.folder / "text.jsonl"
        rows = [{"text": f"What is {i} + {j}? <think>{i + j}</think>"} for i in range(4) for j in range(4)]
        text.write_text("\n".join(map(json.dumps, rows)) + "\n")
        # Rounded to nearest as loading does it: the same network.
        folder = self.command("quantize", self.source, "quantize-rtn")
        self.add("quantize-rtn", self.expected["nvfp4"], folder)
        packed = self.command("export", folder, "export-nvfp4", "--format", "nvfp4")
        self.add("export-nvfp4", self.expected["nvfp4"], packed, dtype="auto")
        words = ("--method", "awq", "--calibration", text, "--length", 8)
        folder = self.command("quantize", self.source, "quantize-awq", *words)
        self.add("quantize-awq", our_logits(unpacked(folder)), folder)

    def command(self, name, source, kind, *words):
        folder = self.folder / kind
        assert main([name, str(source), str(folder), *map(str, words)]) == 0
        return folder

    def trained(self):
        """What an update of this library leaves: norms and LoRA trained on 4-bit weights."""
        folder, packed = self.folder / "trained", self.folder / "nvfp4"
        adapter = trained_adapter(self.quantized)
        save_adapter(adapter, folder, str(packed), tokenizer_from=self.source)
        self.add("trained", our_logits(in_bfloat16(self.quantized), adapter), packed, folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory, theirs, other_programs):
    """What this library writes of each network, read by the others."""
    written = {family: Written(tmp_path_factory.mktemp(family), theirs / family) for family in FAMILIES}
    for network in written.values():
        network.models_and_adapters()
        network.merged()
        network.exported()
        network.quantized_by_command()
    written["qwen2"].trained()
    other_programs("read", [job for network in written.values() for job in network.jobs], theirs)
    return written


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_our_logits(ours, family, kind):
    expected, found = ours[family].expected, np.load(ours[family].folder / f"{kind}.npy")
    if KINDS[kind]:
        assert np.abs(expected[kind] - expected[KINDS[kind]]).max() > 0.05
    if kind == "export-nvfp4":  # read as transformers does by default, in bfloat16
        np.testing.assert_allclose(found, expected[kind], rtol=0, atol=0.03 * np.abs(expected[kind]).max())
    else:
        assert_logits(found, expected[kind])


def test_they_compute_our_logits_after_training(ours):
    expected = ours["qwen2"].expected
    assert_logits(np.load(ours["qwen2"].folder / "trained.npy"), expected["trained"])
    assert np.abs(expected["trained"] - expected["nvfp4"]).max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_find_tokenizer_and_generation_configuration(ours, theirs, family, kind):
    found = json.loads((ours[family].folder / f"{kind}.json").read_text())
    assert found == json.loads((theirs / f"{family}.json").read_text())
