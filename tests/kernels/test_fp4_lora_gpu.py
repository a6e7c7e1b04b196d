"""LoRA inside the streaming kernel, on a CUDA device: `python -m pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead, packed, shape, start_stream
from random_weights import poison, random_matrix, swiglu

from pallas_kernels import KernelWeight, fp4_matmul, fragment_order, inputs_kernel, stream_kernel, variants
from pallas_kernels.inputs_plan import GIVEN
from pallas_kernels.operands import number, padded_rank
from pallas_kernels.stream_plan import StreamConfig, make_plan

pytestmark = pytest.mark.gpu


def _start(programs, m, k, ns, ranks):
    """The kernel, and the same configuration for a row less; their keys."""
    padded = tuple(padded_rank(rank) for rank in ranks)
    config = variants.config_for(m, k, ns, padded)
    assert variants.takes_lora(m, k, ns, config, padded)
    return [start_stream(programs, rows, k, ns, config, padded) for rows in (m, m - 1) if rows]


def _call(rng, m, k, ns, ranks, global_scales=None):
    """x, matrices and adapters (or None), and the kernel's operands behind x."""
    global_scales = global_scales or [2688] * len(ns)
    matrices = [random_matrix(rng, n, k, scale, 0x10, 0x50) for n, scale in zip(ns, global_scales, strict=True)]
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    loras = [
        None if not r else (
            jnp.asarray(rng.standard_normal((r, k)) / k**0.5, jnp.bfloat16),
            jnp.asarray(rng.standard_normal((n, r)), jnp.bfloat16),
            jnp.float32(0.7),
        )
        for r, n in zip(ranks, ns, strict=True)
    ]  # fmt: skip
    operands = stream_kernel.lora_operands(loras, k)
    return x, matrices, loras, [*(w.weight.data for w in matrices), *_scales(matrices), *operands]


def _scales(matrices):
    return [np.full(1, w.global_scale) for w in matrices]


def _same_each_time(m, ns, call):
    """The results of `call`, in float64, which are the same four times."""
    first = None
    for _ in range(4):
        poison(m, sum(ns))
        ys = [np.asarray(y, np.float64) for y in call()]
        first = first or ys
        assert all(np.array_equal(y, f) for y, f in zip(ys, first, strict=True))
    return first


def _true(x, matrix, lora):
    """What one weight's results are, and how far from it they may be."""
    x64, dense = np.asarray(x, np.float64), matrix.dense
    true, bound = x64 @ dense.T, 1e-5 * (np.abs(x64) @ np.abs(dense).T)
    if lora is not None:
        a, b, s = (np.asarray(v, np.float64) for v in lora)
        hidden = s * (x64 @ a.T)
        true, bound = true + hidden @ b.T, bound + 2.0**-8 * (np.abs(hidden) @ np.abs(b).T)
    return true, bound


def _assert_right(ys, x, matrices, loras):
    for y, matrix, lora in zip(ys, matrices, loras, strict=True):
        true, bound = _true(x, matrix, lora)
        assert (np.abs(y - true) <= bound).all()


@ahead(_start)
@pytest.mark.parametrize("m, k, ns, ranks", [
    (8, 1024, (512, 128, 128), (32, 32, 32)),
    (3, 3584, (3584, 512, 512), (32, 0, 16)),
    (8, 3584, (3584,), (32,)),
    (1, 3584, (18944, 18944), (32, 32)),
    (8, 18944, (3584,), (32,)),
    (16, 3584, (3584,), (128,)),
    (9, 18944, (3584,), (8,)),
    (24, 2048, (1024, 128), (64, 16)),
    (64, 3584, (3584,), (32,)),
    (40, 1280, (40, 33), (32, 24)),
])  # fmt: skip
def test_lora_in_the_kernel(rng, programs, m, k, ns, ranks):
    x, matrices, loras, operands = _call(rng, m, k, ns, ranks)
    kernel, *fewer = (programs.get(key) for key in _start(programs, m, k, ns, ranks))
    first = _same_each_time(m, ns, lambda: kernel(x, *operands))
    _assert_right(first, x, matrices, loras)
    for program in fewer:
        again = program(x[: m - 1], *operands)
        assert all(np.array_equal(np.asarray(y, np.float64), f[: m - 1]) for y, f in zip(again, first, strict=True))


def _start_prepared(programs, m, k, ns, ranks, config, swiglu=False):
    """The streaming kernel behind those that make its x and s x A^T; the key."""
    config = config or variants.config_for(m, k, ns, ranks)
    plan = make_plan(m, k, ns, config, ranks, prepared=True, swiglu=swiglu)
    kernel = stream_kernel.build(m, k, ns, config, wide_out=True, ranks=ranks, prepared=True, swiglu=swiglu)
    present = [(r, n) for r, n in zip(ranks, ns, strict=True) if r]
    down = inputs_kernel.build(m, k, tuple(r for r, _ in present), GIVEN) if present else None

    def run(x, data, scales, all_a, all_b, of_adapters):
        ordered = fragment_order.in_fragment_order(x, plan.m_tiles * 8) if config.wgmma else x
        h = [down(x, *all_a, *of_adapters)["h"]] if down else []
        return kernel(ordered, *data, *scales, *h, *all_b)

    x, one, data = shape((m, k), jnp.bfloat16), shape((1,), jnp.float32), [packed(n, k) for n in ns]
    all_a = [shape((r, k), jnp.bfloat16) for r, _ in present]
    all_b = [shape((n, r), jnp.bfloat16) for r, n in present]
    key = ("prepared", m, k, ns, ranks, config, swiglu)
    programs.start(key, run, x, data, [one] * len(ns), all_a, all_b, [one] * 2 * len(present))
    return key


@ahead(_start_prepared)
@pytest.mark.parametrize("m, k, ns, ranks, config", [
    (16, 3584, (3584, 512, 512), (32, 0, 16), None),
    (9, 5120, (13824, 13824), (32, 32), None),
    (32, 18944, (3584,), (128,), None),
    (33, 3584, (3584, 512, 512), (16, 32, 32), None),
    (64, 18944, (3584,), (32,), None),
    (64, 1024, (27648, 27648), (32, 32), StreamConfig(1, 16, 1, 1, 2, 3, True, waves=2, promote=0)),
])  # fmt: skip
def test_prepared_operands(rng, programs, m, k, ns, ranks, config):
    x, matrices, loras, _ = _call(rng, m, k, ns, ranks)
    program = programs.get(_start_prepared(programs, m, k, ns, ranks, config))
    ys = _same_each_time(m, ns, lambda: program(x, *_prepared_operands(matrices, loras)))
    _assert_right(ys, x, matrices, loras)


def _prepared_operands(matrices, loras):
    """What the program of _start_prepared takes behind x."""
    present = [(*lora, w) for lora, w in zip(loras, matrices, strict=True) if lora is not None]
    all_a, all_b = [a for a, *_ in present], [b for _, b, *_ in present]
    of_adapters = [*_scales([w for *_, w in present]), *(number(s) for _, _, s, _ in present)]
    return [w.weight.data for w in matrices], _scales(matrices), all_a, all_b, of_adapters


def _start_swiglu(programs, m, k, n, ranks, config):
    return _start_prepared(programs, m, k, (n, n), ranks, config, swiglu=True)


@ahead(_start_swiglu)
@pytest.mark.parametrize("m, k, n, ranks, config", [
    (8, 1024, 2001, (0, 16), StreamConfig(2, 4, 2, 1, 3, 3)),
    (33, 3584, 18944, (32, 32), StreamConfig(1, 20, 1, 1, 2, 2, True, promote=0)),
    (64, 5120, 13824, (32, 16), StreamConfig(1, 16, 1, 1, 2, 2, True, promote=0)),
    (48, 1024, 27648, (0, 0), StreamConfig(1, 16, 1, 1, 3, 3, True, waves=2, promote=0)),
    (64, 3584, 18944, (128, 128), StreamConfig(1, 20, 1, 1, 2, 3, True, promote=0, late_b=True)),
    (12, 1024, 2001, (96, 0), StreamConfig(2, 4, 2, 1, 3, 3, late_b=True)),
])  # fmt: skip
def test_swiglu(rng, programs, m, k, n, ranks, config):
    x, matrices, loras, _ = _call(rng, m, k, (n, n), ranks, (200, 700))
    program = programs.get(_start_swiglu(programs, m, k, n, ranks, config))
    (y,) = _same_each_time(m, (n,), lambda: program(x, *_prepared_operands(matrices, loras)))
    both = [_true(x, matrix, lora) for matrix, lora in zip(matrices, loras, strict=True)]
    true, bound = swiglu(*zip(*both, strict=True))
    assert (np.abs(y - true) <= bound).all()


def test_lora_gradient_loop_and_vmap(rng):
    k, r = 512, 16
    matrix = random_matrix(rng, k, k, 2e3, 0x20, 0x50)
    weight, gs = matrix.weight, matrix.global_scale
    a = jnp.asarray(rng.standard_normal((r, k)) / k**0.5, jnp.bfloat16)
    b = jnp.asarray(rng.standard_normal((k, r)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((8, k)), jnp.bfloat16)

    def f(x, w, a, b):
        return fp4_matmul(x, w, gs, lora=(a, b, 0.1))

    loop = jax.jit(lambda x, w, a, b: jax.lax.fori_loop(0, 5, lambda _, x: f(x, w, a, b), x))
    want = x
    once = jax.jit(f)
    for _ in range(5):
        want = once(want, weight, a, b)
    assert np.array_equal(np.asarray(loop(x, weight, a, b)), np.asarray(want))
    batch = jax.jit(jax.vmap(f, (0, None, None, None)))(x.reshape(2, 4, k), weight, a, b)
    assert np.array_equal(np.asarray(batch).reshape(8, k), np.asarray(once(x, weight, a, b)))
    dy = jnp.asarray(rng.standard_normal((8, k)), jnp.bfloat16)
    grads = jax.jit(jax.grad(lambda x, a, b: (f(x, weight, a, b) * dy).sum().astype(jnp.float32), (0, 1, 2)))(x, a, b)
    x64, a64, b64, dy64 = (np.asarray(v, np.float64) for v in (x, a, b, dy))
    true = (
        dy64 @ (matrix.dense + 0.1 * b64 @ a64),
        0.1 * (dy64 @ b64).T @ x64,
        0.1 * dy64.T @ (x64 @ a64.T),
    )
    for g, t in zip(grads, true, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), t, rtol=2**-6, atol=6e-3 * np.abs(t).max())


LOOP_K, LOOP_NS, LOOP_RANK, TURNS = 3584, (3584, 512, 512), 32, 300
LOOP_SCALES = [jnp.float32(2688.0)] * 3


def _both(x, weights, last, loras, lora):
    q, _, v = fp4_matmul(x, weights, LOOP_SCALES, lora=loras)
    return fp4_matmul(q, last, LOOP_SCALES[0], lora=lora), v


def _wrong_turns(xs, expected, *operands):
    def turn(i, wrong):
        now = _both(xs[i % 4], *operands)  # another x each time, so that nothing leaves the loop
        same = [jnp.array_equal(y, e[i % 4]) for y, e in zip(now, expected, strict=True)]
        return wrong + ~jnp.stack(same).all()

    return jax.lax.fori_loop(0, TURNS, turn, 0)


def _start_loop(programs, m):
    def pair(n, k):
        return shape((LOOP_RANK, k), jnp.bfloat16), shape((n, LOOP_RANK), jnp.bfloat16), shape((), jnp.float32)

    k, n = LOOP_K, LOOP_NS[0]
    weights = [KernelWeight(packed(n_i, k), n_i, k) for n_i in LOOP_NS]
    operands = (weights, KernelWeight(packed(k, n), k, n), [pair(n_i, k) for n_i in LOOP_NS], pair(k, n))
    x, out = shape((m, k), jnp.bfloat16), [shape((4, m, n_i), jnp.bfloat16) for n_i in (k, LOOP_NS[2])]
    programs.start(("both", m), _both, x, *operands)
    programs.start(("turns", m), _wrong_turns, shape((4, m, k), jnp.bfloat16), out, *operands)


@ahead(_start_loop)
@pytest.mark.parametrize("m", [1, 8, 64])
def test_lora_in_a_compiled_loop(rng, programs, m):
    """Two calls a turn, 300 turns: the counters between CTAs, a constant of the program, are zero after each."""

    def pair(n, k):
        a, b = rng.standard_normal((LOOP_RANK, k)) / k**0.5, rng.standard_normal((n, LOOP_RANK))
        return jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), jnp.float32(0.7)

    k, n = LOOP_K, LOOP_NS[0]
    matrices = [random_matrix(rng, n_i, k, 2688, 0x10, 0x50) for n_i in LOOP_NS]
    last = random_matrix(rng, k, n, 2688, 0x10, 0x50).weight
    operands = ([w.weight for w in matrices], last, [pair(n_i, k) for n_i in LOOP_NS], pair(k, n))
    xs = jnp.asarray(rng.standard_normal((4, m, k)), jnp.bfloat16)
    both = programs.get(("both", m))
    expected = [jnp.stack(ys) for ys in zip(*(both(x, *operands) for x in xs), strict=True)]
    a, b, s = (np.asarray(v, np.float64) for v in operands[2][2])
    x = np.asarray(xs[0], np.float64)
    true = x @ matrices[2].dense.T + s * (x @ a.T) @ b.T
    np.testing.assert_allclose(np.asarray(expected[1][0], np.float64), true, rtol=2**-6, atol=0.05)
    assert int(programs.get(("turns", m))(xs, expected, *operands)) == 0
