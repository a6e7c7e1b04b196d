"""Which kernels copy what streams past so that it leaves the L2 first, and that the copies' addresses are per lane."""

import jax
import jax.numpy as jnp
import pytest
from ahead import packed, shape
from test_attention import H, K
from test_block import SHAPES, shapes_of

from pallas_kernels import attention_kernel, between_attentions, compiling_for, fp4_matmul, layout, wide_kernel
from pallas_kernels.attention_plan import READ_ONCE_PROMPTS, AttentionConfig, AttentionPlan
from pallas_kernels.layout import KernelWeight
from pallas_kernels.mosaic_kernels import mosaic_kernels
from pallas_kernels.wide_plan import WideConfig

POLICY, HINT, SHUFFLE = b"createpolicy.fractional.L2::evict_first", b"L2::cache_hint", b"shfl.sync.idx.b32 v, v"


def kernel_of(f, *operands):
    """What the one Mosaic kernel of a program is made of."""
    with compiling_for(90):
        [told] = mosaic_kernels(jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))).values()
    return told["module"]


def scalar(shape_=()):
    return shape(shape_, jnp.float32)


def test_weights_of_the_streaming_kernel():
    def product(x, data, scale):
        return fp4_matmul(x, KernelWeight(data, 3584, 3584), scale, backend="mosaic")

    module = kernel_of(product, shape((8, 3584), jnp.bfloat16), packed(3584, 3584), scalar())
    assert POLICY in module and HINT in module and SHUFFLE in module


def test_weights_of_the_block_kernel():
    hidden, _, heads, _ = SHAPES["7B"]
    streams = shape((8, heads), jnp.bfloat16), scalar((8, hidden))
    module = kernel_of(
        lambda *operands: between_attentions(*operands, 1e-6), *streams, shapes_of("7B", 0), (scalar((hidden,)),) * 2
    )
    assert POLICY in module and HINT in module and SHUFFLE in module


@pytest.mark.parametrize("m, once", [(256, True), (257, False)])
def test_weights_of_the_wide_kernel_where_one_tile_of_rows_reads_them(m, once):
    n, k = 1024, 1024
    kernel = wide_kernel.build(m, k, (n,), WideConfig(256, 2, 1, 4, 4), False, False, False, (), False, False)
    data = shape((n // 16, k // 256 * layout.QUAD_WORDS), jnp.uint32)
    module = kernel_of(kernel, shape((m, k), jnp.bfloat16), data, scalar((1,)))
    assert (POLICY in module) == (HINT in module) == once


@pytest.mark.parametrize("more, once", [(0, True), (1, False)])
def test_keys_and_values_where_prompts_are_few(more, once):
    head, samples, own = 128, 2, 64
    prompt = READ_ONCE_PROMPTS // (4 * K * head) + more
    plan = AttentionPlan(samples, H, K, head, 1, prompt, own, False, AttentionConfig())
    rows = [shape((samples, n * head), jnp.bfloat16) for n in (H, K, K)]
    caches = [[shape((n, slots, K, head), jnp.bfloat16)] * 2 for n, slots in ((1, prompt), (samples, own))]
    numbers = [shape((samples,), jnp.int32)] * 3
    module = kernel_of(
        attention_kernel.build(plan), *rows, *[scalar((samples, head // 2))] * 2, *caches[0], *numbers, *caches[1]
    )
    assert (POLICY in module) == (HINT in module) == once
    assert SHUFFLE in module
