"""What a plan counts for a prefill, against what XLA says that the compiled programs make beside their results; and
that decoding makes no copy of the cache."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.shapes import MODELS, random_model
from pallas_kernels import compiling_for, variants
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.init import init_adapter, init_model
from qerl_jax.models.params import norms_of
from qerl_jax.rollout import Prompts, SamplingSettings, prepared
from qerl_jax.rollout.memory import nbytes, plan_slots
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.queued import Queue, empty_slots

CONFIG = ModelConfig("qwen2", 61, 64, 512, 2, 4, 2, 16, 1e-6, 10000.0, True, True, 10**5)
KEY = jax.eval_shape(jax.random.key, 0)


def shapes(adapted=True, **fields):
    """A model and an adapter without arrays."""
    model = jax.eval_shape(lambda: init_model(jax.random.key(0), dataclasses.replace(CONFIG, **fields), jnp.float32))
    return model, jax.eval_shape(lambda: init_adapter(jax.random.key(0), model, 8, 16.0)) if adapted else None


def settings(kv_cache_dtype):
    return SamplingSettings(8, (3,), 0, kv_cache_dtype=kv_cache_dtype)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def lowered_admit(model, adapter, prompts, P, kv_cache_dtype="auto"):
    sizes = {"rows": prompts, "max_prompt_length": P, "slots": 4, "used": 4}
    slots = jax.eval_shape(lambda key: empty_slots(model, settings(kv_cache_dtype), key, **sizes), KEY)
    operands = slots, model, adapter, jax.eval_shape(norms_of, model, adapter)
    return programs().admit.lower(*operands, ints(prompts, P), ints(prompts), ints(prompts))


def admitting(*arguments):
    """Bytes that `admit` of so many prompts makes."""
    return lowered_admit(*arguments).compile().memory_analysis().temp_size_in_bytes


def decoding(model, P, C):
    """Bytes that `decode_queue` of 4 slots makes, and those of one layer's completions."""
    long = SamplingSettings(C, (3,), 0)
    sizes = {"rows": 4, "max_prompt_length": P, "slots": 4, "used": 4}
    slots = jax.eval_shape(lambda key: empty_slots(model, long, key, **sizes), KEY)
    queue, norms = Queue(*[ints(16)] * 5, ints()), jax.eval_shape(norms_of, model, None)
    program = programs().decode_queue.lower(slots, queue, KEY, model, None, norms, 8, 1, long, log_steps=8).compile()
    return program.memory_analysis().temp_size_in_bytes, sum(array.size * 4 for array in slots.cache.completion[0])


def beginning(model, adapter, prompts, P):
    """Bytes that `begun` with so many prompts makes beside what it returns."""
    each, norms = ints(prompts), jax.eval_shape(norms_of, model, adapter)
    of_prompts = Prompts(ints(prompts, P), each, each)
    operands = model, adapter, of_prompts, KEY, settings("auto"), 1, norms, each
    return programs().begun.lower(*operands).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("prompts, P, kv_cache_dtype, adapted, fields", [
    (16, 32, "auto", True, {}),  # all in the network together
    (2048, 32, "auto", True, {}),  # packs, and four times their slots in attention
    (2048, 32, "auto", False, {}),
    (2048, 32, "auto", True, {"num_hidden_layers": 6}),
    (300, 500, "auto", True, {}),  # scores
    (9, 2000, "auto", False, {}),
    (32, 500, "fp8_values", True, {}),
    (128, 512, "auto", True, {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 6}),
    (3, 2049, "auto", True, {}),  # a prompt alone, and so in chunks
    (3, 20000, "auto", True, {}),
    (3, 20000, "fp8_values", True, {"num_hidden_layers": 6}),
])  # fmt: skip
def test_a_plan_counts_what_a_prefill_makes(prompts, P, kv_cache_dtype, adapted, fields):
    model, adapter = shapes(adapted, **fields)
    made = admitting(model, adapter, prompts, P, kv_cache_dtype)
    sizes = {"samples": prompts, "prompts": prompts, "cache_bytes": 10**12}
    plan = plan_slots(model, settings(kv_cache_dtype), P, **sizes, adapter=adapter)
    assert made <= plan.made <= 1.15 * made


def test_a_plan_has_room_for_fewer_prompts_in_a_larger_pack():
    """7 of 300 tokens go together, 8 by fours."""
    model, adapter = shapes(intermediate_size=4096)
    made = admitting(model, adapter, 7, 300)
    plan = plan_slots(model, settings("auto"), 300, samples=8, prompts=8, cache_bytes=10**12, adapter=adapter)
    assert made <= plan.made <= 1.15 * made


@pytest.mark.parametrize("name, P, prompts, compiled, most", [
    ("qwen2.5-7b", 1024, 64, 186.8, 1.3),
    ("qwen2.5-7b", 1500, 9, 242.9, 1.2),
    ("qwen2.5-7b", 8192, 2, 319.9, 1.15),
    ("qwen2.5-7b", 16384, 2, 571.5, 1.15),
    ("qwen2.5-7b", 65536, 2, 2248.2, 1.15),
    ("qwen3-4b", 34000, 2, 1212.2, 1.15),
])  # fmt: skip
def test_a_plan_counts_what_a_prefill_takes_on_an_h200(name, P, prompts, compiled, most, monkeypatch):
    """MB that XLA counts in `admit`, compiled for one with two layers and adapters of rank 32."""
    monkeypatch.setattr(variants, "missing", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = dataclasses.replace(MODELS[name], num_hidden_layers=2)
    with compiling_for(90):
        model = jax.eval_shape(lambda: random_model(config, jnp.dtype(jnp.bfloat16), kernels=True))
        adapter = jax.eval_shape(lambda: init_adapter(jax.random.key(0), model, 32, 64.0))
        sizes = {"samples": prompts, "prompts": prompts, "cache_bytes": 10**12}
        plan = plan_slots(model, settings("auto"), P, **sizes, adapter=adapter)
    made = plan.made - nbytes(jax.eval_shape(prepared.made, model, adapter))
    assert compiled <= made / 1e6 <= most * compiled


def test_packed_weights_without_a_kernel_are_counted_decoded(monkeypatch):
    """The largest of them, in the compute dtype; and gate and up beside what SwiGLU makes of them, with adapters."""
    monkeypatch.setattr(variants, "missing", lambda: None)
    config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=512, head_dim=64)
    plain = jax.eval_shape(lambda: init_model(jax.random.key(0), config, jnp.bfloat16))
    packed = jax.eval_shape(lambda: random_model(config, jnp.dtype(jnp.bfloat16), kernels=True))
    adapter = jax.eval_shape(lambda: init_adapter(jax.random.key(0), plain, 8, 16.0))

    def made(model, capability):
        with compiling_for(capability):
            sizes = {"samples": 4, "prompts": 4, "cache_bytes": 10**12}
            plan = plan_slots(model, settings("auto"), 64, **sizes, adapter=adapter)
        return plan.made - nbytes(jax.eval_shape(prepared.made, model, adapter))

    assert made(packed, 80) - made(plain, 80) == 2 * 512 * 256
    assert made(packed, 90) < made(plain, 90) == made(plain, 80)  # with a kernel neither


@pytest.mark.parametrize("program", [admitting, beginning])
def test_prompts_that_wait_for_the_network_cost_their_tokens_alone(program):
    model, adapter = shapes()
    few, many = (program(model, adapter, prompts, 32) for prompts in (1024, 4096))
    assert many - few < 32 * 3072 * 32  # where the keys and values of a token are 512 bytes


def test_of_a_long_prompt_few_tokens_have_scores_at_once():
    assert admitting(*shapes(), 1, 20000) < 8192 * 20000 * CONFIG.num_attention_heads * 4 / 3


def test_what_prompts_leave_does_not_order_the_pool():
    """As on a GPU it did, by a copy of it, where a prompt went in chunks."""
    model, adapter = shapes()
    text = lowered_admit(model, adapter, 3, 20000).as_text()
    assert text.count("@LayoutConstraint") == 2 * model.config.num_hidden_layers


def test_decoding_makes_no_copy_of_the_cache():
    """As XLA does of heads that products find behind positions: here of a layer, on a GPU of all layers at once."""
    model, _ = shapes(adapted=False)
    made, layer = decoding(model, 16, 4096)
    assert made < layer / 2
