"""Each family against transformers and PEFT: logits, greedy continuations, adapters and their gradients.

`oracles/transformers_logits.py` wrote the folders and the numbers.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_model, quantize
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS, norms_of
from qerl_jax.models.peft import load_adapter
from qerl_jax.models.rope import rope_frequencies
from qerl_jax.models.transformer import forward
from qerl_jax.models.transformer import logits as traced_logits
from qerl_jax.noise import perturb_norms
from qerl_jax.rollout import Prompts, SamplingSettings, generate

ORACLES = Path(__file__).parent / "oracles"
STORED = np.load(ORACLES / "transformers_logits.npz")
NAMES = ("qwen2_tied", "qwen2_untied", "qwen3_sharded", "qwen3_yarn", "llama3", "llama_biased")
SCALED = ("qwen3_yarn", "llama3", "llama_biased")
PARTIAL = {"llama_biased": {"q_proj", "v_proj", "down_proj"}}
WITH_NORMS = ("qwen2_untied", "qwen3_sharded", "llama3")

logits = jax.jit(traced_logits)


@functools.cache
def network(name):
    return load_model(ORACLES / name, dtype="float32")


@functools.cache
def adapter_of(name):
    return load_adapter(ORACLES / f"{name}_adapter", network(name), base_name=f"elsewhere/{name}")


def stored(name, key):
    return STORED[f"{name}/{key}"]


def error(found, expected):
    """Largest difference, relative to the largest value expected."""
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_are_those_of_transformers(name, side):
    mask = stored(name, f"{side}_mask")
    found = logits(network(name), stored(name, f"{side}_ids"), attention_mask=mask if side == "left" else None)
    real = mask.astype(bool)
    assert error(found[real], stored(name, f"{side}_logits")[real]) < 2e-5


@pytest.mark.parametrize("name", SCALED)
def test_the_scaling_of_positions_acts_at_the_tested_ones(name):
    model, right = network(name), stored(name, "right_mask").astype(bool)
    plain = model.replace(
        config=ModelConfig.from_hf(model.config.to_hf() | {"rope_scaling": None, "rope_parameters": None})
    )
    assert error(logits(plain, stored(name, "right_ids"))[right], stored(name, "right_logits")[right]) > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuations_equal_transformers_token_for_token(name):
    model = network(name)
    lengths = jnp.asarray(stored(name, "right_mask").sum(1), jnp.int32)
    prompts = Prompts(jnp.asarray(stored(name, "right_ids"), jnp.int32), lengths, jnp.arange(3))
    settings = SamplingSettings(16, (), 0, temperature=0.0)
    run = jax.jit(generate, static_argnames=("settings", "num_generations"))
    out = run(model, None, prompts, jax.random.key(0), settings=settings, num_generations=1)
    np.testing.assert_array_equal(out.tokens, stored(name, "greedy"))


@pytest.mark.parametrize("name", NAMES)
def test_logits_with_an_adapter_are_those_of_peft(name):
    adapter = adapter_of(name)
    assert (adapter.norms is not None) == (name in WITH_NORMS)
    assert all(set(layer) == PARTIAL.get(name, set(PROJECTIONS)) for layer in adapter.lora)
    real = stored(name, "right_mask").astype(bool)
    found = logits(network(name), stored(name, "right_ids"), adapter=adapter)
    assert error(found[real], stored(name, "adapter_logits")[real]) < 2e-5
    # The stored logits are far from the base's, so the comparison says something.
    assert error(stored(name, "right_logits")[real], stored(name, "adapter_logits")[real]) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_an_adapter_are_those_of_peft(name):
    """Of the mean of -log p(next token) over the pairs of real neighbours, by every tensor of the adapter."""
    ids, real = stored(name, "right_ids"), stored(name, "right_mask")[:, 1:].astype(bool)

    @jax.jit
    def loss_and_gradients(model, adapter):
        def loss(adapter):
            logps = jax.nn.log_softmax(traced_logits(model, ids, adapter=adapter)[:, :-1])
            return -jnp.take_along_axis(logps, ids[:, 1:, None], axis=-1)[..., 0][real].mean()

        return jax.value_and_grad(loss)(adapter)

    loss, gradients = loss_and_gradients(network(name), adapter_of(name))
    assert loss == pytest.approx(stored(name, "loss").item(), rel=2e-5)
    found = {}
    prefix = f"{name}/gradient/base_model.model.model.layers."
    for i, layer in enumerate(gradients.lora):
        for module, pair in layer.items():
            part = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            found |= {f"{prefix}{i}.{part}.{module}.lora_{half}.weight": getattr(pair, half.lower()) for half in "AB"}
        if gradients.norms is not None:
            found[f"{prefix}{i}.input_layernorm.weight"] = gradients.norms.input[i]
            found[f"{prefix}{i}.post_attention_layernorm.weight"] = gradients.norms.post_attention[i]
    assert found.keys() == {key for key in STORED.files if key.startswith(f"{name}/gradient/")}
    for key, gradient in found.items():
        assert error(gradient, STORED[key]) < 2e-5, key


@pytest.mark.parametrize("rope", ["qwen2.5", "qwen2.5-yarn", "llama-3.1", "llama-3.2-1b", "linear", "yarn-all"])
def test_frequencies_are_those_of_transformers(rope):
    """To one bit in the last place, which is what two float32 power functions differ by."""
    config = ModelConfig.from_hf(json.loads(STORED[f"rope/{rope}/config"].item()))
    frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(frequencies, STORED[f"rope/{rope}/frequencies"], rtol=1e-6)
    assert frequencies.dtype == np.float32 and factor == STORED[f"rope/{rope}/factor"]


@pytest.mark.parametrize("name", NAMES)
def test_noise_scales_what_reads_the_noisy_norms_and_nothing_else(name):
    """w + Z on a norm is (1 + Z / w) on the input channels of what follows it; norms of queries and keys stay."""
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), network(name))
        norms = norms_of(model, None)
        noisy = perturb_norms(norms, 0.05, jax.random.key(3), final_norm=True)
        layers = tuple(
            layer.replace(
                **{n: getattr(layer, n) * (noisy.input[i] / norms.input[i]) for n in PROJECTIONS[:3]},
                **{
                    n: getattr(layer, n) * (noisy.post_attention[i] / norms.post_attention[i]) for n in PROJECTIONS[4:6]
                },
            )
            for i, layer in enumerate(model.base.layers)
        )
        scaled = model.replace(base=model.base.replace(layers=layers, final_norm=noisy.final))
        ids = jnp.asarray(stored(name, "right_ids"))
        with_noise, with_scaling, clean = (
            jax.jit(forward)(network, None, ids, norms=scales)[0]
            for network, scales in ((model, noisy), (scaled, norms_of(scaled, None)), (model, norms))
        )
    assert error(with_noise, np.asarray(with_scaling)) < 1e-11
    assert error(with_noise, np.asarray(clean)) > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_network_of_the_family_has_the_same_parts(name):
    model = network(name)
    fresh = jax.eval_shape(functools.partial(init_model, config=model.config), jax.random.key(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(model)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, model)
    norms = fresh.base.layers[0].q_norm, fresh.base.layers[0].k_norm
    assert [norm is not None for norm in norms] == [name.startswith("qwen3")] * 2
    packed = jax.eval_shape(quantize, fresh)
    found = jax.eval_shape(traced_logits, packed, jnp.zeros((1, 4), jnp.int32))
    assert (found.shape, found.dtype) == ((1, 4, 61), jnp.float32)
