"""The benchmark of the block kernel's events without a GPU: where its program marks them."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import fp4_block_clock
from benchmarks.fp4_block import random_layer
from pallas_kernels import compiling_for


@pytest.mark.parametrize("rank", [0, 64, 128])  # of large ranks some of B is fetched ahead, tile by tile
def test_each_part_is_marked_once_and_in_turn(monkeypatch, rank):
    marked, mark_part = [], fp4_block_clock.TimedKernel.mark_part

    def noted(self, i, event, warp):
        marked.append((i, event))
        mark_part(self, i, event, warp)

    monkeypatch.setattr(fp4_block_clock.TimedKernel, "mark_part", noted)
    layer = random_layer(jax.random.key(0), (256, 256, 256, 128), rank)
    x, residual = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros((2, 256))
    with compiling_for(90):
        jax.jit(fp4_block_clock.clocks).trace(x, residual, [layer], None).lower(lowering_platforms=("cuda",))
    of_tiles = "weights done", "tiles begun", "tiles stored", "outputs stored"
    assert [mark for mark in marked if mark[1] in of_tiles] == [(i, event) for i in range(4) for event in of_tiles]
