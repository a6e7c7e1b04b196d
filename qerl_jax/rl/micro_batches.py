"""The rows of an optimizer batch in micro-batches, as many at once as fit in memory.

Dimension letters: B rows of the batch, R rows of a micro-batch, T token slots of the longest possible row.
"""

from collections.abc import Callable, Iterator
from typing import Any

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
    B = lengths_B.shape[0]
    widths = widths_of(longest, buckets)
    if len(widths) == 1:

        def in_order(i: jax.Array, carry: Any) -> Any:
            part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * size, size), rows)
            return body(carry, part, i * size + jnp.arange(size), longest)

        return jax.lax.fori_loop(0, B // size, in_order, carry)

    counts = _counts(B, size, widths)
    order = jnp.argsort(-lengths_B, stable=True)
    places_filled = jnp.concatenate([order, jnp.full(counts[-1], B)])

    def of_width(k: int, at: jax.Array, carry: Any) -> Any:
        places_R = jax.lax.dynamic_slice_in_dim(places_filled, at, counts[k])
        return body(carry, taken(rows, places_R), places_R, widths[k])

    def step(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        at, carry = state
        k = jnp.sum(lengths_B[order[at]] <= jnp.array(widths[1:]))
        branches = [lambda at, carry, k=k: of_width(k, at, carry) for k in range(len(widths))]
        return at + jnp.array(counts, jnp.int32)[k], jax.lax.switch(k, branches, at, carry)

    return jax.lax.while_loop(lambda state: state[0] < B, step, (jnp.int32(0), carry))[1]


def micro_batches(lengths_B: np.ndarray, *, size: int, longest: int, buckets: int) -> Iterator[tuple[np.ndarray, int]]:
    """The places [R] and the width of each micro-batch that `in_micro_batches` would make, for a loop on the host."""
    B, widths = len(lengths_B), widths_of(longest, buckets)
    counts = _counts(B, size, widths)
    order = np.arange(B) if len(widths) == 1 else np.argsort(-lengths_B, kind="stable")
    places_filled = np.concatenate([order, np.full(counts[-1], B)]).astype(np.int32)
    at = 0
    while at < B:
        k = sum(int(lengths_B[order[at]]) <= width for width in widths[1:])
        yield places_filled[at : at + counts[k]], widths[k]
        at += counts[k]


def sizes_of(rows: int, *, size: int, longest: int, buckets: int) -> dict[int, int]:
    """Of a batch of so many rows, the rows of a micro-batch by its width."""
    widths = widths_of(longest, buckets)
    return dict(zip(widths, _counts(rows, size, widths), strict=True))


def _counts(B: int, size: int, widths: tuple[int, ...]) -> list[int]:
    """The rows of a micro-batch of each width."""
    return [min(B, size * 2**k) for k in range(len(widths))]


def taken(rows: Any, places_R: jax.Array) -> Any:
    """A micro-batch's rows [R, ...]; at place B the last one, which computes nothing that real rows do not."""
    return jax.tree.map(lambda leaf: leaf.at[places_R].get(mode="clip"), rows)


def put(whole: Any, places_R: jax.Array, part: Any) -> Any:
    """`whole` [B, ...] with a micro-batch's rows at their places."""
    return jax.tree.map(lambda all_rows, new: all_rows.at[places_R].set(new, mode="drop"), whole, part)
