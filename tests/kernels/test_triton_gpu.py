"""The Triton kernels' numbers on a CUDA device, and what GPUs compile that have no others."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import CASES, adversarial, normal, poison, random_matrix

from pallas_kernels import (
    HeadNorms,
    OwnKV,
    PromptKV,
    compiling_for,
    decode_attention,
    decode_attention_reference,
    fp4_matmul,
    fp4_matmul_reference,
    stored,
)
from pallas_kernels.variants import MAX_TRITON_ROWS

pytestmark = pytest.mark.gpu

pytest.importorskip("jax_triton", exc_type=ImportError)

triton = jax.jit(functools.partial(fp4_matmul, backend="triton", out_dtype=jnp.float32))


def sums(x, matrix):
    poison(len(x), matrix.weight.n)
    return np.asarray(triton(x, matrix.weight, matrix.global_scale))


def within_1e_5(y, x, matrix):
    """Of |x| |W|^T, against the float64 product of the dequantized weights."""
    w, x64 = matrix.dense, np.asarray(x, np.float64)
    return bool((np.abs(y - x64 @ w.T) <= 1e-5 * (np.abs(x64) @ np.abs(w).T)).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 8, 13, 32, 64, 100])
@pytest.mark.parametrize("k, n", [(768, 200), (80, 33), (3584, 4608), (18944, 512)])
def test_within_1e_5_and_repeatable(rng, m, k, n, dtype):
    matrix = random_matrix(rng, n, k, 10 ** rng.uniform(-2, 5), dtype=dtype)
    x = normal(rng, m, k, dtype=dtype)
    y = sums(x, matrix)
    assert within_1e_5(y, x, matrix) and np.array_equal(y, sums(x, matrix))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("m", [8, 64])
def test_adversarial(rng, m, case):
    x, matrix = adversarial(rng, case, m, 320, 5120)
    assert within_1e_5(sums(x, matrix), x, matrix)


@pytest.mark.parametrize("most, fewer", [(8, (1, 3)), (16, (9, 12)), (32, (17,)), (64, (40,))])
def test_rows_do_not_depend_on_how_many_there_are(rng, most, fewer):
    matrix, x = random_matrix(rng, 4608, 3584, 7), normal(rng, most, 3584, dtype=jnp.bfloat16)
    full = sums(x, matrix)
    for m in fewer:
        assert np.array_equal(full[:m], sums(x[:m], matrix))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("k, ns, ranks", [
    (3584, (3584, 512, 512), (32, 32, 32)), (1024, (200, 328), (8, 128)), (768, (160, 33, 64, 96), (16, 0, 48, 24)),
])  # fmt: skip
def test_weights_together_with_adapters(rng, m, k, ns, ranks, dtype):
    """As one by one, and right: the adapters' part is half of all."""
    matrices = [random_matrix(rng, n, k, 10 ** rng.uniform(-2, 5), dtype=dtype) for n in ns]
    x = normal(rng, m, k, dtype=dtype)
    loras = []
    for matrix, rank in zip(matrices, ranks, strict=True):
        spread = float(np.abs(matrix.dense).mean())
        a, b = normal(rng, rank, k, dtype=dtype), normal(rng, matrix.weight.n, rank, dtype=dtype)
        loras.append((a, b, jnp.float32(spread / max(1, rank) ** 0.5)) if rank else None)
    weights, scales = [matrix.weight for matrix in matrices], [matrix.global_scale for matrix in matrices]
    for matrix in matrices:
        poison(m, matrix.weight.n)
    ys = jax.jit(functools.partial(fp4_matmul, backend="triton", out_dtype=jnp.float32))(x, weights, scales, lora=loras)
    for y, matrix, lora in zip(ys, matrices, loras, strict=True):
        alone = jax.jit(functools.partial(fp4_matmul, backend="triton", out_dtype=jnp.float32))(
            x, matrix.weight, matrix.global_scale, lora=lora
        )
        x64, dense = np.asarray(x, np.float64), matrix.dense
        true, size = x64 @ dense.T, np.abs(x64) @ np.abs(dense).T
        tolerance = 1e-5 * size
        if lora is not None:
            a, b = (np.asarray(one, np.float64) for one in lora[:2])
            h = np.asarray(jnp.asarray(x64 @ a.T).astype(dtype), np.float64)
            true += float(lora[2]) * h @ b.T
            # of x A^T the last bit may be rounded otherwise
            tolerance += float(lora[2]) * (2**-7 if dtype == "bfloat16" else 2**-10) * np.abs(h) @ np.abs(b.T)
        for got in (y, alone):
            assert (np.abs(np.asarray(got, np.float64) - true) <= tolerance).all()


@pytest.mark.parametrize("m", [5, MAX_TRITON_ROWS, MAX_TRITON_ROWS + 1])
def test_what_other_gpus_compile(rng, m):
    """The product with an adapter and a bias, its gradients, and a batch of x."""
    k, n, rank = 1024, 640, 16
    matrix = random_matrix(rng, n, k, 300)
    x, a, b, bias = (normal(rng, *s, dtype=jnp.bfloat16) for s in ((m, k), (rank, k), (n, rank), (n,)))
    scale, dy = matrix.global_scale, normal(rng, m, n)

    def loss(multiply, x, a, b):
        return jnp.sum(dy * multiply(x, (a / k**0.5, b / rank**0.5, 0.5)).astype(jnp.float32))

    def ours(x, lora):
        return fp4_matmul(x, matrix.weight, scale, lora=lora, bias=bias)

    def plain(x, lora):
        x, a, b = x.astype(jnp.float32), *(v.astype(jnp.float32) for v in lora[:2])
        return fp4_matmul_reference(x, matrix.weight, scale) + lora[2] * (x @ a.T) @ b.T + bias.astype(jnp.float32)

    with compiling_for(80), jax.default_matmul_precision("highest"):
        program = jax.jit(jax.value_and_grad(functools.partial(loss, ours), (0, 1, 2))).lower(x, a, b).compile()
        batch = jax.jit(jax.vmap(lambda x: ours(x, None)))(x.reshape(m, 1, k))
    assert "triton_kernel_call" in program.as_text()
    value, gradients = program(x, a, b)
    with jax.default_matmul_precision("highest"):
        true, expected = jax.jit(jax.value_and_grad(functools.partial(loss, plain), (0, 1, 2)))(x, a, b)
        alone = jax.jit(lambda x: plain(x, (jnp.zeros((1, k)), jnp.zeros((n, 1)), 0.0)))(x)
    assert abs(value - true) <= 2**-7 * float(jnp.sum(jnp.abs(dy))) * float(jnp.abs(alone).max())
    for got, want in zip(gradients, expected, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
    batch, alone = np.asarray(batch[:, 0], np.float32), np.asarray(alone)
    np.testing.assert_allclose(batch, alone, rtol=2**-7, atol=1e-5 * np.abs(alone).max())


ATTENTION = [
    (8, 28, 4, 128, 2, 256, 96), (4, 14, 2, 64, 2, 37, 50), (6, 16, 2, 128, 3, 1, 1), (2, 8, 8, 64, 1, 100, 300),
    (64, 28, 4, 128, 8, 300, 70),
]  # fmt: skip
KEPT = [(wide, narrow) for wide in ("", "float8_e4m3fn") for narrow in ("", "float8_e4m3fn")]


def attention_case(rng, sizes, kept, dtype):
    """What `decode_attention` takes but for norms."""
    B, H, K, E, N, P, C = sizes

    def caches(*shape):
        return [stored(normal(rng, *shape, K, E, dtype=dtype), of) for of in kept]

    angles = jnp.asarray(rng.uniform(0, 500, (B, E // 2)), jnp.float32)
    of = jnp.asarray(rng.integers(0, N, B), jnp.int32)
    prompt = PromptKV(*caches(N, P), of, jnp.asarray(rng.integers(1, P + 1, N), jnp.int32)[of])
    own = OwnKV(*caches(B, C), jnp.asarray(rng.integers(-1, C, B), jnp.int32))
    new = [normal(rng, B, heads * E, dtype=dtype) for heads in (H, K, K)]
    return *new, jnp.cos(angles), jnp.sin(angles), prompt, own


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kept", KEPT, ids="-".join)
@pytest.mark.parametrize("sizes", ATTENTION)
def test_attention(rng, sizes, kept, dtype):
    _, H, _, E, *_ = sizes
    kept = [jnp.dtype(name or dtype) for name in kept]
    case = attention_case(rng, sizes, kept, dtype)
    norms = HeadNorms(*(jnp.asarray(rng.uniform(0.2, 1, E), jnp.float32) for _ in range(2)), 1e-6) if H == 16 else None

    def attend(*case):
        return decode_attention(*case, norms)

    with compiling_for(89):
        program = jax.jit(attend).lower(*case).compile()
    assert "triton_kernel_call" in program.as_text()
    out, own_k, own_v = (np.asarray(x, np.float32) for x in program(*case))
    again, *_ = program(*case)
    assert np.array_equal(out, np.asarray(again, np.float32))
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        true, true_k, true_v = jax.jit(lambda *case: decode_attention_reference(*case, norms))(
            *jax.device_put(case, cpu)
        )
    step = 0.13 if kept[0].itemsize == 1 else 0.01  # where a rotated number lies between two, either may be taken
    wider = 1 if norms is None else 5  # as it may be where a normed one is rounded, which XLA leaves out on a GPU
    np.testing.assert_allclose(own_k, np.asarray(true_k, np.float32), rtol=step, atol=0.002 * wider)
    np.testing.assert_array_equal(own_v, np.asarray(true_v, np.float32))
    np.testing.assert_allclose(out, np.asarray(true, np.float32), atol=0.03 * wider, rtol=0.03)


def test_attention_of_a_batch(rng):
    """Each call of a batch as alone, up to the order in which parts are added."""
    cases = [attention_case(rng, ATTENTION[1], [jnp.bfloat16] * 2, jnp.bfloat16) for _ in range(3)]
    batch = jax.tree.map(lambda *of_each: jnp.stack(of_each), *cases)
    with compiling_for(80):
        together = jax.jit(jax.vmap(decode_attention)).lower(*batch).compile()
        alone = jax.jit(decode_attention).lower(*cases[0]).compile()
    calls = [len(re.findall(r'custom_call_target="[^"]*triton', of.as_text())) for of in (together, alone)]
    assert calls == [1, 1]
    for got, want in zip(together(*batch), zip(*(alone(*case) for case in cases), strict=True), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(jnp.stack(want), np.float32)
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3)
