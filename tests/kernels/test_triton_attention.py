"""The portable attention kernel: its numbers in Triton's interpreter, and compiled for GPUs without one."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_programs import compiled_for, run_interpreted

from pallas_kernels import OwnKV, PromptKV, decode_attention_reference

pytest.importorskip("triton")
triton_attention = importlib.import_module("pallas_kernels.triton_attention")

# Samples with and without keys of their own, two that have ended, prompts of one position, of a tile and of several;
# in as many parts as there are tiles, fewer, and one.
INTERPRETED = """
import sys, numpy as np, jax.numpy as jnp, ml_dtypes
from triton_programs import Array
from pallas_kernels import stored
from pallas_kernels.triton_attention import attention_constants, decode_attention_part, joined

rng = np.random.default_rng(int(sys.argv[1]))
NAMES = {"float8_e4m3fn": "float8e4nv"}
for dtype, kept, (H, K, E), parts in (
    ("bfloat16", ("bfloat16", "bfloat16"), (14, 2, 64), 4),
    ("float16", ("float16", "float16"), (8, 8, 64), 1),
    ("bfloat16", ("bfloat16", "float8_e4m3fn"), (4, 1, 128), 8),
    ("bfloat16", ("float8_e4m3fn", "float8_e4m3fn"), (6, 2, 64), 2),
):
    B, N, P, C = 6, 3, 200, 150
    def normal(of, *shape):
        return np.array(stored(jnp.asarray(rng.standard_normal(shape), dtype), of))
    q, k, v = normal(dtype, B, H, E), normal(kept[0], B, K, E), normal(kept[1], B, K, E)
    prompts, owns = ([normal(of, *sizes, K, E) for of in kept] for sizes in ((N, P), (B, C)))
    of, lengths, steps = [2, 2, 0, 1, 1, 0], [200, 1, 64, 63, 129, 65], [0, C - 1, -1, 64, 1, -1]
    for own in owns:
        for b, step in enumerate(steps):
            own[b, max(0, step) :] = np.nan  # what nobody may read
    before = [own.copy() for own in owns]
    left = [np.full((parts, B, H, *last), np.nan, np.float32) for last in ((E,), (), ())]
    new, shared, own = ([Array(x, NAMES.get(of, of)) for x, of in zip(two, kept)] for two in ((k, v), prompts, owns))
    decode_attention_part[(B * K, parts)](
        Array(q, dtype), *new, *shared, *(Array(np.array(x, np.int32), "int32") for x in (of, lengths, steps)), *own,
        *(Array(x, "float32") for x in left),
        **attention_constants(q, prompts[0], owns[0], parts, True),
    )
    out = np.asarray(joined(*map(jnp.asarray, left), jnp.asarray(steps), jnp.float32))
    for b, (row, length, step) in enumerate(zip(of, lengths, steps)):
        for cache, old, one in zip(owns, before, (k, v)):
            if step >= 0:
                old[b, step] = one[b]
            np.testing.assert_array_equal(cache[b].astype(np.float32), old[b].astype(np.float32))
        if step < 0:
            assert not out[b].any()
            continue
        keys, values = (
            np.concatenate([shared[row, :length], own[b, : step + 1]]).astype(np.float64)
            for shared, own in zip(prompts, owns)
        )
        scores = np.einsum("kqe,pke->kqp", q[b].reshape(K, -1, E).astype(np.float64), keys) / E**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[b], np.einsum("kqp,pke->kqe", weights, values).ravel(), atol=1e-5)
    print("right", dtype, *kept, parts)
"""


def test_numbers_in_the_interpreter():
    assert run_interpreted(INTERPRETED) == [
        "right bfloat16 bfloat16 bfloat16 4",
        "right float16 float16 float16 1",
        "right bfloat16 bfloat16 float8_e4m3fn 8",
        "right bfloat16 float8_e4m3fn float8_e4m3fn 2",
    ]


def by_jax(_, operands, left, grid, constants, **__):
    """In the place of `triton_call.call`: the reference's result as the first part's, the others empty."""
    q, k, v, prompt_k, prompt_v, of, lengths, steps, own_k, own_v = operands
    B, _, E = q.shape
    assert grid == (B * constants["K"], constants["PARTS"])
    turn = jnp.ones((B, E // 2)), jnp.zeros((B, E // 2))
    flat, own = [x.reshape(B, -1) for x in (q, k, v)], OwnKV(own_k[...], own_v[...], steps)
    out, own_k[...], own_v[...] = decode_attention_reference(
        *flat, *turn, PromptKV(prompt_k, prompt_v, of, lengths), own
    )
    acc, most, total = (jnp.zeros(one.shape).at[0].set(1) for one in left)
    return acc.at[0].set(out.reshape(q.shape)), 1e30 * (most - 1), total


def test_a_batch_of_calls(monkeypatch):
    """Each as alone, with prompts of its own or of all."""
    monkeypatch.setattr(triton_attention, "call", by_jax)
    B, H, K, E, N, P, C = 4, 6, 2, 16, 2, 128, 8
    ends = (0, N), (1, P + 1), (-1, C)

    def case(key):
        keys = jax.random.split(key, 10)
        sizes = (B, H, E), (B, K, E), (B, K, E), (N, P, K, E), (N, P, K, E), (B, C, K, E), (B, C, K, E)
        q, k, v, *prompts, own_k, own_v = map(jax.random.normal, keys[:7], sizes)
        of, lengths, steps = (jax.random.randint(key, (B,), *two) for key, two in zip(keys[7:], ends, strict=True))
        return q, k, v, *prompts, of, lengths, own_k, own_v, steps

    cases = [case(key) for key in jax.random.split(jax.random.key(0), 3)]
    for shared in ((), (3, 4)):
        each = [[cases[0][i] if i in shared else x for i, x in enumerate(one)] for one in cases]
        axes = [None if i in shared else 0 for i in range(10)]
        batch = [
            xs[0] if axis is None else jnp.stack(xs) for axis, xs in zip(axes, zip(*each, strict=True), strict=True)
        ]
        together = jax.jit(jax.vmap(triton_attention.attend, axes))(*batch)
        alone = [triton_attention.attend(*one) for one in each]
        for got, want in zip(together, zip(*alone, strict=True), strict=True):
            np.testing.assert_allclose(got, jnp.stack(want), atol=1e-6)
        assert np.abs(alone[0][0]).max() > 0.1


POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float8_e4m3fn": "*fp8e4nv"}
COMPILED = [("bfloat16", "bfloat16", (80, 86, 89, 90, 100, 120)), ("float16", "float16", (80, 100))]
COMPILED += [("bfloat16", "float8_e4m3fn", (89, 120))]


@pytest.mark.parametrize("dtype, values, architecture", [(*case, gpu) for *case, gpus in COMPILED for gpu in gpus])
def test_compiles_without_a_gpu(dtype, values, architecture):
    kernel = importlib.import_module("pallas_kernels.triton_attention")
    q, prompt_k, own_k = (
        jax.ShapeDtypeStruct(size, dtype) for size in ((8, 28, 128), (2, 256, 4, 128), (8, 512, 4, 128))
    )
    of, of_v = POINTERS[dtype], POINTERS[values]
    arguments = {"q_ptr": of, "k_ptr": of, "v_ptr": of_v, "prompt_k_ptr": of, "prompt_v_ptr": of_v}
    arguments |= dict.fromkeys(("of_ptr", "lengths_ptr", "steps_ptr"), "*i32") | {"own_k_ptr": of, "own_v_ptr": of_v}
    arguments |= dict.fromkeys(("acc_ptr", "most_ptr", "total_ptr"), "*fp32")
    constants = kernel.attention_constants(q, prompt_k, own_k, 4)
    options = {"num_warps": kernel.WARPS, "num_stages": kernel.STAGES}
    compiled = compiled_for(architecture, kernel.decode_attention_part, arguments, constants, **options)
    assert "mma.sync" in compiled.asm["ptx"] and "cp.async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 48 * 1024


def test_parts():
    parts_for = triton_attention.parts_for
    assert [parts_for(units, 768, 132) for units in (4, 32, 64, 128, 256, 512, 1024)] == [8, 8, 8, 4, 2, 1, 1]
    assert [parts_for(4, positions, 132) for positions in (1, 64, 128, 300)] == [1, 1, 2, 4]
