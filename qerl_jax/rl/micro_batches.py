"""The rows of an optimizer batch in micro-batches, as many at once as fit in memory.

Dimension letters: B rows of the batch, R rows of a micro-batch, T token slots of the longest possible row.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.rl.widths import widths_of

# Of what has been gathered so far, rows [R, ...], their places in the batch [R] (B where there is none) and the static
# width: what has been gathered then.
Body = Callable[[Any, Any, jax.Array, int], Any]


def in_micro_batches(
    body: Body, carry: Any, rows: Any, lengths_B: jax.Array, *, size: int, longest: int, buckets: int
) -> Any:
    """Calls `body(carry, rows, places, width)` for micro-batches until every row has been in one.

    With one width, `size` rows at a time in the order of the batch, all T wide. With several, the rows go by
    length, the longest first, and a micro-batch is as wide as its first row asks for: T, or about T / 2, T / 4, ..
    With half the width it has twice the rows, so all take the same memory, and there are never more than with one.

    Args:
      body: traced once for each width.
      carry: any pytree.
      rows: a pytree of arrays [B, ...]. What fills a last micro-batch up is the batch's last row, at place B.
      lengths_B: tokens of each row, at most `longest`.
      size: rows of width T at a time; divides B.
      longest: T.
      buckets: widths to choose from.

    Returns:
      The last carry.
    """
    B, at = lengths_B.shape[0], jnp.int32(0)
    sizes = sizes_of(B, size=size, longest=longest, buckets=buckets)
    order_B = jnp.arange(B) if len(sizes) == 1 else jnp.argsort(-lengths_B, stable=True)
    for (width, R), (narrower, _) in itertools.pairwise([*sizes.items(), (-1, 0)]):
        places = jnp.concatenate([order_B, jnp.full(R, B)])

        def more(state: tuple[jax.Array, Any], narrower: int = narrower) -> jax.Array:
            return (state[0] < B) & (narrower < 0 or lengths_B[order_B[state[0]]] > narrower)

        def step(state: tuple[jax.Array, Any], places: jax.Array = places, R: int = R, width: int = width) -> Any:
            at, carry = state
            places_R = jax.lax.dynamic_slice_in_dim(places, at, R)
            return at + R, body(carry, taken(rows, places_R), places_R, width)

        at, carry = jax.lax.while_loop(more, step, (at, carry))
    return carry


class Stretch(NamedTuple):
    """Micro-batches of one width, one after the other: `number` of them, of rows in the order of `places` [B + R] (the
    batch's, then R times B), from place number `first` on."""

    width: int
    places: np.ndarray
    first: int
    number: int


def stretches(lengths_B: np.ndarray, *, size: int, longest: int, buckets: int) -> Iterator[Stretch]:
    """The micro-batches that `in_micro_batches` would make, for a program of each width that the host calls."""
    B, at = len(lengths_B), 0
    sizes = sizes_of(B, size=size, longest=longest, buckets=buckets)
    order_B = np.arange(B) if len(sizes) == 1 else np.argsort(-lengths_B, kind="stable")
    for (width, R), (narrower, _) in itertools.pairwise([*sizes.items(), (-1, 0)]):
        first = at
        while at < B and lengths_B[order_B[at]] > narrower:
            at += R
        if at > first:
            places = np.concatenate([order_B, np.full(R, B)]).astype(np.int32)
            yield Stretch(width, places, first, (at - first) // R)


def in_stretch(
    body: Body, carry: Any, rows: Any, places: jax.Array, first: jax.Array, number: jax.Array, *, width: int
) -> Any:
    """Calls `body` for a stretch's micro-batches of `rows` [B, ...]; see `in_micro_batches`."""
    R = places.shape[0] - jax.tree.leaves(rows)[0].shape[0]

    def one(i: jax.Array, carry: Any) -> Any:
        places_R = jax.lax.dynamic_slice_in_dim(places, first + i * R, R)
        return body(carry, taken(rows, places_R), places_R, width)

    return jax.lax.fori_loop(0, number, one, carry)


def sizes_of(rows: int, *, size: int, longest: int, buckets: int) -> dict[int, int]:
    """The widths of a batch of so many rows, the largest first, with the rows of a micro-batch of each."""
    return {width: min(rows, size * 2**k) for k, width in enumerate(widths_of(longest, buckets))}


def taken(rows: Any, places_R: jax.Array) -> Any:
    """A micro-batch's rows [R, ...]; at place B the last one, which computes nothing that real rows do not."""
    return jax.tree.map(lambda leaf: leaf.at[places_R].get(mode="clip"), rows)


def put(whole: Any, places_R: jax.Array, part: Any) -> Any:
    """`whole` [B, ...] with a micro-batch's rows at their places."""
    return jax.tree.map(lambda all_rows, new: all_rows.at[places_R].set(new, mode="drop"), whole, part)
