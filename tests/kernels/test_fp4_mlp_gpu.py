"""`fp4_mlp` on a CUDA device: values and gradients against float64, with fresh seeds each run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import poison, random_matrix

from pallas_kernels import fp4_mlp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m, k, f, ranks, size", [
    (300, 1024, 1008, (32, 16, 8), 1),  # the last tile of outputs is partly beyond the end
    (2112, 1024, 4096, (32, 0, 32), 1),  # a tile of 64 rows behind the others
    (70, 3584, 1792, (32, 32, 32), 1),  # D of gate and up, and of dx, is split
    (256, 3584, 18944, (0, 0, 0), 1),
    (33, 2048, 4096, (16, 16, 16), 1),  # another kernel, and SwiGLU outside
    (300, 1024, 1008, (32, 16, 0), 150),  # what is between the products is beyond float16's range
    (33, 2048, 4096, (0, 0, 0), 150),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_and_gradients(rng, m, k, f, ranks, size, dtype):
    """`size` is that of gate and up."""
    ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]

    def normal(*shape, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), dtype)

    shapes, sizes = ((f, k), (f, k), (k, f)), (size, size, size**-2)
    # weights of size 1 / sqrt(inputs), so that all numbers have sizes near 1
    matrices = [
        random_matrix(rng, n, i, 1.8 * i**0.5 / own, 0x28, 0x40, dtype)
        for (n, i), own in zip(shapes, sizes, strict=True)
    ]
    weights, scales = [matrix.weight for matrix in matrices], [matrix.global_scale for matrix in matrices]
    pairs = [
        (normal(r, i, size=i**-0.5), normal(n, r, size=r**-0.5)) if r else None
        for r, (n, i) in zip(ranks, shapes, strict=True)
    ]
    x, dy = normal(m, k), normal(m, k)

    def call(x, pairs):
        return fp4_mlp(x, weights, scales, lora=[pair and (*pair, 0.7) for pair in pairs])

    def both(x, pairs, dy):
        y, pull = jax.vjp(call, x, pairs)
        return y, pull(dy)

    program = jax.jit(both)
    poison(m, f)
    y, (dx, d_pairs) = program(x, pairs, dy)
    assert all(
        bool((a == b).all())
        for _ in range(20)
        for a, b in zip(jax.tree.leaves(program(x, pairs, dy)), jax.tree.leaves((y, (dx, d_pairs))), strict=True)
    )
    # of the kernels alone: in which order XLA adds up what is outside, x A^T, it chooses by trial, in each program anew
    bare = functools.partial(fp4_mlp, weights=weights, global_scales=scales)
    alone, kept = (
        jax.jit(f, compiler_options={"xla_gpu_autotune_level": "0"})(x) for f in (bare, lambda x: jax.vjp(bare, x)[0])
    )
    assert bool((alone == kept).all()), "what is kept for the gradient changes nothing"

    def exact(x, pairs):
        def linear(x, i):
            y = x @ jnp.asarray(matrices[i].dense.T, jnp.float64)
            return y if pairs[i] is None else y + 0.7 * (x @ pairs[i][0].T) @ pairs[i][1].T

        inner = jax.nn.silu(linear(x, 0)) * linear(x, 1)
        return linear(inner, 2), jnp.abs(inner).max()

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda v: jnp.asarray(np.asarray(v, np.float64)), (x, pairs, dy))
        true_y, pull, largest = jax.vjp(exact, *wide[:2], has_aux=True)
        true = jax.tree.map(np.asarray, (true_y, pull(wide[2])))
    assert (largest > 65504) == (size > 1)
    for got, want in zip(jax.tree.leaves((y, (dx, d_pairs))), jax.tree.leaves(true), strict=True):
        error = np.abs(np.asarray(got, np.float64) - want)
        assert np.sqrt((error**2).mean()) <= 3 * ulp * np.sqrt((want**2).mean())
        assert error.max() <= 8 * ulp * np.abs(want).max()
