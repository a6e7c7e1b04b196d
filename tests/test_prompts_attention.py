"""The attention of a pack of prompts, which has no gradient: as that of rows, each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.models import attention
from qerl_jax.models.attention import packed_attention, prompts_attention
from qerl_jax.models.packed_rows import Frame, packed_rows


def prompts_of(lengths, slots, longest, dtype):
    """Queries, keys and values of a pack that has one frame, of all rows at full width, and the pack."""
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = [jax.random.normal(k, (slots, heads, 128), dtype) for k, heads in zip(keys, (28, 4, 4), strict=True)]
    return *drawn, packed_rows(jnp.array(lengths, jnp.int32), slots, (Frame(len(lengths), longest),))


def expected_of_prompts(q, k, v, pack):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return jnp.where(pack.live_L[:, None, None], packed_attention(q, k, v, pack), 0)


PROMPTS = [([700, 30, 1024, 1, 200, 0, 0, 0], 2048), ([1024, 1024, 0, 0], 2048), ([7, 1024, 64], 3 * 1024)]


@pytest.mark.parametrize(("lengths", "slots"), PROMPTS, ids=["short ones", "full ones", "as it stands"])
@pytest.mark.parametrize("dtype", [
    jnp.float32, *(pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (jnp.bfloat16, jnp.float16))
])  # fmt: skip
def test_prompts_attend_as_rows_of_a_pack_do(lengths, slots, dtype):
    operands = prompts_of(lengths, slots, 1024, dtype)
    found, pack = jax.jit(prompts_attention)(*operands), operands[-1]
    expected = jax.jit(expected_of_prompts)(*operands)
    live_L11, eps = pack.live_L[:, None, None], float(jnp.finfo(dtype).eps)
    error = float(jnp.abs(jnp.where(live_L11, found, 0) - expected).max())
    assert error <= max(2 * eps, 1e-5) * float(jnp.abs(expected).max())
    assert bool(jnp.isfinite(found).all())
    if dtype != jnp.float32:
        both = jax.jit(jax.vmap(prompts_attention, (0, 0, 0, None)))(*(jnp.stack([x, -x]) for x in operands[:3]), pack)
        assert jnp.array_equal(both[0], found) and jnp.array_equal(both[1], -found)


@pytest.mark.parametrize("lengths", [[7, 3, 10, 1, 2, 0, 0, 0], [7, 10, 1]], ids=["short ones", "as it stands"])
def test_slots_behind_prompts_attend_as_the_last_token_does_whatever_cudnn_leaves_there(lengths, monkeypatch):
    *operands, pack = prompts_of(lengths, 30, 10, jnp.float32)
    expected = packed_attention(*operands, pack)[pack.starts_N[pack.row_L] + pack.place_L]
    by_products = jax.nn.dot_product_attention

    def by_cudnn(q, k, v, *, query_seq_lengths, key_value_seq_lengths, **_):
        assert query_seq_lengths is key_value_seq_lengths
        real = jnp.arange(q.shape[1]) < query_seq_lengths[:, None]
        return jnp.where(real[:, :, None, None], by_products(q, k, v, is_causal=True), jnp.nan)

    monkeypatch.setattr(attention, "by_cudnn", lambda dtype: True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_cudnn)
    np.testing.assert_allclose(prompts_attention(*operands, pack), expected, atol=1e-5)
