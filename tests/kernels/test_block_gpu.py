"""The block kernel on a GPU against its reference in plain JAX: numbers, repeatability, rows, and a captured loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead, shape

from benchmarks.fp4_block import EPS, SHAPES, random_layer
from pallas_kernels import between_attentions, between_attentions_reference
from pallas_kernels.hidden import hidden_parts, hidden_shape

pytestmark = pytest.mark.gpu
TURNS = 300


SMALL = {"small": (1024, 2816, 1024, 256), "few tiles": (256, 1280, 512, 16)}  # the last leaves CTAs without work


@functools.cache
def layer_of(name, rank):
    return random_layer(jax.random.key(0), (SHAPES | SMALL)[name], rank)


def shapes_of(name, rank, m, given):
    """What `between_attentions` is called with, but eps."""
    layer, norms = jax.eval_shape(lambda: random_layer(jax.random.key(0), (SHAPES | SMALL)[name], rank))
    x, residual = shape((m, layer.o.weight.k), jnp.bfloat16), shape((m, layer.o.weight.n), jnp.float32)
    return x, residual, layer, norms, hidden_shape(given, rank, m) if given else None


def start(programs, f, name, rank, m, given=0):
    key = (f, name, rank, m, given)
    programs.start(key, lambda *operands: f(*operands[:4], EPS, hidden=operands[4]), *shapes_of(name, rank, m, given))
    return key


def run(programs, f, x, residual, name, rank, hidden=None):
    given = 0 if hidden is None else len(hidden)
    program = programs.get(start(programs, f, name, rank, len(x), given))
    return jax.tree.leaves(program(x, residual, *layer_of(name, rank), hidden))


def hidden_of(x, name, rank, parts):
    """x A^T of o, as it may be given, in so many parts."""
    return hidden_parts(x, layer_of(name, rank)[0].o.lora[0], parts) if parts else None


def inputs(rng, m, layer):
    x = jnp.asarray(rng.standard_normal((m, layer.o.weight.k)), jnp.bfloat16)
    return x, jnp.asarray(rng.standard_normal((m, layer.o.weight.n)), jnp.float32)


@ahead(
    lambda programs, name, rank, m, given: [
        start(programs, between_attentions, name, rank, m, given),
        start(programs, between_attentions_reference, name, rank, m),
    ]
)
@pytest.mark.parametrize("name, rank, m, given", [
    ("7B", 32, 8, 0), ("32B", 32, 8, 0), ("small", 0, 1, 0), ("small", 128, 3, 0), ("few tiles", 16, 5, 0),
    ("7B", 32, 16, 0), ("14B", 128, 9, 0), ("32B", 32, 13, 0), ("small", 0, 16, 0), ("small", 128, 11, 0),
    ("7B", 32, 1, 28), ("7B", 32, 8, 28), ("32B", 32, 7, 40), ("small", 128, 3, 16), ("few tiles", 16, 5, 4),
    ("14B", 32, 16, 40), ("small", 128, 11, 8), ("7B", 128, 8, 0), ("7B", 96, 16, 0), ("32B", 128, 5, 0),
])  # fmt: skip
def test_against_the_reference(rng, programs, name, rank, m, given):
    x, residual = inputs(rng, m, layer_of(name, rank)[0])
    poison = jnp.full((m, 1 << 20), jnp.nan)
    jax.block_until_ready(poison)
    del poison
    made = run(programs, between_attentions, x, residual, name, rank, hidden_of(x, name, rank, given))
    true = run(programs, between_attentions_reference, x, residual, name, rank)
    for a, b in zip(made, true, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # activations are rounded to bfloat16 in another place: 2^-9 each, of a few hundred that count
        assert (np.abs(a - b) < 0.04 * np.sqrt((b**2).mean()) + 2**-7 * np.abs(b)).all()
        assert np.sqrt(((a - b) ** 2).mean()) < 0.006 * np.sqrt((b**2).mean())


@ahead(
    lambda programs, name, all_rows, given: [
        start(programs, between_attentions, name, 32, rows, given) for rows in all_rows
    ]
)
@pytest.mark.parametrize("name, all_rows, given", [
    ("7B", (8, 5, 1), 0), ("few tiles", (8, 5, 1), 0), ("7B", (16, 13, 9), 0), ("small", (16, 9), 0),
    ("7B", (8, 5, 1), 28), ("small", (16, 9), 16),
])  # fmt: skip
def test_bitwise_the_same_again_and_beside_fewer_rows(rng, programs, name, all_rows, given):
    x, residual = inputs(rng, all_rows[0], layer_of(name, 32)[0])
    hidden = hidden_of(x, name, 32, given)  # with fewer rows their numbers stand behind M
    first = run(programs, between_attentions, x, residual, name, 32, hidden)
    for rows in all_rows:
        again = run(programs, between_attentions, x[:rows], residual[:rows], name, 32, hidden)
        for a, b in zip(again, first, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b)[:rows])


def turn(x, residual, layer, norms):
    return between_attentions(x, residual, layer, norms, EPS)[1][0]


def turns(x, residual, layer, norms):
    return jax.lax.fori_loop(0, TURNS, lambda _, x: turn(x, residual, layer, norms), x)


def start_turns(programs, m):
    """Of one turn, and of all."""
    for f in (turn, turns):
        programs.start((f, m), f, *shapes_of("7B", 32, m, 0)[:4])
    return (turn, m), (turns, m)


@ahead(start_turns)
@pytest.mark.parametrize("m", [8, 16])
def test_in_a_captured_loop(rng, programs, m):
    """Many turns, each from the last one's queries: bit for bit as the same calls one after the other."""
    layer, norms = layer_of("7B", 32)
    x, residual = inputs(rng, m, layer)
    one, all_turns = map(programs.get, start_turns(programs, m))
    looped = all_turns(x, residual, layer, norms)
    for _ in range(TURNS):
        x = one(x, residual, layer, norms)
    assert bool(jnp.isfinite(looped).all())
    np.testing.assert_array_equal(np.asarray(looped), np.asarray(x))
