"""Thresholds found by halving against those that a sort gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rollout.thresholds import kth_largest, nucleus_floor

V = 400


def rows():
    """Logits that are ordinary, steep, equal, tied in blocks, of both zeros, tiny, huge, and partly excluded."""
    random = np.random.default_rng(0)
    ordinary = random.normal(size=(6, V)) * np.array([[0.1], [1.0], [4.0], [20.0], [100.0], [3e37]])
    equal = np.zeros((1, V))
    blocks = random.integers(-3, 3, (3, V)).astype(float)
    zeros = np.where(random.random((2, V)) < 0.5, 0.0, -0.0)
    tiny = random.normal(size=(1, V)) * 1e-36
    excluded = np.where(random.random((2, V)) < 0.9, -np.inf, random.normal(size=(2, V)))
    one_left = np.full((1, V), -np.inf)
    one_left[0, 7] = -5.0
    spike = np.full((1, V), -30.0)
    spike[0, 3] = 30.0
    return np.concatenate([ordinary, equal, blocks, zeros, tiny, excluded, one_left, spike]).astype(np.float32)


ROWS = rows()


@pytest.mark.parametrize("k", [1, 2, 3, 50, V - 1, V])
def test_kth_largest_is_the_sorted_rows_kth(k):
    expected = np.sort(ROWS, axis=-1)[:, ::-1][:, k - 1]
    found = np.asarray(jax.jit(kth_largest, static_argnums=1)(jnp.asarray(ROWS), k))[:, 0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
def test_the_nucleus_is_that_of_a_sort(top_p):
    floors = np.asarray(jax.jit(nucleus_floor, static_argnums=1)(jnp.asarray(ROWS), top_p))
    for row, floor in zip(ROWS, floors, strict=True):
        weights = np.exp(row.astype(np.float64) - row.max())
        weights /= weights.sum()
        mass_above = np.array([weights[row > value].sum() for value in row])
        kept = row >= floor
        clear = np.abs(mass_above - top_p) > 1e-6  # nearer than that, rounding decides
        np.testing.assert_array_equal(kept[clear], (mass_above < top_p)[clear])
        assert kept[row == row.max()].all()


def test_a_nucleus_by_hand_with_a_tie_at_its_edge():
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.1, 0.1]]))
    for top_p, expected in ((0.39, 1), (0.41, 3), (0.79, 3), (0.81, 5)):
        assert int((logits >= nucleus_floor(logits, top_p)).sum()) == expected


def test_the_nucleus_ends_where_exactly_top_p_is_reached():
    logits = jnp.array([[0.0, -1e-9]])  # each of probability 1/2 in float32
    for top_p, expected in ((0.5, [True, False]), (0.5001, [True, True])):
        assert (logits >= nucleus_floor(logits, top_p))[0].tolist() == expected


def test_rows_do_not_depend_on_each_other():
    together = nucleus_floor(jnp.asarray(ROWS), 0.7)
    for i in (0, 8, 16):
        np.testing.assert_array_equal(nucleus_floor(jnp.asarray(ROWS[i : i + 1]), 0.7), together[i : i + 1])
