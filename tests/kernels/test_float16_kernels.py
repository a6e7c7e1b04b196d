"""float16 through the public calls: each kernel lowers for CUDA without a GPU, in the dtype of its weights alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from benchmarks.fp4_block import EPS, SHAPES, random_layer
from pallas_kernels import (
    OwnKV,
    PromptKV,
    between_attentions,
    compiling_for,
    decode_attention,
    fp4_matmul,
    repack,
    takes_between_attentions,
    takes_decode_attention,
)

F16, K, N = jnp.float16, 1024, 512
shape = jax.ShapeDtypeStruct


def weights(*dtypes, n=N):
    packed, scale = shape((n, K // 2), jnp.uint8), shape((n, K // 16), jnp.uint8)
    return [jax.eval_shape(functools.partial(repack, dtype=dtype), packed, scale) for dtype in dtypes]


def lowered(f, *operands):
    """The calls of kernels in a program for Hopper."""
    with compiling_for(90):
        module = export.export(jax.jit(f), platforms=["cuda"])(*operands).mlir_module()
    return [line for line in module.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]


def assert_one_half(calls):
    assert calls and all("xf16>" in call and "xbf16>" not in call for call in calls)


@pytest.mark.parametrize("m", [8, 64, 300])
def test_products_with_adapters_and_their_gradients(m):
    lora = shape((32, K), F16), shape((N, 32), F16), shape((), jnp.float32)

    def loss(x, lora, weight, scale):
        return fp4_matmul(x, weight, scale, lora=lora, out_dtype=jnp.float32).sum()

    operands = shape((m, K), F16), lora, *weights(F16), shape((), jnp.float32)
    assert_one_half(lowered(jax.grad(loss), *operands))
    assert_one_half(lowered(loss, *operands))


@pytest.mark.parametrize("m", [1, 8, 16, 32, 200])
def test_between_attentions(m):
    layer, norms = jax.eval_shape(lambda: random_layer(jax.random.key(0), SHAPES["7B"], 32, "float16"))
    x, residual = shape((m, layer.o.weight.k), F16), shape((m, layer.o.weight.n), jnp.float32)
    with compiling_for(90):
        assert takes_between_attentions(m, F16, layer)
        assert not takes_between_attentions(m, jnp.bfloat16, layer)
    assert_one_half(lowered(functools.partial(between_attentions, eps=EPS), x, residual, layer, norms))


def test_a_layer_in_another_dtype_than_its_weights_is_refused():
    layer, norms = jax.eval_shape(lambda: random_layer(jax.random.key(0), SHAPES["7B"], 0, "float16"))
    x, residual = shape((8, layer.o.weight.k), jnp.bfloat16), shape((8, layer.o.weight.n), jnp.float32)
    with pytest.raises(ValueError, match="x is bfloat16; the layout of the layer's weights is for float16"):
        lowered(functools.partial(between_attentions, eps=EPS), x, residual, layer, norms)
    mixed = layer._replace(down=jax.eval_shape(lambda: random_layer(jax.random.key(0), SHAPES["7B"], 0)[0]).down)
    with pytest.raises(ValueError, match="a layer's weights must have one dtype, got bfloat16, float16"):
        lowered(functools.partial(between_attentions, eps=EPS), x, residual, mixed, norms)
    with compiling_for(90):
        assert not takes_between_attentions(8, F16, mixed)


@pytest.mark.parametrize("values", [F16, jnp.float8_e4m3fn])
def test_attention(values):
    B, H, heads, E, P, C = 8, 8, 2, 64, 32, 48
    rows = [shape((B, count * E), F16) for count in (H, heads, heads)]
    angles, numbers = [shape((B, E // 2), jnp.float32)] * 2, shape((B,), jnp.int32)
    prompt = PromptKV(shape((1, P, heads, E), F16), shape((1, P, heads, E), values), numbers, numbers)
    own = OwnKV(shape((B, C, heads, E), F16), shape((B, C, heads, E), values), numbers)
    with compiling_for(90):
        assert takes_decode_attention(jnp.dtype(F16), H, heads, E, jnp.dtype(F16), jnp.dtype(values))
        assert not takes_decode_attention(jnp.dtype(F16), H, heads, E, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))
    assert_one_half(lowered(decode_attention, *rows, *angles, prompt, own))


def test_weights_of_two_dtypes_are_refused():
    packed, scale = np.zeros((16, 32), np.uint8), np.zeros((16, 4), np.uint8)
    both = [repack(jnp.asarray(packed), jnp.asarray(scale), dtype) for dtype in (jnp.bfloat16, F16)]
    with pytest.raises(ValueError, match="weights that share x must have one dtype, got bfloat16, float16"):
        fp4_matmul(jnp.zeros((2, 64), F16), both, [1.0, 1.0])
    with pytest.raises(ValueError, match="dtype is float32; allowed: bfloat16, float16"):
        repack(jnp.asarray(packed), jnp.asarray(scale), jnp.float32)
