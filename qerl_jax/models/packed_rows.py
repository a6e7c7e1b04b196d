"""Rows of different lengths in one pack: one behind the other, without padding between.

Nearly all of a network computes token by token and takes a pack as one long row. Attention alone needs the rows apart:
they are taken out into a frame, rows of one width, and the results are put back. If the pack has no more rows than fit
into its slots at the full width, they stand in the pack as in that frame, and nothing is moved.

Dimension letters: L token slots of a pack, N the most rows in it, F rows of a frame, W its width.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

NARROWEST = 128  # width of a frame that is narrower than the longest row; fewer slots to attend in save next to nothing
_MULTIPLE = 16  # a divisor of such a width


class Frame(NamedTuple):
    """A shape that rows are taken out into."""

    rows: int
    width: int

    def fills(self, slots: int) -> bool:
        """Whether a pack of so many slots is that shape."""
        return self.rows * self.width == slots


def frames_of(rows: int, slots: int, longest: int) -> tuple[Frame, ...]:
    """The frames of a pack of `slots` token slots and up to so many `rows`, the cheapest to attend in first.

    One frame has the full width and as many slots as the pack. The others have twice as many, of the full width and of
    about a half, a quarter, .. of it. Rows that are longer than half of such a width fill the pack before there are too
    many of them for the frame. Rows that are shorter than half of the narrowest may be too many (see `most_rows`).
    """
    found = {Frame(min(rows, max(1, slots // longest)), longest)}
    width, parts = longest, 1
    while True:
        found.add(Frame(min(rows, 2 * slots // width), width))
        parts, wider = 2 * parts, width
        width = -(-longest // (parts * _MULTIPLE)) * _MULTIPLE
        if not NARROWEST <= width < wider:
            return tuple(sorted(found, key=lambda frame: (frame.rows * frame.width**2, frame.width)))


def most_rows(frames: tuple[Frame, ...], lengths: jax.Array) -> jax.Array:
    """The most rows that a frame holds if the longest of them has so many tokens; int32, elementwise."""
    holds = [jnp.where(lengths <= frame.width, frame.rows, 0) for frame in frames]
    return jnp.max(jnp.stack(holds), axis=0).astype(jnp.int32)


class PackedRows(flax.struct.PyTreeNode):
    """Where the tokens of a pack stand, int32 but for `live_L`. Slots behind a row repeat its last token, with that
    token's place, and nothing reads them."""

    starts_N: jax.Array  # the slot of each row's first token
    lengths_N: jax.Array  # rows of no tokens come last
    row_L: jax.Array  # of each slot its row
    place_L: jax.Array  # and its token's place in that
    live_L: jax.Array  # bool, whether it is not such a repetition
    frame: jax.Array  # [], which of `frames` the rows are taken out into
    frames: tuple[Frame, ...] = flax.struct.field(pytree_node=False)


def packed_rows(lengths_N: jax.Array, slots: int, frames: tuple[Frame, ...]) -> PackedRows:
    """The pack of rows of these lengths.

    Args:
      lengths_N: 1 or more, or 0 at the end; the sum is at most `slots`.
      slots: L.
      frames: the first of them that holds the rows is the one that they are taken out into.
    """
    lengths_N = lengths_N.astype(jnp.int32)
    rows, widest = jnp.sum(lengths_N > 0), jnp.max(lengths_N)
    holds = jnp.stack([(rows <= frame.rows) & (widest <= frame.width) for frame in frames])
    chosen = jnp.argmax(holds).astype(jnp.int32)
    where: tuple[jax.Array, ...] = in_a_row(lengths_N, slots)
    for i, frame in enumerate(frames):
        if frame.fills(slots):
            as_in_frame = _in_rows(lengths_N, frame)
            where = tuple(jnp.where(chosen == i, a, b) for a, b in zip(as_in_frame, where, strict=True))
    row_L, place_L, live_L, starts_N = where
    return PackedRows(starts_N, lengths_N, row_L, place_L, live_L, chosen, frames)


def in_a_row(lengths_N: jax.Array, slots: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Parts of these lengths, some of which may be 0, one behind the other. Returns each slot's part, its place in the
    part, and whether there is one (else both are the last part's end), [slots]; and where each part starts [N]."""
    ends_N = jnp.cumsum(lengths_N, dtype=jnp.int32)
    starts_N = ends_N - lengths_N
    slot_L = jnp.arange(slots, dtype=jnp.int32)
    last = jnp.max(jnp.where(lengths_N > 0, jnp.arange(len(lengths_N), dtype=jnp.int32), 0))
    part_L = jnp.minimum(jnp.searchsorted(ends_N, slot_L, side="right").astype(jnp.int32), last)
    place_L = jnp.clip(slot_L - starts_N[part_L], 0, jnp.maximum(lengths_N[part_L] - 1, 0))
    return part_L, place_L, slot_L < ends_N[-1], starts_N


def _in_rows(lengths_N: jax.Array, frame: Frame) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`in_a_row`'s, of rows as they stand in a frame."""
    row_L, place_L = (x.reshape(-1) for x in jnp.mgrid[: frame.rows, : frame.width].astype(jnp.int32))
    length_L = lengths_N[row_L]
    starts_N = frame.width * jnp.arange(lengths_N.shape[0], dtype=jnp.int32)
    return row_L, jnp.clip(place_L, 0, jnp.maximum(length_L - 1, 0)), place_L < length_L, starts_N


@jax.custom_vjp
def moved(x: jax.Array, to: jax.Array, back: jax.Array) -> jax.Array:
    """x[to], whose gradient is a gather too, where a plain one's adds up in no order that a GPU keeps.

    Args:
      x: [M, ...].
      to: int32 of any shape, from 0 to M - 1. If an entry of x is moved to several places, only the one in `back` may
        have a gradient that is not 0.
      back: int32 [M], for each entry of x its place in the result, counted over all dimensions of `to`; negative if it
        has none.
    """
    return x.at[to].get(mode="promise_in_bounds")


def _moved(x: jax.Array, to: jax.Array, back: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return moved(x, to, back), (to, back)


def _moved_back(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None, None]:
    to, back = kept
    flat = dy.reshape(-1, *dy.shape[to.ndim :])
    found = flat.at[jnp.maximum(back, 0)].get(mode="promise_in_bounds")
    return _where(back >= 0, found), None, None


moved.defvjp(_moved, _moved_back)


class Placed(NamedTuple):
    """Where tokens are in a pack and in one of its frames, for `moved`: for each place of the frame the token's slot
    (or that of the row's last token, where it has none), [F, W]; for each slot its place in the frame, [L]; and on
    either side which are real."""

    slot_FW: jax.Array
    place_L: jax.Array
    real_FW: jax.Array
    real_L: jax.Array

    def take_out(self, x_L: jax.Array) -> jax.Array:
        """[L, ...] to [F, W, ...]."""
        return moved(x_L, self.slot_FW, jnp.where(self.real_L, self.place_L, -1))

    def put_back(self, y_FW: jax.Array) -> jax.Array:
        """[F, W, ...] to [L, ...]."""
        flat = y_FW.reshape(-1, *y_FW.shape[2:])
        return moved(flat, self.place_L, jnp.where(self.real_FW, self.slot_FW, -1).reshape(-1))

    def take_out_gradient(self, x_L: jax.Array) -> jax.Array:
        """[L, ...] to [F, W, ...], 0 where there is no token."""
        return _where(self.real_FW, self.take_out(x_L))

    def put_back_gradient(self, y_FW: jax.Array) -> jax.Array:
        """[F, W, ...] to [L, ...], 0 where there is no token."""
        return _where(self.real_L, self.put_back(y_FW))


def _where(real: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - real.ndim)), x, 0)


class AsItStands(NamedTuple):
    """`Placed`, for a frame whose shape the pack has already. On both sides what is no token has no gradient."""

    frame: Frame

    def take_out(self, x_L: jax.Array) -> jax.Array:
        return x_L.reshape(*self.frame, *x_L.shape[1:])

    def put_back(self, y_FW: jax.Array) -> jax.Array:
        return y_FW.reshape(-1, *y_FW.shape[2:])

    def take_out_gradient(self, x_L: jax.Array) -> jax.Array:
        return self.take_out(x_L)

    def put_back_gradient(self, y_FW: jax.Array) -> jax.Array:
        return self.put_back(y_FW)


def placed(pack: PackedRows, frame: Frame) -> Placed | AsItStands:
    """The pack in one of its frames; it has no meaning unless this is the frame that the rows are taken out into."""
    (F, W), L = frame, pack.row_L.shape[0]
    if frame.fills(L):
        return AsItStands(frame)
    starts_F1, lengths_F1 = pack.starts_N[:F, None], pack.lengths_N[:F, None]
    place_W = jnp.arange(W, dtype=jnp.int32)
    slot_FW = jnp.clip(starts_F1 + jnp.minimum(place_W, lengths_F1 - 1), 0, L - 1)
    place_L = jnp.minimum(pack.row_L, F - 1) * W + jnp.minimum(pack.place_L, W - 1)
    return Placed(slot_FW, place_L, place_W < lengths_F1, pack.live_L)
