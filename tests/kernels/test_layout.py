"""The weight layout and its bit algebra, over all codes and all scale bytes."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import layout

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _random(seed, n, k):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8)
    return packed, scale


DTYPES = pytest.mark.parametrize("dtype", layout.DECODINGS)


@DTYPES
def test_every_bit_of_a_word_is_used_once(dtype):
    source_bit = layout.DECODINGS[dtype].source_bit
    bits = [source_bit(p, h, b) for p, h, b in itertools.product(range(4), range(2), range(4))]
    assert sorted(bits) == list(range(32))


@pytest.mark.parametrize("dtype, factor", [("bfloat16", 2.0**-126), ("float16", 2.0**-14)])
def test_decode_word_gives_every_code_at_every_place(dtype, factor):
    source_bit = layout.DECODINGS[dtype].source_bit
    for pair, half, code in itertools.product(range(4), range(2), range(16)):
        word = 0
        for bit in range(4):
            word |= (code >> bit & 1) << source_bit(pair, half, bit)
        for fill in (0, 0xFFFFFFFF):  # the other seven codes must not leak in
            own = sum(1 << source_bit(pair, half, b) for b in range(4))
            got = layout.decode_word(np.uint32((fill & ~own) | word), dtype)[pair]
            value = np.uint16((int(got) >> 16 * half) & 0xFFFF).view(dtype)
            assert float(value) == E2M1[code] * factor, (pair, half, code)


@pytest.mark.parametrize("dtype, of_code, of_byte", [
    ("bfloat16", 2.0**-126, 2.0**-120), ("float16", 2.0**-14, 2.0**-8),
])  # fmt: skip
def test_scale_bytes_scale_exactly(dtype, of_code, of_byte):
    decoding, byte = layout.DECODINGS[dtype], np.arange(0x7F, dtype=np.uint8)
    true = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scaled = (byte.astype(np.uint16) << decoding.scale_shift).view(dtype).astype(np.float64)
    assert np.array_equal(scaled, true * of_byte)
    for step in decoding.scale_steps:
        power = np.uint16(decoding.power_of_two(step) & 0xFFFF).view(dtype)
        assert float(power) == 2.0**step
        scaled = scaled * 2.0**step
        assert np.array_equal(scaled.astype(dtype).astype(np.float64), scaled)
    product = (E2M1[:, None].astype(np.float64) * of_code) * scaled
    assert np.array_equal(product.astype(dtype).astype(np.float64), product)
    assert np.array_equal(product * layout.EPILOGUE_FACTOR, E2M1[:, None] * true)
    assert np.abs(product[product != 0]).min() == 2.0**-17  # normal, or in float16 subnormal, which its products keep


@DTYPES
@pytest.mark.parametrize("n, k", [(16, 64), (48, 256), (40, 144), (1, 16), (33, 80)])
def test_unpack_inverts_repack(n, k, dtype):
    packed, scale = _random(n * k, n, k)
    weight = layout.repack(jnp.asarray(packed), jnp.asarray(scale).view(jnp.float8_e4m3fn), dtype)
    assert weight.shape == (n, k) and weight.dtype == dtype
    assert weight.data.shape == (-(-n // 16), -(-k // 256), layout.QUAD_WORDS)
    packed_out, scale_out = layout.unpack(weight)
    assert np.array_equal(packed_out, packed)
    assert np.array_equal(np.asarray(scale_out).view(np.uint8), scale)


def test_words_hold_the_fragments_that_the_docstring_says():
    packed, scale = _random(0, 32, 512)
    weight = np.asarray(layout.repack(jnp.asarray(packed), jnp.asarray(scale)).data)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(32, 512)
    tile, quad = 1, 1
    for unit in range(4):
        first = 256 * quad + 64 * unit
        block = codes[16:32, first : first + 64]
        for g, t, j in itertools.product(range(8), range(4), range(4)):
            pairs = layout.decode_word(weight[tile, quad, unit * 128 + (4 * g + t) * 4 + j])
            for p, pair in enumerate(pairs):
                row, col = g + 8 * (p % 2), 16 * t + 4 * j + 2 * (p // 2)
                for half in range(2):
                    value = np.uint16((int(pair) >> 16 * half) & 0xFFFF).view(ml_dtypes.bfloat16)
                    assert float(value) == E2M1[block[row, col + half]] * 2.0**-126
        scales = weight[tile, quad, 512 + 32 * (unit // 2) :][:32].view(np.uint8).reshape(32, 4)
        for g, t, h in itertools.product(range(8), range(4), range(2)):
            assert scales[4 * g + t, 2 * (unit % 2) + h] == scale[16 + g + 8 * h, first // 16 + t]


def test_dequantize_matches_a_table_lookup():
    packed, scale = _random(1, 32, 64)
    weight = layout.repack(jnp.asarray(packed), jnp.asarray(scale))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(32, 4, 16)
    true = E2M1[codes].astype(np.float64) * (scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64) / 3.0)[..., None]
    got = np.asarray(layout.dequantize(weight, jnp.float32(3.0), jnp.float32), np.float64).reshape(true.shape)
    np.testing.assert_allclose(got, true, rtol=2e-7, atol=0)


@pytest.mark.parametrize("made_by", [layout.dequantize, jax.jit(layout.dequantize, static_argnums=2)])
def test_dequantize_divides_as_the_writers_of_the_format_do(made_by):
    packed, scale = _random(2, 32, 256)
    weight = layout.repack(jnp.asarray(packed), jnp.asarray(scale))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(32, 16, 16)
    block = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / np.float32(700.3)
    got = np.asarray(made_by(weight, jnp.float32(700.3), jnp.float32))
    np.testing.assert_array_equal(got, (E2M1[codes].astype(np.float32) * block[..., None]).reshape(32, 256))


def test_weight_is_a_pytree_with_static_shape():
    weight = layout.KernelWeight(jnp.zeros((1, 1, 576), jnp.uint32), 16, 64)
    leaves, treedef = jax.tree.flatten(weight)
    assert len(leaves) == 1 and jax.tree.unflatten(treedef, leaves).shape == (16, 64)


def test_repack_names_a_wrong_shape():
    with pytest.raises(ValueError, match=r"packed must be \[N, K/2\], got shape \(2, 16, 32\)"):
        layout.repack(jnp.zeros((2, 16, 32), jnp.uint8), jnp.zeros((2, 16, 4), jnp.uint8))
    with pytest.raises(ValueError, match="multiple of 16"):
        layout.repack(jnp.zeros((16, 12), jnp.uint8), jnp.zeros((16, 1), jnp.uint8))
    with pytest.raises(ValueError, match=r"\(16, 4\)"):
        layout.repack(jnp.zeros((16, 32), jnp.uint8), jnp.zeros((16, 3), jnp.uint8))
