"""How many slots, and rows of the pool, a plan gives a rollout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from tiny import CONFIG, Device, tiny_model
from tiny_engine import ADAPTER, MODEL, SETTINGS, P

from pallas_kernels import compiling_for, variants
from qerl_jax.errors import UserError
from qerl_jax.models.init import init_adapter, init_model
from qerl_jax.rollout import Engine, memory
from qerl_jax.rollout.memory import nbytes, plan_slots


def test_memory_is_planned_by_hand():
    # Per position 2 (keys, values) x 2 layers x 2 heads x 8 x 4 bytes = 256; per slot 12 tokens x (256 + 12), logits
    # 16 x 61, and a copy of one layer's prompt 9 x 128; per row 9 x 256 + 32 x 4.
    slot, row = 12 * 268 + 976 + 1152, 9 * 256 + 128
    plan = functools.partial(plan_slots, MODEL, SETTINGS, P)
    found = plan(samples=20, prompts=5, cache_bytes=10**9)
    assert (found.slots, found.rows, found.slot_bytes, found.row_bytes) == (20, 5, slot, row)
    # Beside them two layers' weights (q and o 32 x 32, k and v 16 x 32, three of 64 x 32) in 4 bytes; and of 5 prompts
    # of 9 tokens what an MLP holds, 4 x 32 and 3 x 64 numbers.
    assert found.made == 2 * 9216 * 4 + 45 * (4 * 32 + 3 * 64) * 4
    assert found.nbytes == 20 * slot + 5 * row + found.made
    plain = plan_slots(tiny_model(weight_format="bf16"), SETTINGS, P, samples=20, prompts=5, cache_bytes=10**9)
    assert found.made - plain.made == 2 * 9216 * 4  # plain weights are taken as they are
    # As many rows as slots, and half as many ahead, if there are so many prompts.
    assert [plan(samples=20, prompts=5, max_slots=most).rows for most in (1, 2, 3, 4)] == [1, 3, 4, 5]
    assert plan(samples=20, prompts=5, cache_bytes=2 * slot + 3 * row).slots == 2
    alone = plan(samples=20, prompts=5, cache_bytes=2 * slot + 3 * row - 1)
    assert (alone.slots, alone.allocated, alone.rows) == (1, 2, 1)
    three = plan(samples=20, prompts=5, max_slots=3)
    assert (three.slots, three.allocated) == (3, 4)
    assert plan(samples=20, prompts=1, cache_bytes=8 * slot + row).slots == 8
    assert plan(samples=20, prompts=1, cache_bytes=8 * slot + row - 1).slots == 4
    # Of long completions half a slot's keys and values of one layer, 1000 x 128 / 2, are more than logits and prompt.
    longer = dataclasses.replace(SETTINGS, max_completion_length=1000)
    assert plan_slots(MODEL, longer, P, samples=1, prompts=1).slot_bytes == 1000 * 268 + 64000
    # Values in 8 bits: 2 layers x 2 heads x 8 x (4 + 1) = 160 per position, and a copy of one layer's whole context.
    small = dataclasses.replace(SETTINGS, kv_cache_dtype="fp8_values")
    found = plan_slots(MODEL, small, P, samples=20, prompts=5)
    assert (found.slot_bytes, found.row_bytes) == (12 * 172 + 976 + 21 * 128, 9 * 160 + 128)
    with pytest.raises(UserError, match=r"not one .*: 12 tokens .* need 5\.3 kB and .* 2\.4 kB; 13\.1 kB are there"):
        plan(samples=20, prompts=5, cache_bytes=2 * slot + row - 1)


def test_a_plan_has_as_many_slots_as_fit():
    """Also where they are filled up to a multiple of four, so that one more may cost nothing, or four."""
    plan = functools.partial(plan_slots, MODEL, SETTINGS, P, samples=23, prompts=23)
    needed = [found.nbytes - found.made for found in (plan(max_slots=most) for most in range(1, 24))]
    for budget in [least + more for least in needed for more in (0, 1000, 9000)]:
        assert plan(cache_bytes=budget).slots == sum(least <= budget for least in needed)


def test_a_plan_of_the_same_shapes_traces_nothing(monkeypatch):
    """A rollout begins with one, while the GPU waits."""
    plan = functools.partial(plan_slots, MODEL, SETTINGS, P, samples=3, prompts=2, adapter=ADAPTER)
    first = plan()
    monkeypatch.setattr(memory, "made", None)
    assert plan(adapter=jax.tree.map(jnp.zeros_like, ADAPTER)) == first
    with pytest.raises(TypeError):  # another rank
        plan(adapter=init_adapter(jax.random.key(0), MODEL, 3, 6.0))


def test_on_a_device_weights_and_training_state_are_taken_off_first(monkeypatch):
    def budget(model, adapter=None, **options):
        return Engine(model, SETTINGS, max_prompt_length=P, **options).plan(20, 5, adapter).budget

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(10**9)])
    weights = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32)  # two layers: q, k and v, o, and the three of the MLP
    packed, plain = tiny_model(weight_format="nvfp4"), tiny_model(weight_format="bf16")
    # Packed weights are decoded before the loop, so both copies are there; plain ones stay as they are.
    extra = sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) + 4 * weights
    assert budget(plain) - budget(packed) == extra - sum(leaf.nbytes for leaf in jax.tree.leaves(plain))
    assert 0.88 * 10**9 < budget(plain) < 0.9 * 10**9 - 4 * weights
    # An adapter, and two numbers of an optimizer for each of its own; and what it adds to gate and up, of 45 tokens.
    adapter = 3 * nbytes(ADAPTER) + 45 * 2 * 64 * 4
    assert budget(plain) - budget(plain, ADAPTER) == adapter
    assert budget(plain, ADAPTER, in_training=False) - budget(plain, ADAPTER) == 2 * nbytes(ADAPTER)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(10**5)])
    with pytest.raises(UserError, match=r"not one completion fits in memory: .*; 0 bytes are there"):
        budget(packed)


def test_the_adapter_in_16_bits_is_counted():
    """A and B, of 4 and of 8 ranks; nothing else of a plan goes by their number."""
    model = tiny_model(dtype=jnp.bfloat16)
    adapters = [init_adapter(jax.random.key(0), model, rank, 8.0) for rank in (4, 8)]
    four, eight = (plan_slots(model, SETTINGS, P, samples=20, prompts=5, adapter=adapter).made for adapter in adapters)
    assert eight - four == sum(leaf.nbytes for leaf in jax.tree.leaves(adapters[0])) / 2


def test_a_kernel_copies_no_prompt(monkeypatch):
    """Of which others copy 4096 x 2 (keys, values) x 2 heads x 64 numbers of a layer, a slot each."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    model = jax.eval_shape(lambda: init_model(jax.random.key(0), config, jnp.bfloat16))
    short = dataclasses.replace(SETTINGS, max_completion_length=1)

    def slot_bytes(capability):
        with compiling_for(capability):
            return plan_slots(model, short, 4096, samples=20, prompts=5).slot_bytes

    monkeypatch.setattr(variants, "missing", lambda: None)
    assert slot_bytes(75) - slot_bytes(90) == 4096 * 2 * 2 * 64 * 2
    assert slot_bytes(80) == slot_bytes(90)
