"""decode_attention: its reference against a loop in NumPy, errors; that the kernel lowers for CUDA without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels import (
    HeadNorms,
    OwnKV,
    PromptKV,
    attention_kernel,
    compiling_for,
    decode_attention,
    decode_attention_reference,
    stored,
    variants,
)
from pallas_kernels.attention import choose_attention
from pallas_kernels.attention_plan import AttentionConfig, AttentionPlan

B, H, K, E, N, P, C = 4, 6, 2, 64, 2, 9, 5


def _turned(x, angles):
    """Rotation of one head [E] by angles [E / 2], as complex numbers."""
    z = (x[: E // 2] + 1j * x[E // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


@pytest.mark.parametrize("kept", [
    (jnp.float32, jnp.float32), (jnp.float32, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
])  # fmt: skip
def test_the_reference_against_a_loop(kept):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n * E)).astype(np.float32) for n in (H, K, K))
    angles = rng.uniform(0, 9, (B, E // 2)).astype(np.float32)
    prompt_k, prompt_v = (rng.normal(size=(N, P, K, E)).astype(dtype) for dtype in kept)
    own_k, own_v = (rng.normal(size=(B, C, K, E)).astype(dtype) for dtype in kept)
    of, prompt_lengths, own_lengths = np.int32([1, 1, 0, 0]), np.int32([3, 3, 9, 9]), np.int32([0, 4, -1, 2])
    scales = rng.uniform(0.5, 2, (2, E)).astype(np.float32)
    out, new_k, new_v = decode_attention_reference(
        *(jnp.asarray(x) for x in (q, k, v, np.cos(angles), np.sin(angles))),
        PromptKV(*map(jnp.asarray, (prompt_k, prompt_v, of, prompt_lengths))),
        OwnKV(*map(jnp.asarray, (own_k, own_v, own_lengths))),
        HeadNorms(*map(jnp.asarray, scales), 1e-6),
    )

    def normed(x, scale):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * scale

    assert (new_k.dtype, new_v.dtype) == kept
    prompt_k, prompt_v, expected_k, expected_v = (x.astype(np.float32) for x in (prompt_k, prompt_v, own_k, own_v))
    for b in range(B):
        n = own_lengths[b]
        if n < 0:
            np.testing.assert_array_equal(np.asarray(out)[b], 0)
            continue
        for h in range(K):
            expected_k[b, n, h] = _turned(normed(k[b, h * E : (h + 1) * E], scales[1]), angles[b]).astype(kept[0])
            expected_v[b, n, h] = v[b, h * E : (h + 1) * E].astype(kept[1])
        for head in range(H):
            h = head // (H // K)
            keys = np.concatenate([prompt_k[of[b], : prompt_lengths[b], h], expected_k[b, : n + 1, h]])
            values = np.concatenate([prompt_v[of[b], : prompt_lengths[b], h], expected_v[b, : n + 1, h]])
            scores = keys @ _turned(normed(q[b, head * E : (head + 1) * E], scales[0]), angles[b]) / np.sqrt(E)
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            np.testing.assert_allclose(np.asarray(out)[b, head * E : (head + 1) * E], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(new_k, np.float32), expected_k, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(new_v, np.float32), expected_v)


def test_what_is_stored_is_what_fits():
    """E4M3's numbers round to the nearest and end at 448, where a cast makes NaN; what is NaN stays NaN."""
    given = jnp.array([500.0, -jnp.inf, 464.0, 1.0625, 1.1875, 2.0**-10, -0.3, jnp.nan])
    found = np.asarray(stored(given, jnp.float8_e4m3fn), np.float32)
    np.testing.assert_array_equal(found, [448, -448, 448, 1.0, 1.25, 0.0, -0.3125, np.nan])
    np.testing.assert_array_equal(stored(given[:-1], jnp.bfloat16), given[:-1].astype(jnp.bfloat16))


def test_the_kernel_refuses_other_caches():
    rows, bf16, fp8 = jnp.zeros((B, E), jnp.bfloat16), jnp.bfloat16, jnp.float8_e4m3fn
    numbers = jnp.zeros(B, jnp.int32)

    def caches(*dtypes):
        prompt_k, prompt_v, own_k, own_v = (jnp.zeros((B, 4, 1, E), dtype) for dtype in dtypes)
        return PromptKV(prompt_k, prompt_v, numbers, numbers), OwnKV(own_k, own_v, numbers)

    for dtypes in ((bf16, bf16, bf16, fp8), (bf16, bf16, jnp.float32, bf16), (jnp.float16,) * 4):
        with pytest.raises(ValueError, match=r"values are .* bfloat16 queries take bfloat16 and float8_e4m3fn"):
            decode_attention(rows, rows, rows, rows, rows, *caches(*dtypes), config=AttentionConfig())
    rows = rows.astype(jnp.float32)
    with pytest.raises(ValueError, match=r"values are float32, .*; the kernel takes bfloat16 or float16, of all three"):
        decode_attention(rows, rows, rows, rows, rows, *caches(*[jnp.float32] * 4), config=AttentionConfig())


@pytest.mark.parametrize("capability, sizes, kept, message", [
    (80, (24, 1, 64), "bfloat16", "24 query heads on 1 key-value heads: the kernel takes up to 8 on each"),
    (120, (7, 2, 64), "bfloat16", "7 query heads on 2 key-value heads"),
    (120, (4, 2, 96), "bfloat16", "head size 96"),
    (86, (4, 2, 64), "float8_e4m3fn", "values are float8_e4m3fn, .* bfloat16 queries take bfloat16$"),
])  # fmt: skip
def test_the_triton_kernel_refuses_what_it_does_not_take(capability, sizes, kept, message, monkeypatch):
    """Of 24 heads it would leave eight as they were."""
    monkeypatch.setattr(variants, "missing", lambda: None)
    heads, kv_heads, size = sizes
    q, new = (jnp.zeros((B, count * size), jnp.bfloat16) for count in (heads, kv_heads))
    cache, turn, numbers = jnp.zeros((B, 4, kv_heads, size), kept), jnp.zeros((B, size // 2)), jnp.zeros(B, jnp.int32)
    prompt, own = PromptKV(cache, cache, numbers, numbers), OwnKV(cache, cache, numbers)
    with compiling_for(capability), pytest.raises(ValueError, match=message):
        decode_attention(q, new, new, turn, turn, prompt, own)


@pytest.mark.parametrize("samples, kv_heads, group, prompt, completion, bytes_of, expected", [
    (1, 4, 1, 256, 512, (2, 2), AttentionConfig(1, 8)),
    (8, 4, 8, 256, 512, (2, 2), AttentionConfig(1, 1)),
    (8, 4, 8, 1024, 512, (2, 2), AttentionConfig(1, 2)),
    (8, 4, 8, 96, 8000, (2, 1), AttentionConfig(1, 2, 8, 4)),
    (4, 4, 4, 256, 512, (2, 2), AttentionConfig(1, 2)),
    (32, 4, 8, 4096, 512, (1, 1), AttentionConfig(1, 1, 8, 6)),
    (64, 4, 8, 256, 512, (2, 2), AttentionConfig(1, 1, 4)),
    (64, 4, 8, 1024, 512, (2, 2), AttentionConfig(2, 1, 8)),
    (64, 4, 1, 1024, 512, (2, 1), AttentionConfig(1, 1, 4, 4)),
    (128, 4, 8, 256, 512, (2, 2), AttentionConfig(2, 1, 8, 3, 2)),
    (128, 4, 2, 256, 512, (2, 2), AttentionConfig(2, 1, 4)),
    (128, 4, 1, 256, 512, (2, 2), AttentionConfig(1, 1, 4)),
    (64, 8, 8, 256, 512, (2, 1), AttentionConfig(2, 1, 8, 4, 2)),
    (80, 8, 8, 256, 512, (2, 2), AttentionConfig(2, 1, 8, 3, 4)),
    (132, 4, 6, 256, 512, (2, 2), AttentionConfig(2, 1, 4)),
    (256, 4, 8, 256, 512, (2, 2), AttentionConfig(2, 1, 8, 3, 4)),
    (256, 4, 32, 256, 512, (2, 2), AttentionConfig(2, 1, 8, 3, 4)),
    (256, 8, 1, 256, 4096, (2, 2), AttentionConfig(1, 1, 4)),
    (65, 8, 5, 1024, 512, (2, 2), AttentionConfig(1, 1, 4)),
])  # fmt: skip
def test_choice(samples, kv_heads, group, prompt, completion, bytes_of, expected):
    config = choose_attention(samples, kv_heads, group, prompt, completion, *bytes_of)
    assert config == expected
    AttentionPlan(samples, kv_heads, kv_heads, 128, samples, 9, 9, False, config, *bytes_of)
    alone = choose_attention(samples, kv_heads, group, prompt, completion, *bytes_of, together=False)
    assert alone.units == 1 and (alone == config or config.units > 1)
    AttentionPlan(samples, kv_heads, kv_heads, 128, samples, 9, 9, False, alone, *bytes_of, ranks=128)


@pytest.mark.parametrize("shape, config, message", [
    ((4, 6, 2, 80), AttentionConfig(), "head size 80"),
    ((4, 18, 2, 64), AttentionConfig(), "up to 8"),
    ((3, 6, 2, 64), AttentionConfig(2), "divide the samples"),
    ((6, 6, 2, 64), AttentionConfig(2, units=2), "divide the samples"),
    ((6, 6, 2, 64), AttentionConfig(units=3), "as many warps"),
    ((4, 6, 2, 64), AttentionConfig(warps=6), "warps must be"),
    ((4, 6, 2, 64), AttentionConfig(warps=36, depth=2), "warps must be"),
    ((4, 6, 2, 128), AttentionConfig(warps=16, depth=4), "shared memory"),
])  # fmt: skip
def test_shapes_that_the_kernel_does_not_take(shape, config, message):
    with pytest.raises(ValueError, match=message):
        AttentionPlan(*shape, N, P, C, False, config)


@pytest.mark.parametrize("ranks, config, message", [
    (24, AttentionConfig(), "ranks must be a multiple of 16, got 24"),
    (32, AttentionConfig(units=2), "with products with A a CTA has one unit, got 2"),
    (32, AttentionConfig(2, depth=2), "4736 bytes before the last slot of a ring for products with A, got 4096"),
])  # fmt: skip
def test_products_that_the_kernel_does_not_make(ranks, config, message):
    with pytest.raises(ValueError, match=message):
        AttentionPlan(4, 8, 2, 64, N, P, C, False, config, ranks=ranks)


def test_angles_lengths_and_norms_come_in_the_kernels_dtypes(monkeypatch):
    rows, numbers = jnp.zeros((B, 2 * E), jnp.bfloat16), jnp.zeros(B, jnp.int8)
    cache, angles = jnp.zeros((B, 4, 1, E), jnp.bfloat16), jnp.zeros((B, E // 2), jnp.bfloat16)
    scale, found = jnp.ones(E, jnp.bfloat16), []
    monkeypatch.setattr(attention_kernel, "build", lambda *_: lambda *operands: found.extend(operands))
    caches = PromptKV(cache, cache, numbers, numbers), OwnKV(cache, cache, numbers)
    decode_attention(rows, rows[:, :E], rows[:, :E], angles, angles, *caches, HeadNorms(scale, scale, 1e-6))
    dtypes = [v.dtype.name for v in found]
    assert dtypes == (
        ["bfloat16"] * 3 + ["float32"] * 2 + ["bfloat16"] * 2 + ["int32"] * 3 + ["float32"] * 2 + ["bfloat16"] * 2
    )


def test_a_of_another_width_is_refused():
    rows, numbers = jnp.zeros((B, 2 * E), jnp.bfloat16), jnp.zeros(B, jnp.int32)
    cache = jnp.zeros((B, 4, 1, E), jnp.bfloat16)
    angles, caches = jnp.zeros((B, E // 2)), (PromptKV(cache, cache, numbers, numbers), OwnKV(cache, cache, numbers))
    with pytest.raises(ValueError, match=r"A must be \[R, 128\], got \(16, 64\)"):
        decode_attention(rows, rows[:, :E], rows[:, :E], angles, angles, *caches, a=jnp.zeros((16, 64)))


@pytest.mark.parametrize("head, norms, config, keys, values", [
    (128, False, AttentionConfig(), 2, 2),
    (64, True, AttentionConfig(2, 4), 1, 1),
    (128, True, AttentionConfig(2, 1, 4, 4), 2, 1),
    (128, False, AttentionConfig(2, 1, 8, 3, 2), 2, 2),
])  # fmt: skip
def test_kernel_lowers_for_cuda_and_writes_the_cache_in_place(head, norms, config, keys, values):
    def s(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    kernel = attention_kernel.build(
        AttentionPlan(B, H, K, head, N, P, C, norms, config, keys, values), 1e-6 if norms else None
    )
    kept = [{2: jnp.bfloat16, 1: jnp.float8_e4m3fn}[size] for size in (keys, values)]
    args = [s((B, n * head)) for n in (H, K, K)] + [s((B, head // 2), jnp.float32)] * 2
    args += (
        [s((N, P, K, head), dtype) for dtype in kept]
        + [s((B,), jnp.int32)] * 3
        + [s((head,), jnp.float32)] * (2 if norms else 0)
    )
    args += [s((B, C, K, head), dtype) for dtype in kept]
    module = export.export(kernel, platforms=["cuda"])(*args).mlir_module()
    assert "mosaic_gpu" in module
    assert module.count("output_operand_alias<") == 2
