"""The decode attention kernel on a CUDA device, fresh seeds each run: `python -m pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import HeadNorms, OwnKV, PromptKV, decode_attention, decode_attention_reference
from pallas_kernels.attention_plan import AttentionConfig

pytestmark = pytest.mark.gpu


def _case(rng, B, H, K, E, N, P, C, dtype, lengths=None, spread=1.0):
    def normal(*shape):
        return jnp.asarray(spread * rng.normal(size=shape), jnp.float32).astype(jnp.bfloat16).astype(dtype)

    angles = jnp.asarray(rng.uniform(0, 500, (B, E // 2)), jnp.float32)
    of = jnp.asarray(np.arange(B) * N // B, jnp.int32)
    prompt_lengths = jnp.asarray(rng.integers(1, P + 1, N), jnp.int32)[of]
    own = rng.integers(-1, C, B) if lengths is None else lengths
    return (
        *(normal(B, heads * E) for heads in (H, K, K)), jnp.cos(angles), jnp.sin(angles),
        PromptKV(normal(N, P, K, E), normal(N, P, K, E), of, prompt_lengths),
        OwnKV(normal(B, C, K, E), normal(B, C, K, E), jnp.asarray(own, jnp.int32)),
    )  # fmt: skip


def _wide(case):
    """The same case in float64 (integers stay)."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, case)


CONFIGS = [
    AttentionConfig(1, 1), AttentionConfig(1, 4), AttentionConfig(2, 1), AttentionConfig(2, 2, 4, 4),
    AttentionConfig(1, 8, 8, 2),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "B, H, K, E, N, P, C",
    [(8, 28, 4, 128, 2, 256, 96), (4, 14, 2, 64, 2, 37, 50), (6, 16, 2, 128, 3, 1, 1), (2, 8, 8, 64, 1, 100, 300)],
)
def test_against_float64(rng, B, H, K, E, N, P, C, config):
    case = _case(rng, B, H, K, E, N, P, C, jnp.bfloat16)
    out, own_k, own_v = decode_attention(*case, config=config)
    with jax.enable_x64(True):
        expected, _, _ = decode_attention_reference(*_wide(case))
    _, expected_k, expected_v = decode_attention_reference(*case)
    np.testing.assert_array_equal(np.asarray(own_v, np.float32), np.asarray(expected_v, np.float32))
    # The rotation's last bit may differ from XLA's, which fuses a multiplication and an addition.
    np.testing.assert_allclose(np.asarray(own_k, np.float32), np.asarray(expected_k, np.float32), rtol=0.01, atol=1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float64), np.asarray(expected), atol=0.02, rtol=0.02)
    again, _, _ = decode_attention(*case, config=config)
    assert np.array_equal(np.asarray(out), np.asarray(again))


@pytest.mark.parametrize("config", CONFIGS[:3])
def test_head_norms(rng, config):
    case = _case(rng, 4, 16, 8, 128, 2, 64, 40, jnp.bfloat16)
    norms = HeadNorms(*(jnp.asarray(rng.uniform(0.5, 2, 128), jnp.float32) for _ in range(2)), 1e-6)
    out, own_k, _ = decode_attention(*case, norms, config=config)
    expected, expected_k, _ = decode_attention_reference(*case, norms)
    np.testing.assert_allclose(np.asarray(own_k, np.float32), np.asarray(expected_k, np.float32), rtol=0.02, atol=1e-2)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.03, rtol=0.03)


def test_sharp_scores_and_what_lies_past_the_end(rng):
    """Scores of hundreds do not overflow, and NaN past the lengths is never read into a result."""
    case = list(_case(rng, 4, 28, 4, 128, 2, 64, 40, jnp.bfloat16, lengths=[0, 15, 16, -1], spread=6.0))
    prompt, own = case[5], case[6]

    def poisoned(x, lengths):
        past = jnp.arange(x.shape[1]) >= lengths[:, None]
        return jnp.where(past[:, :, None, None], jnp.nan, x)

    lengths_N = jnp.zeros(2, jnp.int32).at[prompt.of].max(prompt.lengths)
    bad = list(case)
    bad[5] = prompt._replace(k=poisoned(prompt.k, lengths_N), v=poisoned(prompt.v, lengths_N))
    bad[6] = own._replace(k=poisoned(own.k, own.lengths), v=poisoned(own.v, own.lengths))
    for config in CONFIGS:
        out, _, _ = decode_attention(*bad, config=config)
        expected, _, _ = decode_attention_reference(*case)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.1, rtol=0.03)
        assert not np.asarray(out, np.float32)[3].any()


def test_result_does_not_depend_on_neighbours(rng):
    case = _case(rng, 6, 28, 4, 128, 1, 128, 64, jnp.bfloat16)
    whole, _, _ = decode_attention(*case, config=AttentionConfig(2, 2))
    q, k, v, cos, sin, prompt, own = case
    own = own._replace(lengths=own.lengths.at[:4].set(-1))
    part, _, _ = decode_attention(q, k, v, cos, sin, prompt, own, config=AttentionConfig(2, 2))
    assert np.array_equal(np.asarray(whole)[4:], np.asarray(part)[4:])
