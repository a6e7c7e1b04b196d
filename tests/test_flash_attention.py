"""Attention by cuDNN: its calls are JAX's own, but for the order that they ask for; its gradient repeats (on a GPU)."""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from qerl_jax.models import flash_attention as module
from qerl_jax.models.flash_attention import backward_in_parts, deterministic_jit, flash_attention, flash_forward

SHAPES = [(2, 64, heads, 128) for heads in (8, 2, 2)]


def by_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def plain(q, k, v):
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, is_causal=True, implementation="xla")


def gradients(attention):
    """Of queries, keys and values, and the output itself; not one function for two programs, which JAX would know."""

    def function(q, k, v, do):
        o, back = jax.vjp(attention, q, k, v)
        return o, *back(do.astype(o.dtype))

    return function


def calls(function, shapes=SHAPES, jit=jax.jit, dtype=jnp.bfloat16):
    """Each custom call of the program for CUDA: its name, what it computes, and its operands and results."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in (*shapes, shapes[0])]
    text = jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'@(__cudnn\S+?)\(.*?backend_config = "(.*?)", (operand_layouts.*)', text)
    unescaped = [re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), config) for _, config, _ in found]
    return [(name, without_defaults(json.loads(c)), rest) for (name, _, rest), c in zip(found, unescaped, strict=True)]


def without_defaults(value):
    """As a protocol buffer reads it: what is absent is 0, and a number may be written as text."""
    if isinstance(value, dict):
        return {key: kept for key, one in value.items() if (kept := without_defaults(one))}
    if isinstance(value, list):
        return [without_defaults(one) for one in value]
    if value == "PRIMITIVE_TYPE_INVALID":
        return 0
    return int(value) if isinstance(value, str) and value.isdigit() else value


@pytest.fixture
def as_with_a_gpu(monkeypatch):
    """JAX looks for cuDNN and a device while it traces."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda capability: False)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("jit", [jax.jit, deterministic_jit])
def test_the_calls_are_those_of_jax_but_for_their_order(dtype, jit, as_with_a_gpu):
    ours, theirs = (calls(gradients(f), jit=jit, dtype=dtype) for f in (flash_attention, by_jax))
    assert [name for name, *_ in ours] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for _, config, _ in ours:
        ordered = config["cudnn_fmha_backend_config"].pop("force_deterministic", False)
        assert ordered is (jit is deterministic_jit)
    assert ours == theirs


def test_without_a_gradient_it_is_the_function_of_jax(as_with_a_gpu):
    ours, theirs = (calls(lambda q, k, v, _, f=f: f(q, k, v)) for f in (flash_attention, by_jax))
    assert ours == theirs


def test_vmap_makes_more_rows(as_with_a_gpu):
    batched = [(3, *shape) for shape in SHAPES]
    rows = [(3 * shape[0], *shape[1:]) for shape in SHAPES]
    assert calls(jax.vmap(gradients(flash_attention)), batched) == calls(gradients(flash_attention), rows)


@pytest.mark.parametrize("rows, T, together", [
    (1, 4096, [(28, 4)]), (4, 2112, [(28, 4)]), (1, 8448, [(14, 2)]), (32, 2112, [(7, 1)]), (1, 12000, [(7, 1)]),
    (1, 16640, [(4, 4), (3, 3)]), (1, 32768, [(1, 1)] * 7), (1, 65536, [(1, 1)] * 7)
])  # fmt: skip
def test_of_a_long_row_few_heads_have_scores_at_once(rows, T, together, as_with_a_gpu):
    """In the fixed order, which keeps them: query heads and their key-value heads of each call in the loop."""
    shapes = [(rows, T, heads, 128) for heads in (28, 4, 4)]

    def heads(jit):
        _, *backward = calls(gradients(flash_attention), shapes, jit)
        found = [re.findall(rf"tensor<{rows}x{T}x(\d+)x128xbf16>", operands) for *_, operands in backward]
        return [(int(queries), int(keys)) for queries, keys, *_ in found]

    assert heads(jax.jit) == [(28, 4)]
    assert heads(deterministic_jit) == together


def backward_of_sums(q, k, v, log_sums, do, o):
    """What cuDNN computes, from the same operands."""
    (_, T, H, E), K = q.shape, k.shape[2]
    keys, values = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    scores = jnp.einsum("bthe,bshe->bhts", q, keys) / E**0.5
    p = jnp.where(jnp.tri(T, dtype=bool), jnp.exp(scores - log_sums[..., None]), 0)
    ds = p * (jnp.einsum("bthe,bshe->bhts", do, values) - (do * o).sum(-1).swapaxes(1, 2)[..., None]) / E**0.5
    of_heads = jnp.einsum("bhts,bthe->bshe", ds, q), jnp.einsum("bhts,bthe->bshe", p, do)
    return jnp.einsum("bhts,bshe->bthe", ds, keys), *(x.reshape(*x.shape[:2], K, -1, E).sum(3) for x in of_heads)


@pytest.mark.parametrize("most, parts", [
    (0, {1}), (1, {1}), (2, {2, 1}), (3, {3}), (4, {3}), (6, {6}), (11, {6}), (12, {12})
])  # fmt: skip
def test_heads_one_after_the_other_are_those_together(most, parts, monkeypatch):
    """Of 12 with 4 key-value heads: some of these, or one and parts of its three queries."""
    T, heads = 7, set()
    q, k, v, do = drawn(2, T, 12, 4, 8, jnp.float32)
    o, back = jax.vjp(plain, q, k, v)
    scores = jnp.einsum("bthe,bshe->bhts", q, jnp.repeat(k, 3, axis=2)) / 8**0.5
    log_sums = jax.nn.logsumexp(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf), axis=-1)

    def part(q, *rest):
        heads.add(q.shape[2])
        return backward_of_sums(q, *rest)

    monkeypatch.setattr(module, "_backward", part)
    found = jax.jit(lambda *x: backward_in_parts(*x, most * 2 * T**2))(q, k, v, log_sums, do, o)
    for ours, right in zip(found, back(do), strict=True):
        np.testing.assert_allclose(ours, right, atol=2e-5)
    assert heads == parts


@pytest.mark.parametrize(
    ("flags", "ordered"),
    [
        ("", False),
        ("--xla_gpu_exclude_nondeterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops --xla_dump_to=x", True),
        ("--xla_gpu_deterministic_ops=false", False),
    ],
)
def test_xla_flags_that_ask_for_an_order_are_followed(flags, ordered):
    """A call that did not say so itself would not be found when the program runs."""
    program = "from qerl_jax.models import flash_attention as f; print(f._deterministic.value)"
    environment = {**os.environ, "XLA_FLAGS": flags}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(ordered)]


def test_a_deterministic_program_keeps_its_name_and_options():
    def scaled(x, by, times):
        return x * by * times

    jitted = deterministic_jit(functools.partial(scaled, by=3), static_argnames="times", donate_argnames="x")
    x = jnp.ones(4)
    assert "@jit_scaled" in jitted.lower(x, times=2).as_text()
    assert jitted(x, times=2).tolist() == [6.0] * 4
    assert x.is_deleted()


def test_what_jit_takes_may_be_an_object():
    class Doubled:
        def __call__(self, x, and_more=0):
            return 2 * x + and_more

    for function in (Doubled(), functools.partial(Doubled(), and_more=0)):
        assert "@jit_Doubled" in deterministic_jit(function).lower(1.0).as_text()


CASES = [  # B, T, H, K, E
    (1, 2112, 28, 4, 128), (2, 515, 28, 4, 128), (3, 77, 14, 2, 64), (3, 40, 4, 2, 16), (2, 130, 8, 4, 256),
    (3, 2, 4, 2, 16),
]  # fmt: skip


def drawn(B, T, H, K, E, dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, (B, T, heads, E), dtype) for key, heads in zip(keys, (H, K, K, H), strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_right_and_repeat_bit_for_bit(case, dtype):
    operands = drawn(*case, dtype)
    program = deterministic_jit(gradients(flash_attention))
    found = program(*operands)
    expected = jax.jit(gradients(plain))(*jax.device_put(operands, cpu := jax.devices("cpu")[0]))
    for ours, right in zip(jax.device_put(found, cpu), expected, strict=True):
        largest = float(jnp.abs(right).max())
        assert float(jnp.abs(ours - right).max()) <= 2 * float(jnp.finfo(dtype).eps) * largest
    for _ in range(20):
        for again, first in zip(program(*operands), found, strict=True):
            np.testing.assert_array_equal(np.asarray(again), np.asarray(first))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3, 7, 14])
@pytest.mark.parametrize("case", [(1, 2112, 28, 4, 128), (2, 301, 28, 4, 64)], ids=str)
def test_heads_one_after_the_other_have_the_same_bits(case, heads):
    (B, T, H, *_), (q, k, v, do) = case, drawn(*case, jnp.bfloat16)
    o, log_sums = jax.jit(flash_forward)(q, k, v)

    def of_parts(most):
        program = deterministic_jit(functools.partial(backward_in_parts, most_scores=most * B * T**2))
        compiled = program.lower(q, k, v, log_sums, do, o).compile()
        return compiled(q, k, v, log_sums, do, o), compiled.memory_analysis().temp_size_in_bytes

    (together, more), (one_after_the_other, fewer) = of_parts(H), of_parts(heads)
    assert fewer < more
    for ours, theirs in zip(one_after_the_other, together, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.gpu
def test_equal_calls_of_one_program_are_all_found():
    """XLA compiles the first of them for all; with another order in their description the others were not found."""

    def layers(q, k, v, do):
        def chain(q, k, v):
            for _ in range(3):
                q = flash_attention(q, k, v)
            return q

        return gradients(chain)(q, k, v, do)

    operands = drawn(1, 2112, 28, 4, 128, jnp.bfloat16)
    program = deterministic_jit(layers)
    found = program(*operands)
    for _ in range(20):
        for again, first in zip(program(*operands), found, strict=True):
            np.testing.assert_array_equal(np.asarray(again), np.asarray(first))


@pytest.mark.gpu
def test_rows_under_vmap_are_those_without():
    operands = drawn(6, 300, 28, 4, 128, jnp.bfloat16)
    apart = [x.reshape(2, 3, *x.shape[1:]) for x in operands]
    for rows, ours in zip(
        deterministic_jit(gradients(flash_attention))(*operands),
        deterministic_jit(jax.vmap(gradients(flash_attention)))(*apart),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(ours).reshape(rows.shape))
