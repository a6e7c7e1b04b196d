"""The decode loop with the attention kernel's reference in it: the same completions; and the kernel in the program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from tiny import CONFIG, tiny_model

from pallas_kernels import compiling_for, decode_attention_reference, in_unit_order
from qerl_jax.models.init import init_model
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import norms_of
from qerl_jax.rollout import Prompts, SamplingSettings, attention, generate
from qerl_jax.rollout.attention import KVCache, empty_kv
from qerl_jax.rollout.decode import decode_step

PROMPTS = Prompts(
    tokens=jnp.array([[5, 9, 11, 0, 0], [7, 0, 0, 0, 0], [20, 21, 22, 23, 24]], jnp.int32),
    lengths=jnp.array([3, 1, 5], jnp.int32),
    places=jnp.array([40, 41, 42], jnp.int32),
)


@pytest.mark.parametrize("family, generations, kv_cache_dtype", [
    ("qwen2", 4, "fp8_values"), ("qwen3", 3, "auto"),
])  # fmt: skip
def test_completions_are_the_same_with_the_kernels_reference(family, generations, kv_cache_dtype, monkeypatch, request):
    model = tiny_model()
    if family == "qwen3":
        model = load_model(request.path.parent / "oracles" / "qwen3_sharded", dtype="float32")
        assert model.base.layers[0].q_norm is not None
    settings = SamplingSettings(8, (3, 4, 10, 12, 50), 0, kv_cache_dtype=kv_cache_dtype)

    def run():
        return jax.jit(lambda key: generate(model, None, PROMPTS, key, settings, generations))(jax.random.key(0))

    plain = run()
    groups = set()

    def by_reference(*arguments, group, in_units, a):
        groups.add(group)
        assert not in_units and a is None
        return decode_attention_reference(*arguments)

    monkeypatch.setattr(attention, "takes_decode_attention", lambda *_: True)
    monkeypatch.setattr(attention, "decode_attention", by_reference)
    with_kernel = run()
    assert groups == {generations}
    assert len(set(np.asarray(plain.lengths).tolist())) > 1, "the example should hold slots that end early"
    np.testing.assert_array_equal(with_kernel.tokens, plain.tokens)
    np.testing.assert_allclose(with_kernel.logps, plain.logps, atol=1e-5)


def test_results_in_unit_order():
    """The same numbers, in the order of `in_unit_order`."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    model = init_model(jax.random.key(0), config, jnp.float32)
    cache = KVCache(empty_kv(model, 2, 16), empty_kv(model, 4, 8), jnp.array([3, 16]))
    of_S, lengths_S, steps_S = jnp.array([0, 0, 1, 1]), jnp.array([3, 3, 16, 16]), jnp.array([0, 1, 0, -1])
    sizes = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    qkv = [jax.random.normal(jax.random.key(i), (4, 1, n * 64)) for i, n in enumerate(sizes)]
    plain, ordered = (
        attention.token_attention(config, cache, of_S, lengths_S, steps_S, 2, in_units)(0)(model.base.layers[0], *qkv)[
            0
        ]
        for in_units in (False, True)
    )
    assert np.abs(np.asarray(plain)).max() > 0
    np.testing.assert_array_equal(ordered[:, 0], in_unit_order(plain[:, 0]))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_values"])
def test_the_kernel_is_in_the_decode_step(kv_cache_dtype):
    config = dataclasses.replace(CONFIG, head_dim=64)
    model = init_model(jax.random.key(0), config, jnp.bfloat16)

    def step(tokens_S, cache, of_S, lengths_S, steps_S):
        return decode_step(model, None, tokens_S, cache, of_S, lengths_S, steps_S, norms_of(model, None), 2)

    numbers = jnp.zeros(4, jnp.int32)
    with compiling_for(90):
        prompts, completions = empty_kv(model, 2, 16, kv_cache_dtype), empty_kv(model, 4, 8, kv_cache_dtype)
        cache = KVCache(prompts, completions, jnp.array([3, 16]))
        lowered = export.export(jax.jit(step), platforms=["cuda"])(numbers, cache, numbers, numbers, numbers)
    assert lowered.mlir_module().count("mosaic_gpu") >= config.num_hidden_layers
