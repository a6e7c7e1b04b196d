"""decode_attention: the plain path against a loop in NumPy, errors; that the kernel lowers for CUDA without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_kernels import HeadNorms, OwnKV, PromptKV, attention_kernel, decode_attention
from pallas_kernels.attention import choose_attention
from pallas_kernels.attention_plan import AttentionConfig, make_attention_plan

B, H, K, E, N, P, C = 4, 6, 2, 64, 2, 9, 5


def _turned(x, angles):
    """Rotation of one head [E] by angles [E / 2], as complex numbers."""
    z = (x[: E // 2] + 1j * x[E // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


def test_plain_path_against_a_loop():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n * E)).astype(np.float32) for n in (H, K, K))
    angles = rng.uniform(0, 9, (B, E // 2)).astype(np.float32)
    prompt_k, prompt_v = (rng.normal(size=(N, P, K, E)).astype(np.float32) for _ in range(2))
    own_k, own_v = (rng.normal(size=(B, C, K, E)).astype(np.float32) for _ in range(2))
    of, prompt_lengths, own_lengths = np.int32([1, 1, 0, 0]), np.int32([3, 3, 9, 9]), np.int32([0, 4, -1, 2])
    scales = rng.uniform(0.5, 2, (2, E)).astype(np.float32)
    out, new_k, new_v = decode_attention(
        *(jnp.asarray(x) for x in (q, k, v, np.cos(angles), np.sin(angles))),
        PromptKV(*map(jnp.asarray, (prompt_k, prompt_v, of, prompt_lengths))),
        OwnKV(*map(jnp.asarray, (own_k, own_v, own_lengths))),
        HeadNorms(*map(jnp.asarray, scales), 1e-6),
    )

    def normed(x, scale):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * scale

    expected_k, expected_v = own_k.copy(), own_v.copy()
    for b in range(B):
        n = own_lengths[b]
        if n < 0:
            np.testing.assert_array_equal(np.asarray(out)[b], 0)
            continue
        for h in range(K):
            expected_k[b, n, h] = _turned(normed(k[b, h * E : (h + 1) * E], scales[1]), angles[b])
            expected_v[b, n, h] = v[b, h * E : (h + 1) * E]
        for head in range(H):
            h = head // (H // K)
            keys = np.concatenate([prompt_k[of[b], : prompt_lengths[b], h], expected_k[b, : n + 1, h]])
            values = np.concatenate([prompt_v[of[b], : prompt_lengths[b], h], expected_v[b, : n + 1, h]])
            scores = keys @ _turned(normed(q[b, head * E : (head + 1) * E], scales[0]), angles[b]) / np.sqrt(E)
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            np.testing.assert_allclose(np.asarray(out)[b, head * E : (head + 1) * E], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(new_k), expected_k, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(new_v), expected_v)


@pytest.mark.parametrize("samples, kv_heads, paired, expected", [
    (1, 4, False, AttentionConfig(1, 8)),
    (8, 4, True, AttentionConfig(1, 2)),
    (64, 8, True, AttentionConfig(1, 1, 4)),
    (256, 8, True, AttentionConfig(2, 1, 4)),
    (256, 8, False, AttentionConfig(1, 1, 4)),
])  # fmt: skip
def test_choice(samples, kv_heads, paired, expected):
    assert choose_attention(samples, kv_heads, paired) == expected


@pytest.mark.parametrize("shape, config, message", [
    ((4, 6, 2, 80), AttentionConfig(), "head size 80"),
    ((4, 18, 2, 64), AttentionConfig(), "up to 8"),
    ((3, 6, 2, 64), AttentionConfig(2), "even number of samples"),
    ((4, 6, 2, 64), AttentionConfig(warps=6), "warps must be"),
    ((4, 6, 2, 128), AttentionConfig(warps=16, depth=4), "shared memory"),
])  # fmt: skip
def test_shapes_that_the_kernel_does_not_take(shape, config, message):
    with pytest.raises(ValueError, match=message):
        make_attention_plan(*shape, N, P, C, False, config)


@pytest.mark.parametrize("head, norms, config", [
    (128, False, AttentionConfig()),
    (64, True, AttentionConfig(2, 4)),
    (128, True, AttentionConfig(2, 1, 4, 4)),
])  # fmt: skip
def test_kernel_lowers_for_cuda_and_writes_the_cache_in_place(head, norms, config):
    def s(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    kernel = attention_kernel.build(B, H, K, head, N, P, C, config, 1e-6 if norms else None)
    args = [s((B, n * head)) for n in (H, K, K)] + [s((B, head // 2), jnp.float32)] * 2
    args += [s((N, P, K, head))] * 2 + [s((B,), jnp.int32)] * 3 + [s((head,), jnp.float32)] * (2 if norms else 0)
    args += [s((B, C, K, head))] * 2
    module = export.export(kernel, platforms=["cuda"])(*args).mlir_module()
    assert "mosaic_gpu" in module
    assert module.count("output_operand_alias<") == 2
