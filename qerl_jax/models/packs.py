"""The rows of a batch in packs: as many of them together as fit into so many token slots.

Dimension letters: B rows of the batch, N the most rows of a pack, L token slots of a pack.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qerl_jax.models.packed_rows import Frame, most_rows

# (what has been gathered so far, a pack's rows [N, ...], their places in the batch [N], B where there is no row) ->
# what has been gathered with them.
Body = Callable[[Any, Any, jax.Array], Any]
_Packs = tuple[jax.Array, jax.Array, jax.Array]  # tokens, rows, and the most rows of each so far, [B]


class Packs(NamedTuple):
    """Which rows go through the network together, int32."""

    rows: jax.Array  # [B + N], a pack's side by side, in the batch's order; then N times B
    first: jax.Array  # [B + 1], where each pack's begin
    number: jax.Array  # of packs


def in_packs(body: Body, carry: Any, rows: Any, lengths_B: jax.Array, *, slots: int, frames: tuple[Frame, ...]) -> Any:
    """Calls `body(carry, rows, places)` for one pack after the other, until every row has been in one.

    Args:
      body: traced once. It must ignore rows at place B, which are copies of the batch's last row.
      carry: any pytree.
      rows: a pytree of arrays [B, ...].
      lengths_B: tokens of each row, from 1 to a frame's width and at most L.
      slots: L.
      frames: those that a pack's rows are taken out into, see `packed_rows`.

    Returns:
      The last carry.
    """
    B = lengths_B.shape[0]
    packs = packs_of(lengths_B, slots=slots, frames=frames)
    N = packs.rows.shape[0] - B

    def one(i: jax.Array, carry: Any) -> Any:
        places_N = jax.lax.dynamic_slice_in_dim(packs.rows, packs.first[i], N)
        places_N = jnp.where(jnp.arange(N) < packs.first[i + 1] - packs.first[i], places_N, B)
        return body(carry, jax.tree.map(lambda leaf: leaf.at[places_N].get(mode="clip"), rows), places_N)

    return jax.lax.fori_loop(0, packs.number, one, carry)


def packs_of(lengths_B: jax.Array, *, slots: int, frames: tuple[Frame, ...]) -> Packs:
    """The longest row first, each into the first pack that has room for it (first-fit decreasing; Johnson 1973). A pack
    has no more rows than a frame holds. If one of the greatest width has all slots, as many rows always fit as it has,
    so there are never more packs than B / rows, rounded up; with B of them there is one, in the batch's order."""
    B = lengths_B.shape[0]
    N = max(frame.rows for frame in frames)
    lengths_B, none_B = lengths_B.astype(jnp.int32), jnp.zeros(B, jnp.int32)
    most_with_B = most_rows(frames, lengths_B)

    def place(packs: _Packs, row: jax.Array) -> tuple[_Packs, jax.Array]:
        tokens_B, rows_B, most_B = packs
        fits_B = (rows_B == 0) | ((rows_B < most_B) & (tokens_B + lengths_B[row] <= slots))
        i = jnp.argmax(fits_B)
        most = jnp.where(rows_B[i] == 0, most_with_B[row], most_B[i])
        return (tokens_B.at[i].add(lengths_B[row]), rows_B.at[i].add(1), most_B.at[i].set(most)), i

    order_B = jnp.argsort(-lengths_B, stable=True)
    (_, rows_B, _), pack_of_ordered = jax.lax.scan(place, (none_B, none_B, none_B), order_B)
    pack_B = none_B.at[order_B].set(pack_of_ordered.astype(jnp.int32), unique_indices=True)
    rows = jnp.concatenate([jnp.argsort(pack_B, stable=True), jnp.full(N, B)]).astype(jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows_B, dtype=jnp.int32)])
    return Packs(rows, first, jnp.sum(rows_B > 0, dtype=jnp.int32))


def put(whole: Any, places_N: jax.Array, part: Any) -> Any:
    """`whole` [B, ...] with a pack's rows at their places."""
    return jax.tree.map(lambda all_rows, new: all_rows.at[places_N].set(new, mode="drop"), whole, part)
